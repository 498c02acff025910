// RMS norm of rows on Hopper: y = bf16(weight * x * (mean(x^2) + eps)^(-1/2)), FP32 inside; its FP8 codes for the next
// product in the same pass; and backward. A row's bits depend on that row alone. The norms of heads, keys and entries,
// which are rotated at once, are in kernels/rotary; the one after a contraction of streams in
// kernels/hyper_connections.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace plumb::kernels {

// Device memory, aligned to 16 bytes; "bf16" pointers are untyped. width: a multiple of 256, at most 8,192.
struct RmsNorm {
  const void* x;        // bf16 [rows, width]
  const float* weight;  // [width]
  void* y;              // bf16 [rows, width], written; may be x
  uint8_t* values;      // e4m3 [rows, width] and scales [rows, width / 128 rounded up to 4], as
  float* scales;        // grouped_linear::quantise_rows writes them; both may be null
  int rows, width;      // rows may be 0
  float eps;
};
cudaError_t rms_norm(const RmsNorm& arguments, cudaStream_t stream);

struct RmsNormBackward {
  const void* x;        // bf16 [rows, width]
  const void* d_y;      // bf16 [rows, width]
  const float* weight;  // [width]
  void* d_x;            // bf16 [rows, width], written; may be d_y; null: only d_weight is wanted
  float* d_weight;      // FP32 [width], +=, rows in a fixed tree; null: frozen
  void* workspace;      // rms_norm_backward_workspace(rows, width) bytes; null without d_weight
  int rows, width;
  float eps;
};
cudaError_t rms_norm_backward(const RmsNormBackward& arguments, cudaStream_t stream);
size_t rms_norm_backward_workspace(int rows, int width);

}  // namespace plumb::kernels
