// Reinforcement learning: groups of answers, rewards, advantages, one policy step, publish; one model samples and
// trains. A run that was killed at any time ends with the adapter that it would have had.
#pragma once
#include "config/run_config.h"
#include "train/loop.h"

namespace plumb {

// `plumb rl`. Errors: those of reading model, prompts and rewards; a loss or a gradient that is not finite.
RunSummary run_rl(const RunConfig& config, const LoopHooks& hooks);

}  // namespace plumb
