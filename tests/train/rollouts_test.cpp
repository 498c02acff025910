// Rollouts and their log: whatever byte a run was killed at, it goes on with what it had and ends with the same
// samples.
#include "train/rollouts.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <latch>

#include "base/error.h"
#include "base/files.h"
#include "base/philox.h"
#include "support/temp_path.h"
#include "support/tiny_model.h"

namespace plumb {
namespace {

using testing::random_adapter;
using testing::random_model;
using testing::random_tokens;
using testing::tiny_config;

void expect_same(const RolloutLog& a, const RolloutLog& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].tokens, b[i].tokens);
    EXPECT_EQ(std::memcmp(a[i].logprob.data(), b[i].logprob.data(), a[i].logprob.size() * sizeof(float)), 0);
    EXPECT_EQ(a[i].turn_end, b[i].turn_end);
    EXPECT_EQ(a[i].finish, b[i].finish);
    EXPECT_EQ(a[i].reward, b[i].reward);
    EXPECT_EQ(a[i].routed, b[i].routed);
  }
}

TEST(RolloutLog, KeepsWhatWasFlushed) {
  const std::string path = testing::temp_path("rollout.log");
  {
    RolloutLog log(path, 3, 7);
    EXPECT_FALSE(log.resumed());
    log.add_token(1, 5, -0.25f, Finish::none);
    log.add_token(1, 6, -0.5f, Finish::stop);
    log.add_reply(1, {8, 9});
    log.add_token(1, 4, -1, Finish::none);
    log.set_reward(2, "{\"reward\": 1}");
    log.flush();
    log.add_token(0, 1, 0, Finish::none);  // not flushed
  }
  RolloutLog log(path, 3, 7);
  EXPECT_TRUE(log.resumed());
  EXPECT_TRUE(log[0].tokens.empty());
  EXPECT_EQ(log[1].tokens, (std::vector<int>{5, 6, 8, 9, 4}));
  EXPECT_EQ(log[1].turn_end, std::vector<int>{2});
  EXPECT_EQ(log[1].open_tokens(), 1);
  EXPECT_FALSE(log[1].policy_made(2));
  EXPECT_EQ(log[2].reward, "{\"reward\": 1}");
}

TEST(RolloutLog, AnIncompleteOrDamagedEndIsCutOff) {
  const std::string path = testing::temp_path("cut.log");
  std::vector<size_t> ends;  // of the file after each token
  {
    RolloutLog log(path, 1, 7);
    ends.push_back(std::filesystem::file_size(path));
    for (int i = 0; i < 5; ++i) {
      log.add_token(0, i, 0, Finish::none);
      log.flush();
      ends.push_back(std::filesystem::file_size(path));
    }
  }
  const std::string whole = read_text(path);
  for (size_t bytes = ends[0]; bytes <= whole.size(); ++bytes) {
    write_text(path, whole.substr(0, bytes));
    RolloutLog log(path, 1, 7);
    const size_t complete = std::upper_bound(ends.begin(), ends.end(), bytes) - ends.begin() - 1;
    ASSERT_EQ(log[0].tokens.size(), complete);
    log.add_token(0, 99, 0, Finish::none);  // goes behind what is valid
    log.flush();
    ASSERT_EQ(RolloutLog(path, 1, 7)[0].tokens.back(), 99);
  }
  std::string damaged = whole;
  damaged[ends[2] + 9] ^= 1;
  write_text(path, damaged);
  EXPECT_EQ(RolloutLog(path, 1, 7)[0].tokens.size(), 2u);
}

TEST(RolloutLog, OfAnotherBatchIsBegunAnew) {
  const std::string path = testing::temp_path("other.log");
  {
    RolloutLog log(path, 1, 7);
    log.add_token(0, 3, 0, Finish::none);
    log.flush();
  }
  EXPECT_FALSE(RolloutLog(path, 1, 8).resumed());
  EXPECT_EQ(RolloutLog(path, 1, 7)[0].tokens.size(), 0u);
  EXPECT_THROW(RolloutLog(testing::temp_path("no/such/folder/x.log"), 1, 7), Error);
}

// ---- Sampling

