// A batch of rollouts as rows of prefix trees, and the gradient of a policy loss and of the distance from a teacher
// over them.
#pragma once
#include <map>
#include <vector>

#include "data/prefix_tree.h"
#include "train/advantages.h"
#include "train/parameters.h"
#include "train/rl_loss.h"
#include "train/teacher.h"

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
  std::vector<TreeSegment> segments;  // what the plan is made of
  SequencePlan plan;                  // wanted: the rows that predict the trained tokens
  std::vector<int> target;            // [wanted]
  std::vector<RlToken> tokens;        // [wanted] old = original = what was recorded, no reference
  std::vector<Origin> origin;         // [wanted]
  // Layer -> i32 [rows, experts of a token] that replace the router's choice in every pass over the row; empty = it
  // chooses. Rows that nothing trained depends on (the last token of a sample) have the experts 0, 1, ... A teacher
  // chooses by itself.
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
  double loss = 0;         // policy_loss + coefficient * divergence
  double policy_loss = 0;  // mean over the tokens with a weight
  double divergence = 0;   // from the teacher, mean over the trained tokens, nats; 0 without one
  RlStats stats;
  std::vector<Tensor> logprobs;  // of each row's targets under the trainee, [wanted]
};

// Adds the gradient of the loss to the trainee's gradients: the policy loss, a mean over all tokens of `rows` with a
// weight other than 0, plus, with a teacher, its coefficient times the divergence from it, a mean over all trained
// tokens. Rows are done in order. Error: there is no token for either.
RlStepResult accumulate_rl_gradients(Trainee& trainee, const std::vector<RlRow>& rows, Numerics numerics,
                                     const RlLossOptions& options, const Teacher* teacher = nullptr);

// The divergence of the model with `adapters` from the teacher, mean over the trained tokens of `rows`; NaN without
// one. No gradients.
double mean_divergence(WeightStore& weights, const AdapterBatch* adapters, const std::vector<RlRow>& rows,
                       Numerics numerics, const Teacher& teacher);

}  // namespace plumb
