// A random model of the shapes of DeepSeek-V4-Flash, in the released formats, small enough to be made in seconds: four
// layers (window with hash routing, CSA with hash routing, HCA, CSA), few experts, a small vocabulary.
#pragma once
#include <memory>

#include "model/lora.h"
#include "model/weights.h"

namespace plumb::testing {

ModelConfig flash_config(int experts = 16);
std::shared_ptr<ResidentWeights> flash_model(uint64_t seed, const ModelConfig& config = flash_config());
// Rank `rank` on all eleven targets, B not zero.
std::shared_ptr<Adapter> flash_adapter(const ModelConfig& config, int rank, uint64_t seed);

}  // namespace plumb::testing
