// Adding T B^T to accumulators that lie as the tensor cores leave them. Every layout runs the same chain for an output:
// fma over the rank in order. Rows of one warp may use different adapters: each adapter that occurs among them gets a
// round.
#pragma once
#include <cstdint>

#include "kernels/lora/lora.h"

namespace plumb::kernels::lora {

__device__ __forceinline__ float4 load_four(const float* p) { return __ldg(reinterpret_cast<const float4*>(p)); }

__device__ __forceinline__ float add_four(float sum, const float4& t, const float4& b) {
  return fmaf(t.w, b.w, fmaf(t.z, b.z, fmaf(t.y, b.y, fmaf(t.x, b.x, sum))));
}

constexpr int kNoAdapter = 0x7fffffff;

// The smallest adapter above `last` among the warp's rows, kNoAdapter if there is none. The same in all lanes: what
// depends on it stays in uniform registers.
template <int kRows>
__device__ __forceinline__ int next_adapter(const int (&adapter)[kRows], int last) {
  int next = kNoAdapter;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (adapter[i] > last) next = min(next, adapter[i]);
  return __reduce_min_sync(~0u, next);
}

// 128 outputs of a group, from output `first` on. n: outputs of a group.
struct Outputs {
  int group, n, first;
};
__device__ __forceinline__ const float* factor_of(const LowRank& l, int adapter, const Outputs& o, int j) {
  return l.factor[adapter] + ((static_cast<size_t>(o.group) * (l.rank / 4) + j / 4) * o.n + o.first) * 4;
}

// Rows as the 64-row operand: d[4 i + 2 h + b] is row[h], output 8 i + 2 q + b.
__device__ __forceinline__ void add_to_rows(float (&d)[64], const LowRank& l, const Outputs& o, const int (&row)[2],
                                            int q) {
  int adapter[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) adapter[h] = l.adapter ? l.adapter[row[h]] : 0;
  for (int now = next_adapter(adapter, -1); now != kNoAdapter; now = next_adapter(adapter, now)) {
    for (int j = 0; j < l.rank; j += 4) {
      const float* factor = factor_of(l, now, o, j) + 8 * q;
      float4 t[2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (adapter[h] == now) t[h] = load_four(l.t + static_cast<size_t>(row[h]) * l.t_stride + j);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (i % 4 == 0) __syncwarp();  // or the compiler loads all factors at once, for which there are no registers
        const float4 b[2] = {load_four(factor + 32 * i), load_four(factor + 32 * i + 4)};
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (adapter[h] == now) {
            d[4 * i + 2 * h] = add_four(d[4 * i + 2 * h], t[h], b[0]);
            d[4 * i + 2 * h + 1] = add_four(d[4 * i + 2 * h + 1], t[h], b[1]);
          }
      }
    }
  }
}

// Rows as the columns of the product (decoding): d[s][4 j + 2 h + b] is output `output` + 64 s + 8 h, row
// first_row + 8 j + 2 q + b; those from `rows` on do not exist.
template <int kTokens, int kSlabs>
__device__ __forceinline__ void add_to_columns(float (&d)[kSlabs][kTokens / 2], const LowRank& l, const Outputs& o,
                                               int first_row, int rows, int output, int q) {
  constexpr int kOwn = kTokens / 4;
  int adapter[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int token = i / 2 * 8 + 2 * q + i % 2;
    adapter[i] = token >= rows ? -1 : l.adapter ? l.adapter[first_row + token] : 0;
  }
  const float* t = l.t + static_cast<size_t>(first_row + 2 * q) * l.t_stride;
  for (int now = next_adapter(adapter, -1); now != kNoAdapter; now = next_adapter(adapter, now)) {
    for (int j = 0; j < l.rank; j += 4) {
      const float* factor = factor_of(l, now, o, j) + output * 4;
      float4 b[2 * kSlabs];
#pragma unroll
      for (int i = 0; i < 2 * kSlabs; ++i) b[i] = load_four(factor + (i / 2 * 64 + i % 2 * 8) * 4);
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        if (adapter[i] == now) {
          const float4 v = load_four(t + static_cast<size_t>(i / 2 * 8 + i % 2) * l.t_stride + j);
#pragma unroll
          for (int k = 0; k < 2 * kSlabs; ++k) {
            float& sum = d[k / 2][i / 2 * 4 + k % 2 * 2 + i % 2];
            sum = add_four(sum, v, b[k]);
          }
        }
    }
  }
}

// One output of group 0: for kernels that have no such layout.
__device__ __forceinline__ float add_to_one(float sum, const LowRank& l, int row, int n, int output) {
  const int adapter = l.adapter ? l.adapter[row] : 0;
  if (adapter < 0) return sum;
  const float* t = l.t + static_cast<size_t>(row) * l.t_stride;
  for (int j = 0; j < l.rank; j += 4)
    sum = add_four(sum, load_four(t + j), load_four(factor_of(l, adapter, {0, n, output}, j)));
  return sum;
}

}  // namespace plumb::kernels::lora
