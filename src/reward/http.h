// Rewards from an HTTP endpoint: POST of a sample, the score in the answer.
#pragma once
#include <memory>

#include "reward/reward.h"
#include "reward/reward_config.h"

namespace plumb {

// Error: the URL is not http://host[:port]/path; `where` names its table in the run file.
std::unique_ptr<Reward> make_http_reward(const HttpKeys& keys, const std::string& where);

}  // namespace plumb
