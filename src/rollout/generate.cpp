#include "rollout/generate.h"

#include <algorithm>

#include "base/error.h"
#include "ops/head.h"

namespace plumb {
namespace {

// One place of the batch: the slots of a sequence in the cache, and how far it has come.
struct Lane {
  size_t request = 0;
  bool active = false;
  int length = 0;            // tokens whose keys are in the cache
  std::vector<int> pending;  // tokens that are not: the rest of the prompt, or the last sampled one
};

class Session {
 public:
  Session(WeightStore& weights, const std::vector<GenerationRequest>& requests, const GenerateOptions& options)
      : weights_(weights), requests_(requests), options_(options), results_(requests.size()) {
    const ModelConfig& c = weights.config();
    shape_ = plan_shape(c);
    int longest = 0;
    for (const auto& r : requests) {
      check(r.sampling);
      if (r.prompt.empty()) fail("prompt", "is empty", "a sequence starts with at least one token");
      for (int t : r.prompt)
        if (t < 0 || t >= c.vocab_size)
          fail("prompt", "token " + std::to_string(t) + " is not in the vocabulary",
               "allowed: 0 to " + std::to_string(c.vocab_size - 1));
      longest = std::max(longest, static_cast<int>(r.prompt.size()) + r.sampling.max_tokens);
    }
    if (longest > c.max_position_embeddings)
      fail("max_tokens",
           "prompt and answer may reach " + std::to_string(longest) + " tokens, more than the model's " +
               std::to_string(c.max_position_embeddings),
           "shorten one of them");
    lanes_.resize(std::max<size_t>(1, std::min<size_t>(options.batch, requests.size())));
    lay_out_cache(c, longest);
    if (options.adapter) adapters_.parts.push_back({options.adapter, {}, true, nullptr});
  }

  std::vector<Generation> run() {
    size_t next = 0;
    for (;;) {
      bool any = false;
      for (Lane& lane : lanes_) {
        if (!lane.active && next < requests_.size()) {
          lane = {next, true, 0, requests_[next].prompt};
          ++next;
        }
        any = any || lane.active;
      }
      if (!any) return std::move(results_);
      step();
    }
  }

 private:
  void lay_out_cache(const ModelConfig& c, int longest) {
    const int keys = std::min(longest, shape_.window + options_.prefill_chunk);
    const int csa = shape_.csa_ratio ? longest / shape_.csa_ratio : 0,
              hca = shape_.hca_ratio ? longest / shape_.hca_ratio : 0;
    CacheShape total;
    for (size_t i = 0; i < lanes_.size(); ++i) {
      const int n = static_cast<int>(i);
      slots_.push_back({n * keys, keys, n * csa, n * hca, n * 2 * shape_.csa_ratio, n * shape_.hca_ratio});
    }
    const int lanes = static_cast<int>(lanes_.size());
    total = {lanes * keys, lanes * csa, lanes * hca};
    cache_shape_ = total;
    cache_ = make_cache(c, total, lanes * 2 * shape_.csa_ratio, lanes * shape_.hca_ratio);
  }

  void step() {
    std::vector<int> length;
    std::vector<std::vector<int>> tokens;
    for (Lane& lane : lanes_) {
      const size_t n = lane.active ? std::min<size_t>(lane.pending.size(), options_.prefill_chunk) : 0;
      length.push_back(lane.length);
      tokens.emplace_back(lane.pending.begin(), lane.pending.begin() + n);
    }
    SequencePlan plan = plan_cached_step(shape_, cache_shape_, slots_, length, tokens, false);
    ForwardOptions o;
    o.numerics = options_.numerics;
    o.adapters = adapters_.parts.empty() ? nullptr : &adapters_;
    o.cache = &cache_;
    const Tensor hidden = forward(weights_, plan, o).hidden;
    const Tensor logits = ops::head_logits(hidden, weights_.outer().head);
    int64_t row = 0;
    for (size_t i = 0; i < lanes_.size(); ++i) {
      if (tokens[i].empty()) continue;
      Lane& lane = lanes_[i];
      lane.length += static_cast<int>(tokens[i].size());
      lane.pending.erase(lane.pending.begin(), lane.pending.begin() + tokens[i].size());
      if (lane.pending.empty()) take(lane, logits.f32() + row * logits.size(1), logits.size(1));
      ++row;  // one wanted row a sequence
    }
  }

  void take(Lane& lane, const float* logits, int64_t vocab) {
    const GenerationRequest& r = requests_[lane.request];
    Generation& g = results_[lane.request];
    const GeneratedToken t = sample_token(logits, vocab, r.sampling, r.id, lane.length);
    g.tokens.push_back(t);
    g.stopped = std::count(r.sampling.stop_tokens.begin(), r.sampling.stop_tokens.end(), t.id) > 0;
    const bool go_on = !options_.on_token || options_.on_token(lane.request, t);
    lane.active = go_on && !g.stopped && static_cast<int>(g.tokens.size()) < r.sampling.max_tokens;
    lane.pending = {t.id};
  }

  WeightStore& weights_;
  const std::vector<GenerationRequest>& requests_;
  const GenerateOptions& options_;
  std::vector<Generation> results_;
  PlanShape shape_;
  CacheShape cache_shape_;
  std::vector<CacheSlots> slots_;
  KvCache cache_;
  AdapterBatch adapters_;
  std::vector<Lane> lanes_;
};

}  // namespace

std::vector<Generation> generate(WeightStore& weights, const std::vector<GenerationRequest>& requests,
                                 const GenerateOptions& options) {
  return Session(weights, requests, options).run();
}

}  // namespace plumb
