// What the forward kernels share, and with it the bits: scores of a block, the softmax's steps, the end of a row.
// Products that several places must agree on are rounded explicitly, so that no compiler fuses one of them.
#pragma once

#include <cuda_fp8.h>

#include "kernels/hopper/numbers.cuh"
#include "kernels/sparse_attention/tile.cuh"

namespace plumb::kernels::attention {

__device__ __forceinline__ int block_count(const Item& item) { return max(1, (item.length + kBlock - 1) / kBlock); }

// Two e4m3 codes times a power of two, as a pair of bf16: exact.
__device__ __forceinline__ uint32_t widen(uint16_t codes, float scale) {
  const float2 v = __half22float2(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3));
  return hopper::pack_bf16(v.x * scale, v.y * scale);
}
// Eight codes; exponent: of their scale, biased by 127.
__device__ __forceinline__ uint4 widen_eight(uint2 codes, uint32_t exponent) {
  const float scale = __uint_as_float(exponent << 23);
  return make_uint4(widen(codes.x & 0xffff, scale), widen(codes.x >> 16, scale), widen(codes.y & 0xffff, scale),
                    widen(codes.y >> 16, scale));
}

// gather_rows for FP8 keys: 256 columns of eight rows, widened on the way. entry: of lane & 7.
__device__ __forceinline__ void gather_fp8_rows(uint8_t* panels, int first_row, int half, const uint8_t* kv,
                                                int entry) {
  constexpr int kTogether = 4;
  const int lane = threadIdx.x & 31;
  const uint32_t base = hopper::shared_address(panels) + (lane >> 3) * kPanelBytes + first_row * 128;
  const bool rotated = half == 1 && lane >= 24;  // these eight channels are bf16
#pragma unroll
  for (int first = 0; first < 8; first += kTogether) {
    uint2 codes[kTogether];
    uint32_t exponent[kTogether];
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      const int row = __shfl_sync(~0u, entry, first + r);
      const uint8_t* key = kv + static_cast<size_t>(max(row, 0)) * kFp8KeyBytes;
      codes[r] = make_uint2(0, 0), exponent[r] = 0;
      if (rotated) {
        hopper::copy16(base + hopper::swizzled(first + r, lane & 7), key + kFp8KeyCodes + (lane - 24) * 16,
                       row >= 0 ? 16 : 0);
      } else if (row >= 0) {
        codes[r] = __ldg(reinterpret_cast<const uint2*>(key + half * 256) + lane);
        exponent[r] = __ldg(key + kFp8KeyScales + half * 4 + (lane >> 3));
      }
    }
#pragma unroll
    for (int r = 0; r < kTogether; ++r)
      if (!rotated)
        hopper::store_shared_16(base + hopper::swizzled(first + r, lane & 7), widen_eight(codes[r], exponent[r]));
  }
}

// S += Q K^T over one half of the columns, 64 heads x 64 keys; first clears S.
__device__ __forceinline__ void issue_scores(float (&scores)[32], uint32_t q, uint32_t keys, bool first) {
#pragma unroll
  for (int step = 0; step < 16; ++step) {
    const uint32_t offset = (step / 4) * kPanelBytes + (step % 4) * 32;
    hopper::wgmma<hopper::kColumnsContracted, hopper::kColumnsContracted>(
        scores, hopper::tile_descriptor(q + offset), hopper::tile_descriptor(keys + offset), !first || step > 0);
  }
}

__device__ __forceinline__ void hide_absent(float (&scores)[32], const uint8_t (&present)[8]) {
  const uint32_t low = reinterpret_cast<const uint32_t*>(present)[0],
                 high = reinterpret_cast<const uint32_t*>(present)[1];
  if ((low & high) == ~0u) return;
  const int quad = threadIdx.x & 3;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int key = (i >> 2) * 8 + quad * 2 + (i & 1);
    if (!(((i < 16 ? low : high) >> (key & 31)) & 1)) scores[i] = -INFINITY;
  }
}

// Largest and sum of a lane's sixteen scores of one row: four independent chains, then a fixed tree.
template <class Combine>
__device__ __forceinline__ float reduce_row(const float (&x)[32], int half, const Combine& combine) {
  float part[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int at = 8 * c + 2 * half;
    part[c] = combine(combine(x[at], x[at + 1]), combine(x[at + 4], x[at + 5]));
  }
  return combine(combine(part[0], part[1]), combine(part[2], part[3]));
}

// The online softmax of the two rows (heads) that a lane shares with three neighbours, in log2 units: weights are
// exp2(score * scale2 - origin).
//
// The reference is the largest score of some block so far. It moves only when a block has one more than 2^8 times
// heavier: weights up to 256 are as exact as weights up to 1 in bf16 and FP32, and rescaling O, which stalls the
// products, becomes rare. Products that two places of the code must agree on are rounded explicitly, so that no
// compiler fuses one of them.
struct Softmax {
  static constexpr float kSlack = 8;
  float scale2;            // scale * log2(e)
  float reference[2];      // after the latest block; -inf before the first key
  float own_reference[2];  // what sum is relative to
  float sum[2];            // of this lane's weights, of every other block

