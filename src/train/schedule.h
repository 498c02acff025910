// The learning rate of each step.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

#include "config/run_config.h"

namespace plumb {

// step from 1 to `total`. Warm-up: linear from 0, the peak is reached at step warmup_steps (or 1). Then constant, or
// falling (a line, or half a cosine) to final_lr_ratio times the peak at the last step.
inline double learning_rate(const TrainKeys& keys, int64_t step, int64_t total) {
  if (step < keys.warmup_steps)
    return keys.learning_rate * static_cast<double>(step) / static_cast<double>(keys.warmup_steps);
  const int64_t first = std::max<int64_t>(keys.warmup_steps, 1);
  if (keys.decay == "constant" || total <= first) return keys.learning_rate;
  const double part = std::min(1.0, static_cast<double>(step - first) / static_cast<double>(total - first));
  const double left = keys.decay == "linear" ? 1 - part : 0.5 * (1 + std::cos(std::numbers::pi * part));
  return keys.learning_rate * (keys.final_lr_ratio + (1 - keys.final_lr_ratio) * left);
}

}  // namespace plumb
