// Adding T B^T to accumulators that lie as the tensor cores leave them: 16 rows x 8 columns of a warp are one
// mma.sync.m16n8k16, whose accumulators lie as those of wgmma. FP32 factors meet it as pairs of bf16, high + low (16
// bits). Eight of the rank are two products of K = 16,
//   T: high high, then low low        B: high low, both times        (eight numbers each; zeros beyond the rank)
// so every product of parts occurs once. An eight is a chain of its own, which is then added to the base's sum in FP32,
// as if it were one more block of K. An output depends on its row of T, its row of B and their order alone: wide,
// narrow and thin kernels agree. Rows of one warp may use different adapters: each adapter that occurs gets a round,
// and only its own rows add the result.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/hopper/copy.cuh"
#include "kernels/hopper/mma.cuh"
#include "kernels/hopper/shared_memory.cuh"
#include "kernels/lora/lora.h"

namespace plumb::kernels::lora {

constexpr int kNoAdapter = 0x7fffffff;

// The smallest adapter above `last` among the warp's rows, kNoAdapter if there is none; the same in all lanes.
template <int kRows>
__device__ __forceinline__ int next_adapter(const int (&adapter)[kRows], int last) {
  int next = kNoAdapter;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (adapter[i] > last) next = min(next, adapter[i]);
  return __reduce_min_sync(~0u, next);
}

// Two floats to pairs of bf16: value = high + low, to 16 bits.
struct Split {
  uint32_t high, low;
};
__device__ __forceinline__ Split split(float2 v) {
  const __nv_bfloat162 high = __floats2bfloat162_rn(v.x, v.y);
  const float2 back = __bfloat1622float2(high);
  const __nv_bfloat162 low = __floats2bfloat162_rn(v.x - back.x, v.y - back.y);
  return {*reinterpret_cast<const uint32_t*>(&high), *reinterpret_cast<const uint32_t*>(&low)};
}

// A packed factor: for each eight of the rank, [n / 16][lane][4] words. Words 2 t and 2 t + 1 of lane (r, q) are the
// high and the low parts of numbers 2 q, + 1 of the eight, of output 16 (n / 16) + 8 t + r. This is the first of them.
__device__ __forceinline__ int factor_word(int output, int q) {
  return (output / 16 * 32 + output % 8 * 4 + q) * 4 + output / 8 % 2 * 2;
}
constexpr int kFactorWords = 8;  // of an output, for eight of the rank
__host__ __device__ constexpr int eights(int rank) { return (rank + 7) / 8; }

// Outputs of a group from `first` on, a multiple of 32. n: outputs of a group, a multiple of 32.
struct Outputs {
  int group, n, first;
};
// Of the eight numbers from j on, at output o.first; factor: the adapter's.
__device__ __forceinline__ const uint32_t* factor_of(const uint32_t* factor, int rank, const Outputs& o, int j) {
  return factor + ((static_cast<size_t>(o.group) * eights(rank) + j / 8) * o.n + o.first) * kFactorWords;
}
__device__ __forceinline__ const uint32_t* factor_of(const LowRank& l, int adapter, const Outputs& o, int j) {
  return factor_of(l.factor[adapter], l.rank, o, j);
}
// This lane's pair of the eight numbers from j on.
__device__ __forceinline__ Split own_pair(const LowRank& l, int row, int j, int q) {
  if (j + 2 * q >= l.rank) return {0, 0};
  return split(__ldg(reinterpret_cast<const float2*>(l.t + static_cast<size_t>(row) * l.t_stride + j + 2 * q)));
}
// sum += rows r (upper) and r + 8 (lower) times eight outputs with these words.
__device__ __forceinline__ void multiply_rows(float (&sum)[4], Split upper, Split lower, uint32_t high, uint32_t low) {
  hopper::multiply_16x8(sum, upper.high, lower.high, upper.high, lower.high, high, low);
  hopper::multiply_16x8(sum, upper.low, lower.low, upper.low, lower.low, high, low);
}

// Rows as the 64-row operand: d[s][4 i + 2 h + b] is row[s][h], output 8 i + 2 q + b of lane (r, q). Slabs from `slabs`
// on do not exist; their rows may be read. kOwnChain = false: the base's chains go on over the rank instead, which
// takes fewer registers: for input gradients, which no other kernel has to agree with.
template <bool kOwnChain = true, int kSlabs>
__device__ __forceinline__ void add_to_rows(float (&d)[kSlabs][64], int slabs, const LowRank& l, const Outputs& o,
                                            const int (&row)[kSlabs][2], int lane) {
  int adapter[2 * kSlabs];
#pragma unroll
  for (int i = 0; i < 2 * kSlabs; ++i) adapter[i] = i / 2 >= slabs ? -1 : l.adapter ? l.adapter[row[i / 2][i % 2]] : 0;
  for (int now = next_adapter(adapter, -1); now != kNoAdapter; now = next_adapter(adapter, now)) {
    for (int j = 0; j < l.rank; j += 8) {
      const uint4* factor = reinterpret_cast<const uint4*>(factor_of(l, now, o, j)) + lane;
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // 64 outputs
        uint4 b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i] = __ldg(factor + 32 * (4 * half + i));
#pragma unroll
        for (int s = 0; s < kSlabs; ++s) {
          if (s >= slabs) break;
          const Split upper = own_pair(l, row[s][0], j, lane % 4), lower = own_pair(l, row[s][1], j, lane % 4);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float* own = &d[s][32 * half + 8 * i];
            float sum[2][4];
#pragma unroll
            for (int k = 0; k < 8; ++k) sum[k / 4][k % 4] = kOwnChain ? 0.0f : own[k];
            multiply_rows(sum[0], upper, lower, b[i].x, b[i].y), multiply_rows(sum[1], upper, lower, b[i].z, b[i].w);
#pragma unroll
            for (int k = 0; k < 8; ++k)
              if (adapter[2 * s + k / 2 % 2] == now)
                own[k] = kOwnChain ? own[k] + sum[k / 4][k % 4] : sum[k / 4][k % 4];
          }
        }
      }
    }
  }
}

