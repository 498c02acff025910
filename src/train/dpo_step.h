// Pairs of answers as rows of prefix trees, in which both share their prompt, and the gradient of the DPO loss over
// them.
#pragma once
#include <vector>

#include "data/pairs.h"
#include "train/dpo_loss.h"
#include "train/rl_step.h"

namespace plumb {

// Answers 2i and 2i + 1 are the chosen and the rejected one of pair i; a pair may be split over two rows.
RlRows make_pair_rows(const PlanShape& shape, const std::vector<const PreferencePair*>& pairs,
                      const TreeOptions& options);

// Log-probability of each answer, a sum over its tokens that count in their order: the same bits however pairs are
// packed. values: NaN = still unknown; rows that hold no such answer are not computed.
void fill_answer_logprobs(WeightStore& weights, const AdapterBatch* adapters, const RlRows& rows, Numerics numerics,
                          std::vector<double>& values);

// Adds the gradient of the loss, a mean over pairs, to the trainee's gradients; rows are done in order. reference
// [answers]: log-probabilities under the reference. -> log-probabilities under the trainee, before its update.
std::vector<double> accumulate_dpo_gradients(Trainee& trainee, const RlRows& rows, Numerics numerics,
                                             const DpoOptions& options, const std::vector<double>& reference);

}  // namespace plumb
