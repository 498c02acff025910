// Direct preference optimization of a LoRA adapter: `plumb dpo`.
#pragma once
#include "train/loop.h"

namespace plumb {

// Reads model and pairs, prints what will be done, and trains. Errors: of the configuration, the checkpoint, the data,
// a loss or a gradient that is not finite.
RunSummary run_dpo(const RunConfig& config, const LoopHooks& hooks = {});

}  // namespace plumb
