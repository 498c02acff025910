#include "ops/head.h"

#include <cmath>
#include <string>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/gpu/dispatch.h"
#include "ops/head_chunks.h"

namespace plumb::ops {
namespace {

void check_targets(const Tensor& hidden, const Linear& head, const std::vector<int>& target) {
  check_hidden(hidden, head);
  if (static_cast<int64_t>(target.size()) != hidden.size(0))
    fail("head", std::to_string(target.size()) + " targets for " + std::to_string(hidden.size(0)) + " rows");
  for (int t : target)
    if (t < 0 || t >= head.out)
      fail("head", "target " + std::to_string(t) + " is outside the vocabulary of " + std::to_string(head.out));
}

Normaliser normaliser_of(const SoftmaxSum& s) { return {s.highest, std::log(s.sum)}; }

// logits of one row -> gradient d * (1[v == target] - p_v), in place.
void softmax_gradient(const SoftmaxSum& s, float* logits, int64_t vocab, int target, float d) {
  const Lanes highest = splat(s.highest), factor = splat(static_cast<float>(-d / s.sum));
  for_lanes(vocab,
            [&](int64_t v, int64_t n) { store_part(logits + v, exp(load_part(logits + v, n) - highest) * factor, n); });
  logits[target] += d;
}

}  // namespace

float log_probability(float logit, const Normaliser& n) {
  return static_cast<float>(double{logit} - n.highest - n.logarithm);
}

Normaliser normaliser_of(std::span<const float> logits) {
  return normaliser_of(softmax_sum(logits.data(), static_cast<int64_t>(logits.size())));
}

Logits head_logits(const Tensor& hidden, const Linear& head) {
  PLUMB_ON_GPU(hidden, head_logits(hidden, head));
  Logits logits{linear(hidden, head), std::vector<Normaliser>(hidden.size(0)), {}};
  parallel_for(hidden.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      logits.normaliser[r] = normaliser_of(softmax_sum(logits.value.f32() + r * head.out, head.out));
  });
  return logits;
}

Tensor logits_on_host(const Logits& logits, const std::vector<int>& rows) {
  const Shape shape = {static_cast<int64_t>(rows.size()), logits.value.size(1)};
  const Tensor there = logits.value.on_device() ? staging(shape) : Tensor::empty(shape);
  for (size_t i = 0; i < rows.size(); ++i) copy_bytes(there.rows(i, i + 1), logits.value.rows(rows[i], rows[i] + 1));
  return there;
}

Tensor head_logprobs(const Tensor& hidden, const Linear& head, const std::vector<int>& target) {
  PLUMB_ON_GPU(hidden, head_logprobs(hidden, head, target));
  check_targets(hidden, head, target);
  Tensor logprobs = Tensor::empty({hidden.size(0)});
  for_chunks(hidden, head, [&](int64_t first, const Tensor& logits) {
    parallel_for(logits.size(0), 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const float* row = logits.f32() + r * head.out;
        logprobs.f32()[first + r] = log_probability(row[target[first + r]], normaliser_of(softmax_sum(row, head.out)));
      }
    });
  });
  return logprobs;
}

Tensor head_logprobs_backward(const Tensor& d_logprob, const Tensor& hidden, const Linear& head,
                              const std::vector<int>& target, const Tensor& d_head, Tensor* logprobs) {
  PLUMB_ON_GPU(hidden, head_logprobs_backward(d_logprob, hidden, head, target, d_head, logprobs));
  check_targets(hidden, head, target);
  Tensor d_hidden = Tensor::empty(hidden.shape());
  if (logprobs) *logprobs = Tensor::empty({hidden.size(0)});
  for_chunks(hidden, head, [&](int64_t first, const Tensor& logits) {
    parallel_for(logits.size(0), 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        float* row = logits.f32() + r * head.out;
        const int wanted = target[first + r];
        const SoftmaxSum s = softmax_sum(row, head.out);
        if (logprobs) logprobs->f32()[first + r] = log_probability(row[wanted], normaliser_of(s));
        softmax_gradient(s, row, head.out, wanted, d_logprob.f32()[first + r]);
      }
    });
    const int64_t n = logits.size(0);
    linear_backward_input(logits.f32(), head.out, n, head, d_hidden.f32() + first * head.in, head.in, false);
    // Chunks continue the chains over rows: the gradient does not depend on their size.
    if (d_head.defined())
      linear_backward_weight(logits.f32(), head.out, hidden.f32() + first * head.in, head.in, n, d_head);
  });
  return d_hidden;
}

}  // namespace plumb::ops
