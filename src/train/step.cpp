#include "train/step.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "ops/head.h"

namespace plumb {
namespace {

// Denominators over the whole step: every row's share of the loss follows from them, whatever row it is in.
struct Totals {
  int64_t tokens = 0, trained = 0, documents = 0, mtp_trained = 0;
};

void add_rows(std::vector<std::vector<int64_t>>& sum, const std::vector<std::vector<int64_t>>& part) {
  if (sum.size() < part.size()) sum.resize(part.size());
  for (size_t layer = 0; layer < part.size(); ++layer) {
    if (sum[layer].size() < part[layer].size()) sum[layer].resize(part[layer].size());
    for (size_t e = 0; e < part[layer].size(); ++e) sum[layer][e] += part[layer][e];
  }
}

class Accumulator {
 public:
  Accumulator(Trainee& trainee, Numerics numerics, const LossWeights& weights, const Totals& totals)
      : t_(trainee), weights_(weights), totals_(totals) {
    options_.numerics = numerics;
    options_.adapters = t_.adapter ? &t_.adapters : nullptr;
  }

  void add(const TrainRow& row, const MtpRow* mtp) {
    options_.keep = kept_of(t_.weights->config(), row.plan.rows());
    const Linear& head = t_.weights->outer().head;
    const ForwardResult result = forward(*t_.weights, row.plan, options_);
    const Tensor d_logprob = Tensor::full({result.hidden.size(0)}, -1.0f / static_cast<float>(totals_.trained));
    Tensor logprob;
    const Tensor d_hidden =
        ops::head_logprobs_backward(d_logprob, result.hidden, head, row.target, t_.gradients.outer.head, &logprob);
    losses_.loss += negative_log_likelihood(logprob) / static_cast<double>(totals_.trained);

    const double share = static_cast<double>(row.documents.size()) / static_cast<double>(totals_.documents);
    AuxiliaryLosses aux;
    aux.indexer = {static_cast<float>(weights_.indexer), false, static_cast<double>(totals_.tokens)};
    aux.balance = static_cast<float>(weights_.balance * share);
    Tensor d_last;
    if (mtp) d_last = add_mtp(*mtp, result.streams.back(), aux, share);
    take(backward(*t_.weights, row.plan, options_, result, d_hidden, d_last, t_.gradients, aux), share);
  }

  StepLosses finish() {
    const ModelConfig& c = t_.weights->config();
    int csa = 0, scored = 0;  // layers with an indexer, with a router that is not a table
    for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
      csa += c.kind(layer) == LayerKind::csa;
      scored += !c.is_hash_layer(layer);
    }
    if (weights_.mtp != 0) scored += t_.weights->mtp_count();
    losses_.balance /= std::max(scored, 1);
    losses_.indexer /= static_cast<double>(totals_.tokens) * std::max(csa, 1);
    losses_.tokens = totals_.tokens;
    losses_.trained = totals_.trained;
    return std::move(losses_);
  }

 private:
  // -> gradient of the last streams
  Tensor add_mtp(const MtpRow& mtp, const Tensor& last, const AuxiliaryLosses& aux, double share) {
    const Linear& head = t_.weights->outer().head;
    const Tensor hidden = mtp_forward(*t_.weights, 0, mtp.input, last, options_);
    Tensor logprob, d_logprob = Tensor::empty({hidden.size(0)});
    const auto each = static_cast<float>(-weights_.mtp / static_cast<double>(totals_.mtp_trained));
    for (int64_t i = 0; i < d_logprob.numel(); ++i) d_logprob.f32()[i] = mtp.weight[i] * each;
    const Tensor d_hidden =
        ops::head_logprobs_backward(d_logprob, hidden, head, mtp.target, t_.gradients.outer.head, &logprob);
    losses_.mtp += negative_log_likelihood(logprob, mtp.weight) / static_cast<double>(totals_.mtp_trained);
    Tensor d_last = Tensor::zeros(last.shape());
    AuxiliaryResults results;
    mtp_backward(*t_.weights, 0, mtp.input, last, options_, d_hidden, d_last, t_.gradients, aux, results);
    take(results, share);
    return d_last;
  }

  void take(const AuxiliaryResults& r, double share) {
    losses_.balance += r.balance * share;
    losses_.indexer += r.indexer;
    add_rows(losses_.expert_rows, r.expert_rows);
  }