class Rollouts : public ::testing::Test {
 protected:
  Rollouts() {
    registry_->publish("policy", random_adapter(model_->model, 2, 5));
    for (int g = 0; g < 3; ++g) {
      prompts_.emplace_back();
      prompts_.back().tokens = random_tokens(model_->model, 14 + 3 * g, 20 + g);
    }
    for (int i = 0; i < 9; ++i) tasks_.push_back({&prompts_[i / 3], i / 3, i % 3, 100u + static_cast<uint64_t>(i)});
    options_.sampling.max_tokens = 20;
    options_.sampling.stop_tokens = {3, 17, 22, 40, 41, 42};
    options_.adapter = "policy";
    options_.max_turns = 3;
    options_.routed = true;
    options_.row_tokens = 70;
    options_.reply = [this](size_t sample, int turn, const LoggedSample& s) {
      ++replies_;
      if ((sample + turn) % 4 == 3) return Reply{};
      return Reply{{1, static_cast<int>(sample), turn, s.tokens.back()}};
    };
    options_.score = [this](size_t sample, const LoggedSample& s) {
      ++scores_;
      return std::to_string(sample) + " " + std::to_string(s.tokens.size());
    };
  }
  Engine engine() {
    EngineOptions o;
    o.max_running = 4;
    o.prefill_chunk = 9;
    o.token_budget = 20;
    o.key_pages = o.entry_pages = 60;
    return Engine(*model_, o, registry_);
  }
  std::shared_ptr<ResidentWeights> model_ = random_model(tiny_config(), 1, WeightFormat::fp8);
  std::shared_ptr<AdapterRegistry> registry_ = std::make_shared<AdapterRegistry>();
  std::vector<Prompt> prompts_;
  std::vector<RolloutTask> tasks_;
  RolloutOptions options_;
  std::atomic<int> replies_ = 0, scores_ = 0;
};

TEST_F(Rollouts, KilledAtAnyByteTheyEndWithTheSameSamples) {
  const std::string path = testing::temp_path("whole.log"), cut = testing::temp_path("killed.log");
  RolloutLog whole(path, tasks_.size(), 1);
  Engine e = engine();
  sample_rollouts(e, tasks_, options_, whole);
  EXPECT_GT(replies_, 3);
  EXPECT_EQ(scores_, 9);
  const std::string text = read_text(path);
  Random random(1, 1);
  for (int i = 0; i < 40; ++i) {
    const std::string kept = text.substr(0, random.below(static_cast<uint32_t>(text.size() + 1)));
    write_text(cut, kept);
    RolloutLog log(cut, tasks_.size(), 1);
    Engine again = engine();
    sample_rollouts(again, tasks_, options_, log);
    expect_same(log, whole);
    const size_t complete = std::max<size_t>(kept.size(), 2000) - 2000;  // no record is longer
    EXPECT_TRUE(read_text(cut).substr(0, complete) == kept.substr(0, complete));  // nothing is written twice
  }
}

TEST_F(Rollouts, AFinishedBatchIsNotSampledAgain) {
  const std::string path = testing::temp_path("finished.log");
  {
    RolloutLog log(path, tasks_.size(), 1);
    Engine e = engine();
    sample_rollouts(e, tasks_, options_, log);
  }
  const std::string before = read_text(path);
  RolloutLog log(path, tasks_.size(), 1);
  Engine e = engine();
  sample_rollouts(e, tasks_, options_, log);
  EXPECT_EQ(e.stats().steps, 0);
  EXPECT_EQ(read_text(path), before);
  EXPECT_EQ(scores_, 9);  // nor scored
}

// A reply and a reward that come only when the other samples have ended: waiting for them in turn would take forever.
TEST_F(Rollouts, SlowProgramsHoldUpNobodyElse) {
  RolloutLog plain(testing::temp_path("plain.log"), tasks_.size(), 1);
  Engine first = engine();
  sample_rollouts(first, tasks_, options_, plain);

  std::latch others(7);
  options_.reply = [this, quick = options_.reply, &others](size_t sample, int turn, const LoggedSample& s) {
    if (sample == 0) others.wait();
    return quick(sample, turn, s);
  };
  options_.score = [quick = options_.score, &others](size_t sample, const LoggedSample& s) {
    if (sample < 2) others.wait();
    if (sample >= 2) others.count_down();
    return quick(sample, s);
  };
  RolloutLog log(testing::temp_path("slow.log"), tasks_.size(), 1);
  Engine e = engine();
  int waited = 0;
  sample_rollouts(e, tasks_, options_, log, [&] { ++waited; });
  expect_same(log, plain);
  EXPECT_GT(waited, 0);
}

