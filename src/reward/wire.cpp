#include "reward/wire.h"

#include <fmt/format.h>

#include <cmath>

#include "base/error.h"
#include "reward/json_text.h"

namespace plumb {

using nlohmann::json;

json answer_to_json(const Answer& answer) {
  json calls = json::array();
  for (const AnswerCall& call : answer.calls)
    calls.push_back({{"id", call.id}, {"name", call.name}, {"arguments", call.arguments}});
  return {{"text", answer.text},           {"content", answer.content},
          {"reasoning", answer.reasoning}, {"tool_calls", std::move(calls)},
          {"tokens", answer.tokens},       {"finish_reason", answer.finish_reason}};
}

json sample_to_json(const RewardSample& sample) {
  return {{"line", sample.line},
          {"messages", sample.messages},
          {"answer", answer_to_json(sample.answer)},
          {"group", sample.group},
          {"sample", sample.number}};
}

void check_no_error(const json& reply, const std::string& where) {
  const auto error = reply.find("error");
  if (error == reply.end() || error->is_null()) return;
  fail(where, "reports: " + shortened(error->is_string() ? error->get<std::string>() : json_line(*error)));
}

double read_reward(const json& reply, const std::string& where) {
  const auto reward = reply.find("reward");
  if (reward == reply.end()) fail(where, "answered without a reward: " + shortened(json_line(reply)));
  if (!reward->is_number() || !std::isfinite(reward->get<double>()))
    fail(where, "answered with a reward that is no number: " + shortened(json_line(reply)));
  return reward->get<double>();
}

std::map<std::string, double> read_metrics(const json& reply, const std::string& where) {
  std::map<std::string, double> metrics;
  const auto found = reply.find("metrics");
  if (found == reply.end() || found->is_null()) return metrics;
  if (!found->is_object()) fail(where, "answered with metrics that are no object: " + shortened(json_line(reply)));
  for (const auto& [name, value] : found->items()) {
    if (!value.is_number() && !value.is_boolean())
      fail(where, fmt::format("answered with a metric {} that is no number: {}", name, shortened(json_line(reply))));
    metrics[name] = value.is_boolean() ? (value.get<bool>() ? 1.0 : 0.0) : value.get<double>();
  }
  return metrics;
}

Score read_score(const json& reply, const std::string& where) {
  if (!reply.is_object()) fail(where, "answered with no JSON object: " + shortened(json_line(reply)));
  check_no_error(reply, where);
  return {.reward = read_reward(reply, where), .metrics = read_metrics(reply, where)};
}

}  // namespace plumb
