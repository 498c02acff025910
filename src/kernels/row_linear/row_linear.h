// Products with weights that are not quantised: y = x W^T with x in bf16, W in bf16 or FP32, FP32 accumulators. Router
// gate, compressor and indexer projections (bf16 weights), mHC mapping (FP32 weights), and the way down into a LoRA
// rank. Hopper only. Nothing synchronises with the host. Arguments that a caller can get wrong raise
// std::invalid_argument; CUDA errors raise std::runtime_error.
//
// Bits. y[row, n] depends on that row of x and on W's row n alone, whatever the number of rows: K is cut into parts
// that depend on n and k only, each part is one chain of tensor-core steps, the parts are added in FP32 in order.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace plumb::kernels::row_linear {

// ---- bf16 weights [n, k] -------------------------------------------------------------------------------------------
// Up to kThinOutputs outputs: parts of 512 of K; few rows are spread over the multiprocessors by part. More outputs:
// one part, tiles of 128 x 256 (wide_product.cuh).
constexpr int kThinOutputs = 1024;

struct Weight {
  const uint16_t* data;  // bf16 bits [n, k], aligned to 16 bytes
  int n, k;              // multiples of 8
};
// 0 if none is needed for that many rows.
size_t workspace_bytes(int rows, const Weight& weight);

// x: bf16 bits [rows, k]; out: [rows, n]; both aligned to 16 bytes.
void linear(const uint16_t* x, int rows, const Weight& weight, float* out, void* workspace, cudaStream_t stream);
void linear_bf16(const uint16_t* x, int rows, const Weight& weight, uint16_t* out, void* workspace,
                 cudaStream_t stream);
// dx[rows, k] = dy[rows, n] W, FP32, one chain over n. dy: bf16.
void linear_backward_input(const uint16_t* dy, int rows, const Weight& weight, float* dx, cudaStream_t stream);
// dw[n, k] += dy^T x, FP32, one chain over the rows, added once.
void linear_backward_weight(const uint16_t* dy, const uint16_t* x, int rows, int n, int k, float* dw,
                            cudaStream_t stream);

// ---- few outputs, FP32 weights, one matrix or one for each group of rows --------------------------------------------
// A weight w is kept as three bf16 numbers, high + middle + low == w exactly (if no part underflows), so that FP32
// weights meet bf16 tensor cores: products are exact, sums FP32. K is cut into eight parts.
constexpr int kMostFewOutputs = 32;

struct SplitWeight {
  const uint16_t* planes;  // [groups][3][n rounded up to 8][k], see split_weight
  int groups, n, k;        // n <= kMostFewOutputs, k a multiple of 32
};
size_t split_bytes(int groups, int n, int k);
// weight: FP32 [groups, n, k], times `scale`.
void split_weight(const float* weight, int groups, int n, int k, float scale, uint16_t* planes, cudaStream_t stream);

// out[r, j] = sum over k of x[source_row[r], k] W[group of r][j, k], r < rows. source_row: device, or null for r.
// first_row: device, [groups + 1], ascending from 0; null for one group. Rows beyond first_row[groups] are not written.
void few_outputs(const uint16_t* x, const int* source_row, const int* first_row, int rows, const SplitWeight& weight,
                 float* out, cudaStream_t stream);

}  // namespace plumb::kernels::row_linear
