// Small random models in memory for tests: every kind of layer, hash and score routing, no parameter zero or constant.
#pragma once
#include <memory>
#include <vector>

#include "model/lora.h"
#include "model/weights.h"

namespace plumb::testing {

// 6 layers (window, csa, hca, csa, hca, window) + 1 MTP layer, 2 hash layers, window 8, ratios 4 and 16, hidden 32.
ModelConfig tiny_config();

// Its window and HCA ratio as released (128), in 3 layers of the three kinds.
ModelConfig released_ratios_config();

// format: of the routed experts and, if it is not fp4, of the attention's matrices (else fp8); the rest is bf16 unless
// format is f32.
std::shared_ptr<ResidentWeights> random_model(const ModelConfig& config, uint64_t seed,
                                              WeightFormat format = WeightFormat::f32);

// An adapter on the given canonical targets (empty = all eleven), B not zero.
std::shared_ptr<Adapter> random_adapter(const ModelConfig& config, int rank, uint64_t seed);

std::vector<int> random_tokens(const ModelConfig& config, int n, uint64_t seed);

}  // namespace plumb::testing
