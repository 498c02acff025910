// The prefix cache: what is shared, what is not, what goes first when there is no room; and prompts of every length.
#include "rollout/prefix_cache.h"

#include <gtest/gtest.h>

#include "base/parallel.h"
#include "engine_testing.h"

namespace plumb {
namespace {

using namespace testing;  // NOLINT: the vocabulary of these tests

class Prefix : public ::testing::Test {
 protected:
  void SetUp() override { threads_ = thread_count(), set_thread_count(1); }
  void TearDown() override { set_thread_count(threads_); }

  static EngineOptions options(int pages) {
    EngineOptions o;
    o.key_pages = o.entry_pages = pages;
    return o;
  }
  // Runs one request to its end.
  static Outcome ask(Engine& engine, const Request& r) {
    Outcome o;
    o.request = r;
    engine.submit(r);
    while (!engine.idle())
      for (Event& e : engine.step()) {
        if (o.tokens.empty()) o.cached_tokens = e.cached_tokens;
        o.tokens.push_back(e.token), o.finish = e.finish, o.routed = e.routed, o.versions = e.versions;
      }
    return o;
  }
  Request request(int length, uint64_t seed) const {
    Request r;
    r.prompt = random_tokens(config_, length, seed), r.sampling.max_tokens = 5;
    return r;
  }
  ModelConfig config_ = small_config();
  std::shared_ptr<ResidentWeights> model_ = random_model(config_, 1, WeightFormat::fp8);

