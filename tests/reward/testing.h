// What the tests of rewards share.
#pragma once
#include <gtest/gtest.h>

#include <string>

#include "base/error.h"
#include "base/waiting.h"
#include "reward/reward.h"
#include "reward/reward_config.h"
#include "reward/scorer.h"

namespace plumb::testing {

inline RewardSample sample_of(const std::string& content, nlohmann::json line = nlohmann::json::object()) {
  RewardSample sample;
  sample.line = std::move(line);
  sample.messages = {{{"role", "user"}, {"content", "question"}}};
  sample.answer.content = content;
  sample.answer.text = content + "<eos>";
  sample.answer.finish_reason = "stop";
  return sample;
}

// One score a sample, in their order; `threads` samples at once.
inline std::vector<Score> score_all(const Scorer& scorer, const std::vector<RewardSample>& samples, int threads = 1) {
  std::vector<Score> scores(samples.size());
  for_each_waiting(static_cast<int64_t>(samples.size()), threads,
                   [&](int64_t k) { scores[static_cast<size_t>(k)] = scorer.score(samples[static_cast<size_t>(k)]); });
  return scores;
}

// what() of the Error that a function throws, "" if it throws none.
template <class Function>
std::string error_of(Function function) {
  try {
    function();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace plumb::testing
