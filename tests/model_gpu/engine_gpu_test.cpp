// The engine's promise on the GPU: paged caches, chunks, preemption, the prefix cache, graphs of decoding steps and
// several adapters in a batch, and yet the log-probabilities of the training pass, on bits.
#include <gtest/gtest.h>

#include "flash_model.h"
#include "memory/device_weights.h"
#include "rollout/cache_size.h"
#include "rollout/engine_testing.h"

namespace plumb {
namespace {

using namespace testing;  // NOLINT: the vocabulary of these tests

constexpr int kAdapters = 3;

WeightStore& weights() {
  static WeightStore& w = *new DeviceWeights(flash_model(5));
  return w;
}

// Of ranks 4, 8, 12, and one more that replaces any of them. Made once: each has ten million numbers.
const std::vector<std::shared_ptr<Adapter>>& adapters() {
  static const auto& all = *new std::vector<std::shared_ptr<Adapter>>{
      flash_adapter(flash_config(), 4, 71), flash_adapter(flash_config(), 8, 72), flash_adapter(flash_config(), 12, 73),
      flash_adapter(flash_config(), 8, 74)};
  return all;
}

std::shared_ptr<AdapterRegistry> flash_registry() {
  auto registry = std::make_shared<AdapterRegistry>(1 << 20);
  for (int i = 0; i < kAdapters; ++i) registry->publish("a" + std::to_string(i + 1), adapters()[i]);
  return registry;
}

// Pages of 128 positions, prompts that end around up to three of them.
std::vector<Request> flash_work(uint64_t seed, bool crowded) {
  WorkLimits limits;
  limits.page = 128, limits.most = 7, limits.most_tokens = 40, limits.adapters = kAdapters;
  std::vector<Request> work = random_work(flash_config(), limits, seed);
  for (Request& r : work) {
    r.stop_strings.clear();                                                       // the model's vocabulary has no text
    if (crowded) r.prompt.resize(118 + seed % 9, 5), r.sampling.max_tokens = 40;  // all reach a second page
  }
  return work;
}

struct Totals {
  int64_t tokens = 0, preemptions = 0, hits = 0, switches = 0, replayed = 0, mismatches = 0;
};

Totals run(uint64_t first, uint64_t count, const std::function<void(SequencePlan&)>& edit_plan = {}) {
  const ModelConfig c = flash_config();
  Totals totals;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const bool crowded = seed % 3 == 0;  // many at a time in a cache for few: they drive each other out
    const std::vector<Request> work = flash_work(seed, crowded);
    EngineOptions o = random_circumstances(work, plan_shape(c), seed);
    o.numerics = Numerics::released, o.tokenizer.reset(), o.edit_plan = edit_plan;
    if (crowded) {
      o.max_running = 8, o.token_budget = std::max(o.token_budget, 64);
      set_least_pages(o, work, plan_shape(c));
    }
    const auto registry = flash_registry();
    Engine engine(weights(), o, registry);
    Random g(seed, 4);
    const auto outcomes = run_schedule(engine, work, seed, true, [&](const Engine&) {
      if (g.below(6) == 0) registry->publish("a" + std::to_string(1 + g.below(kAdapters)), adapters().back());
    });
    const EngineStats s = engine.stats();
    EXPECT_EQ(s.free_key_pages, o.key_pages);
    totals.mismatches += mismatches(weights(), o.numerics, outcomes, *registry);
    totals.preemptions += s.preemptions, totals.hits += s.prefix_hits, totals.replayed += s.decode_graphs.replays;
    for (const Outcome& r : outcomes)
      totals.tokens += static_cast<int64_t>(r.tokens.size()), totals.switches += r.versions.size() > 1;
  }
  return totals;
}

TEST(EngineGpu, LogProbabilitiesHaveTheBitsOfTraining) {
  const Totals t = run(0, 60);
  EXPECT_EQ(t.mismatches, 0);
  EXPECT_GT(t.tokens, 1000);
  EXPECT_GT(t.preemptions, 5);
  EXPECT_GT(t.hits, 10);
  EXPECT_GT(t.switches, 3);
  EXPECT_GT(t.replayed, 100);
}

TEST(EngineGpu, TheCacheTakesWhatIsSaid) {
  EngineOptions o;
  o.max_running = 5, o.prefill_chunk = 100;
  const int64_t budget = int64_t{3} << 26;
  fit_cache(o, flash_config(), budget, 1000, Space::device);
  int64_t bytes = 0;
  for (const LayerCache& l : make_engine_cache(flash_config(), o, Space::device).layers)
    for (const Tensor* t :
         {&l.keys, &l.index_keys, &l.pending_kv, &l.pending_gate, &l.index_pending_kv, &l.index_pending_gate})
      bytes += static_cast<int64_t>(t->bytes());
  const CacheBytes expected = cache_bytes(flash_config(), Space::device);
  EXPECT_EQ(bytes, expected.total(o));
  EXPECT_LE(bytes, budget);
  EXPECT_GT(bytes, budget - expected.key_page - expected.entry_page);
}

TEST(EngineGpu, APlantedErrorIsFound) {
  const auto error = [](SequencePlan& p) {
    for (EntryRange& r : p.hca.visible.range) r.last = std::max(r.first, r.last - 1);
  };
  EXPECT_GT(run(0, 8, error).mismatches, 0);
}

}  // namespace
}  // namespace plumb
