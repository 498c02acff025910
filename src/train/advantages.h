// From rewards of groups to what each trained token weighs (reference trainer, section 4.1).
#pragma once
#include <cstdint>
#include <vector>

namespace plumb {

struct RewardedSample {
  int group = 0;
  double reward = 0;
  int64_t trained_tokens = 0;
};

struct AdvantageOptions {
  bool scale_rewards = true;         // divide by the standard deviation of the group's rewards
  bool normalize_advantages = true;  // divide by the mean of |advantage| * weight over trained tokens
  double advantage_balance = 0;  // in [-1, 1]: > 0 scales negative advantages by 1 - it, < 0 positive ones by 1 + it
};

struct SampleWeight {
  float advantage = 0;
  float weight = 0;   // of each of its trained tokens; the mean over trained tokens is 1
  bool kept = false;  // false: it teaches nothing (advantage 0, or no trained token)
};

struct GroupCounts {
  int groups = 0;
  int without_variance = 0;  // all rewards of the group are equal: its samples are dropped
};

// One weight a sample. Error: a reward that is not finite, a balance out of range.
std::vector<SampleWeight> sample_weights(const std::vector<RewardedSample>& samples, const AdvantageOptions& options,
                                         GroupCounts* counts = nullptr);

}  // namespace plumb
