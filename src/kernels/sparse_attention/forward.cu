// Sparse attention forward. One persistent CTA an SM takes every gridDim.x-th item, four warpgroups:
//   warpgroups 0, 1   consumers. Warpgroup g scores the blocks in key buffer g, every other block (S = Q K^T, softmax).
//                     It adds all blocks, in order, to its own half of the output columns (O += P V; its own P from
//                     registers, the other's from shared memory). So one group's softmax runs beside the products of
//                     the other.
//   warpgroups 2, 3   producers. They gather Q and the key rows, 16 bytes a copy, the left half of the columns first:
//                     scores can start on it, and each half is free again when its warpgroup has added the block.
// V is the same shared-memory block as K, read with its rows contracted.
// pairs.cu and clusters_of_eight.cu have the kernels for so few items that many multiprocessors would have none.
#include <algorithm>
#include <type_traits>

#include "kernels/device.h"
#include "kernels/portable/attention.h"
#include "kernels/sparse_attention/forward_parts.cuh"

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
  uint64_t q_full, q_empty, sums_full;
  uint64_t keys_full[2][2], keys_empty[2][2];  // [buffer][column half]
  uint64_t weights_full[2];  // [buffer] weights and reference. They are free again when the buffer's keys are.
};

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
    for (int half = 0; half < 2; ++half) copy_rows<8>(s.q[half], first_row, heads + half * 512, lane);
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
          gather_rows<8>(s.keys[buffer][half], first_row, kv + half * 512, mine, lane);
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

__device__ __forceinline__ void rescale_rows(float (&o)[2][64], const float (&factor)[2]) {
  // The usual case once the reference has settled; exact either way.
  if (__all_sync(~0u, factor[0] == 1.f && factor[1] == 1.f)) return;
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i >> 6][i & 63] *= factor[(i >> 1) & 1];
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
    softmax.clear();
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
      float top[2], to[2], factor[2];
      largest_scores(scores, top);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        to[half] = Softmax::reference_after(softmax.reference[half], top[half], softmax.scale2);
      softmax.move(to, factor);
      uint32_t weights[4][4];
      make_weights(scores, to, softmax.scale2, weights);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        softmax.rebase(half);
        softmax.sum[half] += sum_of_weights(scores, half);
      }
      product_wait<0>();  // the other's block
      pin(o[0]), pin(o[1]);
      if (b > 0 && scores_first) barrier_arrive(&s.keys_empty[other][group]);
      store_weights(shared_address(s.weights[group]), weights, row);
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
    barrier_arrive(&s.sums_full);
    barrier_wait(&s.sums_full, item_number & 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = row + 8 * half;
      const RowEnd end = end_of_row(softmax.reference[half], softmax.sum[half] + sums[other][head],
                                    __ldg(p.sink + (index & (tiles - 1)) * kTileHeads + head));
      factor[half] = end.factor;
      if (group == 0 && quad == 0) p.lse[static_cast<size_t>(index) * kTileHeads + head] = end.lse;
    }
    const bool rotated = p.rotation != nullptr && group == 1;
    if (rotated) rotate_back(o[1] + 32, factor, p.rotation, index >> (tiles - 1));
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
    barrier_init(&s.sums_full, kConsumers);
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

// CTAs that share an item. As many clusters as run at once: one that must wait for another costs more than an item to
// each multiprocessor. Eight win over two only where keys are widened, and where there is room for all.
int cluster_size(const SparseAttentionForward& p, int items) {
  if (p.kv_fp8 && items <= 8) return 8;
  return items <= multiprocessors() / 2 ? 2 : 1;
}

}  // namespace
}  // namespace attention

cudaError_t sparse_attention_forward(const SparseAttentionForward& p, cudaStream_t stream) {
  using namespace attention;
  if (p.queries < 0 || (p.heads != 64 && p.heads != 128) || !(p.scale > 0)) return cudaErrorInvalidValue;
  if (p.queries == 0) return cudaSuccess;
  if (!is_hopper()) return launch_portable_forward(p, stream);
  const int items = p.queries * (p.heads / kTileHeads);
  switch (cluster_size(p, items)) {
    case 8:
      return launch_clusters_of_eight(p, stream);
    case 2:
      return launch_pairs(p, stream);
  }
  const auto kernel = p.kv_fp8 ? forward_kernel<true> : forward_kernel<false>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  kernel<<<std::min(multiprocessors(), items), kThreads, sizeof(Shared), stream>>>(p);
  return cudaGetLastError();
}

}  // namespace plumb::kernels
