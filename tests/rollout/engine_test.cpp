// The engine against the training pass, on bits, under random circumstances; its order, its pages, its errors.
#include "rollout/engine.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/parallel.h"
#include "engine_testing.h"
#include "rollout/generate.h"

namespace plumb {
namespace {

using testing::adapters_of;
using testing::mismatches;
using testing::Outcome;
using testing::random_adapter;
using testing::random_circumstances;
using testing::random_model;
using testing::random_tokens;
using testing::random_work;
using testing::run_schedule;
using testing::three_adapters;
using testing::tiny_config;

class Rollout : public ::testing::Test {  // steps are tiny: handing them to threads takes longer than computing them
 protected:
  void SetUp() override { threads_ = thread_count(), set_thread_count(1); }
  void TearDown() override { set_thread_count(threads_); }
  std::shared_ptr<ResidentWeights> model_ = random_model(tiny_config(), 1, WeightFormat::fp8);
  std::shared_ptr<AdapterRegistry> registry_ = three_adapters(tiny_config());

 private:
  int threads_ = 1;
};

TEST_F(Rollout, LogProbabilitiesAreThoseOfTrainingWhateverTheSchedule) {
  int64_t preemptions = 0, tokens = 0;
  int cancelled = 0;
  for (uint64_t seed = 0; seed < 240; ++seed) {
    const Numerics n = seed % 2 ? Numerics::fp32 : Numerics::released;
    const std::vector<Request> work = random_work(model_->model, seed);
    EngineOptions o = random_circumstances(work, plan_shape(model_->model), seed);
    o.numerics = n;
    Engine engine(*model_, o, registry_);
    const auto outcomes = run_schedule(engine, work, seed, true, [&](const Engine& e) {
      const EngineStats s = e.stats();
      ASSERT_EQ(s.free_key_pages + s.held_key_pages, o.key_pages);
      ASSERT_EQ(s.free_entry_pages + s.held_entry_pages, o.entry_pages);
      ASSERT_LE(s.running, o.max_running);
    });
    ASSERT_EQ(engine.stats().free_key_pages, o.key_pages) << seed;
    ASSERT_EQ(engine.stats().free_entry_pages, o.entry_pages) << seed;
    ASSERT_EQ(mismatches(*model_, n, outcomes, *registry_), 0) << "seed " << seed;
    preemptions += engine.stats().preemptions;
    for (const Outcome& c : outcomes) {
      tokens += static_cast<int64_t>(c.tokens.size());
      cancelled += c.finish == Finish::none;
      if (c.finish == Finish::none) continue;
      ASSERT_EQ(c.routed.defined(), c.request.routed_experts);
      ASSERT_EQ(c.prompt_logprobs.size(), c.request.prompt_logprobs ? c.request.prompt.size() - 1 : 0);
    }
  }
  EXPECT_GT(preemptions, 50);  // the circumstances are what they claim to be
  EXPECT_GT(cancelled, 50);
  EXPECT_GT(tokens, 5000);
}

// Pages of 128 positions, as the released model has them; prompts that end around a page and around the window.
TEST_F(Rollout, LogProbabilitiesAreThoseOfTrainingAtTheReleasedRatios) {
  ModelConfig c = tiny_config();
  c.hca_ratio = 128, c.sliding_window = 128, c.num_hidden_layers = 3;
  c.layer_kinds = {LayerKind::csa, LayerKind::hca, LayerKind::window, LayerKind::window};
  const auto model = random_model(c, 3);
  const auto registry = three_adapters(c);
  int64_t preemptions = 0;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    std::vector<Request> work;
    for (int length : {1, 126, 127, 128, 129, 252, 255, 256}) {
      Request r;
      r.prompt = random_tokens(c, length, seed * 1000 + length);
      r.key = work.size(), r.sampling.max_tokens = 6;
      if (work.size() % 3 == seed % 3) r.adapter = "a1";
      work.push_back(r);
    }
    EngineOptions o = random_circumstances(work, plan_shape(c), seed);
    o.prefill_chunk *= 3, o.key_pages += 1;  // a larger chunk may touch one page more
    Engine engine(*model, o, registry);
    const auto outcomes = run_schedule(engine, work, seed, false, [](const Engine&) {});
    ASSERT_EQ(mismatches(*model, o.numerics, outcomes, *registry), 0) << "seed " << seed;
    preemptions += engine.stats().preemptions;
  }
  EXPECT_GT(preemptions, 0);
}

TEST_F(Rollout, TheSameTokensWhateverTheSchedule) {
  for (uint64_t seed = 1000; seed < 1015; ++seed) {
    const std::vector<Request> work = random_work(model_->model, seed);
    std::vector<Outcome> first;
    for (uint64_t schedule : {seed, seed + 500, seed + 900}) {
      const EngineOptions o = random_circumstances(work, plan_shape(model_->model), schedule);
      Engine engine(*model_, o, registry_);
      const auto outcomes = run_schedule(engine, work, schedule, false, [](const Engine&) {});
      if (first.empty()) first = outcomes;
      for (size_t i = 0; i < work.size(); ++i) {
        EXPECT_TRUE(outcomes[i].tokens == first[i].tokens) << seed << " request " << i;
        EXPECT_EQ(outcomes[i].finish, first[i].finish);
        EXPECT_EQ(outcomes[i].prompt_logprobs, first[i].prompt_logprobs);
      }
    }
  }
}

// The comparison must see errors of the kinds that a paged cache can have.
TEST_F(Rollout, APlantedErrorIsFound) {
  const auto forget = [](CompressionPlan& c) {
    if (!c.pending_row.empty()) c.pending_row.pop_back(), c.pending_slot.pop_back();
  };
  const std::map<std::string, std::function<void(SequencePlan&)>> errors = {
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
    for (Numerics n : {Numerics::fp32, Numerics::released}) {
      int found = 0;
      for (uint64_t seed = 2000; seed < 2003; ++seed) {
        const std::vector<Request> work = random_work(model_->model, seed);
        EngineOptions o = random_circumstances(work, plan_shape(model_->model), seed);
        o.numerics = n, o.edit_plan = error;
        Engine engine(*model_, o, registry_);
        found += mismatches(*model_, n, run_schedule(engine, work, seed, false, [](const Engine&) {}), *registry_);
      }
      EXPECT_GT(found, 0) << name << ", " << numerics_name(n);
    }
}

// Versions are published while answers are written, with preemptions: each token's row keeps the version that first
// computed it. Prompts run in one step, so the version of the first token is that of the whole prompt.
TEST_F(Rollout, FollowersSwitchAtATokenAndPinnedOnesDoNot) {
  auto registry = std::make_shared<AdapterRegistry>(100);
  registry->publish("a", random_adapter(model_->model, 2, 1));
  EngineOptions o;
  o.key_pages = 9, o.entry_pages = 9, o.token_budget = 400;
  Engine engine(*model_, o, registry);
  std::vector<Request> work(6);
  for (size_t i = 0; i < work.size(); ++i) {
    work[i].prompt = random_tokens(model_->model, 10 + static_cast<int>(i), i);
    work[i].sampling.max_tokens = 30, work[i].key = i, work[i].adapter = "a";
    if (i % 3 == 2) work[i].adapter_version = 1;
  }
  const auto outcomes = run_schedule(engine, work, 5, false, [&](const Engine& e) {
    if (e.stats().steps % 7 == 0) registry->publish("a", random_adapter(model_->model, 2, 10 + e.stats().steps));
  });
  EXPECT_GT(engine.stats().preemptions, 0);
  EXPECT_EQ(mismatches(*model_, o.numerics, outcomes, *registry), 0);
  for (size_t i = 0; i < work.size(); ++i) {
    const auto& tokens = outcomes[i].tokens;
    if (i % 3 == 2)
      EXPECT_TRUE(tokens.front().adapter_version == 1 && tokens.back().adapter_version == 1);
    else
      EXPECT_LT(tokens.front().adapter_version, tokens.back().adapter_version);
  }
}

TEST_F(Rollout, OrderIsPriorityThenArrival) {
  EngineOptions o;
  o.max_running = 1, o.key_pages = 8, o.entry_pages = 8;
  Engine engine(*model_, o);
  Request r;
  r.prompt = {1, 2, 3}, r.sampling.max_tokens = 2;
  std::vector<RequestId> ids;
  for (int priority : {0, 0, 5, -1, 5}) r.priority = priority, ids.push_back(engine.submit(r));
  std::vector<RequestId> finished;
  while (!engine.idle())
    for (const Event& e : engine.step())
      if (e.finish != Finish::none) finished.push_back(e.request);
  EXPECT_EQ(finished, (std::vector<RequestId>{ids[2], ids[4], ids[0], ids[1], ids[3]}));
}

TEST_F(Rollout, CancellingFreesAtOnce) {
  EngineOptions o;
  o.key_pages = 8, o.entry_pages = 8;
  Engine engine(*model_, o);
  Request r;
  r.prompt = random_tokens(model_->model, 40, 1), r.sampling.max_tokens = 50;
  const RequestId running = engine.submit(r), waiting = engine.submit(r);
  engine.step();
  EXPECT_EQ(engine.stats().running + engine.stats().waiting, 2);
  EXPECT_TRUE(engine.cancel(running));
  EXPECT_TRUE(engine.cancel(waiting));
  EXPECT_FALSE(engine.cancel(running));
  EXPECT_TRUE(engine.idle());
  EXPECT_EQ(engine.stats().free_key_pages, 8);
  EXPECT_EQ(engine.stats().free_entry_pages, 8);
}

// A long answer holds few key pages: those that the window has passed are free again.
TEST_F(Rollout, KeysPastTheWindowAreGivenBack) {
  EngineOptions o;
  o.prefill_chunk = 8, o.key_pages = 2, o.entry_pages = 13;
  Engine engine(*model_, o);
  Request r;
  r.prompt = random_tokens(model_->model, 100, 1), r.sampling.max_tokens = 100;
  engine.submit(r);
  while (!engine.idle()) engine.step();
  EXPECT_EQ(engine.stats().preemptions, 0);
  EXPECT_EQ(engine.stats().rows, 199);
}

TEST_F(Rollout, BadRequestsAreRefusedAndLeaveNothing) {
  EngineOptions o;
  o.key_pages = 8, o.entry_pages = 8;
  Engine engine(*model_, o, registry_);
  const auto refused = [&](auto&& change, const std::string& where) {
    Request r;
    r.prompt = {1, 2, 3}, r.sampling.max_tokens = 5;
    change(r);
    try {
      engine.submit(r);
      ADD_FAILURE() << where;
    } catch (const Error& e) {
      EXPECT_EQ(e.where(), where) << e.what();
    }
  };
  refused([](Request& r) { r.prompt.clear(); }, "prompt");
  refused([](Request& r) { r.prompt = {61}; }, "prompt");
  refused([](Request& r) { r.sampling.max_tokens = 1 << 30; }, "max_tokens");
  refused([](Request& r) { r.sampling.max_tokens = 8 * 16; }, "max_tokens");  // the cache: 8 pages of 16
  refused([](Request& r) { r.sampling.min_tokens = 6; }, "min_tokens");
  refused([](Request& r) { r.sampling.logit_bias = {{61, 1.0f}}; }, "logit_bias");
  refused([](Request& r) { r.sampling.stop_tokens = {-1}; }, "stop_tokens");
  refused([](Request& r) { r.sampling.temperature = NAN; }, "temperature");
  refused([](Request& r) { r.adapter = "b"; }, "adapter");
  refused([](Request& r) { r.adapter = "a1", r.adapter_version = 7; }, "adapter");
  EXPECT_TRUE(engine.idle());
}

TEST_F(Rollout, GenerateIsTheEngineWithOneRequestAnAnswer) {
  std::vector<GenerationRequest> requests(5);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = random_tokens(model_->model, 3 + 9 * static_cast<int>(i), i);
    requests[i].sampling.max_tokens = 12, requests[i].id = i;
  }
  GenerateOptions o;
  o.batch = 2, o.adapter = registry_->newest("a2")->adapter;
  const auto two = generate(*model_, requests, o);
  o.batch = 5, o.prefill_chunk = 4;
  o.on_token = [&](size_t request, const GeneratedToken& t) {
    return request != 3 || t.id != two[3].tokens[6].id;  // ends answer 3 early
  };
  const auto five = generate(*model_, requests, o);
  for (size_t i = 0; i < requests.size(); ++i) {
    ASSERT_EQ(two[i].tokens.size(), 12u);
    ASSERT_LE(five[i].tokens.size(), i == 3 ? 7u : 12u);
    EXPECT_TRUE(std::equal(five[i].tokens.begin(), five[i].tokens.end(), two[i].tokens.begin()));
  }
}

}  // namespace
}  // namespace plumb
