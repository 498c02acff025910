// The rewards of a run: weighted parts, and their sum.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "reward/reward.h"
#include "reward/reward_config.h"

namespace plumb {

struct RewardPart {
  std::string name;
  double weight = 1;
  std::unique_ptr<Reward> reward;
};

// Error: a pattern, a schema or a command is wrong; names the table in the run file.
RewardPart make_reward(const RewardConfig& config);

class Scorer {
 public:
  explicit Scorer(std::vector<RewardPart> parts) : parts_(std::move(parts)) {}
  explicit Scorer(const std::vector<RewardConfig>& configs);

  // The total is the sum of weight * reward over the parts, added in their order; metrics are "NAME" (the part's reward
  // without its weight) and "NAME/METRIC". If a part fails, the sample has failed, with the part's name and reason, and
  // later parts are not asked. Never throws for what a reward does. May be called from several threads at once.
  Score score(const RewardSample& sample) const;

  // Whether every part has what it needs of a dataset line. Error: `where` (file:line) and the field.
  void check_line(const nlohmann::json& line, const std::string& where) const;

 private:
  std::vector<RewardPart> parts_;
};

}  // namespace plumb
