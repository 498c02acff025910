// LM head and what is taken from its logits, in chunks of rows: a [rows, vocab] tensor never exists when training.
#pragma once
#include <span>
#include <vector>

#include "base/tensor.h"
#include "ops/linear.h"

namespace plumb::ops {

// What makes a logit of a row a log-probability, at temperature 1.
struct Normaliser {
  float highest = 0;     // logit
  double logarithm = 0;  // of the sum of exp(logit - highest)
};
// logit - highest - logarithm in double, rounded once.
float log_probability(float logit, const Normaliser& n);
// Of logits [vocab] that were changed since head_logits made them. Sums in order.
Normaliser normaliser_of(std::span<const float> logits);

// Where the model computes decides how exponentials are added up, so the normalisers come with the logits.
struct Logits {
  Tensor value;                        // f32 [rows,V], where hidden is
  std::vector<Normaliser> normaliser;  // [rows]
  Tensor tiles;                        // on a device: what looks for the most likely tokens starts from
};
// hidden [rows,d] (normed), head [V,d].
Logits head_logits(const Tensor& hidden, const Linear& head);
// The logits of these rows, in this order, on the host.
Tensor logits_on_host(const Logits& logits, const std::vector<int>& rows);

// Log-probability of target[row] under the softmax of row's logits: f32 [rows], on the host. The bits of
// log_probability with what head_logits returns.
Tensor head_logprobs(const Tensor& hidden, const Linear& head, const std::vector<int>& target);

// Backward of sum_i d_logprob[i] * logprob[i]: -> d_hidden [rows,d]; d_head f32 [V,d] += if defined. Recomputes the
// logits; logprobs, if not null, becomes what head_logprobs returns, so that who knows d_logprob before needs no
// forward pass.
Tensor head_logprobs_backward(const Tensor& d_logprob, const Tensor& hidden, const Linear& head,
                              const std::vector<int>& target, const Tensor& d_head, Tensor* logprobs = nullptr);

}  // namespace plumb::ops
