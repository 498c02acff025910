// The teacher of on-policy distillation: the run's model without or with an adapter, or another model.
#pragma once
#include <memory>
#include <optional>

#include "config/run_config.h"
#include "model/forward.h"
#include "ops/head_divergence.h"
#include "tokenizer/tokenizer.h"

namespace plumb {

struct Teacher {
  std::shared_ptr<WeightStore> weights;  // those of the run, or its own
  AdapterBatch adapters;                 // no part: the model alone
  ops::Divergence divergence = ops::Divergence::reverse_kl;
  double coefficient = 1;  // loss += coefficient * mean divergence over the trained tokens
};

// What [distill] says; nothing if distill.coefficient is 0. student: of model.path; tokenizer: its own, or nullptr.
// Errors: a folder that cannot be read; another vocabulary than the student's, by its size or, where both have a
// tokenizer, by the spelling of a token (named).
std::optional<Teacher> load_teacher(const RunConfig& config, std::shared_ptr<WeightStore> student,
                                    const Tokenizer* tokenizer);

}  // namespace plumb
