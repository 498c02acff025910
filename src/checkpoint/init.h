// Random checkpoints of a configuration.
#pragma once
#include <cstdint>
#include <string>

#include "checkpoint/stream.h"

namespace plumb {

// Writes the folder `out` with random weights: matrices N(0, initializer_range), norms 1, sinks and router biases 0,
// position biases N(0, initializer_range), hyper-connections as spec/model.md 3.9 (mapping Xavier-uniform, scales 0.01,
// base 0), hash tables with distinct experts for each token. A value depends on (seed, tensor name, index) alone, not
// on threads or shards. options.format keep = as config.expert_dtype says.
WriteReport init_checkpoint(const ModelConfig& config, const std::string& out, uint64_t seed,
                            const WriteOptions& options);

}  // namespace plumb
