#include "reward/scorer.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

#include "base/error.h"
#include "base/log.h"
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

void report_failures(const std::vector<Score>& scores) {
  const auto failed = std::ranges::count_if(scores, &Score::failed);
  if (failed == 0) return;
  const auto first = std::ranges::find_if(scores, &Score::failed);
  log_warning("{} of {} samples have no reward and are left out; the first of them (sample {} of the batch): {}",
              failed, scores.size(), first - scores.begin(), first->failure);
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

Scorer::Scorer(std::vector<RewardPart> parts, int threads) : parts_(std::move(parts)), threads_(threads) {
  PLUMB_CHECK(threads >= 1);
}

Scorer::Scorer(const std::vector<RewardConfig>& configs, int threads) : Scorer(make_parts(configs), threads) {}

Score Scorer::score_one(const RewardSample& sample) const {
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

std::vector<Score> Scorer::score(std::span<const RewardSample> samples) const {
  std::vector<Score> scores(samples.size());
  for_each_waiting(static_cast<int64_t>(samples.size()), threads_,
                   [&](int64_t k) { scores[static_cast<size_t>(k)] = score_one(samples[static_cast<size_t>(k)]); });
  report_failures(scores);
  return scores;
}

void Scorer::check_line(const nlohmann::json& line, const std::string& where) const {
  for (const RewardPart& part : parts_) part.reward->check_line(line, where);
}

void for_each_waiting(int64_t n, int threads, const std::function<void(int64_t)>& body) {
  std::atomic<int64_t> next = 0;
  const auto work = [&] {
    for (int64_t k = next++; k < n; k = next++) body(k);
  };
  std::vector<std::jthread> others;
  for (int64_t k = 1; k < std::min<int64_t>(threads, n); ++k) others.emplace_back(work);
  work();
}

}  // namespace plumb
