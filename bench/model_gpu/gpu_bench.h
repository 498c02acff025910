// What the benchmarks of the model on a GPU share.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "memory/device_weights.h"

namespace plumb::bench {

using Clock = std::chrono::steady_clock;
using Figures = nlohmann::ordered_json;

double milliseconds_since(Clock::time_point start);
void wait_for_device();

// Token i of the benchmarks' documents.
int token(const ModelConfig& config, int64_t i);
// Four layers of Flash's shape with 256 experts.
std::shared_ptr<DeviceWeights> four_layers();

// Prints the figures of `measure` and writes them to argv[1] if it is there, under `head` (name, title, command); with
// --step as the first argument calls profile(argc, argv) instead. -> exit status; 77: there is no GPU.
int run_on_gpu(int argc, char** argv, Figures head, const std::function<Figures()>& measure,
               const std::function<int(int, char**)>& profile);

}  // namespace plumb::bench
