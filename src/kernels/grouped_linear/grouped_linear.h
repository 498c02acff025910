// Matrix products with packed FP8 or FP4 weights on FP8 activations, for one weight matrix (a dense linear) or one for
// each group of rows (the experts of a mixture). Raw pointers and a stream; nothing synchronises
// with the host, so all of it can be captured in a CUDA graph. Arguments that a caller can get wrong raise
// std::invalid_argument; CUDA errors raise std::runtime_error.
//
// A forward pass through a layer of experts:
//   make_plan(first_row)                                      once a layer, from the routing, on the device
//   quantise_rows(x, rows gathered by expert)                 bf16 -> e4m3, one power-of-two scale for 1 x 128
//   linear_swiglu(w1 and w3 packed together, ...)             FP8 hidden, clamped SwiGLU and route weight in the
//   epilogue linear(w2, ...)                                           bf16, one row a (token, expert)
// A dense linear is the same with one group and first_row = {0, rows}.
//
// Bits. out[row, n] is a function of that row and weight row n alone: sum over K in blocks of 128 in order, each block
// one FP8 tensor-core sum of four steps, multiplied by (activation scale * weight base) and added in FP32 by one fma,
// rounded to bf16 once at the end. The tile width, the group's size, the row's place and the format (FP4 or its FP8
// expansion) do not change it: widths differ in speed only (docs/kernels/grouped_linear.md). On other GPUs than Hopper
// the sum is one chain of FP32 steps over the same order of K (kernels/portable).
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/grouped_linear/weight_format.h"
#include "kernels/lora/lora.h"

namespace plumb::kernels::grouped_linear {

// Device pointers into packed matrices, see weight_format.h.
struct Weights {
  WeightFormat format;
  int groups, n, k;        // n: output rows of a group, a multiple of 256; k: inputs, a multiple of 128
  const uint8_t* records;  // [groups][n/256][k/128] records, aligned to 128 bytes
  const float* bases;      // [groups][n/128][block_stride(k)], aligned to 16 bytes
};

// Quantised rows, those of a group behind each other.
struct Activations {
  const uint8_t* values;  // [rows, k], e4m3, K permuted (weight_format.h), aligned to 128 bytes
  const float* scales;    // [rows, block_stride(k)], powers of two, aligned to 16 bytes
  int rows;
};

// The work list of products that share the rows of the groups and n. `rows` is the capacity: first_row[groups] on the
// device may be less, and rows beyond it are neither read nor written.
struct Plan {
  int groups, rows, n;
  int width;        // rows of a tile: 8, 16, 64 (weights as tensor-core rows) or 256 (activations as tensor-core rows)
  void* workspace;  // plan_bytes, aligned to 256, in use until the last product of the plan is done
  // At least one launch stands between make_plan and the next product, and between whatever wrote the weights and it:
  // the kernels for few rows then fetch weights while that launch still runs (launch_dependent).
  bool settled = false;
};

// The fastest width for that many rows, known without looking at the groups' sizes.
int best_width(int rows, int groups);
size_t plan_bytes(int groups, int rows, int n, int width);
// first_row: device, [groups + 1], ascending from 0; group g owns rows first_row[g] .. first_row[g + 1] - 1.
void make_plan(const int* first_row, const Plan& plan, cudaStream_t stream);

// out[row, n] = bf16(sum over k of activation * weight of the row's group). out: device, [rows, n] of bf16 bits. For
// weights packed as gate and up, columns are in record order: 128 gates, then the 128 ups of the same hidden units, and
// so on.
// low_rank: added in FP32 before the rounding (lora.h).
void linear(const Weights& weights, const Activations& activations, const Plan& plan, uint16_t* out,
            cudaStream_t stream, const lora::LowRank& low_rank = {});

// Weights packed as gate and up (n = 2 * hidden): g and u = bf16(product); g = min(g, limit), u = clamp(u, -limit,
// limit), h = bf16(g / (1 + exp(-g)) * u * route_weight[row]), quantised as quantise_rows does. limit <= 0: no clamp.
// route_weight: device, [rows], or null for 1. hidden: [rows, n/2] e4m3; hidden_scales: [rows, block_stride(n/2)].
void linear_swiglu(const Weights& weights, const Activations& activations, const Plan& plan, const float* route_weight,
                   float limit, uint8_t* hidden, float* hidden_scales, cudaStream_t stream,
                   const lora::LowRank& low_rank = {});

// The epilogue of linear_swiglu as a kernel of its own, for passes that need g and u: gate_up [rows, n] as `linear`
// writes it. Same bits. natural: the hidden rows before they are quantised, bf16 [rows, n/2] in the order of hidden
// units, aligned to 8 bytes. Either result may be null: not wanted.
void swiglu_quantise(const uint16_t* gate_up, int rows, int n, const float* route_weight, float limit, uint8_t* hidden,
                     float* hidden_scales, cudaStream_t stream, uint16_t* natural = nullptr);

// Row r of the result is row source_row[r] of x (null: row r). For each 128 channels: scale = power of two at or above
// max(|x|, 1e-4) / 448, value = e4m3(x / scale), nearest even, places permuted. x: device, bf16 bits [*, k];
// values [rows, k], scales [rows, block_stride(k)]. k: a multiple of 128.
void quantise_rows(const uint16_t* x, const int* source_row, int rows, int k, uint8_t* values, float* scales,
                   cudaStream_t stream);

// ---- Backward ------------------------------------------------------------------------------------------------------
// dx[row, k] = bf16(sum over n = 0 .. N - 1, in order, of dy[row, n] * weight[n, k]), one chain of FP32 accumulators:
// weights are widened to bf16 inside the kernel (exact: four significant bits, powers of two). dy: bf16 bits [rows, N],
// columns in record order, aligned to 16; dx: [rows, K]. plan: made with n = K, a multiple of 256, and width 256.
// low_rank: U A is added before the rounding.
void linear_backward_input(const Weights& weights, const uint16_t* dy, const Plan& plan, uint16_t* dx,
                           cudaStream_t stream, const lora::LowRank& low_rank = {});

// Through clamped SwiGLU and the route weight. d_hidden: bf16 [rows, n/2], in the natural order of hidden units (dx of
// the down product); gate_up: [rows, n] as `linear` wrote it -> d_gate_up, the same shape and order; d_route [rows], or
// null. A clamped value passes no gradient.
void swiglu_backward(const uint16_t* d_hidden, const uint16_t* gate_up, int rows, int n, const float* route_weight,
                     float limit, uint16_t* d_gate_up, float* d_route, cudaStream_t stream);

}  // namespace plumb::kernels::grouped_linear
