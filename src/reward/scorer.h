// The rewards of a run: weighted parts, whole batches at once.
#pragma once
#include <functional>
#include <memory>
#include <span>
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
  // threads: samples that are scored at once, at least 1. As many as the largest number of processes make sense.
  Scorer(std::vector<RewardPart> parts, int threads);
  Scorer(const std::vector<RewardConfig>& configs, int threads);

  // One score a sample, in their order. The total is the sum of weight * reward over the parts, added in their order;
  // metrics are "NAME" (the part's reward without its weight) and "NAME/METRIC". If a part fails, the sample has
  // failed, with the part's name and reason, and later parts are not asked. Never throws for what a reward does;
  // failures are counted in the log, with the first reason. May be called from several threads.
  std::vector<Score> score(std::span<const RewardSample> samples) const;

  // Whether every part has what it needs of a dataset line. Error: `where` (file:line) and the field.
  void check_line(const nlohmann::json& line, const std::string& where) const;

 private:
  Score score_one(const RewardSample& sample) const;
  std::vector<RewardPart> parts_;
  int threads_;
};

// Calls body(0) ... body(n - 1), each once, on at most `threads` threads; returns when all are done. For work that
// waits, where base/parallel.h is for work that computes. The body must not throw.
void for_each_waiting(int64_t n, int threads, const std::function<void(int64_t)>& body);

}  // namespace plumb
