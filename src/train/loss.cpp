#include "train/loss.h"

#include <algorithm>

namespace plumb {

TrainRow make_row(const PlanShape& shape, const std::vector<Sample>& samples, const Row& row) {
  TrainRow r;
  std::vector<int> wanted;
  int first = 0;  // row of the document's first token
  for (int index : row) {
    const Sample& s = samples[index];
    for (size_t i = 1; i < s.tokens.size(); ++i) {
      if (!s.mask[i]) continue;
      wanted.push_back(first + static_cast<int>(i) - 1);
      r.target.push_back(s.tokens[i]);
    }
    first += static_cast<int>(s.tokens.size());
    r.documents.push_back(s.tokens);
    r.mask.push_back(s.mask);
  }
  r.plan = plan_documents(shape, r.documents);
  r.plan.wanted = wanted;
  return r;
}

int64_t MtpRow::trained() const { return std::count(weight.begin(), weight.end(), 1.0f); }

MtpRow make_mtp_row(const PlanShape& shape, const TrainRow& row) {
  MtpRow r;
  r.input = plan_mtp(shape, row.documents);
  for (size_t d = 0; d < row.documents.size(); ++d)
    for (size_t i = 0; i + 1 < row.documents[d].size(); ++i) {
      const bool known = i + 2 < row.documents[d].size() && row.mask[d][i + 2];
      r.target.push_back(known ? row.documents[d][i + 2] : 0);
      r.weight.push_back(known ? 1.0f : 0.0f);
    }
  return r;
}

double negative_log_likelihood(const Tensor& logprob, const std::vector<float>& weight) {
  double sum = 0;
  for (int64_t i = 0; i < logprob.numel(); ++i)
    if (weight.empty() || weight[i] != 0) sum -= (weight.empty() ? 1.0 : weight[i]) * logprob.f32()[i];
  return sum;
}

}  // namespace plumb