// The routes that were recorded are those of a whole pass, and training takes them whatever its own router says.
TEST_F(Rollouts, RecordedRoutesAreReplayed) {
  RolloutLog log(testing::temp_path("routed.log"), tasks_.size(), 1);
  Engine e = engine();
  sample_rollouts(e, tasks_, options_, log);
  std::vector<RlSample> samples;
  for (size_t i = 0; i < tasks_.size(); ++i) samples.push_back(rl_sample(tasks_[i], log[i]));
  const std::vector<SampleWeight> weights(tasks_.size(), {1, 1, true});
  const ModelConfig& c = model_->model;
  const ReplayShape shape{c.num_hidden_layers, c.n_routed_experts, c.num_experts_per_tok};
  const auto logprobs = [&](const std::shared_ptr<const Adapter>& adapter, bool replay) {
    const AdapterBatch adapters{{{adapter, {}, true, nullptr}}};
    std::vector<std::vector<float>> all(samples.size());
    for (const RlRow& row :
         make_rl_rows(plan_shape(c), samples, weights, {200, 4, 1}, replay ? shape : ReplayShape{}).rows) {
      Taps taps;
      ForwardOptions o;
      o.adapters = &adapters;
      o.replay = row.replay;
      o.taps = &taps;
      forward(*model_, row.plan, o);
      for (const auto& [layer, forced] : row.replay) {
        const Tensor& taken = taps.values.at("routed." + std::to_string(layer));
        for (int64_t i = 0; i < forced.numel(); ++i) EXPECT_EQ(taken.ptr<int64_t>()[i], forced.ptr<int32_t>()[i]);
      }
      const Tensor logprob = row_logprobs(*model_, &adapters, row, Numerics::released);
      for (size_t i = 0; i < row.origin.size(); ++i) all[row.origin[i].sample].push_back(logprob.f32()[i]);
    }
    return all;
  };
  const std::shared_ptr<const Adapter> sampled = registry_->newest("policy")->adapter;
  EXPECT_EQ(logprobs(sampled, true), logprobs(sampled, false));  // nothing differs, so nothing changes
  const auto other = random_adapter(c, 2, 6);
  EXPECT_NE(logprobs(other, true), logprobs(other, false));

  const auto error = [&](std::vector<uint16_t> routed) {
    samples[4].routed = std::move(routed);
    try {
      make_rl_rows(plan_shape(c), samples, weights, {200, 4, 1}, shape);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  std::vector<uint16_t> routed = samples[4].routed;
  EXPECT_NE(error({}).find("sample 4"), std::string::npos);
  EXPECT_NE(error({routed.begin(), routed.end() - c.num_experts_per_tok}).find("routes for"), std::string::npos);
  routed[7] = static_cast<uint16_t>(c.n_routed_experts);
  EXPECT_NE(error(routed).find("was routed to expert"), std::string::npos);
  routed[7] = routed[6];
  EXPECT_NE(error(routed).find("was routed to expert"), std::string::npos);
}

TEST_F(Rollouts, WhatAProgramThrowsEndsTheSampling) {
  options_.score = [](size_t sample, const LoggedSample&) -> std::string {
    if (sample == 4) fail("score", "went wrong");
    return "1";
  };
  RolloutLog log(testing::temp_path("thrown.log"), tasks_.size(), 1);
  Engine e = engine();
  EXPECT_THROW(sample_rollouts(e, tasks_, options_, log), Error);
}

TEST_F(Rollouts, SamplesAreWhatWasSaidAndRecorded) {
  RolloutLog log(testing::temp_path("samples.log"), tasks_.size(), 1);
  Engine e = engine();
  sample_rollouts(e, tasks_, options_, log);
  int multi_turn = 0;
  for (size_t i = 0; i < tasks_.size(); ++i) {
    const RlSample s = rl_sample(tasks_[i], log[i]);
    ASSERT_LE(static_cast<int>(s.tokens.size()), options_.row_tokens);
    EXPECT_EQ(s.prompt, static_cast<int>(prompts_[i / 3].tokens.size()));
    for (size_t p = 0; p < s.tokens.size(); ++p) EXPECT_EQ(s.mask[p] == 1, !std::isnan(s.logprob[p]));
    multi_turn += log[i].turn_end.size() > 1;
    EXPECT_EQ(truncated(log[i]), log[i].finish.back() == Finish::length);
  }
  EXPECT_GT(multi_turn, 0);
  // The trainer's forward pass gives what was recorded, replies in between or not.
  const std::vector<SampleWeight> weights(tasks_.size(), {1, 1, true});
  std::vector<RlSample> samples;
  for (size_t i = 0; i < tasks_.size(); ++i) samples.push_back(rl_sample(tasks_[i], log[i]));
  const AdapterBatch adapters{{{registry_->newest("policy")->adapter, {}, true, nullptr}}};
  for (const RlRow& row : make_rl_rows(plan_shape(model_->model), samples, weights, {200, 4, 1}).rows) {
    const Tensor logprob = row_logprobs(*model_, &adapters, row, Numerics::released);
    for (size_t i = 0; i < row.tokens.size(); ++i)
      ASSERT_EQ(std::memcmp(&row.tokens[i].original, logprob.f32() + i, sizeof(float)), 0);
  }
}

}  // namespace
}  // namespace plumb
