// Supervised fine-tuning of a LoRA adapter: `plumb train`.
#pragma once
#include "train/loop.h"

namespace plumb {

// Reads model and data, prints what will be done, and trains. Errors: of the configuration, the checkpoint, the data,
// and those of run_loop.
RunSummary run_sft(const RunConfig& config, const LoopHooks& hooks = {});

// The lines about model and data that every run begins with.
void print_inputs(const RunConfig& config, const ModelConfig& model, const TrainingData& data);

}  // namespace plumb
