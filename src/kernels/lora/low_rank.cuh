// Adding T B^T to accumulators that lie as the tensor cores leave them: 16 rows x 8 columns of a warp are one
// mma.sync.m16n8k16, whose accumulators lie as those of wgmma. FP32 factors meet it as pairs of bf16, high + low (16
// bits): four of the rank make 16 of K,
//   T: high high low low        B: high low high low      (four numbers each)
// so every product of parts occurs once. An output's sum depends on its row of T, its row of B and their order alone:
// wide, narrow and thin kernels agree. Rows of one warp may use different adapters: each adapter that occurs gets a
// round, and only its own rows keep the result.
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

// A packed factor: for each four of the rank, [n / 32][lane][4] words. Word `tile` of lane (r, q) belongs to output 32
// * (n / 32) + 8 tile + r: the high parts (q < 2) or the low parts of numbers 2 (q % 2), + 1 of the four.
__device__ __forceinline__ size_t factor_word(int output, int q) {
  return (static_cast<size_t>(output / 32) * 32 + output % 8 * 4 + q) * 4 + output / 8 % 4;
}

// Outputs of a group from `first` on, a multiple of 32. n: outputs of a group, a multiple of 32.
struct Outputs {
  int group, n, first;
};
// Of the four numbers from j on, at output o.first.
__device__ __forceinline__ const uint32_t* factor_of(const LowRank& l, int adapter, const Outputs& o, int j) {
  return l.factor[adapter] + ((static_cast<size_t>(o.group) * (l.rank / 4) + j / 4) * o.n + o.first) * 4;
}
// This lane's pair of the four numbers from j on.
__device__ __forceinline__ float2 own_pair(const LowRank& l, int row, int j, int q) {
  return __ldg(reinterpret_cast<const float2*>(l.t + static_cast<size_t>(row) * l.t_stride + j + q % 2 * 2));
}

// Rows as the 64-row operand: d[s][4 i + 2 h + b] is row[s][h], output 8 i + 2 q + b. Slabs from `slabs` on do not
// exist.
template <int kSlabs>
__device__ __forceinline__ void add_to_rows(float (&d)[kSlabs][64], int slabs, const LowRank& l, const Outputs& o,
                                            const int (&row)[kSlabs][2], int lane) {
  const int q = lane % 4;
  int adapter[2 * kSlabs];
#pragma unroll
  for (int i = 0; i < 2 * kSlabs; ++i) adapter[i] = i / 2 >= slabs ? -1 : l.adapter ? l.adapter[row[i / 2][i % 2]] : 0;
  for (int now = next_adapter(adapter, -1); now != kNoAdapter; now = next_adapter(adapter, now)) {
    for (int j = 0; j < l.rank; j += 4) {
      const uint4* factor = reinterpret_cast<const uint4*>(factor_of(l, now, o, j)) + lane;
      uint4 b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = __ldg(factor + 32 * i);
#pragma unroll
      for (int s = 0; s < kSlabs; ++s) {
        if (s >= slabs) break;
        const Split upper = split(own_pair(l, row[s][0], j, q)), lower = split(own_pair(l, row[s][1], j, q));
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const uint32_t word = i % 4 == 0   ? b[i / 4].x
                                : i % 4 == 1 ? b[i / 4].y
                                : i % 4 == 2 ? b[i / 4].z
                                             : b[i / 4].w;
          float c[4] = {d[s][4 * i], d[s][4 * i + 1], d[s][4 * i + 2], d[s][4 * i + 3]};
          hopper::multiply_16x8(c, upper.high, lower.high, upper.low, lower.low, word, word);
#pragma unroll
          for (int k = 0; k < 4; ++k)
            if (adapter[2 * s + k / 2] == now) d[s][4 * i + k] = c[k];
        }
      }
    }
  }
}

