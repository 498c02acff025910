// Sparse attention forward. One persistent CTA an SM takes every gridDim.x-th item, four warpgroups:
//   warpgroups 0, 1   consumers. Warpgroup g scores the blocks in key buffer g, every other block (S = Q K^T, softmax).
//                     It adds all blocks, in order, to its own half of the output columns (O += P V; its own P from
//                     registers, the other's from shared memory). So one group's softmax runs beside the products of
//                     the other.
//   warpgroups 2, 3   producers. They gather Q and the key rows, 16 bytes a copy, the left half of the columns first:
//                     scores can start on it, and each half is free again when its warpgroup has added the block.
// V is the same shared-memory block as K, read with its rows contracted.
#include <cuda_fp8.h>

#include <algorithm>
#include <type_traits>

#include "kernels/hopper/numbers.cuh"
#include "kernels/sparse_attention/tile.cuh"

namespace plumb::kernels {
namespace attention {
namespace {

using namespace hopper;

constexpr int kThreads = 512, kConsumers = 256;

struct Shared {
  alignas(1024) uint8_t q[2][kHalfBytes];  // [column half], four panels of 64 heads x 64 columns
  uint8_t keys[2][2][kHalfBytes];          // [buffer][column half]
  uint8_t weights[2][kPanelBytes];         // [buffer] P of the block as bf16, 64 heads x 64 keys
  float reference[2][kTileHeads];          // [buffer] the softmax's reference after this block
  float sums[2][2][kTileHeads];      // [item parity][warpgroup] sum of its weights, relative to the last reference
  alignas(8) uint8_t present[2][8];  // [buffer] bit k of byte w: entry 8 w + k of the block is a key
  uint64_t q_full, q_empty;
  uint64_t keys_full[2][2], keys_empty[2][2];  // [buffer][column half]
  uint64_t weights_full[2];  // [buffer] weights and reference. They are free again when the buffer's keys are.
};

__device__ __forceinline__ int block_count(const Item& item) { return max(1, (item.length + kBlock - 1) / kBlock); }

// Two e4m3 codes times a power of two, as a pair of bf16: exact.
__device__ __forceinline__ uint32_t widen(uint16_t codes, float scale) {
  const float2 v = __half22float2(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3));
  return pack_bf16(v.x * scale, v.y * scale);
}

// gather_rows for FP8 keys: 256 columns of eight rows, widened on the way. entry: of lane & 7.
__device__ __forceinline__ void gather_fp8_rows(uint8_t* panels, int first_row, int half, const uint8_t* kv,
                                                int entry) {
  constexpr int kTogether = 4;
  const int lane = threadIdx.x & 31;
  const uint32_t base = shared_address(panels) + (lane >> 3) * kPanelBytes + first_row * 128;
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
        copy16(base + swizzled(first + r, lane & 7), key + kFp8KeyCodes + (lane - 24) * 16, row >= 0 ? 16 : 0);
      } else if (row >= 0) {
        codes[r] = __ldg(reinterpret_cast<const uint2*>(key + half * 256) + lane);
        exponent[r] = __ldg(key + kFp8KeyScales + half * 4 + (lane >> 3));
      }
    }
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      const float scale = __uint_as_float(exponent[r] << 23);
      if (!rotated)
        store_shared_16(base + swizzled(first + r, lane & 7),
                        make_uint4(widen(codes[r].x & 0xffff, scale), widen(codes[r].x >> 16, scale),
                                   widen(codes[r].y & 0xffff, scale), widen(codes[r].y >> 16, scale)));
    }
  }
}

