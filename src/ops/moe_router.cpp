#include <algorithm>
#include <cmath>
#include <string>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/gpu/dispatch.h"
#include "ops/moe.h"

namespace plumb::ops {
namespace {

constexpr double kEps = 1e-20;  // all chosen scores may underflow

// sqrt(softplus(z)), evaluated in FP64 and rounded once.
float sqrt_softplus(float z) {
  return static_cast<float>(std::sqrt(std::log1p(std::exp(-std::fabs(double{z}))) + std::max(double{z}, 0.0)));
}

// Its derivative sigmoid(z) / (2 score). Far below zero both underflow, but their ratio tends to exp(z/2) / 2.
double sqrt_softplus_slope(double z) {
  if (z < -20) return std::exp(z / 2) / 2;
  const double score = std::sqrt(std::log1p(std::exp(-std::fabs(z))) + std::max(z, 0.0));
  return 1 / (1 + std::exp(-z)) / (2 * score);
}

// The `count` best of n values in descending order; equal values: the lower index first. NaN is worse than anything.
void best(const float* value, const float* bias, int64_t n, int64_t count, int32_t* chosen) {
  for (int64_t slot = 0; slot < count; ++slot) {
    int32_t winner = -1;
    float top = 0;
    for (int32_t i = 0; i < n; ++i) {
      if (std::find(chosen, chosen + slot, i) != chosen + slot) continue;
      const float v = bias ? value[i] + bias[i] : value[i];
      if (winner < 0 || v > top || (std::isnan(top) && !std::isnan(v))) winner = i, top = v;
    }
    chosen[slot] = winner;
  }
}

void check_routes(const char* what, const Tensor& t, int64_t rows, int64_t k, int64_t experts) {
  if (t.shape() != Shape{rows, k})
    fail("router", std::string(what) + " " + to_string({rows, k}) + " expected, " + to_string(t.shape()) + " found");
  for (int64_t i = 0; i < t.numel(); ++i)
    if (t.ptr<int32_t>()[i] < 0 || t.ptr<int32_t>()[i] >= experts)
      fail("router", std::string(what) + " of row " + std::to_string(i / k) + " names expert " +
                         std::to_string(t.ptr<int32_t>()[i]) + " of " + std::to_string(experts));
}

Tensor hashed(const Tensor& tid2eid, const Tensor& tokens, int64_t k) {
  if (tid2eid.dim() != 2 || tid2eid.size(1) != k)
    fail("router", "tid2eid [vocabulary," + std::to_string(k) + "] expected, " + to_string(tid2eid.shape()) + " found");
  const int32_t* token = tokens.ptr<int32_t>();
  Tensor expert = Tensor::empty({tokens.numel(), k}, DType::i32);
  for (int64_t r = 0; r < tokens.numel(); ++r) {
    if (token[r] < 0 || token[r] >= tid2eid.size(0))
      fail("router", "token " + std::to_string(token[r]) + " is outside the hash table of " +
                         std::to_string(tid2eid.size(0)) + " tokens");
    std::copy_n(tid2eid.ptr<int32_t>() + token[r] * k, k, expert.ptr<int32_t>() + r * k);
  }
  return expert;
}

}  // namespace

Routing route(const Tensor& x, const Tensor& token, const RouterWeights& w, const RouterOptions& o,
              const Tensor& forced) {
  PLUMB_ON_GPU(x, route(x, token, w, o, forced));
  const int64_t rows = x.size(0), experts = w.gate.out, k = o.experts_per_token;
  if (k < 1 || k > experts)
    fail("router", std::to_string(k) + " experts a token of " + std::to_string(experts),
         "use 1 to the number of experts");
  Routing r;
  r.logits = linear(x, w.gate);
  r.score = Tensor::empty({rows, experts});
  parallel_for(rows * experts, 2048, [&](int64_t begin, int64_t end) {
    const float* logit = r.logits.f32();
    float* score = r.score.f32();
    for (int64_t i = begin; i < end; ++i) score[i] = sqrt_softplus(logit[i]);
  });
  if (forced.defined()) {
    r.expert = forced;
  } else if (w.tid2eid.defined()) {
    if (token.numel() != rows)
      fail("router", std::to_string(token.numel()) + " tokens for " + std::to_string(rows) + " rows");
    r.expert = hashed(w.tid2eid, token, k);
  } else {
    r.expert = Tensor::empty({rows, k}, DType::i32);
    const float* bias = w.bias.defined() ? w.bias.f32() : nullptr;
    parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        best(r.score.f32() + t * experts, bias, experts, k, r.expert.ptr<int32_t>() + t * k);
    });
  }
  check_routes(forced.defined() ? "forced choice" : "choice", r.expert, rows, k, experts);
  r.weight = Tensor::empty({rows, k});
  for (int64_t t = 0; t < rows; ++t) {
    const int32_t* chosen = r.expert.ptr<int32_t>() + t * k;
    const float* score = r.score.f32() + t * experts;
    float total = 0;
    for (int64_t j = 0; j < k; ++j) total += score[chosen[j]];
    for (int64_t j = 0; j < k; ++j)
      r.weight.f32()[t * k + j] = score[chosen[j]] / (total + static_cast<float>(kEps)) * o.scale;
  }
  return r;
}

