// How far a student's distributions of the next token are from a teacher's, over the whole vocabulary, and the
// gradient: the loss of distillation. Errors as in head.h.
//   reverse_kl  sum_v p_v (log p_v - log q_v)      p the student's, q the teacher's probabilities
//   forward_kl  sum_v q_v (log q_v - log p_v)
// Both models' logits (those of head.h, bit by bit) exist for a chunk of rows at a time. A row's results depend on that
// row alone; they are exactly 0 where both have the same logits.
#pragma once
#include "kernels/head/head.h"

namespace plumb::kernels::head {

enum class Divergence { reverse_kl, forward_kl };

// hidden: bf16 bits [rows, width], aligned to 16. The models may differ in width, not in vocabulary.
struct Model {
  const uint16_t* hidden;
  Weight weight;
};

size_t divergence_workspace_bytes(int chunk_rows, int vocabulary);  // aligned to 256

// -> divergence: [rows], nats. d_divergence [rows] or null; with it d_hidden, FP32 [rows, the student's width], is
// assigned the gradient of sum over rows of d_divergence * divergence with respect to the student's hidden rows.
// Gradients of logits are rounded to bf16.
void divergence(Divergence kind, const Model& student, const Model& teacher, int rows, int chunk_rows,
                float* divergence, const float* d_divergence, float* d_hidden, void* workspace, cudaStream_t stream);

}  // namespace plumb::kernels::head