template <bool kFp8>
__device__ __forceinline__ void produce(Shared& s, const SparseAttentionForward& p, int items) {
  const int tiles = p.heads / kTileHeads;
  const int warp = (threadIdx.x - kConsumers) >> 5, lane = threadIdx.x & 31, first_row = warp * 8;
  const int my_row = first_row + (lane & 7);
  const uint8_t* kv = static_cast<const uint8_t*>(p.kv);
  uint32_t block = 0, item_number = 0;  // of this CTA
  Item item = item_at(p.lists, tiles, blockIdx.x);
  int entry = list_entry(p.lists, item, my_row);  // loaded one block ahead: entries come from device memory
  for (int index = blockIdx.x; index < items; index += gridDim.x, ++item_number) {
    const Item next = item_at(p.lists, tiles, min(index + static_cast<int>(gridDim.x), items - 1));
    const uint8_t* heads =
        static_cast<const uint8_t*>(p.q) + static_cast<size_t>(index) * kTileBytes + first_row * kRowBytes;
    barrier_wait(&s.q_empty, (item_number & 1) ^ 1);
#pragma unroll 1
    for (int half = 0; half < 2; ++half)
      gather_rows<8, kPanelBytes>(s.q[half], first_row,
                                  [&](int r, bool&) { return heads + r * kRowBytes + half * 512; });
    copy_commit();
    for (int b = 0, blocks = block_count(item); b < blocks; ++b, ++block) {
      const int buffer = block & 1, mine = entry;
      const uint32_t parity = ((block >> 1) & 1) ^ 1;
      entry = b + 1 < blocks ? list_entry(p.lists, item, (b + 1) * kBlock + my_row) : list_entry(p.lists, next, my_row);
      const uint32_t present = __ballot_sync(~0u, mine >= 0);
      bool left_published = false;
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        if (half == 1 && !barrier_test(&s.keys_empty[buffer][1], parity)) {
          publish<0>(&s.keys_full[buffer][0]);
          left_published = true;
        }
        barrier_wait(&s.keys_empty[buffer][half], parity);
        if constexpr (kFp8)
          gather_fp8_rows(s.keys[buffer][half], first_row, half, kv, mine);
        else
          gather_rows<8, kPanelBytes>(s.keys[buffer][half], first_row, [&](int r, bool& is_key) {
            const int row = __shfl_sync(~0u, mine, r);
            is_key = row >= 0;
            return kv + static_cast<size_t>(max(row, 0)) * kRowBytes + half * 512;
          });
        copy_commit();
        if (half == 0) {
          if (lane == 0) s.present[buffer][warp] = static_cast<uint8_t>(present);
          if (b == 0) publish<1>(&s.q_full);  // Q is older than the keys
        }
      }
      if (!left_published) publish<1>(&s.keys_full[buffer][0]);
      publish<0>(&s.keys_full[buffer][1]);
    }
    item = next;
  }
}

// S += Q K^T over one half of the columns, 64 heads x 64 keys; first clears S.
__device__ __forceinline__ void issue_scores(float (&scores)[32], uint32_t q, uint32_t keys, bool first) {
#pragma unroll
  for (int step = 0; step < 16; ++step) {
    const uint32_t offset = (step / 4) * kPanelBytes + (step % 4) * 32;
    wgmma<kColumnsContracted, kColumnsContracted>(scores, tile_descriptor(q + offset), tile_descriptor(keys + offset),
                                                  !first || step > 0);
  }
}

// O += P V for 256 columns, in two products of 128 (with 512 threads the compiler starts from 128 registers a thread
// and refuses one with 128 accumulators). P is a shared-memory address or fragments in registers.
template <class Weights>
__device__ __forceinline__ void issue_values(float (&o)[2][64], const Weights& weights, uint32_t values) {
#pragma unroll
  for (int step = 0; step < kBlock / 16; ++step)
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const uint64_t v = tile_descriptor(values + part * 2 * kPanelBytes + step * 2048, kPanelBytes);
      if constexpr (std::is_same_v<Weights, uint32_t>)
        wgmma<kColumnsContracted, kRowsContracted>(o[part], tile_descriptor(weights + step * 32), v, true);
      else
        wgmma<kRowsContracted>(o[part], weights[step], v, true);
    }
  product_commit();
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

__device__ __forceinline__ void rescale_rows(float (&o)[2][64], const float (&factor)[2]) {
  // The usual case once the reference has settled; exact either way.
  if (__all_sync(~0u, factor[0] == 1.f && factor[1] == 1.f)) return;
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i >> 6][i & 63] *= factor[(i >> 1) & 1];
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
  float sum[2];            // of this lane's weights, of the blocks that this warpgroup scored

  // No key yet: any finite origin makes every weight 0.
  __device__ float origin(int half) const { return reference[half] == -INFINITY ? 0.f : reference[half]; }
  __device__ float reference_for(int half, float largest_score) const {
    const float largest = __fmul_rn(largest_score, scale2);
    return largest - reference[half] > kSlack ? largest : reference[half];  // false for -inf on both sides (NaN)
  }
  // Takes the reference of a later block; returns the factors for sums relative to the old one.
  __device__ void move(const float (&to)[2], float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float old = reference[half];
      reference[half] = to[half];
      factor[half] = exp2_fast(old - origin(half));
    }
  }
  // Makes sum relative to the present reference.
  __device__ void rebase(int half) {
    sum[half] = __fmul_rn(sum[half], exp2_fast(own_reference[half] - origin(half)));
    own_reference[half] = reference[half];
  }
};

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

