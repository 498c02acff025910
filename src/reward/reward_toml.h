// The same for nodes of a run file that toml++ has read. Apart because toml++ is a large header.
#pragma once
#include <toml++/toml.h>

#include <string>
#include <vector>

#include "reward/reward_config.h"

namespace plumb {

// node: the value of the key `reward`, which must be an array of tables.
std::vector<RewardConfig> parse_rewards(const toml::node& node, const std::string& file);

// node: the value of the key `environment`, a table with the keys of a program.
ProgramKeys parse_environment(const toml::node& node, const std::string& file);

}  // namespace plumb
