// The order of the engine, its pages, what it refuses, and what its events say. mismatch_test.cpp has its promise,
// prefix_test.cpp what it keeps of prompts.
#include "rollout/engine.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/parallel.h"
#include "engine_testing.h"
#include "rollout/generate.h"

namespace plumb {
namespace {

using namespace testing;  // NOLINT: the vocabulary of these tests

class Rollout : public ::testing::Test {  // steps are tiny: handing them to threads takes longer than computing them
 protected:
  void SetUp() override { threads_ = thread_count(), set_thread_count(1); }
  void TearDown() override { set_thread_count(threads_); }
  std::shared_ptr<ResidentWeights> model_ = random_model(tiny_config(), 1, WeightFormat::fp8);
  std::shared_ptr<AdapterRegistry> registry_ = some_adapters(tiny_config(), 4);

 private:
  int threads_ = 1;
};

TEST_F(Rollout, TheSameTokensWhateverTheSchedule) {
  for (uint64_t seed = 1000; seed < 1015; ++seed) {
    const std::vector<Request> work = random_work(model_->model, {}, seed);
    std::vector<Outcome> first;  // the schedules differ in the use of the prefix cache, too
    for (uint64_t schedule : {seed, seed + 500, seed + 900}) {
      EngineOptions o = random_circumstances(work, plan_shape(model_->model), schedule);
      o.numerics = Numerics::released;
      Engine engine(*model_, o, registry_);
      const auto outcomes = run_schedule(engine, work, schedule, false, [](const Engine&) {});
      if (first.empty()) first = outcomes;
      for (size_t i = 0; i < work.size(); ++i) {
        EXPECT_TRUE(outcomes[i].tokens == first[i].tokens) << seed << " request " << i;
        EXPECT_EQ(outcomes[i].finish, first[i].finish);
        EXPECT_EQ(outcomes[i].prompt_logprobs, first[i].prompt_logprobs);
        EXPECT_EQ(outcomes[i].prompt_top, first[i].prompt_top);
        EXPECT_EQ(outcomes[i].text, first[i].text);
        EXPECT_EQ(outcomes[i].stop_string, first[i].stop_string);
      }
    }
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
  refused([](Request& r) { r.sampling.max_tokens = 0; }, "max_tokens");
  refused([](Request& r) { r.stop_strings = {"x"}; }, "stop_strings");  // no tokenizer
  refused([](Request& r) { r.stop_strings = {""}; }, "stop_strings");
  refused([](Request& r) { r.prompt_top_logprobs = 2; }, "prompt_top_logprobs");
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

TEST_F(Rollout, AFullQueueIsAnErrorOfItsOwn) {
  EngineOptions o;
  o.key_pages = 8, o.entry_pages = 8, o.max_waiting = 2;
  Engine engine(*model_, o);
  Request r;
  r.prompt = {1, 2, 3}, r.sampling.max_tokens = 2;
  engine.submit(r);
  engine.submit(r);
  EXPECT_THROW(engine.submit(r), QueueFull);
  r.prompt = {};
  EXPECT_THROW(engine.submit(r), Error);  // what is wrong with a request is said first
  engine.step();
  r.prompt = {1};
  EXPECT_NO_THROW(engine.submit(r));
}

TEST_F(Rollout, APromptAloneHasOneEventWithoutAToken) {
  EngineOptions o;
  o.key_pages = 8, o.entry_pages = 8, o.prefill_chunk = 7;
  Engine engine(*model_, o);
  std::vector<Request> work(2);
  for (Request& r : work) {
    r.prompt = random_tokens(model_->model, 33, 1), r.sampling.max_tokens = 0;
    r.prompt_logprobs = r.routed_experts = true, r.prompt_top_logprobs = 3;
  }
  work[1].prompt = {5};
  const auto outcomes = run_schedule(engine, work, 1, false, [](const Engine&) {});
  for (const Outcome& r : outcomes) {
    const int64_t prompt = static_cast<int64_t>(r.request.prompt.size());
    EXPECT_EQ(r.finish, Finish::length);
    EXPECT_TRUE(r.tokens.empty());
    EXPECT_EQ(static_cast<int64_t>(r.prompt_logprobs.size()), prompt - 1);
    EXPECT_EQ(static_cast<int64_t>(r.prompt_top.size()), prompt - 1);
    EXPECT_EQ(r.routed.size(0), prompt);
    for (const auto& top : r.prompt_top) EXPECT_TRUE(top.size() == 3 && top[0].logprob >= top[1].logprob);
  }
  EXPECT_EQ(mismatches(*model_, o.numerics, outcomes, *registry_), 0);
}

TEST_F(Rollout, TheTextEndsWhereAStopStringBegins) {
  EngineOptions o;
  o.key_pages = 30, o.entry_pages = 30, o.tokenizer = letters();
  Request r;
  r.prompt = {1, 2, 3}, r.sampling.max_tokens = 40;
  const auto answer = [&](const Request& request) {
    Engine engine(*model_, o);
    return run_schedule(engine, {request}, 1, false, [](const Engine&) {})[0];
  };
  const Outcome whole = answer(r);
  ASSERT_EQ(whole.text.size(), 40u);  // one byte a token
  EXPECT_EQ(whole.finish, Finish::length);
  const std::string stop = whole.text.substr(20, 3);
  const size_t at = whole.text.find(stop);
  r.stop_strings = {stop, "none"};
  const Outcome cut = answer(r);
  EXPECT_EQ(cut.finish, Finish::stop);
  EXPECT_EQ(cut.stop_string, stop);
  EXPECT_EQ(cut.text, whole.text.substr(0, at));
  ASSERT_EQ(cut.tokens.size(), at + 3);
  EXPECT_TRUE(std::equal(cut.tokens.begin(), cut.tokens.end(), whole.tokens.begin()));
  r.sampling.min_tokens = static_cast<int>(at) + 3;  // the first min_tokens tokens end nothing
  EXPECT_GT(answer(r).text.size(), at);
  r.sampling.min_tokens = 0, r.stop_strings.clear();
  r.sampling.stop_tokens = {whole.tokens[10].id};
  const size_t first = whole.text.find(whole.text[10]);
  EXPECT_EQ(answer(r).text, whole.text.substr(0, first));  // a stop token has no text
}

TEST_F(Rollout, AStepThatThrowsEndsItsRequestsAndNothingElse) {
  EngineOptions o;
  bool broken = false;
  o.key_pages = 8, o.entry_pages = 8, o.max_running = 1;
  o.edit_plan = [&](SequencePlan&) {
    if (broken) throw std::runtime_error("out of luck");
  };
  Engine engine(*model_, o);
  Request r;
  r.prompt = random_tokens(model_->model, 20, 1), r.sampling.max_tokens = 3;
  const RequestId first = engine.submit(r), second = engine.submit(r);
  engine.step();
  broken = true;
  const std::vector<Event> events = engine.step();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].request, first);
  EXPECT_EQ(events[0].finish, Finish::error);
  EXPECT_EQ(events[0].error, "out of luck");
  broken = false;
  int tokens = 0;
  while (!engine.idle())
    for (const Event& e : engine.step()) tokens += e.request == second;
  EXPECT_EQ(tokens, 3);
  EXPECT_EQ(engine.stats().free_key_pages, 8);
}

// Random submits (good and bad), cancels and steps (some of which throw): at the end everything is free, and the engine
// answers as if nothing had been.
TEST_F(Rollout, AStormLeavesNothingBehind) {
  Random g(11);
  EngineOptions o;
  o.key_pages = 14, o.entry_pages = 20, o.prefill_chunk = 9, o.token_budget = 40, o.max_waiting = 20;
  o.tokenizer = letters();
  bool broken = false;
  o.edit_plan = [&](SequencePlan&) {
    if (broken) throw std::runtime_error("broken");
  };
  Engine engine(*model_, o, registry_);
  const auto free = [&] { return std::pair(engine.stats().free_key_pages, engine.stats().free_entry_pages); };
  RequestId newest = 0;
  int refused = 0, cancelled = 0;
  for (int i = 0; i < 3000; ++i) {
    const uint32_t what = g.below(8);
    if (what < 4) {
      Request r = random_request(model_->model, {}, g, i / 100);
      if (g.below(8) == 0) r.prompt.push_back(1000);
      if (g.below(8) == 0) r.adapter = "unknown";
      try {
        newest = engine.submit(std::move(r));
      } catch (const Error&) {
        ++refused;
      }
    } else if (what < 6 && newest > 0) {
      cancelled += engine.cancel(newest - g.below(static_cast<uint32_t>(std::min<RequestId>(newest, 30))));
    } else {
      broken = g.below(50) == 0;
      engine.step();
    }
    const EngineStats s = engine.stats();
    ASSERT_EQ(s.free_key_pages + s.held_key_pages, o.key_pages);
    ASSERT_EQ(s.free_entry_pages + s.held_entry_pages, o.entry_pages);
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(cancelled, 200);
  broken = false;
  for (RequestId id = 1; id <= newest; ++id) engine.cancel(id);
  EXPECT_TRUE(engine.idle());
  EXPECT_EQ(free(), std::pair(o.key_pages, o.entry_pages));
  const std::vector<Request> work = random_work(model_->model, {}, 5);
  Engine fresh(*model_, o, registry_);
  std::vector<Outcome> outcomes[2];
  for (Engine* e : {&engine, &fresh})
    for (const Request& r : work) {
      auto& list = outcomes[e == &fresh];
      list.emplace_back();
      e->submit(r);
      while (!e->idle())
        for (Event& event : e->step()) list.back().tokens.push_back(event.token);
    }
  for (size_t i = 0; i < work.size(); ++i) EXPECT_TRUE(outcomes[0][i].tokens == outcomes[1][i].tokens) << i;
}

}  // namespace
}  // namespace plumb
