#include "train/dpo_step.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "base/error.h"
#include "ops/head.h"
#include "train/step.h"

namespace plumb {
namespace {

// An answer is in one row, so its sum is complete.
void sum_answers(const RlRow& row, const Tensor& logprob, std::vector<double>& values) {
  for (const RlRow::Origin& o : row.origin) values[static_cast<size_t>(o.sample)] = 0;
  for (size_t i = 0; i < row.origin.size(); ++i) values[static_cast<size_t>(row.origin[i].sample)] += logprob.f32()[i];
}

// Whether the row has one answer of a pair without the other.
bool splits_a_pair(const RlRow& row) {
  std::set<int> answers;
  for (const RlRow::Origin& o : row.origin) answers.insert(o.sample);
  return std::ranges::any_of(answers, [&](int a) { return !answers.contains(a ^ 1); });
}

}  // namespace

RlRows make_pair_rows(const PlanShape& shape, const std::vector<const PreferencePair*>& pairs,
                      const TreeOptions& options) {
  std::vector<RlSample> answers;
  for (size_t i = 0; i < pairs.size(); ++i)
    for (const Sample* s : {&pairs[i]->chosen, &pairs[i]->rejected}) {
      RlSample& a = answers.emplace_back();
      a.tokens = s->tokens, a.mask = s->mask;
      a.logprob.assign(s->tokens.size(), std::numeric_limits<float>::quiet_NaN());
      a.group = static_cast<int>(i);
      a.prompt = static_cast<int>(s->tokens.size());  // as far as both answers are equal and nothing counts
    }
  return make_rl_rows(shape, answers, std::vector<SampleWeight>(answers.size(), {0, 1, true}), options);
}

void fill_answer_logprobs(WeightStore& weights, const AdapterBatch* adapters, const RlRows& rows, Numerics numerics,
                          std::vector<double>& values) {
  for (const RlRow& row : rows.rows) {
    const bool known = std::ranges::none_of(
        row.origin, [&](const RlRow::Origin& o) { return std::isnan(values[static_cast<size_t>(o.sample)]); });
    if (!known) sum_answers(row, row_logprobs(weights, adapters, row, numerics), values);
  }
}

std::vector<double> accumulate_dpo_gradients(Trainee& t, const RlRows& rows, Numerics numerics,
                                             const DpoOptions& options, const std::vector<double>& reference) {
  ForwardOptions o;
  o.numerics = numerics;
  o.adapters = t.adapter ? &t.adapters : nullptr;
  const double pairs = static_cast<double>(reference.size()) / 2;
  // The gradient of an answer needs the log-probability of the other one, which is usually in the same row.
  std::vector<double> policy(reference.size(), std::numeric_limits<double>::quiet_NaN());
  for (const RlRow& row : rows.rows)
    if (splits_a_pair(row)) sum_answers(row, row_logprobs(*t.weights, o.adapters, row, numerics), policy);

  const Linear& head = t.weights->outer().head;
  for (const RlRow& row : rows.rows) {
    o.keep = kept_of(t.weights->config(), row.plan.rows());
    const ForwardResult r = forward(*t.weights, row.plan, o);
    sum_answers(row, ops::head_logprobs(r.hidden, head, row.target), policy);
    Tensor d_logprob = Tensor::empty({r.hidden.size(0)});
    for (size_t i = 0; i < row.origin.size(); ++i) {
      const size_t answer = static_cast<size_t>(row.origin[i].sample), chosen = answer & ~size_t{1};
      const PairLoss loss =
          dpo_loss(options, {policy[chosen], policy[chosen + 1], reference[chosen], reference[chosen + 1]});
      d_logprob.f32()[i] = static_cast<float>((answer == chosen ? loss.d_chosen : loss.d_rejected) / pairs);
    }
    const Tensor d_hidden = ops::head_logprobs_backward(d_logprob, r.hidden, head, row.target, t.gradients.outer.head);
    backward(*t.weights, row.plan, o, r, d_hidden, {}, t.gradients, {});
  }
  return policy;
}

}  // namespace plumb
