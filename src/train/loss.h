// Packed rows as the model computes them, and the supervised loss: the mean negative log-probability of the trained
// tokens of a whole optimizer step, each predicted from the tokens before it in its own document. The mean runs over
// tokens, so it does not depend on how samples were packed into rows.
#pragma once
#include <vector>

#include "data/dataset.h"
#include "data/packing.h"
#include "model/forward.h"

namespace plumb {

struct TrainRow {
  std::vector<std::vector<int>> documents;
  std::vector<std::vector<uint8_t>> mask;
  SequencePlan plan;        // of the documents; wanted: the rows whose next token is trained
  std::vector<int> target;  // [wanted] that token
  int64_t tokens() const { return plan.rows(); }
  int64_t trained() const { return static_cast<int64_t>(target.size()); }
};
TrainRow make_row(const PlanShape& shape, const std::vector<Sample>& samples, const Row& row);

// What the MTP layer is trained on: from row i, whose hidden state knows token i + 1, the token after it (spec 3.10).
struct MtpRow {
  MtpInput input;
  std::vector<int> target;    // [rows of input.plan]; 0 where there is none
  std::vector<float> weight;  // [rows of input.plan] 1 = trained
  int64_t trained() const;
};
MtpRow make_mtp_row(const PlanShape& shape, const TrainRow& row);

// logprob [n] -> minus the sum of weight * logprob, in order and in double; weight {} = all 1.
double negative_log_likelihood(const Tensor& logprob, const std::vector<float>& weight = {});

}  // namespace plumb
