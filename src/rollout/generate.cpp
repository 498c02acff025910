#include "rollout/generate.h"

#include <algorithm>

#include "base/error.h"
#include "rollout/engine.h"

namespace plumb {
namespace {

// An engine with room for `batch` of the longest requests, so that none is ever preempted.
EngineOptions engine_options(const ModelConfig& config, const std::vector<GenerationRequest>& requests,
                             const GenerateOptions& o) {
  const PlanShape shape = plan_shape(config);
  const PagePools size{page_positions(shape), PagePool(0), PagePool(0)};
  int longest = 1;
  for (const GenerationRequest& r : requests) {
    const int64_t total = static_cast<int64_t>(r.prompt.size()) + r.sampling.max_tokens;
    // What the model cannot hold is refused when it is submitted.
    longest = std::max(longest, static_cast<int>(std::min<int64_t>(total, config.max_position_embeddings)));
  }
  EngineOptions e;
  e.numerics = o.numerics;
  e.max_running = static_cast<int>(std::clamp<size_t>(requests.size(), 1, std::max(1, o.batch)));
  e.prefill_chunk = o.prefill_chunk;
  e.token_budget = e.max_running + 4 * o.prefill_chunk;
  e.key_pages = e.max_running * most_key_pages(size, shape.window, o.prefill_chunk, longest);
  e.entry_pages = e.max_running * size.pages(longest);
  return e;
}

}  // namespace

std::vector<Generation> generate(WeightStore& weights, const std::vector<GenerationRequest>& requests,
                                 const GenerateOptions& options) {
  auto registry = std::make_shared<AdapterRegistry>();
  if (options.adapter) registry->publish("adapter", options.adapter);
  Engine engine(weights, engine_options(weights.config(), requests, options), registry);
  std::vector<Generation> results(requests.size());
  RequestId first = 0;  // ids ascend by one
  for (size_t i = 0; i < requests.size(); ++i) {
    Request r;
    r.prompt = requests[i].prompt, r.sampling = requests[i].sampling, r.key = requests[i].id;
    if (options.adapter) r.adapter = "adapter";
    const RequestId id = engine.submit(std::move(r));
    if (i == 0) first = id;
  }
  while (!engine.idle())
    for (Event& e : engine.step()) {
      if (e.finish == Finish::error) fail("engine", e.error);
      const size_t index = e.request - first;
      Generation& g = results[index];
      g.tokens.push_back(std::move(e.token));
      g.stopped = e.finish == Finish::stop;
      if (options.on_token && !options.on_token(index, g.tokens.back())) engine.cancel(e.request);
    }
  return results;
}

}  // namespace plumb
