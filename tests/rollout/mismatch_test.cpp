// The promise of the engine: its log-probabilities have the bits of the training pass, whatever the schedule.
#include <gtest/gtest.h>

#include "base/parallel.h"
#include "engine_testing.h"

namespace plumb {
namespace {

using namespace testing;  // NOLINT: the vocabulary of these tests

struct Totals {
  int64_t preemptions = 0, hits = 0, tokens = 0, switches = 0, cancelled = 0, stopped_by_string = 0, widest = 0;
};

struct Campaign {
  ModelConfig config;
  WeightFormat format = WeightFormat::fp8;
  WorkLimits limits;
  uint64_t first = 0, count = 0;
};

// Random schedules, each compared with the training pass. While they run, new versions of the adapters are published
// now and then, from a few that exist already.
Totals run(const Campaign& c) {
  const int threads = thread_count();
  set_thread_count(1);  // steps are tiny: handing them to threads takes longer than computing them
  const auto model = random_model(c.config, 1, c.format);
  std::vector<std::shared_ptr<const Adapter>> spare;
  for (int i = 0; i < 6; ++i) spare.push_back(random_adapter(c.config, 1 + i % 3, 90 + i));
  Totals totals;
  for (uint64_t seed = c.first; seed < c.first + c.count; ++seed) {
    WorkLimits limits = c.limits;
    if (seed % 24 == 23) limits.most = 9 * limits.most;
    const std::vector<Request> work = random_work(c.config, limits, seed);
    const EngineOptions o = random_circumstances(work, plan_shape(c.config), seed);
    const auto registry = some_adapters(c.config, 4);
    Engine engine(*model, o, registry);
    Random g(seed, 4);
    const auto outcomes = run_schedule(engine, work, seed, true, [&](const Engine& e) {
      const EngineStats s = e.stats();
      EXPECT_EQ(s.free_key_pages + s.held_key_pages, o.key_pages);
      EXPECT_EQ(s.free_entry_pages + s.held_entry_pages, o.entry_pages);
      EXPECT_LE(s.running, o.max_running);
      totals.widest = std::max<int64_t>(totals.widest, s.running);
      if (seed % 3 == 0 && g.below(6) == 0)
        registry->publish("a" + std::to_string(1 + g.below(4)), spare[g.below(static_cast<uint32_t>(spare.size()))]);
    });
    const EngineStats s = engine.stats();
    EXPECT_EQ(s.free_key_pages, o.key_pages);
    EXPECT_EQ(s.free_entry_pages, o.entry_pages);
    EXPECT_EQ(mismatches(*model, o.numerics, outcomes, *registry), 0);
    if (seed % 8 < 2) {
      EXPECT_EQ(mismatches_alone(*model, o.numerics, outcomes, *registry), 0);
    }
    totals.preemptions += s.preemptions, totals.hits += s.prefix_hits;
    for (const Outcome& r : outcomes) {
      totals.tokens += static_cast<int64_t>(r.tokens.size());
      totals.cancelled += r.finish == Finish::none, totals.stopped_by_string += !r.stop_string.empty();
      totals.switches += r.versions.size() > 1;
      if (r.finish == Finish::none) continue;
      EXPECT_EQ(r.routed.defined(), r.request.routed_experts);
      EXPECT_EQ(r.prompt_logprobs.size(), r.request.prompt_logprobs ? r.request.prompt.size() - 1 : 0);
      EXPECT_EQ(r.prompt_top.size(), r.request.prompt_top_logprobs ? r.request.prompt.size() - 1 : 0);
    }
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "seed " << seed;
      break;
    }
  }
  set_thread_count(threads);
  return totals;
}

// The circumstances are what they claim to be.
void expect_eventful(const Totals& t) {
  EXPECT_GT(t.preemptions, 50);
  EXPECT_GT(t.hits, 100);
  EXPECT_GT(t.cancelled, 50);
  EXPECT_GT(t.switches, 30);
  EXPECT_GT(t.stopped_by_string, 50);
  EXPECT_GE(t.widest, 50);
  EXPECT_GT(t.tokens, 5000);
}

TEST(Mismatch, IsZeroWithFp8Weights) { expect_eventful(run({small_config(), WeightFormat::fp8, {}, 0, 600})); }
TEST(Mismatch, IsZeroWithFp32Weights) { expect_eventful(run({small_config(), WeightFormat::f32, {}, 600, 600})); }
TEST(Mismatch, IsZeroWithBf16Weights) { expect_eventful(run({small_config(), WeightFormat::bf16, {}, 1200, 600})); }

// Hash and score routing, all kinds of layers more than once, FP4 experts.
TEST(Mismatch, IsZeroInADeeperModel) {
  const Totals t = run({tiny_config(), WeightFormat::fp4, {}, 1800, 120});
  EXPECT_GT(t.preemptions, 10);
  EXPECT_GT(t.hits, 20);
}

// Window and pages of 128 positions; prompts that end around up to three of them.
TEST(Mismatch, IsZeroAtTheReleasedRatios) {
  WorkLimits limits;
  limits.page = 128, limits.most = 5;
  const Totals t = run({released_ratios(small_config()), WeightFormat::fp8, limits, 1920, 120});
  EXPECT_GT(t.preemptions, 0);
  EXPECT_GT(t.hits, 50);
}

// ---- The comparison must see errors of the kinds that a paged cache can have.

using EditPlan = std::function<void(SequencePlan&)>;

int found_with(const EditPlan& error, Numerics n, const WorkLimits& limits = {},
               const std::function<void(EngineOptions&)>& change = {}) {
  const int threads = thread_count();
  set_thread_count(1);
  const ModelConfig c = tiny_config();
  const auto model = random_model(c, 1, WeightFormat::fp8);
  const auto registry = some_adapters(c, 4);
  int found = 0;
  for (uint64_t seed = 3000; seed < 3030 && found == 0; ++seed) {
    const std::vector<Request> work = random_work(c, limits, seed);
    EngineOptions o = random_circumstances(work, plan_shape(c), seed);
    o.numerics = n, o.edit_plan = error;
    if (change) change(o);
    Engine engine(*model, o, registry);
    found += mismatches(*model, n, run_schedule(engine, work, seed, false, [](const Engine&) {}), *registry);
  }
  set_thread_count(threads);
  return found;
}

TEST(Mismatch, APlantedErrorIsFound) {
  const auto forget = [](CompressionPlan& c) {
    if (!c.pending_row.empty()) c.pending_row.pop_back(), c.pending_slot.pop_back();
  };
  const std::map<std::string, EditPlan> errors = {
      {"a pending row of ratio 4 is stale", [&](SequencePlan& p) { forget(p.csa); }},
      {"a pending row of ratio 16 is stale", [&](SequencePlan& p) { forget(p.hca); }},
      {"the newest entry is not seen",
       [](SequencePlan& p) {
         for (EntryRange& r : p.hca.visible.range) r.last = std::max(r.first, r.last - 1);
       }},
      {"entries are rotated at the end of their window",
       [](SequencePlan& p) {
         for (int& position : p.csa.position) position += p.csa.ratio - 1;
       }},
      {"the oldest key is that of another position",
       [](SequencePlan& p) {
         const int first = p.window.begin[p.window.size() - 1], last = p.window.begin[p.window.size()] - 1;
         p.window.row[first] = p.window.row[last];
       }},
      {"keys are met in another order", [](SequencePlan& p) {
         for (int i = 0; i < p.window.size(); ++i)
           std::reverse(p.window.row.begin() + p.window.begin[i], p.window.row.begin() + p.window.begin[i + 1]);
       }}};
  for (const auto& [name, error] : errors)
    for (Numerics n : {Numerics::fp32, Numerics::released})
      EXPECT_GT(found_with(error, n), 0) << name << ", " << numerics_name(n);
  EXPECT_EQ(found_with({}, Numerics::fp32), 0);
}

// A prompt that goes on behind cached pages reads the pending rows that lie with the last of them. With chunks of 5 no
// chunk of a prompt of less than 80 tokens begins at the end of a page of 16 unless the pages before it were cached, so
// the error strikes hits alone.
TEST(Mismatch, AStalePendingRowOnAPrefixHitIsFound) {
  const EditPlan error = [](SequencePlan& p) {
    size_t entry = 0;  // of the plan's new ones
    for (int row = 0; row < p.rows(); ++row) {
      if (row > 0 && p.document[row] == p.document[row - 1]) continue;
      int end = row + 1;
      while (end < p.rows() && p.document[end] == p.document[row]) ++end;
      const int begin = p.position[row], count = end - row;
      const size_t entries = (begin + count) / p.csa.ratio - begin / p.csa.ratio;
      if (begin > 0 && begin % 16 == 0 && count > 1 && entries > 0) {
        int& source = p.csa.source[entry * p.csa.slots];  // the oldest row of the entry behind the page's end
        source = source == p.rows() ? source + 1 : source - 1;
      }
      entry += entries;
    }
  };
  for (Numerics n : {Numerics::fp32, Numerics::released})
    for (bool cache : {true, false}) {
      WorkLimits alike;
      alike.adapters = 0;
      const int found = found_with(error, n, alike, [&](EngineOptions& o) {
        o.prefix_cache = cache, o.prefill_chunk = 5, o.token_budget = 400, o.max_running = 2;
        o.key_pages = 40, o.entry_pages = 40;
      });
      EXPECT_EQ(found > 0, cache) << numerics_name(n);
    }
}

}  // namespace
}  // namespace plumb
