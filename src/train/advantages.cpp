#include "train/advantages.h"

#include <cmath>
#include <map>
#include <string>

#include "base/error.h"

namespace plumb {
namespace {

struct Spread {
  double mean = 0, deviation = 0;
};

std::map<int, Spread> spread_of_groups(const std::vector<RewardedSample>& samples) {
  std::map<int, std::vector<double>> rewards;
  for (const RewardedSample& s : samples) rewards[s.group].push_back(s.reward);
  std::map<int, Spread> spread;
  for (const auto& [group, list] : rewards) {
    bool equal = true;
    double sum = 0, squares = 0;
    for (double r : list) sum += r, equal = equal && r == list[0];
    // Equal rewards have a deviation of exactly 0, which the rounding of the mean must not hide.
    const double mean = equal ? list[0] : sum / static_cast<double>(list.size());
    for (double r : list) squares += (r - mean) * (r - mean);
    spread[group] = {mean, std::sqrt(squares / static_cast<double>(list.size()))};
  }
  return spread;
}

void scale_weights(const std::vector<RewardedSample>& samples, std::vector<SampleWeight>& weights) {
  double sum = 0, tokens = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    if (!weights[i].kept) continue;
    const double n = static_cast<double>(samples[i].trained_tokens);
    weights[i].weight = static_cast<float>(1 / (n + 1e-6));
    sum += n * weights[i].weight;
    tokens += n;
  }
  for (SampleWeight& w : weights)
    if (w.kept) w.weight = static_cast<float>(w.weight / (sum / tokens));
}

}  // namespace

std::vector<SampleWeight> sample_weights(const std::vector<RewardedSample>& samples, const AdvantageOptions& options,
                                         GroupCounts* counts) {
  if (!(std::fabs(options.advantage_balance) <= 1))
    fail("advantage_balance", std::to_string(options.advantage_balance), "a number from -1 to 1");
  for (size_t i = 0; i < samples.size(); ++i)
    if (!std::isfinite(samples[i].reward))
      fail("sample " + std::to_string(i), "its reward is " + std::to_string(samples[i].reward), "rewards are numbers");

  const std::map<int, Spread> spread = spread_of_groups(samples);
  if (counts) {
    counts->groups = static_cast<int>(spread.size());
    counts->without_variance = 0;
    for (const auto& [group, s] : spread) counts->without_variance += s.deviation == 0;
  }
  std::vector<SampleWeight> weights(samples.size());
  for (size_t i = 0; i < samples.size(); ++i) {
    const Spread& s = spread.at(samples[i].group);
    double advantage = samples[i].reward - s.mean;
    if (options.scale_rewards) advantage /= s.deviation + 1e-6;
    weights[i].advantage = static_cast<float>(advantage);
    weights[i].kept = advantage != 0 && samples[i].trained_tokens > 0;
  }
  scale_weights(samples, weights);

  const double b = options.advantage_balance;
  double size = 0, tokens = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    SampleWeight& w = weights[i];
    if (b > 0 && w.advantage < 0) w.advantage *= static_cast<float>(1 - b);
    if (b < 0 && w.advantage > 0) w.advantage *= static_cast<float>(1 + b);
    if (!w.kept) continue;
    const double n = static_cast<double>(samples[i].trained_tokens);
    size += n * std::fabs(w.advantage) * w.weight;
    tokens += n;
  }
  if (options.normalize_advantages && size > 0)
    for (SampleWeight& w : weights) w.advantage = static_cast<float>(w.advantage / (size / tokens));
  return weights;
}

}  // namespace plumb