 private:
  int threads_ = 1;
};

TEST_F(Prefix, ChoicesOfOnePromptShareItFromTheStart) {
  for (const bool routed : {false, true}) {
    Engine engine(*model_, options(60));
    std::vector<Request> work(8, request(100, 1));  // six pages of 16, and 4 tokens
    for (size_t i = 0; i < work.size(); ++i) work[i].key = i, work[i].routed_experts = routed;
    std::map<RequestId, size_t> index;
    std::vector<Outcome> outcomes(work.size());
    for (size_t i = 0; i < work.size(); ++i) index[engine.submit(work[i])] = i, outcomes[i].request = work[i];
    int most_held = 0;
    while (!engine.idle()) {
      for (Event& e : engine.step()) {
        Outcome& o = outcomes[index.at(e.request)];
        EXPECT_EQ(e.cached_tokens, o.tokens.empty() && index.at(e.request) > 0 ? 96 : 0);
        o.tokens.push_back(e.token), o.finish = e.finish, o.routed = e.routed;
      }
      most_held = std::max(most_held, engine.stats().held_entry_pages);
    }
    EXPECT_EQ(engine.stats().rows, 96 + 8 * (4 + 4));
    EXPECT_EQ(engine.stats().prefix_hit_tokens, 7 * 96);
    EXPECT_LE(most_held, 6 + 8);
    EXPECT_EQ(mismatches(*model_, Numerics::released, outcomes, AdapterRegistry()), 0);
  }
}

TEST_F(Prefix, AFollowUpQuestionGoesOnWhereTheAnswerEnded) {
  Engine engine(*model_, options(60));
  Request r = request(50, 1);
  r.sampling.max_tokens = 40;
  const Outcome first = ask(engine, r);
  r.prompt = document_of(first);
  r.prompt.insert(r.prompt.end(), {1, 2, 3});
  EXPECT_EQ(ask(engine, r).cached_tokens, 80);  // 89 rows were computed
}

TEST_F(Prefix, RecordsThatAreNotKeptAreComputedAnew) {
  Engine engine(*model_, options(60));
  Request plain = request(70, 1), with_logprobs = plain, with_experts = plain;
  with_logprobs.prompt_logprobs = true;
  with_experts.routed_experts = true;
  EXPECT_EQ(ask(engine, plain).cached_tokens, 0);
  EXPECT_EQ(ask(engine, plain).cached_tokens, 64);
  EXPECT_EQ(ask(engine, with_logprobs).cached_tokens, 0);
  EXPECT_EQ(ask(engine, with_experts).cached_tokens, 0);   // nobody has recorded them
  EXPECT_EQ(ask(engine, with_experts).cached_tokens, 64);  // now somebody has
  EXPECT_EQ(engine.stats().cached_pages, 4);               // the same pages all the time
}

TEST_F(Prefix, PagesOfOtherAdaptersAndVersionsAreOthers) {
  const auto registry = some_adapters(config_, 2);
  Engine engine(*model_, options(60), registry);
  const auto cached = [&](const std::string& adapter, std::optional<int64_t> version = {}) {
    Request r = request(40, 1);
    r.adapter = adapter, r.adapter_version = version;
    return ask(engine, r).cached_tokens;
  };
  for (const char* name : {"", "a1", "a2"}) EXPECT_EQ(cached(name), 0) << name;
  for (const char* name : {"", "a1", "a2"}) EXPECT_EQ(cached(name), 32) << name;
  registry->publish("a1", random_adapter(config_, 2, 7));
  EXPECT_EQ(cached("a1"), 0);
  EXPECT_EQ(cached("a1", 1), 32);
  EXPECT_EQ(cached("a1"), 32);
}

TEST_F(Prefix, WhatWasNotUsedForLongestGoesFirst) {
  Engine engine(*model_, options(9));  // one prompt of 40 takes 3 pages, two of which stay
  const auto cached = [&](uint64_t prompt) { return ask(engine, request(40, prompt)).cached_tokens; };
  for (uint64_t prompt : {1, 2, 3}) EXPECT_EQ(cached(prompt), 0);
  EXPECT_EQ(cached(1), 32);
  EXPECT_EQ(engine.stats().cached_pages, 6);
  EXPECT_EQ(cached(4), 0);  // 8 of 9 pages
  EXPECT_EQ(cached(5), 0);  // takes the place of 2
  EXPECT_EQ(cached(1), 32);
  EXPECT_EQ(cached(3), 32);
  EXPECT_EQ(cached(2), 0);
  EXPECT_EQ(engine.stats().free_entry_pages, 9);
}

// Where only the keys of a prefix are gone, the entries lead to a later page whose keys are there.
TEST_F(Prefix, OldKeysAreNotNeededToGoOn) {
  EngineOptions o = options(20);
  o.key_pages = 4, o.prefill_chunk = 16;
  Engine engine(*model_, o);
  EXPECT_EQ(ask(engine, request(150, 1)).cached_tokens, 0);
  EXPECT_EQ(ask(engine, request(150, 1)).cached_tokens, 144);
  EXPECT_EQ(ask(engine, request(40, 1)).cached_tokens, 0);  // ends where the keys are gone
}

TEST_F(Prefix, OnOrOffTheTokensAndTheirBitsAreTheSame) {
  int64_t hits = 0;
  for (uint64_t seed = 5000; seed < 5060; ++seed) {
    const std::vector<Request> work = random_work(config_, {}, seed);
    const auto registry = some_adapters(config_, 4);
    std::vector<Outcome> outcomes[2];
    for (const bool on : {false, true}) {
      EngineOptions o = random_circumstances(work, plan_shape(config_), seed);
      o.prefix_cache = on;
      Engine engine(*model_, o, registry);
      outcomes[on] = run_schedule(engine, work, seed, false, [](const Engine&) {});
      hits += engine.stats().prefix_hits;
    }
    for (size_t i = 0; i < work.size(); ++i) {
      const Outcome &off = outcomes[0][i], &on = outcomes[1][i];
      EXPECT_TRUE(off.tokens == on.tokens && off.text == on.text && off.prompt_logprobs == on.prompt_logprobs &&
                  off.prompt_top == on.prompt_top && off.finish == on.finish)
          << seed << " request " << i;
    }
  }
  EXPECT_GT(hits, 50);
}

// A long answer, and prompts that are its first 1, 2, ... 520 tokens: what follows is what followed there, with the
// same bits; random numbers depend on the position alone. Window, pages and the larger ratio are 128.
TEST_F(Prefix, EveryLengthOfPromptGoesOnAsTheWholeDid) {
  config_ = released_ratios(small_config());
  const auto model = random_model(config_, 1, WeightFormat::fp8);
  for (const bool cache : {false, true}) {
    EngineOptions o = options(80);
    o.numerics = cache ? Numerics::released : Numerics::fp32;
    o.prefill_chunk = 600, o.token_budget = 1000, o.prefix_cache = false;
    Request r;
    r.prompt = {7}, r.sampling.max_tokens = 522, r.sampling.seed = 3;
    Engine whole(*model, o);
    const Outcome all = ask(whole, r);
    EXPECT_EQ(mismatches(*model, o.numerics, {all}, AdapterRegistry()), 0);
    const std::vector<int> tokens = document_of(all);
    o.prefix_cache = cache;
    Engine engine(*model, o);
    std::vector<Request> work(520, r);
    for (int n = 1; n <= 520; ++n) {
      work[n - 1].prompt.assign(tokens.begin(), tokens.begin() + n);
      work[n - 1].sampling.max_tokens = 2;
    }
    const auto outcomes = run_schedule(engine, work, 1, false, [](const Engine&) {});
    for (int n = 1; n <= 520; ++n)
      EXPECT_TRUE(std::equal(outcomes[n - 1].tokens.begin(), outcomes[n - 1].tokens.end(), all.tokens.begin() + n - 1))
          << n;
    EXPECT_EQ(engine.stats().prefix_hits > 300, cache);
  }
}

}  // namespace
}  // namespace plumb
