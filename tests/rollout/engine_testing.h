// Random work for the engine, random circumstances under which it is done, and the comparison with the training pass.
#pragma once
#include <map>
#include <memory>
#include <vector>

#include "base/philox.h"
#include "ops/head.h"
#include "rollout/engine.h"
#include "support/tiny_model.h"

namespace plumb::testing {

// What a request got.
struct Outcome {
  Request request;
  std::vector<GeneratedToken> tokens;
  std::vector<float> prompt_logprobs;
  Tensor routed;
  Finish finish = Finish::none;  // none: cancelled
};

// Adapters a1, a2, a3 of different ranks.
inline std::shared_ptr<AdapterRegistry> three_adapters(const ModelConfig& c) {
  auto registry = std::make_shared<AdapterRegistry>();
  for (int i = 1; i <= 3; ++i) registry->publish("a" + std::to_string(i), random_adapter(c, 1 + i, 40 + i));
  return registry;
}

// Prompts and answers around the multiples of 4 and 16, past the window of 8; every option now and then.
inline std::vector<Request> random_work(const ModelConfig& c, uint64_t seed) {
  Random g(seed, 1);
  std::vector<Request> work(2 + g.below(7));
  const int adapters = static_cast<int>(g.below(4));
  for (size_t i = 0; i < work.size(); ++i) {
    Request& r = work[i];
    const int boundary = 4 * static_cast<int>(g.below(10));
    r.prompt = random_tokens(c, std::max(1, boundary - 1 + static_cast<int>(g.below(3))), seed * 100 + i);
    r.key = i;
    r.sampling.seed = seed;
    r.sampling.max_tokens = 1 + static_cast<int>(g.below(22));
    r.sampling.temperature = g.below(4) == 0 ? 0.0f : 1.0f;
    if (g.below(2)) r.sampling.stop_tokens = {3, 17};
    if (g.below(4) == 0) r.sampling.repetition_penalty = 1.2f, r.sampling.presence_penalty = 0.5f;
    if (g.below(4) == 0) r.sampling.top_k = 5, r.sampling.top_p = 0.9f;
    r.sampling.top_logprobs = static_cast<int>(g.below(3));
    r.prompt_logprobs = g.below(3) == 0;
    r.routed_experts = g.below(3) == 0;
    const int adapter = static_cast<int>(g.below(adapters + 1));
    if (adapter > 0) r.adapter = "a" + std::to_string(adapter);
    if (adapter > 0 && g.below(2)) r.adapter_version = 1;
  }
  return work;
}

// Sizes of steps and of the cache. The cache is just large enough for the longest request, plus a little.
inline EngineOptions random_circumstances(const std::vector<Request>& work, const PlanShape& shape, uint64_t seed) {
  Random g(seed, 2);
  EngineOptions o;
  o.max_running = 1 + static_cast<int>(g.below(16));
  o.prefill_chunk = 1 + static_cast<int>(g.below(g.below(2) ? 6 : 40));
  o.token_budget = o.max_running + static_cast<int>(g.below(40));
  const PagePools size{page_positions(shape), PagePool(0), PagePool(0)};
  for (const Request& r : work) {
    const int total = static_cast<int>(r.prompt.size()) + r.sampling.max_tokens;
    o.entry_pages = std::max(o.entry_pages, size.pages(total));
    o.key_pages = std::max(o.key_pages, most_key_pages(size.positions, shape.window, o.prefill_chunk, total));
  }
  o.entry_pages += static_cast<int>(g.below(5)), o.key_pages += static_cast<int>(g.below(5));
  return o;
}

// Runs the work with random arrivals and, where asked for, random cancels. `each` sees the engine after every step.
template <class Each>
std::vector<Outcome> run_schedule(Engine& engine, const std::vector<Request>& work, uint64_t seed, bool cancels,
                                  Each&& each) {
  Random g(seed, 3);
  std::vector<Outcome> outcomes;
  std::map<RequestId, size_t> index;
  while (outcomes.size() < work.size() || !engine.idle()) {
    for (uint32_t arrivals = g.below(4); arrivals > 0 && outcomes.size() < work.size(); --arrivals) {
      const Request& r = work[outcomes.size()];
      index[engine.submit(r)] = outcomes.size();
      outcomes.push_back({r, {}, {}, {}, Finish::none});
    }
    for (Event& e : engine.step()) {
      Outcome& o = outcomes[index.at(e.request)];
      o.tokens.push_back(e.token);
      if (o.tokens.size() == 1) o.prompt_logprobs = e.prompt_logprobs;
      o.finish = e.finish, o.routed = e.routed;
    }
    if (cancels && !outcomes.empty() && g.below(12) == 0) engine.cancel(1 + g.below(outcomes.size()));
    each(engine);
  }
  return outcomes;
}

// The adapter version that computed each row: rows of the prompt like the first token.
inline AdapterBatch adapters_of(const std::vector<Outcome>& outcomes, const AdapterRegistry& registry) {
  AdapterBatch batch;
  int row = 0;
  for (const Outcome& o : outcomes) {
    const int prompt = static_cast<int>(o.request.prompt.size()), count = static_cast<int>(o.tokens.size());
    for (int t = 0; t < prompt + count; ++t, ++row) {
      if (o.request.adapter.empty()) continue;
      const int64_t version = o.tokens[std::clamp(t - prompt + 1, 0, count - 1)].adapter_version;
      const auto adapter = registry.version(o.request.adapter, version)->adapter;
      auto part = std::find_if(batch.parts.begin(), batch.parts.end(), [&](auto& p) { return p.adapter == adapter; });
      if (part == batch.parts.end()) part = batch.parts.insert(part, {adapter, {}, false, nullptr});
      part->rows.push_back(row);
    }
  }
  return batch;
}

// Differences on bits between what the engine recorded and the training pass over the finished sequences, packed into
// one row.
inline int mismatches(ResidentWeights& m, Numerics n, const std::vector<Outcome>& all,
                      const AdapterRegistry& registry) {
  std::vector<Outcome> outcomes;
  std::vector<std::vector<int>> documents;
  for (const Outcome& o : all) {
    if (o.tokens.empty()) continue;
    outcomes.push_back(o);
    documents.push_back(o.request.prompt);
    for (const GeneratedToken& t : o.tokens) documents.back().push_back(t.id);
  }
  if (documents.empty()) return 0;
  const AdapterBatch adapters = adapters_of(outcomes, registry);
  const SequencePlan plan = plan_documents(plan_shape(m.model), documents);
  Taps taps;
  taps.choices_only = true;
  ForwardOptions options;
  options.numerics = n, options.adapters = &adapters, options.taps = &taps;
  const Tensor hidden = forward(m, plan, options).hidden;
  std::vector<int> target(plan.token.begin() + 1, plan.token.end());
  target.push_back(0);
  const Tensor logprobs = ops::head_logprobs(hidden, m.outer().head, target);
  const Tensor logits = ops::head_logits(hidden, m.outer().head);

  int bad = 0, first = 0;
  for (size_t d = 0; d < outcomes.size(); first += static_cast<int>(documents[d++].size())) {
    const Outcome& o = outcomes[d];
    const int prompt = static_cast<int>(o.request.prompt.size());
    for (size_t i = 0; i < o.tokens.size(); ++i) {
      const int64_t row = first + prompt - 1 + static_cast<int64_t>(i);
      bad += o.tokens[i].logprob != logprobs.f32()[row];
      for (const TokenLogprob& t : o.tokens[i].top)
        bad += t.logprob != ops::log_probability(logits.f32() + row * logits.size(1), logits.size(1), t.id);
    }
    for (size_t i = 0; i < o.prompt_logprobs.size(); ++i)
      bad += o.prompt_logprobs[i] != logprobs.f32()[first + static_cast<int64_t>(i)];
    if (!o.routed.defined()) continue;
    const int64_t layers = o.routed.size(1), width = o.routed.size(2);
    for (int64_t i = 0; i < o.routed.numel(); ++i) {
      const int64_t row = i / (layers * width), layer = i / width % layers;
      const Tensor& chosen = taps.values.at("routed." + std::to_string(layer));
      bad += o.routed.ptr<int32_t>()[i] != chosen.ptr<int64_t>()[(first + row) * width + i % width];
    }
  }
  return bad;
}

}  // namespace plumb::testing
