// What the tests of rewards share.
#pragma once
#include <gtest/gtest.h>

#include <string>

#include "base/error.h"
#include "reward/reward.h"
#include "reward/reward_config.h"

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
