#include "train/rl_loss.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"

namespace plumb {
namespace {

constexpr double kLargestExponent = 20;

struct ClipRange {
  double low, high;
  bool holds(double ratio) const { return low <= ratio && ratio <= high; }
};
ClipRange clip_range(const RlLossOptions& o) {
  const bool cispo = o.loss == PolicyLoss::cispo;
  const double below = o.epsilon >= 0 ? o.epsilon : cispo ? 1.0 : 0.2;
  const double above = o.epsilon_high >= 0 ? o.epsilon_high : cispo ? 4.0 : below;
  return {1 - below, 1 + above};
}

// A ratio, and how it moves with the token's own log-ratio and with the mean log-ratio of its sequence.
struct Ratio {
  double value, by_own, by_mean;
};

// exp, held where it could overflow; its slope is 0 there.
struct Exp {
  double value, slope;
};
Exp exp_of(double x) {
  if (std::fabs(x) > kLargestExponent) return {std::exp(std::copysign(kLargestExponent, x)), 0};
  return {std::exp(x), std::exp(x)};
}

Ratio ratio_of(const RlLossOptions& o, double own, double mean) {
  const Exp t = exp_of(own), s = exp_of(mean);
  Ratio r{};
  switch (o.level) {
    case ImportanceLevel::token:
      r = {t.value, t.slope, 0};
      break;
    case ImportanceLevel::sequence:
      r = {s.value, 0, s.slope};
      break;
    case ImportanceLevel::average:
      r = {(t.value + s.value) / 2, t.slope / 2, s.slope / 2};
      break;
    case ImportanceLevel::geometric_average: {
      const double root = std::sqrt(t.value * s.value);
      r = {root, t.slope > 0 ? root / 2 : 0, s.slope > 0 ? root / 2 : 0};
      break;
    }
  }
  if (o.max_ratio > 0 && r.value > o.max_ratio) r = {o.max_ratio, 0, 0};
  return r;
}

double log_ratio(const RlToken& t, float logprob) {
  return std::isnan(t.old_logprob) ? 0 : double(logprob) - t.old_logprob;
}

// NaN where there is no reference.
double shaping_kl(const RlLossOptions& o, const RlToken& t, float logprob) {
  const float from = o.kl_source == KlSource::sample && !std::isnan(t.old_logprob) ? t.old_logprob : logprob;
  return double(from) - t.reference;
}

double shaped_advantage(const RlLossOptions& o, const RlToken& t, float logprob, double own, double mean_kl) {
  double advantage = t.advantage;
  if (o.kl_coefficient > 0) {
    const double kl = shaping_kl(o, t, logprob);
    if (!std::isnan(kl)) advantage += o.kl_coefficient * (mean_kl - kl);
  }
  return advantage - o.kimi_tau * own;
}

double truncation_factor(const RlLossOptions& o, const RlToken& t) {
  if (o.truncated_importance <= 0 || std::isnan(t.old_logprob) || std::isnan(t.original)) return 1;
  return std::min(exp_of(double(t.old_logprob) - t.original).value, o.truncated_importance);
}

void count(RlStats& s, const RlToken& t, float logprob, double ratio, bool clipped) {
  ++s.tokens;
  s.clipped += clipped;
  s.ratio += ratio;
  s.largest_ratio = std::max(s.largest_ratio, ratio);
  if (!std::isnan(t.original)) {
    s.unequal += std::memcmp(&t.original, &logprob, sizeof logprob) != 0;
    const double difference = std::fabs(double(logprob) - t.original);
    s.difference += difference;
    s.largest_difference = std::max(s.largest_difference, difference);
  }
  if (!std::isnan(t.reference)) {
    const double kl = double(logprob) - t.reference;
    s.kl += kl;
    s.kl3 += std::exp(-std::clamp(kl, -kLargestExponent, kLargestExponent)) + kl - 1;
    ++s.kl_tokens;
  }
  if (!std::isnan(t.old_logprob)) {
    const double x = std::exp(double(t.old_logprob)), y = std::exp(double(logprob));
    s.old += x, s.fresh += y, s.old2 += x * x, s.fresh2 += y * y, s.product += x * y;
    ++s.pairs;
  }
}

}  // namespace

void check(const RlLossOptions& o) {
  const auto not_below = [](const char* name, double value, double least) {
    if (!(value >= least)) fail(name, std::to_string(value), "a number from " + std::to_string(least) + " on");
  };
  not_below("max_negative_advantage_importance_sampling_weight", o.max_ratio, 0);
  not_below("kl_penalty_coef", o.kl_coefficient, 0);
  not_below("kimi_k2_tau", o.kimi_tau, 0);
  not_below("truncated_importance_sampling", o.truncated_importance, 0);
  if (std::isnan(o.epsilon) || std::isnan(o.epsilon_high))
    fail("epsilon", "is not a number", "leave it out for the default");
}

void RlStats::add(const RlStats& other) {
  tokens += other.tokens, clipped += other.clipped, unequal += other.unequal;
  ratio += other.ratio, largest_ratio = std::max(largest_ratio, other.largest_ratio);
  difference += other.difference, largest_difference = std::max(largest_difference, other.largest_difference);
  kl += other.kl, kl3 += other.kl3, kl_tokens += other.kl_tokens;
  old += other.old, fresh += other.fresh, old2 += other.old2, fresh2 += other.fresh2, product += other.product;
  pairs += other.pairs;
}

double RlStats::probability_correlation() const {
  const double n = static_cast<double>(pairs);
  const double covariance = n * product - old * fresh;
  const double variances = (n * old2 - old * old) * (n * fresh2 - fresh * fresh);
  return variances > 0 ? covariance / std::sqrt(variances) : 1;
}

void add_kl(const RlLossOptions& o, const std::vector<RlToken>& tokens, const float* logprob, KlSum& sum) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    const float fresh = logprob ? logprob[i] : std::numeric_limits<float>::quiet_NaN();
    const double kl = shaping_kl(o, tokens[i], fresh);
    if (std::isnan(kl) || tokens[i].weight == 0) continue;
    sum.sum += kl;
    ++sum.tokens;
  }
}

