// C = A B^T for any GPU, the plainest product in tiles: an output is one chain of FP32 fused multiply-adds over K in
// order, so it depends on its row of A and its row of B alone. Operands are functions (element, k) -> float, what
// becomes of a sum is one too: formats and epilogues of all products are theirs.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/launch.cuh"
#include "kernels/lora/low_rank.cuh"

namespace plumb::kernels::portable {

constexpr int kTile = 64, kFewRows = 16, kDepth = 32, kThreads = 256;

// kRows x kTile sums by all kThreads threads of a block: store(i, j, sum over l < k of a(i, l) * b(j, l)). kRows is a
// multiple of 16; while a step of K is multiplied, the next one is on its way.
template <int kRows, typename A, typename B, typename Store>
__device__ __forceinline__ void product_tile(int k, const A& a, const B& b, const Store& store) {
  __shared__ float tile_a[kDepth][kRows + 1], tile_b[kDepth][kTile + 1];
  constexpr int kSide = 16, kOwnRows = kRows / kSide, kOwn = kTile / kSide;  // sums of a thread
  constexpr int kApart = kThreads / kDepth, kOwnA = kRows / kApart, kOwnB = kTile / kApart;
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide, own_l = threadIdx.x % kDepth, own = threadIdx.x / kDepth;
  float next_a[kOwnA], next_b[kOwnB], sum[kOwnRows][kOwn] = {};
  const auto fetch = [&](int l) {
#pragma unroll
    for (int n = 0; n < kOwnA; ++n) next_a[n] = l < k ? a(own + n * kApart, l) : 0.f;
#pragma unroll
    for (int n = 0; n < kOwnB; ++n) next_b[n] = l < k ? b(own + n * kApart, l) : 0.f;
  };
  fetch(own_l);
  for (int first = 0; first < k; first += kDepth) {
    __syncthreads();  // the step before has been read
#pragma unroll
    for (int n = 0; n < kOwnA; ++n) tile_a[own_l][own + n * kApart] = next_a[n];
#pragma unroll
    for (int n = 0; n < kOwnB; ++n) tile_b[own_l][own + n * kApart] = next_b[n];
    __syncthreads();
    fetch(first + kDepth + own_l);
#pragma unroll 8
    for (int l = 0; l < kDepth; ++l)
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i)
#pragma unroll
        for (int j = 0; j < kOwn; ++j) sum[i][j] = fmaf(tile_a[l][y + kSide * i], tile_b[l][x + kSide * j], sum[i][j]);
  }
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i)
#pragma unroll
    for (int j = 0; j < kOwn; ++j) store(y + kSide * i, x + kSide * j, sum[i][j]);
}

__device__ __forceinline__ float from_bf16(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
__device__ __forceinline__ uint16_t to_bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }

// `sum` goes on over the low rank's terms of output o.first of the group (lora.h).
__device__ __forceinline__ float add_low_rank(float sum, const lora::LowRank& l, int row, lora::Outputs o) {
  const int adapter = l.adapter ? l.adapter[row] : 0, inside = o.first % 32;
  if (l.rank == 0 || adapter < 0) return sum;
  o.first -= inside;
#pragma unroll 1
  for (int j = 0; j < l.rank; ++j) {
    const uint32_t* words = lora::factor_of(l, adapter, o, j) + lora::factor_word(inside, j % 8 / 2);
    const int shift = j % 2 * 16;
    const float high = from_bf16(static_cast<uint16_t>(words[0] >> shift)),
                low = from_bf16(static_cast<uint16_t>(words[1] >> shift));
    sum = fmaf(l.t[static_cast<size_t>(row) * l.t_stride + j], high + low, sum);
  }
  return sum;
}

// ---- bf16 matrices -------------------------------------------------------------------------------------------------
// Element (i, l) of group g lies at data[g * group + i * row + l * k].
struct Operand {
  const uint16_t* data;
  int64_t row, k, group;
};

// Grid: (tiles of columns, tiles of rows, groups). store(group, row, column, sum).
template <int kRows, typename Store>
__global__ void __launch_bounds__(kThreads)
    product_kernel(const Operand a, const Operand b, int rows, int columns, int k, const Store store) {
  const int group = blockIdx.z, first_row = blockIdx.y * kRows, first_column = blockIdx.x * kTile;
  const auto element = [group](const Operand& o, int i, int count, int l) {
    return i < count ? from_bf16(o.data[group * o.group + i * o.row + l * o.k]) : 0.f;
  };
  product_tile<kRows>(
      k, [&](int i, int l) { return element(a, first_row + i, rows, l); },
      [&](int j, int l) { return element(b, first_column + j, columns, l); },
      [&](int i, int j, float sum) {
        if (first_row + i < rows && first_column + j < columns) store(group, first_row + i, first_column + j, sum);
      });
}

template <typename Store>
void product(const Operand& a, const Operand& b, int rows, int columns, int k, int groups, const Store& store,
             cudaStream_t stream) {
  const auto launch = [&](auto* kernel, int tile_rows) {
    const dim3 tiles((columns + kTile - 1) / kTile, (rows + tile_rows - 1) / tile_rows, groups);
    kernel<<<tiles, kThreads, 0, stream>>>(a, b, rows, columns, k, store);
  };
  rows <= kFewRows ? launch(product_kernel<kFewRows, Store>, kFewRows) : launch(product_kernel<kTile, Store>, kTile);
  check_cuda(cudaGetLastError(), "launching a portable product");
}

// Sums as elements of a matrix: (row, column) of group g lies at g * group + row * stride + column.
struct Store {
  float* f32;      // one of the two
  uint16_t* bf16;  // null: f32
  int columns;     // of a group
  int64_t stride, group;
  bool add = false;  // f32 only
  lora::LowRank low_rank = {};
  bool own_factor = true;  // the factor has the rows of all groups behind each other; otherwise they share its rows
  __device__ __forceinline__ void operator()(int g, int row, int column, float sum) const {
    lora::LowRank l = low_rank;
    l.t += g * l.rank;
    sum = own_factor ? add_low_rank(sum, l, row, {0, static_cast<int>(stride), g * columns + column})
                     : add_low_rank(sum, l, row, {0, columns, column});
    const int64_t at = g * group + row * stride + column;
    if (bf16)
      bf16[at] = to_bf16(sum);
    else
      f32[at] = add ? __fadd_rn(f32[at], sum) : sum;
  }
};

}  // namespace plumb::kernels::portable
