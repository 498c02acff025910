// The JSON that programs and HTTP endpoints get and give (docs/rewards.md).
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "reward/reward.h"

namespace plumb {

// {"text", "content", "reasoning", "tool_calls": [{"id", "name", "arguments"}], "tokens", "finish_reason"}
nlohmann::json answer_to_json(const Answer& answer);

// {"line", "messages", "answer", "group", "sample"}
nlohmann::json sample_to_json(const RewardSample& sample);

// Reads {"reward", "metrics"?, "error"?}. Error: `where` and why there is no reward: the "error" text, no number, not
// finite.
Score read_score(const nlohmann::json& reply, const std::string& where);

// Its parts, for replies that need not have a reward. Errors as above.
void check_no_error(const nlohmann::json& reply, const std::string& where);
double read_reward(const nlohmann::json& reply, const std::string& where);
std::map<std::string, double> read_metrics(const nlohmann::json& reply, const std::string& where);

}  // namespace plumb