// T and the factor can be brought into shared memory while a tile's products run (staged.cuh): for one adapter of all
// rows, and up to this rank.
constexpr int kStagedRank = 8;
__host__ __device__ inline bool can_stage(const LowRank& l) { return !l.adapter && l.rank <= kStagedRank; }

// Rows as the columns of the product (decoding): d[s][4 j + 2 h + b] is output 64 s + 16 warp + r + 8 h, row first_row
// + 8 j
// + 2 q + b of lane (r, q); those from `rows` on do not exist.
template <int kTokens, int kSlabs>
__device__ __forceinline__ void add_to_columns(float (&d)[kSlabs][kTokens / 2], const LowRank& l, const Outputs& o,
                                               int first_row, int rows, int warp, int lane) {
  constexpr int kOwn = kTokens / 4;
  const int q = lane % 4;
  int adapter[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int token = i / 2 * 8 + 2 * q + i % 2;
    adapter[i] = token >= rows ? -1 : l.adapter ? l.adapter[first_row + token] : 0;
  }
  for (int now = next_adapter(adapter, -1); now != kNoAdapter; now = next_adapter(adapter, now)) {
    for (int j = 0; j < l.rank; j += 8) {
      const uint32_t* factor = factor_of(l, now, o, j);
      uint2 a[kSlabs][2];  // high, low
#pragma unroll
      for (int i = 0; i < 2 * kSlabs; ++i)
        a[i / 2][i % 2] = __ldg(
            reinterpret_cast<const uint2*>(factor + factor_word(i / 2 * 64 + warp * 16 + i % 2 * 8 + lane / 4, q)));
#pragma unroll
      for (int tokens = 0; tokens < kTokens / 8; ++tokens) {
        const Split t = own_pair(l, first_row + min(tokens * 8 + lane / 4, rows - 1), j, q);
#pragma unroll
        for (int s = 0; s < kSlabs; ++s) {
          float sum[4] = {};
          hopper::multiply_16x8(sum, a[s][0].x, a[s][1].x, a[s][0].y, a[s][1].y, t.high, t.high);
          hopper::multiply_16x8(sum, a[s][0].x, a[s][1].x, a[s][0].y, a[s][1].y, t.low, t.low);
#pragma unroll
          for (int k = 0; k < 4; ++k)
            if (adapter[2 * tokens + k % 2] == now) d[s][4 * tokens + k] += sum[k];
        }
      }
    }
  }
}

}  // namespace plumb::kernels::lora
