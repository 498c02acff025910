// A batch of rollouts as rows of prefix trees, and the gradient of a policy loss over them.
#pragma once
#include <vector>

#include "data/prefix_tree.h"
#include "train/advantages.h"
#include "train/parameters.h"
#include "train/rl_loss.h"

namespace plumb {

// A finished rollout: everything that was said, and what the sampler recorded.
struct RlSample {
  std::vector<int> tokens;
  std::vector<uint8_t> mask;   // [tokens] 1 = sampled by the policy, so trained; never the first token
  std::vector<float> logprob;  // [tokens] as recorded when it was sampled; NaN elsewhere
  int group = 0;
  int prompt = 0;  // tokens in front of the first answer: what may be shared
  int64_t trained() const;
};

// A row of several trees and the tokens of it that are trained.
struct RlRow {
  struct Origin {
    int sample, position;  // of the target token
  };
  SequencePlan plan;            // wanted: the rows that predict the trained tokens
  std::vector<int> target;      // [wanted]
  std::vector<RlToken> tokens;  // [wanted] old = original = what was recorded, no reference
  std::vector<Origin> origin;   // [wanted]
};

struct RlRows {
  std::vector<RlRow> rows;
  int64_t logical_tokens = 0, physical_tokens = 0;  // see TreePacking
  int64_t trained = 0;
};

// Rows of the samples that are kept. weights: one a sample. options.min_shared > every length gives rows without any
// sharing. Error: a sample that fits into no row.
RlRows make_rl_rows(const PlanShape& shape, const std::vector<RlSample>& samples,
                    const std::vector<SampleWeight>& weights, const TreeOptions& options);

// Log-probabilities [wanted] of a row's targets under the model with `adapters` (nullptr = base model).
Tensor row_logprobs(WeightStore& weights, const AdapterBatch* adapters, const RlRow& row, Numerics numerics);

struct RlStepResult {
  double loss = 0;  // mean over the trained tokens of the step
  RlStats stats;
};

// Adds the gradient of the loss, a mean over all trained tokens of `rows`, to the trainee's gradients. Rows are done in
// order. Error: there is no trained token.
RlStepResult accumulate_rl_gradients(Trainee& trainee, const std::vector<RlRow>& rows, Numerics numerics,
                                     const RlLossOptions& options);

}  // namespace plumb
