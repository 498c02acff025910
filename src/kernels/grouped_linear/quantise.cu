// Activations between products: bf16 -> e4m3 with a power-of-two scale for 128 channels, and clamped SwiGLU before it.
// Both are bound by memory; a warp takes one block of 128 channels of a row, a lane four neighbours of it. Few rows are
// shared out among more warps, so that a decoded token does not wait for one warp's loads.
#include <limits>

#include "kernels/grouped_linear/activation.cuh"
#include "kernels/grouped_linear/grouped_linear.h"
#include "kernels/hopper/launch_order.cuh"
#include "kernels/launch.cuh"

namespace plumb::kernels::grouped_linear {
namespace {

constexpr int kWarps = 8;     // of a block; each takes a row
constexpr int kInFlight = 4;  // K blocks of a warp

// share of a row's `shares`: every so many runs of kInFlight blocks.
__global__ void __launch_bounds__(32 * kWarps) quantise_kernel(const uint16_t* x, const int* source_row, int rows,
                                                               int k, int shares, uint8_t* values, float* scales) {
  hopper::take_turn();
  const int item = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = item / shares, share = item % shares;
  if (row >= rows) return;
  const uint16_t* source = x + static_cast<size_t>(source_row ? source_row[row] : row) * k + k_of_place(4 * lane);
  for (int first = share * kInFlight * kBlock; first < k; first += shares * kInFlight * kBlock) {
    uint2 v[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + i * kBlock < k) v[i] = *reinterpret_cast<const uint2*>(source + first + i * kBlock);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int column = first + i * kBlock;
      if (column >= k) break;
      const float scale = quantise_block(v[i].x, v[i].y, values + static_cast<size_t>(row) * k + column);
      if (lane == 0) scales[static_cast<size_t>(row) * block_stride(k) + column / kBlock] = scale;
    }
  }
}

// gate_up [rows, n] in record order.
__global__ void __launch_bounds__(32 * kWarps)
    swiglu_kernel(const uint16_t* gate_up, int rows, int n, const float* route_weight, float limit, uint8_t* hidden,
                  float* hidden_scales, uint16_t* natural) {
  hopper::take_turn();
  const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  const float weight = route_weight ? route_weight[row] : 1.0f;
  const uint16_t* source = gate_up + static_cast<size_t>(row) * n;
#pragma unroll 4
  for (int record = 0; record < n / kRecordRows; ++record) {
    const uint2 h = swiglu_record(source + record * kRecordRows, lane, limit, weight);
    if (hidden) {
      const float scale = quantise_block(h.x, h.y, hidden + static_cast<size_t>(row) * (n / 2) + record * kBlock);
      if (lane == 0) hidden_scales[static_cast<size_t>(row) * block_stride(n / 2) + record] = scale;
    }
    if (natural)
      *reinterpret_cast<uint2*>(natural + static_cast<size_t>(row) * (n / 2) + record * kBlock + k_of_place(4 * lane)) =
          h;
  }
}

unsigned blocks_for(int rows) { return static_cast<unsigned>(rows + kWarps - 1) / kWarps; }

}  // namespace

void quantise_rows(const uint16_t* x, const int* source_row, int rows, int k, uint8_t* values, float* scales,
                   cudaStream_t stream) {
  if (rows <= 0 || k <= 0 || k % kBlock != 0)
    throw std::invalid_argument("quantise_rows: rows = " + std::to_string(rows) +
                                " must be positive and k = " + std::to_string(k) + " a positive multiple of 128");
  const bool few = rows <= kWarps * multiprocessors();
  const int shares = few ? (k + kInFlight * kBlock - 1) / (kInFlight * kBlock) : 1;
  launch_dependent(quantise_kernel, {blocks_for(rows * shares), 32 * kWarps}, stream, x, source_row, rows, k, shares,
                   values, scales);
}

void swiglu_quantise(const uint16_t* gate_up, int rows, int n, const float* route_weight, float limit, uint8_t* hidden,
                     float* hidden_scales, cudaStream_t stream, uint16_t* natural) {
  if (rows <= 0 || n <= 0 || n % kRecordRows != 0)
    throw std::invalid_argument("swiglu_quantise: rows = " + std::to_string(rows) +
                                " must be positive and n = " + std::to_string(n) + " a positive multiple of 256");
  launch_dependent(swiglu_kernel, {blocks_for(rows), 32 * kWarps}, stream, gate_up, rows, n, route_weight,
                   limit > 0 ? limit : std::numeric_limits<float>::infinity(), hidden, hidden_scales, natural);
}

}  // namespace plumb::kernels::grouped_linear
