// Shapes that have a name: the two released models and small relatives of them.
#pragma once
#include <string>
#include <vector>

#include "config/model_config.h"

namespace plumb {

// tiny          3.6 million parameters, every kind of layer, for tests and demonstrations on a CPU
// flash         DeepSeek-V4-Flash
// flash-4layer  Flash's shapes in 4 layers that cover every kind of layer and both kinds of routing, for one GPU
// pro           DeepSeek-V4-Pro
// An unknown name is an error that names the nearest known one.
ModelConfig preset(const std::string& name);

const std::vector<std::string>& preset_names();

}  // namespace plumb
