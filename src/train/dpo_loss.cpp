#include "train/dpo_loss.h"

#include <cmath>
#include <cstddef>

namespace plumb {
namespace {

// Neither overflows, however far x is from 0.
double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }
double log_sigmoid(double x) { return std::fmin(x, 0) - std::log1p(std::exp(-std::fabs(x))); }

}  // namespace

PairLoss dpo_loss(const DpoOptions& o, const PairLogprobs& p) {
  PairLoss r{};
  r.reward_chosen = o.beta * (p.chosen - p.reference_chosen);
  r.reward_rejected = o.beta * (p.rejected - p.reference_rejected);
  const double margin = r.reward_chosen - r.reward_rejected, s = o.label_smoothing;
  r.loss = -(1 - s) * log_sigmoid(margin) - s * log_sigmoid(-margin);
  r.d_chosen = o.beta * (s * sigmoid(margin) - (1 - s) * sigmoid(-margin));
  r.d_rejected = -r.d_chosen;
  return r;
}

DpoFigures dpo_figures(const DpoOptions& o, const std::vector<double>& policy, const std::vector<double>& reference) {
  DpoFigures f;
  const double share = policy.empty() ? 0 : 2.0 / static_cast<double>(policy.size());  // of a pair
  for (size_t i = 0; i + 1 < policy.size(); i += 2) {
    const PairLoss p = dpo_loss(o, {policy[i], policy[i + 1], reference[i], reference[i + 1]});
    f.loss += share * p.loss;
    f.reward_chosen += share * p.reward_chosen;
    f.reward_rejected += share * p.reward_rejected;
    f.accuracy += share * (p.reward_chosen > p.reward_rejected);
    f.margin += share * (p.reward_chosen - p.reward_rejected);
    f.logp_chosen += share * policy[i];
    f.logp_rejected += share * policy[i + 1];
  }
  return f;
}

}  // namespace plumb
