// The router of a mixture of experts: from logits (row_linear.h) to the chosen experts and their weights, and back.
// Nothing synchronises with the host. Arguments that a caller can get wrong raise std::invalid_argument; CUDA errors
// raise std::runtime_error.
//
// score = sqrt(softplus(logit)), evaluated in FP64 and rounded once to FP32, so that a GPU and a CPU that see the same
// logits agree in every choice. weight of slot j = score_j / (sum of the slots' scores, in slot order, + 1e-20) *
// scale.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace plumb::kernels::router {

constexpr int kMostExperts = 512, kMostSlots = 16;

struct Sizes {
  int rows, experts, slots;  // experts at most kMostExperts, slots at most kMostSlots and at most the experts
};

// Score layers: the `slots` best of score + bias, best first, equal values: the lower expert first, NaN last. bias:
// [experts] or null. Hash layers: expert = table[token[row]]; token: [rows]; table: [vocabulary, slots]; a token
// outside of the vocabulary gets expert -1 and weight 0 (route.h takes both as "no expert"). A choice that is already
// made (replay): table [rows, slots], token = 0, 1, 2, ..., vocabulary = rows.
struct Choice {
  const float* bias;
  const int *token, *table;  // both null on score layers
  int vocabulary;
  float scale;  // routed_scaling_factor
};

// logits: [rows, experts] -> expert [rows, slots], weight [rows, slots], score [rows, experts] or null.
void route(const float* logits, const Sizes& sizes, const Choice& choice, int* expert, float* weight, float* score,
           cudaStream_t stream);

// Of the sum over slots of d_weight * weight. -> d_logit [rows, slots], of the chosen experts; all others are 0.
// d_weight: [rows, slots], or with row_of_slot (grouped_linear/route.h) in the order of the experts' rows, as
// swiglu_backward leaves it.
void route_backward(const float* d_weight, const float* logits, const int* expert, const Sizes& sizes, float scale,
                    float* d_logit, cudaStream_t stream, const int* row_of_slot = nullptr);

// d_logits [rows, experts], assigned: d_logit at the chosen experts, and the gradient that a loss of all scores adds.
// d_score: [rows, experts]. A row names no expert twice.
void all_logits_backward(const float* d_logit, const float* d_score, const float* logits, const int* expert,
                         const Sizes& sizes, float* d_logits, cudaStream_t stream);

// dx[row] = sum over the chosen experts, the lowest expert first, of d_logit * gate[expert]. gate: bf16 bits
// [experts, k], k a multiple of 8; dx: FP32 [rows, k], assigned, or added to if `add`.
void route_backward_input(const float* d_logit, const int* expert, const Sizes& sizes, const uint16_t* gate, int k,
                          bool add, float* dx, cudaStream_t stream);

// d_gate[e] += sum over the pairs of expert e, in order of their tokens, of d_logit * x[token]: FP32, added once. x:
// bf16 bits [rows, k], k a multiple of 8; d_gate: FP32 [experts, k]. first_row, source_row, row_of_slot: the pairs
// sorted by expert (grouped_linear/route.h), on the device.
struct SortedPairs {
  const int *first_row, *source_row, *row_of_slot;
};
void route_backward_gate(const float* d_logit, const SortedPairs& pairs, const Sizes& sizes, const uint16_t* x, int k,
                         float* d_gate, cudaStream_t stream);

}  // namespace plumb::kernels::router
