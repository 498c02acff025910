// Hyper-connections (mHC) on Hopper: four residual streams a token, mixed before and after each sublayer.
//
// A boundary between two sublayers is one call: the streams take up the output of the finished sublayer, the mapping of
// the next one is computed from them while they are on chip, and the next sublayer's normed input leaves:
//   next_k = bf16(post_k * out + sum_j comb[j, k] * streams_j)           (post of the finished sublayer)
//   mix = rho * (fn . next), rho = (mean(next^2) + norm_eps)^(-1/2)      (FP32 weights, FP32-exact products)
//   pre = sigmoid(mix scale0 + base) + hc_eps, post = 2 sigmoid(mix scale1 + base), comb = Sinkhorn(mix scale2 + base)
//   y = bf16(sum_j pre_j next_j), x = bf16(norm_weight * y * rms(y)^-1)  (pre, contraction, norm of the next sublayer)
// Sums run over channels in one order: rows do not influence each other. docs/kernels/hyper_connections.md has budgets.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace plumb::kernels {

constexpr int kHyperStreams = 4;
constexpr int kHyperOutputs = 24;  // rows of fn: pre 4, post 4, comb 16 in the order (source, destination)

struct HyperMapping {  // device memory, FP32
  const float* fn;     // [outputs, 4 * width]
  const float* base;   // [outputs]
  const float* scale;  // [3]: pre, post, comb; head: [1]
  int outputs;         // 24, or 4: the contraction before the head, which has pre only
  int sinkhorn_iterations;
  float hc_eps, norm_eps;
};

// Pointers are to device memory, aligned to 16 bytes; "bf16" pointers are untyped. width is a multiple of 256, at most
// 8,192.
struct HyperBoundary {
  const void* streams;       // bf16 [rows, 4, width]
  const void* out;           // bf16 [rows, width]: what the finished sublayer gave. Null: nothing is finished
  const float* finished;     // [rows, 24] coefficients of the finished sublayer; null without out
  void* next;                // bf16 [rows, 4, width], written; may be `streams`; null without out
  HyperMapping mapping;      // of the next sublayer
  float* coefficients;       // [rows, 24], written: pre, post, comb (head: pre, then zeros)
  float *mix, *rho;          // [rows, 24] and [rows], written: what the backward pass needs
  const float* norm_weight;  // [width]
  float rms_eps;             // of that norm
  void* y;                   // bf16 [rows, width], written; may be null
  void* x;                   // bf16 [rows, width], written
  uint8_t* x_values;         // e4m3 [rows, width] and scales [rows, width / 128 rounded up to 4], as
  float* x_scales;           // grouped_linear::quantise_rows writes them; both may be null
  void* workspace;           // hyper_boundary_workspace(rows, width) bytes, aligned to 256
  int rows, width;           // rows may be 0
};
cudaError_t hyper_boundary(const HyperBoundary& arguments, cudaStream_t stream);
size_t hyper_boundary_workspace(int rows, int width);

// Backward of `next` with regard to the finished sublayer: d_out = bf16(sum_k post_k d_next_k), and the gradients of
// its coefficients, d_post_k = d_next_k . out, d_comb[j, k] = d_next_k . streams_j.
struct HyperPostBackward {
  const void* d_next;     // bf16 [rows, 4, width]
  const void* streams;    // bf16 [rows, 4, width], before the sublayer's output was taken up
  const void* out;        // bf16 [rows, width]
  const float* finished;  // [rows, 24]
  void* d_out;            // bf16 [rows, width], written
  float* d_coefficients;  // [rows, 24], elements 4 to 23 written
  int rows, width;
};
cudaError_t hyper_post_backward(const HyperPostBackward& arguments, cudaStream_t stream);

// Backward of a sublayer's whole use of its streams: through norm, contraction and mapping (d_x, d_coefficients), and
// through the mixing after it (d_next):
//   d_streams_j = bf16(sum_k comb[j, k] d_next_k + pre_j d_y + sum_o rho fn[o, j] d_mix_o + factor streams_j)
struct HyperPreBackward {
  const void* d_next;         // bf16 [rows, 4, width]; null: nothing was mixed (the head)
  const void* streams;        // bf16 [rows, 4, width], those that the mapping read
  const void* d_x;            // bf16 [rows, width], gradient of the norm's output
  const float* coefficients;  // [rows, 24]
  const float *mix, *rho;     // [rows, 24], [rows]
  HyperMapping mapping;
  const float* norm_weight;  // [width]
  float rms_eps;
  float* d_coefficients;           // [rows, 24]: 4 to 23 from hyper_post_backward (head: set to 0); 0 to 3 written
  void* d_streams;                 // bf16 [rows, 4, width], written; may be d_next
  float *d_fn, *d_base, *d_scale;  // FP32, += ; all null: the mapping is frozen
  void* workspace;                 // hyper_pre_backward_workspace() bytes, aligned to 256
  int rows, width;
};
cudaError_t hyper_pre_backward(const HyperPreBackward& arguments, cudaStream_t stream);
size_t hyper_pre_backward_workspace(int rows, int width, bool weight_gradients);

}  // namespace plumb::kernels
