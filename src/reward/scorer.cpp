#include "reward/scorer.h"

#include <fmt/format.h>

#include <cmath>

#include "base/error.h"
#include "reward/http.h"
#include "reward/json_text.h"
#include "reward/program.h"
#include "reward/verifiers.h"

namespace plumb {
namespace {

std::vector<RewardPart> make_parts(const std::vector<RewardConfig>& configs) {
  std::vector<RewardPart> parts;
  for (const RewardConfig& config : configs) parts.push_back(make_reward(config));
  return parts;
}

}  // namespace

RewardPart make_reward(const RewardConfig& config) {
  const auto make = [&]<class Keys>(const Keys& keys) -> std::unique_ptr<Reward> {
    if constexpr (std::is_same_v<Keys, ProgramKeys>) return make_program_reward(keys, config.name);
    if constexpr (std::is_same_v<Keys, HttpKeys>) return make_http_reward(keys, config.where);
    if constexpr (requires { make_verifier(keys, config.where); }) return make_verifier(keys, config.where);
    if constexpr (requires { make_verifier(keys); }) return make_verifier(keys);
  };
  return {config.name, config.weight, std::visit(make, config.keys)};
}

Scorer::Scorer(const std::vector<RewardConfig>& configs) : Scorer(make_parts(configs)) {}

Score Scorer::score(const RewardSample& sample) const {
  Score total;
  for (const RewardPart& part : parts_) {
    try {
      const Score one = part.reward->score(sample);
      if (one.failed()) return {.failure = fmt::format("{}: {}", part.name, one.failure)};
      if (!std::isfinite(one.reward)) return {.failure = fmt::format("{}: the reward is {}", part.name, one.reward)};
      total.reward += part.weight * one.reward;
      total.metrics[part.name] = one.reward;
      for (const auto& [name, value] : one.metrics) total.metrics[part.name + "/" + name] = value;
    } catch (const std::exception& e) {
      return {.failure = fmt::format("{}: {}", part.name, e.what())};
    }
  }
  if (!std::isfinite(total.reward)) return {.failure = fmt::format("the sum of the rewards is {}", total.reward)};
  return total;
}

void Scorer::check_line(const nlohmann::json& line, const std::string& where) const {
  for (const RewardPart& part : parts_) part.reward->check_line(line, where);
}

}  // namespace plumb