// The same sums where T and the factor were brought into shared memory while the tile's products ran: for one adapter
// of all rows and up to kStagedRank. Each of the four warps of a warpgroup has a corner: T of its own 32 rows, then a
// quarter of the factor of 128 outputs.
constexpr int kStagedRank = 8, kCornerBytes = 32 * kStagedRank * 4 + kStagedRank / 4 * 512;
__device__ __forceinline__ bool can_stage(const LowRank& l) { return !l.adapter && l.rank <= kStagedRank; }
struct Staged {
  uint32_t corners;  // shared-memory address of the first
  int step;          // bytes from one warp's corner to the next
  // T of row 16 s + r of a warp's slab s, from number j of the rank on.
  __device__ __forceinline__ uint32_t t(int warp, int row, int j) const {
    return corners + warp * step + (row * kStagedRank + j) * 4;
  }
  __device__ __forceinline__ uint32_t factor(int quarter, int j, int lane) const {
    return corners + quarter * step + 32 * kStagedRank * 4 + j * 128 + lane * 16;
  }
};
// A warp's corner. row: of lane 16 s + r, the one that its slab s has in place r.
__device__ __forceinline__ void stage(const LowRank& l, const Outputs& o, const Staged& staged, int row, int warp,
                                      int lane) {
  for (int j = 0; j < l.rank; j += 4) {
    hopper::copy16(staged.t(warp, lane, j), l.t + static_cast<size_t>(row) * l.t_stride + j, 16);
    hopper::copy16(staged.factor(warp, j, lane), factor_of(l, 0, o, j) + warp * 128 + lane * 4, 16);
  }
  hopper::copy_commit();
}
// After all four warps' copies have arrived.
__device__ __forceinline__ void add_staged(float (&d)[2][64], int slabs, int rank, const Staged& staged, int warp,
                                           int lane) {
  for (int j = 0; j < rank; j += 4) {
    uint4 b[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = hopper::load_shared_16(staged.factor(i, j, lane));
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (s >= slabs) break;
      const uint32_t t = staged.t(warp, s * 16 + lane / 4, j + lane % 2 * 2);
      const Split upper = split(hopper::load_shared_float2(t)),
                  lower = split(hopper::load_shared_float2(t + 8 * kStagedRank * 4));
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const uint32_t word = i % 4 == 0 ? b[i / 4].x : i % 4 == 1 ? b[i / 4].y : i % 4 == 2 ? b[i / 4].z : b[i / 4].w;
        float c[4] = {d[s][4 * i], d[s][4 * i + 1], d[s][4 * i + 2], d[s][4 * i + 3]};
        hopper::multiply_16x8(c, upper.high, lower.high, upper.low, lower.low, word, word);
#pragma unroll
        for (int k = 0; k < 4; ++k) d[s][4 * i + k] = c[k];
      }
    }
  }
}

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
    for (int j = 0; j < l.rank; j += 4) {
      const uint32_t* factor = factor_of(l, now, o, j);
      uint32_t a[kSlabs][2];
#pragma unroll
      for (int i = 0; i < 2 * kSlabs; ++i)
        a[i / 2][i % 2] = __ldg(factor + factor_word(i / 2 * 64 + warp * 16 + i % 2 * 8 + lane / 4, q));
#pragma unroll
      for (int tokens = 0; tokens < kTokens / 8; ++tokens) {
        const Split t = split(own_pair(l, first_row + min(tokens * 8 + lane / 4, rows - 1), j, q));
#pragma unroll
        for (int s = 0; s < kSlabs; ++s) {
          float* sum = &d[s][4 * tokens];
          float c[4] = {sum[0], sum[1], sum[2], sum[3]};
          hopper::multiply_16x8(c, a[s][0], a[s][1], a[s][0], a[s][1], t.high, t.low);
#pragma unroll
          for (int k = 0; k < 4; ++k)
            if (adapter[2 * tokens + k % 2] == now) sum[k] = c[k];
        }
      }
    }
  }
}

}  // namespace plumb::kernels::lora
