// How far a student's distributions of the next token are from a teacher's, over the whole vocabulary: the loss of
// distillation. Like everything that is taken from the LM head (head.h), in chunks of rows: neither model's logits ever
// exist for all rows.
#pragma once
#include <cstdint>

#include "base/tensor.h"
#include "ops/linear.h"

namespace plumb::ops {

// With p the student's and q the teacher's probabilities (softmax at temperature 1):
//   reverse_kl  KL(p || q) = sum_v p_v (log p_v - log q_v)   the student keeps to what the teacher finds likely
//   forward_kl  KL(q || p) = sum_v q_v (log q_v - log p_v)   the student covers all that the teacher finds likely
enum class Divergence : uint8_t { reverse_kl, forward_kl };

// A model's normed rows [rows,d] and its head [V,d]. The student and the teacher may differ in d, not in V.
struct HeadRows {
  const Tensor& hidden;
  const Linear& head;
};

// -> f32 [rows], nats. Exactly 0 where both have the same logits. Error: other numbers of rows, other vocabularies.
Tensor head_divergence(Divergence kind, const HeadRows& student, const HeadRows& teacher);

// Backward of sum_i d_divergence[i] * divergence[i] with respect to the student: -> d_hidden [rows,d]; d_head f32 [V,d]
// += if defined. The teacher is a constant. Recomputes both logits; divergence, if not null, becomes what
// head_divergence returns.
Tensor head_divergence_backward(Divergence kind, const Tensor& d_divergence, const HeadRows& student,
                                const HeadRows& teacher, const Tensor& d_head, Tensor* divergence = nullptr);

}  // namespace plumb::ops