  __device__ void clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reference[half] = own_reference[half] = -INFINITY;
      sum[half] = 0.f;
    }
  }
  // No key yet: any finite origin makes every weight 0.
  static __device__ float origin_of(float reference) { return reference == -INFINITY ? 0.f : reference; }
  // After a block with that largest score.
  static __device__ float reference_after(float reference, float largest_score, float scale2) {
    const float largest = __fmul_rn(largest_score, scale2);
    return largest - reference > kSlack ? largest : reference;  // false for -inf on both sides (NaN)
  }
  // Takes the reference of a later block; returns the factors for sums relative to the old one.
  __device__ void move(const float (&to)[2], float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float old = reference[half];
      reference[half] = to[half];
      factor[half] = exp2_fast(old - origin_of(reference[half]));
    }
  }
  // Makes sum relative to the present reference.
  __device__ void rebase(int half) {
    sum[half] = __fmul_rn(sum[half], exp2_fast(own_reference[half] - origin_of(reference[half])));
    own_reference[half] = reference[half];
  }
};

// Largest score of each of a lane's two rows, the same in the four lanes that share them.
__device__ __forceinline__ void largest_scores(const float (&scores)[32], float (&top)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half] = reduce_row(scores, half, [](float x, float y) { return fmaxf(x, y); });
    top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
    top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 2));
  }
}

// Scores to weights, relative to the references of the two rows; as operand fragments too, 16 keys each.
__device__ __forceinline__ void make_weights(float (&scores)[32], const float (&reference)[2], float scale2,
                                             uint32_t (&weights)[4][4]) {
  const float origin[2] = {Softmax::origin_of(reference[0]), Softmax::origin_of(reference[1])};
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const int half = (i >> 1) & 1;
    scores[i] = exp2_fast(fmaf(scores[i], scale2, -origin[half]));
    scores[i + 1] = exp2_fast(fmaf(scores[i + 1], scale2, -origin[half]));
    weights[i >> 3][(i >> 1) & 3] = hopper::pack_bf16(scores[i], scores[i + 1]);
  }
}
__device__ __forceinline__ float sum_of_weights(const float (&weights)[32], int half) {
  return reduce_row(weights, half, [](float x, float y) { return x + y; });
}
// Into a panel of 64 heads x 64 keys. row: the lane's upper one.
__device__ __forceinline__ void store_weights(uint32_t panel, const uint32_t (&weights)[4][4], int row) {
  const int quad = threadIdx.x & 3;
#pragma unroll
  for (int g = 0; g < 8; ++g) {
    hopper::store_shared_4(panel + hopper::swizzled(row, g) + quad * 4, weights[g >> 1][2 * (g & 1)]);
    hopper::store_shared_4(panel + hopper::swizzled(row + 8, g) + quad * 4, weights[g >> 1][2 * (g & 1) + 1]);
  }
}

// Of a row after its last block: what its sums of values are multiplied by, and its lse. sum: of all its weights,
// relative to the reference.
struct RowEnd {
  float factor, lse;
};
__device__ __forceinline__ RowEnd end_of_row(float reference, float sum, float sink) {
  const float sink2 = __fmul_rn(sink, kLog2e), common = fmaxf(reference, sink2);  // a sink far above all keys must
  const float shrink = exp2_fast(reference - common);                             // not overflow
  const float denominator = fmaf(sum, shrink, exp2_fast(sink2 - common));
  return {shrink / denominator, __fmul_rn(common + __log2f(denominator), kLn2)};
}

// Accumulators of the output columns 448 to 511 rotated back by the angles of the query: scaled and rounded to bf16
// first, as an output that is rotated by a kernel of its own would be.
__device__ __forceinline__ void rotate_back(float* o, const float (&factor)[2], const void* table, int query) {
  const float2* angle = static_cast<const float2*>(table) + static_cast<size_t>(query) * 32 + (threadIdx.x & 3);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 turn = __ldg(angle + 4 * i);  // cos and sin of pair 4 i + quad
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float &even = o[4 * i + 2 * half], &odd = o[4 * i + 2 * half + 1];
      const uint32_t pair = hopper::pack_bf16(even * factor[half], odd * factor[half]);
      const float e = low_bf16(pair), f = high_bf16(pair);
      even = __fmul_rn(e, turn.x) + __fmul_rn(f, turn.y);
      odd = __fmul_rn(f, turn.x) - __fmul_rn(e, turn.y);
    }
  }
}

// The kernels for so few items that two CTAs (pairs.cu), or, with FP8 keys, eight (clusters_of_eight.cu), can have
// each; the same bits.
cudaError_t launch_pairs(const SparseAttentionForward& arguments, cudaStream_t stream);
cudaError_t launch_clusters_of_eight(const SparseAttentionForward& arguments, cudaStream_t stream);

}  // namespace plumb::kernels::attention
