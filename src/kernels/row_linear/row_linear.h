// Products with weights that are not quantised: y = x W^T with x in bf16, W in bf16 or FP32, FP32 accumulators. Router
// gate, compressor and indexer projections (bf16 weights), mHC mapping (FP32 weights), and the way down into a LoRA
// rank. Nothing synchronises with the host. Arguments that a caller can get wrong raise std::invalid_argument; CUDA
// errors raise std::runtime_error.
//
// Bits. y[row, n] depends on that row of x and on W's row n alone, whatever the number of rows: K is cut into parts
// that depend on the shape of W only, each part is one chain of tensor-core steps, the parts are added in FP32 in
// order. (On other GPUs than Hopper one FP32 chain: kernels/portable.)
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/lora/lora.h"

namespace plumb::kernels::row_linear {

// ---- bf16 weights [n, k] -------------------------------------------------------------------------------------------
// Up to kThinOutputs outputs: parts of 512 of K; few rows are spread over the multiprocessors by part. More outputs, or
// several groups: one part; tiles of 128 x 256 (wide_product.cuh), for up to 128 rows of 64 outputs
// (narrow_product.cuh).
constexpr int kThinOutputs = 1024;

// The launch directly before a product has not written its weight: few rows fetch it while that launch still runs
// (launch_dependent).
struct Weight {
  const uint16_t* data;  // bf16 bits [groups * n, k], aligned to 16 bytes
  int n, k;              // multiples of 8
  // Several groups (wo_a): outputs g * n .. of y meet inputs g * k .. of x, y = [rows, groups * n], x = [rows, groups *
  // k]. Then n is a multiple of 128, k a multiple of 64. Gradients of the input: n a multiple of 64, k of 256; of the
  // weight: n a multiple of 256.
  int groups = 1;
};
// 0 if none is needed for that many rows.
size_t workspace_bytes(int rows, const Weight& weight);

// x: bf16 bits [rows, k]; out: [rows, n]; both aligned to 16 bytes. low_rank (lora.h; n a multiple of 128): added in
// FP32 before the rounding. With groups, that of group g lies at t + g * rank; the factor is packed for all groups * n
// outputs together.
void linear(const uint16_t* x, int rows, const Weight& weight, float* out, void* workspace, cudaStream_t stream,
            const lora::LowRank& low_rank = {});
void linear_bf16(const uint16_t* x, int rows, const Weight& weight, uint16_t* out, void* workspace, cudaStream_t stream,
                 const lora::LowRank& low_rank = {});
// dx[rows, groups * k] = dy[rows, groups * n] W, FP32, one chain over n. dy: bf16 bits. low_rank: U A is added in FP32;
// k is then a multiple of 256, the factor is A of [rank, k], the same for all groups, and group g's U lies at
// t + g * rank.
void linear_backward_input(const uint16_t* dy, int rows, const Weight& weight, float* dx, cudaStream_t stream,
                           const lora::LowRank& low_rank = {});
void linear_backward_input_bf16(const uint16_t* dy, int rows, const Weight& weight, uint16_t* dx, cudaStream_t stream,
                                const lora::LowRank& low_rank = {});
// dw[groups * n, k] += dy^T x of each group, FP32, one chain over the rows, added once.
void linear_backward_weight(const uint16_t* dy, const uint16_t* x, int rows, int n, int k, float* dw,
                            cudaStream_t stream, int groups = 1);

// ---- FP32 weights with few outputs
// ----------------------------------------------------------------------------------- A weight w is kept as three bf16
// numbers, high + middle + low == w exactly (if no part underflows), so that FP32 weights meet bf16 tensor cores:
// products are exact, sums FP32.
constexpr int kMostFewOutputs = 32;

struct SplitWeight {
  const uint16_t* planes;  // [groups][3][n rounded up to 8][k], see split_weight; aligned to 16 bytes
  int groups, n, k;        // n <= kMostFewOutputs, k a multiple of 32
};
size_t split_bytes(int groups, int n, int k);

// Where the weight lies: FP32 [groups, n, k]; transposed: [groups, k, n]. gate_up: rows of x will be in record order
// (weight_format.h), k is counted in the natural order.
struct Source {
  bool transposed = false, gate_up = false;
};
// A weight to be split: see split_weight. k is even, the weight aligned to 16 bytes.
struct Split {
  const float* weight;
  int groups, n, k;
  float scale;
  Source source;
  uint16_t* to;
};
// The planes of scale * weight (rounded once).
void split_weight(const float* weight, int groups, int n, int k, float scale, uint16_t* planes, cudaStream_t stream,
                  const Source& source = {});

// y = x W^T for one weight, through the tiles of the bf16 products: the mHC mapping. out: FP32 [rows, n].
size_t split_workspace_bytes(int rows, const SplitWeight& weight);
void linear_split(const uint16_t* x, int rows, const SplitWeight& weight, float* out, void* workspace,
                  cudaStream_t stream);

// Of many adapters: each row names its own, -1 for none (its output is not written).
struct Adapters {
  const uint16_t* const* planes = nullptr;  // device, [count]: as SplitWeight::planes, which is then not used
  const int* of_row = nullptr;              // device, [rows]; null: no adapters
  int count = 0;
};
// The way down into a low rank: out[r, j] = sum over k of x[source_row[r], k] W[group of r][j, k], r < rows. K is cut
// into eight parts. source_row: device, or null for r. first_row: device, [groups + 1], ascending from 0; null for one
// group. Rows beyond first_row[groups] are not written.
void few_outputs(const uint16_t* x, const int* source_row, const int* first_row, int rows, const SplitWeight& weight,
                 float* out, cudaStream_t stream, const Adapters& adapters = {});

// The same for several products that read the same rows: one launch for up to kMostFewOutputs outputs together (the n
// of each rounded up to eight). An output has the bits that it has alone.
struct Down {
  const uint16_t* planes;             // as SplitWeight::planes
  const uint16_t* const* of_adapter;  // as Adapters::planes, where rows name their adapters
  int n;
  float* out;  // FP32 [rows, n]
};
void few_outputs(const uint16_t* x, const int* source_row, const int* first_row, int rows, int groups, int k,
                 const std::vector<Down>& downs, cudaStream_t stream, const int* adapter_of_row = nullptr,
                 int adapters = 0);

}  // namespace plumb::kernels::row_linear
