#include "rollout/generate.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "rollout/cache_size.h"
#include "rollout/engine.h"

namespace plumb {
namespace {

// An engine with room for `batch` of the longest requests, so that none is ever preempted.
EngineOptions engine_options(const WeightStore& weights, const std::vector<GenerationRequest>& requests,
                             const GenerateOptions& o) {
  const ModelConfig& config = weights.config();
  const PlanShape shape = plan_shape(config);
  const int positions = page_positions(shape);
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
  set_step_sizes(e, weights.space());
  e.key_pages = e.max_running * most_key_pages(positions, shape.window, e.prefill_chunk, longest);
  e.entry_pages = e.max_running * ((longest + positions - 1) / positions);
  return e;
}

constexpr int kScoredTogether = 32;  // documents in the cache

// An engine with room for the longest document and, beside it, for what makes two steps.
EngineOptions engine_options(const ModelConfig& config, const std::vector<std::vector<int>>& documents,
                             const ScoreOptions& o) {
  const PlanShape shape = plan_shape(config);
  const int positions = page_positions(shape);
  size_t longest = 1;
  for (const auto& d : documents) longest = std::max(longest, d.size());
  const int tokens = static_cast<int>(std::min<size_t>(longest, config.max_position_embeddings)) + 1;
  EngineOptions e;
  e.numerics = o.numerics;
  e.max_running = static_cast<int>(std::clamp<size_t>(documents.size(), 1, kScoredTogether));
  e.prefill_chunk = std::max(1, o.step_tokens);
  e.token_budget = std::max(e.max_running, e.prefill_chunk);
  const int beside = e.max_running + 2 * e.token_budget / positions;
  e.key_pages = most_key_pages(positions, shape.window, e.prefill_chunk, tokens) + beside;
  e.entry_pages = (tokens + positions - 1) / positions + beside;
  return e;
}

}  // namespace

std::vector<Generation> generate(WeightStore& weights, const std::vector<GenerationRequest>& requests,
                                 const GenerateOptions& options) {
  auto registry = std::make_shared<AdapterRegistry>();
  if (options.adapter) registry->publish("adapter", options.adapter);
  Engine engine(weights, engine_options(weights, requests, options), registry);
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

void score(WeightStore& weights, const std::vector<std::vector<int>>& documents, const ScoreOptions& options,
           const std::function<void(size_t document, const Scores&)>& done) {
  auto registry = std::make_shared<AdapterRegistry>();
  if (options.adapter) registry->publish("adapter", options.adapter);
  Engine engine(weights, engine_options(weights.config(), documents, options), registry);
  std::map<RequestId, size_t> index;
  for (size_t i = 0; i < documents.size(); ++i) {
    Request r;
    r.prompt = documents[i], r.sampling.max_tokens = 0;
    r.prompt_logprobs = true, r.routed_experts = options.routed_experts;
    if (options.adapter) r.adapter = "adapter";
    index[engine.submit(std::move(r))] = i;
  }
  std::map<size_t, Scores> finished;  // whose turn has not come
  size_t next = 0;
  while (!engine.idle())
    for (Event& e : engine.step()) {
      if (e.finish == Finish::error) fail("engine", e.error);
      finished[index.at(e.request)] = {std::move(e.prompt_logprobs), e.routed};
      for (; !finished.empty() && finished.begin()->first == next; finished.erase(finished.begin()))
        done(next++, finished.begin()->second);
    }
}

}  // namespace plumb
