// Training of every weight of a model: `plumb pretrain`.
#pragma once
#include "train/loop.h"

namespace plumb {

// As run_sft, with the losses of pretraining (spec/model.md 4): multi-token prediction, balance of the router, the
// indexer's own loss; router biases follow the load. Error: more than one MTP layer.
RunSummary run_pretrain(const RunConfig& config, const LoopHooks& hooks = {});

}  // namespace plumb
