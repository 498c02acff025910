// LM head and what is taken from its logits, in chunks of rows: a [rows, vocab] tensor never exists when training.
#pragma once
#include <span>
#include <vector>

#include "base/tensor.h"
#include "ops/linear.h"

namespace plumb::ops {

// hidden [rows,d] (normed), head [V,d] -> logits f32 [rows,V].
Tensor head_logits(const Tensor& hidden, const Linear& head);

// Log-probability of target[row] under the softmax of row's logits, at temperature 1, FP32 (log-sum-exp: maximum, then
// sum in order). The same bits from whole rows of logits and from the chunked path.
float log_probability(const float* logits, int64_t vocab, int target);
// Those of several targets, with one pass over the logits.
std::vector<float> log_probabilities(const float* logits, int64_t vocab, std::span<const int> targets);
Tensor head_logprobs(const Tensor& hidden, const Linear& head, const std::vector<int>& target);  // f32 [rows]

// Backward of sum_i d_logprob[i] * logprob[i]: -> d_hidden [rows,d]; d_head f32 [V,d] += if defined. Recomputes the
// logits; logprobs, if not null, becomes what head_logprobs returns, so that who knows d_logprob before needs no
// forward pass.
Tensor head_logprobs_backward(const Tensor& d_logprob, const Tensor& hidden, const Linear& head,
                              const std::vector<int>& target, const Tensor& d_head, Tensor* logprobs = nullptr);

}  // namespace plumb::ops