Tensor route_backward(const Tensor& d_weight, const Tensor& d_score_extra, const Tensor& x, const RouterWeights& w,
                      const Routing& r, const RouterOptions& o, const Tensor& d_gate) {
  PLUMB_ON_GPU(x, route_backward(d_weight, d_score_extra, x, w, r, o, d_gate));
  const int64_t rows = x.size(0), experts = w.gate.out, k = o.experts_per_token;
  Tensor d_logits = d_score_extra.defined() ? d_score_extra.clone() : Tensor::zeros({rows, experts});
  parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int32_t* chosen = r.expert.ptr<int32_t>() + t * k;
      const float *score = r.score.f32() + t * experts, *logit = r.logits.f32() + t * experts;
      const float *d = d_weight.f32() + t * k, *weight = r.weight.f32() + t * k;
      float* out = d_logits.f32() + t * experts;
      double total = kEps, dot = 0;
      for (int64_t j = 0; j < k; ++j) total += score[chosen[j]], dot += double{d[j]} * weight[j];
      // weight_j = scale a_j / total
      for (int64_t j = 0; j < k; ++j) out[chosen[j]] += static_cast<float>((double{o.scale} * d[j] - dot) / total);
      for (int64_t e = 0; e < experts; ++e)
        if (out[e] != 0) out[e] = static_cast<float>(out[e] * sqrt_softplus_slope(logit[e]));
    }
  });
  return linear_backward(d_logits, x, w.gate, {}, {}, {}, d_gate);
}

double balance_loss(const Routing& r, const std::vector<int>& document, float coefficient, const Tensor& d_score) {
  PLUMB_ON_GPU(r.score, balance_loss(r, document, coefficient, d_score));
  const int64_t rows = r.score.size(0), experts = r.score.size(1), k = r.expert.size(1);
  if (static_cast<int64_t>(document.size()) != rows)
    fail("balance_loss", std::to_string(document.size()) + " document numbers for " + std::to_string(rows) + " rows");
  std::vector<int> documents = document;
  std::sort(documents.begin(), documents.end());
  documents.erase(std::unique(documents.begin(), documents.end()), documents.end());
  const auto index = [&](int64_t t) {
    return std::lower_bound(documents.begin(), documents.end(), document[t]) - documents.begin();
  };

  const int64_t n = static_cast<int64_t>(documents.size());
  std::vector<double> length(n), count(n * experts), share(n * experts), total(rows, kEps);
  std::vector<int32_t> chosen(k);
  for (int64_t t = 0; t < rows; ++t) {
    const float* a = r.score.f32() + t * experts;
    const int64_t d = index(t);
    for (int64_t e = 0; e < experts; ++e) total[t] += a[e];
    for (int64_t e = 0; e < experts; ++e) share[d * experts + e] += a[e] / total[t];
    best(a, nullptr, experts, k, chosen.data());
    for (int32_t e : chosen) ++count[d * experts + e];
    ++length[d];
  }
  // slope[d, e] = d loss / d (normalised score) = E f_e / T / documents, the same for all rows of a document.
  std::vector<double> slope(n * experts);
  double loss = 0;
  for (int64_t i = 0; i < n * experts; ++i) {
    const double tokens = length[i / experts];
    slope[i] =
        static_cast<double>(experts) * count[i] / (static_cast<double>(k) * tokens) / tokens / static_cast<double>(n);
    loss += slope[i] * share[i];
  }
  for (int64_t t = 0; t < rows && d_score.defined(); ++t) {
    const float* a = r.score.f32() + t * experts;
    const double* g = slope.data() + index(t) * experts;
    double mean = 0;
    for (int64_t e = 0; e < experts; ++e) mean += g[e] * a[e] / total[t];
    for (int64_t e = 0; e < experts; ++e)
      d_score.f32()[t * experts + e] += static_cast<float>(coefficient * (g[e] - mean) / total[t]);
  }
  return loss;
}

}  // namespace plumb::ops