// Output columns 448 to 511, the last 64 of warpgroup 1, rotated back by the angles of the query: scaled and rounded to
// bf16 first, as an output that is rotated by a kernel of its own would be.
__device__ __forceinline__ void rotate_back(float (&o)[64], const float (&factor)[2], const void* table, int query) {
  const float2* angle = static_cast<const float2*>(table) + static_cast<size_t>(query) * 32 + (threadIdx.x & 3);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 turn = __ldg(angle + 4 * i);  // cos and sin of pair 4 i + quad
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float &even = o[32 + 4 * i + 2 * half], &odd = o[32 + 4 * i + 2 * half + 1];
      const uint32_t pair = pack_bf16(even * factor[half], odd * factor[half]);
      const float e = low_bf16(pair), f = high_bf16(pair);
      even = __fmul_rn(e, turn.x) + __fmul_rn(f, turn.y);
      odd = __fmul_rn(f, turn.x) - __fmul_rn(e, turn.y);
    }
  }
}

__device__ __forceinline__ void consume(Shared& s, const SparseAttentionForward& p, int items) {
  const int tiles = p.heads / kTileHeads;
  const int group = threadIdx.x >> 7, other = group ^ 1, lane = threadIdx.x & 31, quad = lane & 3;
  const int row = ((threadIdx.x & 127) >> 5) * 16 + (lane >> 2);
  const uint32_t q = shared_address(s.q);
  uint32_t first_block = 0, item_number = 0;  // of this CTA
  float o[2][64];
  Softmax softmax{p.scale * kLog2e};

  // O += P V for a block that the other warpgroup scored.
  const auto add_block_of_other = [&](uint32_t block, bool first) {
    barrier_wait(&s.weights_full[other], (block >> 1) & 1);
    const float to[2] = {s.reference[other][row], s.reference[other][row + 8]};
    float factor[2];
    softmax.move(to, factor);
    if (!first) rescale_rows(o, factor);
    product_fence();
    issue_values(o, shared_address(s.weights[other]), shared_address(s.keys[other][group]));
  };

  int blocks = block_count(item_at(p.lists, tiles, blockIdx.x));
  for (int index = blockIdx.x; index < items; index += gridDim.x, ++item_number) {
    const int next_blocks = block_count(item_at(p.lists, tiles, min(index + static_cast<int>(gridDim.x), items - 1)));
    const int first_own = (first_block & 1) == group ? 0 : 1;
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i >> 6][i & 63] = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.reference[half] = softmax.own_reference[half] = -INFINITY;
      softmax.sum[half] = 0.f;
    }
    if (first_own >= blocks) barrier_arrive(&s.q_empty);
    for (int b = first_own; b < blocks; b += 2) {
      const uint32_t parity = ((first_block + b) >> 1) & 1;
      const bool first = b == first_own;
      // The other's block may be added before or after the scores are issued. Before, if the keys are not there yet:
      // the block's keys can be given back earlier. All four warps must agree on the order.
      bool scores_first = true;
      if (b > 0) {
        bool there;
        do {
          there = !first || barrier_test(&s.q_full, item_number & 1);
#pragma unroll
          for (int half = 0; half < 2; ++half) there &= barrier_test(&s.keys_full[group][half], parity);
        } while (!there && !barrier_test(&s.weights_full[other], ((first_block + b - 1) >> 1) & 1));
        scores_first = group_all(2 + group, 128, there);
        if (!scores_first) {
          add_block_of_other(first_block + b - 1, b == 1);
          product_wait<0>();
          pin(o[0]), pin(o[1]);
          barrier_arrive(&s.keys_empty[other][group]);
        }
      }
      float scores[32];
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // the second half may still be on its way
        if (first && half == 0) barrier_wait(&s.q_full, item_number & 1);
        barrier_wait(&s.keys_full[group][half], parity);
        product_fence();
        issue_scores(scores, q + half * kHalfBytes, shared_address(s.keys[group][half]), half == 0);
      }
      product_commit();
      if (b > 0 && scores_first) {
        add_block_of_other(first_block + b - 1, b == 1);
        product_wait<1>();
      } else {
        product_wait<0>();
      }
      pin(scores);
      if (b + 2 >= blocks) barrier_arrive(&s.q_empty);
      hide_absent(scores, s.present[group]);
      float to[2], factor[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = reduce_row(scores, half, [](float x, float y) { return fmaxf(x, y); });
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        to[half] = softmax.reference_for(half, top);
      }
      softmax.move(to, factor);
      const float origin[2] = {softmax.origin(0), softmax.origin(1)};
      uint32_t weights[4][4];  // P as operand fragments, 16 keys each
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        const int half = (i >> 1) & 1;
        scores[i] = exp2_fast(fmaf(scores[i], softmax.scale2, -origin[half]));
        scores[i + 1] = exp2_fast(fmaf(scores[i + 1], softmax.scale2, -origin[half]));
        weights[i >> 3][(i >> 1) & 3] = pack_bf16(scores[i], scores[i + 1]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        softmax.rebase(half);
        softmax.sum[half] += reduce_row(scores, half, [](float x, float y) { return x + y; });
      }
      product_wait<0>();  // the other's block
      pin(o[0]), pin(o[1]);
      if (b > 0 && scores_first) barrier_arrive(&s.keys_empty[other][group]);
      const uint32_t tile = shared_address(s.weights[group]);