RlLoss rl_loss(const RlLossOptions& o, const std::vector<RlToken>& tokens, const float* logprob, double mean_kl,
               double scale) {
  const ClipRange range = clip_range(o);
  RlLoss result;
  result.d_logprob.resize(tokens.size());
  size_t end = 0;
  for (size_t begin = 0; begin < tokens.size(); begin = end) {  // a sequence at a time
    double mean = 0;
    for (end = begin; end < tokens.size() && tokens[end].sequence == tokens[begin].sequence; ++end)
      mean += log_ratio(tokens[end], logprob[end]);
    const double n = static_cast<double>(end - begin);
    mean /= n;
    double d_mean = 0;  // gradient with respect to the mean log-ratio
    for (size_t i = begin; i < end; ++i) {
      const RlToken& t = tokens[i];
      const double own = log_ratio(t, logprob[i]);
      const Ratio r = ratio_of(o, own, mean);
      const bool inside = range.holds(r.value);
      count(result.stats, t, logprob[i], r.value, !inside);
      if (o.mask_ratio && !inside) continue;
      const double advantage = shaped_advantage(o, t, logprob[i], own, mean_kl);
      const double weight = -scale * t.weight * truncation_factor(o, t) * advantage;
      const double clipped = std::clamp(r.value, range.low, range.high);
      if (o.loss == PolicyLoss::cispo) {  // the ratio is a constant, the gradient goes through the log-probability
        result.sum += weight * clipped * logprob[i];
        result.d_logprob[i] = static_cast<float>(weight * clipped);
      } else {  // the smaller of both objectives; only the one with the ratio itself has a gradient
        const bool ratio_counts = inside || r.value * advantage < clipped * advantage;
        result.sum += weight * (ratio_counts ? r.value : clipped);
        if (!ratio_counts) continue;
        result.d_logprob[i] = static_cast<float>(weight * r.by_own);
        d_mean += weight * r.by_mean;
      }
    }
    if (d_mean != 0)
      for (size_t i = begin; i < end; ++i) result.d_logprob[i] += static_cast<float>(d_mean / n);
  }
  return result;
}

}  // namespace plumb