  Trainee& t_;
  LossWeights weights_;
  Totals totals_;
  ForwardOptions options_;
  StepLosses losses_;
};

}  // namespace

Keep kept_of(const ModelConfig& config, int64_t rows) {
  constexpr int64_t kKeptBytes = int64_t{2} << 30;
  return kept_layer_bytes(config, rows) <= kKeptBytes ? Keep::all : Keep::outputs;
}

StepLosses accumulate_gradients(Trainee& trainee, const std::vector<TrainRow>& rows, Numerics numerics,
                                const LossWeights& weights) {
  PLUMB_CHECK(trainee.trained || (weights.mtp == 0 && weights.balance == 0 && weights.indexer == 0));
  const bool use_mtp = weights.mtp != 0 && trainee.weights->mtp_count() > 0;
  Totals totals;
  std::vector<MtpRow> mtp;
  for (const TrainRow& row : rows) {
    totals.tokens += row.tokens();
    totals.trained += row.trained();
    totals.documents += static_cast<int64_t>(row.documents.size());
    if (!use_mtp) continue;
    mtp.push_back(make_mtp_row(plan_shape(trainee.weights->config()), row));
    totals.mtp_trained += mtp.back().trained();
  }
  PLUMB_CHECK(totals.trained > 0);
  Accumulator accumulator(trainee, numerics, weights, totals);
  for (size_t i = 0; i < rows.size(); ++i)
    accumulator.add(rows[i], use_mtp && mtp[i].trained() > 0 ? &mtp[i] : nullptr);
  return accumulator.finish();
}

double evaluate(Trainee& trainee, const std::vector<TrainRow>& rows, Numerics numerics) {
  ForwardOptions options;
  options.numerics = numerics;
  options.adapters = trainee.adapter ? &trainee.adapters : nullptr;
  double sum = 0;
  int64_t trained = 0;
  for (const TrainRow& row : rows) {
    const Tensor hidden = forward(*trainee.weights, row.plan, options).hidden;
    sum += negative_log_likelihood(ops::head_logprobs(hidden, trainee.weights->outer().head, row.target));
    trained += row.trained();
  }
  return sum / static_cast<double>(trained);
}

void update_router_bias(Trainee& trainee, const std::vector<std::vector<int64_t>>& expert_rows, double rate) {
  ResidentWeights& w = *trainee.trained;
  for (size_t layer = 0; layer < expert_rows.size(); ++layer) {
    const std::vector<int64_t>& rows = expert_rows[layer];
    const size_t backbone = w.layers.size();
    const Tensor& bias = (layer < backbone ? w.layers[layer] : w.mtps[layer - backbone].block).router.bias;
    if (!bias.defined() || rows.empty()) continue;
    int64_t total = 0;
    for (int64_t n : rows) total += n;
    const auto experts = static_cast<int64_t>(rows.size());
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t missing = total - rows[e] * experts;  // sign of mean - rows, in whole numbers
      if (missing != 0) bias.f32()[e] += static_cast<float>(missing > 0 ? rate : -rate);
    }
  }
}

namespace {
[[noreturn]] void fail_diverged(int64_t step, const std::string& what, const std::string& checkpoint) {
  fail("step " + std::to_string(step), what,
       "lower train.learning_rate or train.max_grad_norm, or raise train.warmup_steps; " +
           (checkpoint.empty() ? "there is no checkpoint yet" : "the last checkpoint is " + checkpoint));
}
}  // namespace

void require_finite_loss(double loss, int64_t step, const std::string& checkpoint) {
  if (!std::isfinite(loss)) fail_diverged(step, fmt::format("the loss is {}", loss), checkpoint);
}

double apply_gradients(Trainee& trainee, Optimizer& optimizer, double lr, double max_norm, int64_t step,
                       const std::string& checkpoint) {
  const double norm = gradient_norm(trainee);
  if (!std::isfinite(norm))
    fail_diverged(step, "the gradient of " + find_bad_gradient(trainee) + " is not finite", checkpoint);
  optimizer.step(trainee, lr, clip_factor(norm, max_norm), step);
  return norm;
}

double clip_factor(double norm, double max_norm) { return max_norm > 0 && norm > max_norm ? max_norm / norm : 1; }

}  // namespace plumb
