// The LM head: log-probabilities of targets and their gradients (training), logits (sampling, which draw.h goes on
// with). Nothing synchronises with the host. Arguments that a caller can get wrong raise std::invalid_argument; CUDA
// errors raise std::runtime_error.
//
// logit[row, v] = sum over the width of hidden * weight, bf16 operands, FP32 accumulators, one chain in order.
// log p(v) = logit - maximum - logarithm in double, rounded once, where the maximum and the logarithm of the sum of
// exp(logit - maximum) (Normaliser) are made from each 256 logits in registers and then combined in a fixed order.
// Training never writes the logits (portable kernels do, for 256 rows at a time); sampling does, from the same kernel:
// the bits of a row's logits, normaliser and log-probabilities depend on the row alone, and are the same on both ways.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace plumb::kernels::head {

struct Weight {
  const uint16_t* data;   // bf16 [vocabulary, width], aligned to 16 bytes
  int vocabulary, width;  // multiples of 8
};
struct Normaliser {
  float maximum, logarithm;
};

// Workspace of the functions below, aligned to 16 bytes. It begins with a float2 for each kTile logits of each row,
// whose first number is the largest of them.
constexpr int kTile = 256;
size_t workspace_bytes(int rows, int vocabulary);

// hidden: device, bf16 bits [rows, width], aligned to 16. target: device, [rows], in 0 .. vocabulary - 1 (others give
// NaN). -> log_probability [rows], normaliser [rows] (for the backward pass).
void log_probabilities(const uint16_t* hidden, int rows, const Weight& weight, const int* target,
                       float* log_probability, Normaliser* normaliser, void* workspace, cudaStream_t stream);

// The same products, written: logits [rows, vocabulary] FP32, aligned to 8.
void logits(const uint16_t* hidden, int rows, const Weight& weight, float* logits, Normaliser* normaliser,
            void* workspace, cudaStream_t stream);

// Gradient of sum over rows of d_log_probability * log_probability. Logits are recomputed for `chunk_rows` rows at a
// time, whose gradients are kept as bf16 in between.
//   d_hidden: FP32 [rows, width], assigned; a row's bits depend on that row alone.
//   d_weight: FP32 [vocabulary, width], += in order of the chunks, or null.
size_t backward_workspace_bytes(int chunk_rows, int vocabulary);
void log_probabilities_backward(const float* d_log_probability, const uint16_t* hidden, int rows, const Weight& weight,
                                const int* target, const Normaliser* normaliser, int chunk_rows, float* d_hidden,
                                float* d_weight, void* workspace, cudaStream_t stream);

}  // namespace plumb::kernels::head