#pragma unroll
      for (int g = 0; g < 8; ++g) {
        store_shared_4(tile + swizzled(row, g) + quad * 4, weights[g >> 1][2 * (g & 1)]);
        store_shared_4(tile + swizzled(row + 8, g) + quad * 4, weights[g >> 1][2 * (g & 1) + 1]);
      }
      if (quad == 0) s.reference[group][row] = to[0], s.reference[group][row + 8] = to[1];
      async_proxy_fence();
      barrier_arrive(&s.weights_full[group]);
      if (b > 0) rescale_rows(o, factor);
      product_fence();
      issue_values(o, weights, shared_address(s.keys[group][group]));
      product_wait<0>();
      pin(o[0]), pin(o[1]);
      barrier_arrive(&s.keys_empty[group][group]);
    }
    if (((first_block + blocks - 1) & 1) == other) {  // the last block was the other's
      add_block_of_other(first_block + blocks - 1, blocks == 1);
      product_wait<0>();
      pin(o[0]), pin(o[1]);
      barrier_arrive(&s.keys_empty[other][group]);
    }

    float(&sums)[2][kTileHeads] = s.sums[item_number & 1];
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.rebase(half);
      float& sum = softmax.sum[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (quad == 0) sums[group][row + 8 * half] = sum;
    }
    group_barrier(1, kConsumers);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = row + 8 * half;
      const float sink2 = __ldg(p.sink + (index & (tiles - 1)) * kTileHeads + head) * kLog2e,
                  top2 = softmax.reference[half];
      const float common = fmaxf(top2, sink2);  // a sink far above all keys must not overflow
      const float shrink = exp2_fast(top2 - common);
      const float denominator = (softmax.sum[half] + sums[other][head]) * shrink + exp2_fast(sink2 - common);
      factor[half] = shrink / denominator;
      if (group == 0 && quad == 0)
        p.lse[static_cast<size_t>(index) * kTileHeads + head] = (common + __log2f(denominator)) * kLn2;
    }
    const bool rotated = p.rotation != nullptr && group == 1;
    if (rotated) rotate_back(o[1], factor, p.rotation, index >> (tiles - 1));
    __nv_bfloat16* out =
        static_cast<__nv_bfloat16*>(p.o) + (static_cast<size_t>(index) * kTileHeads + row) * kDim + group * (kDim / 2);
    store_rows_bf16<16>(o[0], factor[0], factor[1], out, 8 * kDim);
    store_rows_bf16<8>(o[1], factor[0], factor[1], out + 128, 8 * kDim);
    store_rows_bf16<8>(o[1] + 32, rotated ? 1.f : factor[0], rotated ? 1.f : factor[1], out + 192, 8 * kDim);
    first_block += blocks;
    blocks = next_blocks;
  }
}

template <bool kFp8>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ SparseAttentionForward p) {
  constexpr int kProducerRegisters = kFp8 ? 56 : 48;  // of the 2 * 128 that a producer and a consumer share
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    barrier_init(&s.q_full, 256);
    barrier_init(&s.q_empty, 256);  // every thread arrives, see backward.cu
    for (int i = 0; i < 2; ++i) {
      barrier_init(&s.weights_full[i], 128);
      for (int half = 0; half < 2; ++half) {
        barrier_init(&s.keys_full[i][half], 256);
        barrier_init(&s.keys_empty[i][half], 128);  // the warpgroup that reads this half as values; scores come before
      }
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int items = p.queries * (p.heads / kTileHeads);
  if (threadIdx.x >= kConsumers) {
    give_registers<kProducerRegisters>();
    produce<kFp8>(s, p, items);
  } else {
    take_registers<256 - kProducerRegisters>();
    consume(s, p, items);
  }
}

}  // namespace
}  // namespace attention

cudaError_t sparse_attention_forward(const SparseAttentionForward& p, cudaStream_t stream) {
  using namespace attention;
  if (p.queries < 0 || (p.heads != 64 && p.heads != 128) || !(p.scale > 0)) return cudaErrorInvalidValue;
  if (p.queries == 0) return cudaSuccess;
  const auto kernel = p.kv_fp8 ? forward_kernel<true> : forward_kernel<false>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  const int items = p.queries * (p.heads / kTileHeads);
  kernel<<<std::min(multiprocessors(), items), kThreads, sizeof(Shared), stream>>>(p);
  return cudaGetLastError();
}

}  // namespace plumb::kernels
