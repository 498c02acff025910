// A batch of rollouts as rows of prefix trees, and the gradient of a policy loss over them.
#pragma once
#include <map>
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
  // The experts that sampling sent its rows to, [tokens - 1, layers, experts of a token]; empty = not recorded.
  std::vector<uint16_t> routed;
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
  // Layer -> i32 [rows, experts of a token] that replace the router's choice in every pass over the row; empty = it
  // chooses. Rows that nothing trained depends on (the last token of a sample) have the experts 0, 1, ...
  std::map<int, Tensor> replay;
};

struct RlRows {
  std::vector<RlRow> rows;
  int64_t logical_tokens = 0, physical_tokens = 0;  // see TreePacking
  int64_t trained = 0;
};

// Whose routes are replayed.
struct ReplayShape {
  int layers = 0;  // 0 = nothing is replayed
  int experts = 0, experts_per_token = 0;
};

// Rows of the samples that are kept. weights: one a sample. options.min_shared > every length gives rows without any
// sharing. Error: a sample that fits into no row, or whose routes are missing, incomplete or no choice of the router.
RlRows make_rl_rows(const PlanShape& shape, const std::vector<RlSample>& samples,
                    const std::vector<SampleWeight>& weights, const TreeOptions& options,
                    const ReplayShape& replay = {});

// Log-probabilities [wanted] of a row's targets under the model with `adapters` (nullptr = base model).
Tensor row_logprobs(WeightStore& weights, const AdapterBatch* adapters, const RlRow& row, Numerics numerics);

struct RlStepResult {
  double loss = 0;  // mean over the trained tokens of the step
  RlStats stats;
  std::vector<Tensor> logprobs;  // of each row's targets under the trainee, [wanted]
};

// Adds the gradient of the loss, a mean over all trained tokens of `rows`, to the trainee's gradients. Rows are done in
// order. Error: there is no trained token.
RlStepResult accumulate_rl_gradients(Trainee& trainee, const std::vector<RlRow>& rows, Numerics numerics,
                                     const RlLossOptions& options);

}  // namespace plumb
