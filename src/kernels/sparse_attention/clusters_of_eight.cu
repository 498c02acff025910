// Sparse attention forward for very few queries from an FP8 cache (decoding): a cluster of eight CTAs an item, so that
// widening its keys is not the work of one multiprocessor, or of two (pairs.cu). Rounds of eight blocks:
//   1. CTA r scores block r of the round and sends the largest score of each head to all CTAs.
//   2. Each CTA walks through all largest scores in order of the list and so knows every reference of the softmax. It
//      makes the weights of its own block and sends them to the other CTAs, with the lanes' sums of them.
//   3. CTA r adds the values of all blocks, in order of the list, to output columns 64 r to 64 r + 63.
// The bits are those of forward.cu. Scores, weights and the sums of a block are the same instructions on the same
// numbers; a largest score is exact, whoever finds it; an output column meets the same blocks in the same order with
// the same factors between them, only no longer in one CTA with all other columns; sums of even and odd blocks are kept
// apart, as the two warpgroups there do. Nothing is summed across CTAs.
//
// One cluster barrier a round: a CTA arrives when it has received and read all that the others sent, and waits before
// it makes or sends anything in the next round, when it has already asked for the next keys and values. The last wait,
// after the output, keeps its memory until the others have received what it sent.
#include "kernels/hopper/cluster.cuh"
#include "kernels/sparse_attention/forward_parts.cuh"

namespace plumb::kernels {
namespace attention {
namespace {

using namespace hopper;

constexpr int kThreads = 512, kConsumers = 128;  // warpgroup 0 computes; all gather
constexpr int kCluster = 8;
static_assert(kCluster * 64 == kDim);

struct Weights {
  uint8_t panel[kPanelBytes];  // bf16, 64 heads x 64 keys
  float sums[2][kConsumers];   // [upper, lower row] each lane's part
};
static_assert(sizeof(Weights) % 1024 == 0);

struct Shared {
  alignas(1024) uint8_t q[2][kHalfBytes];  // [column half]
  union {
    // Of this CTA's block. Free when its largest scores are sent, and nobody sends weights before he has them from all.
    uint8_t keys[2][kHalfBytes];
    Weights weights[kCluster];  // [block of the round] from the others
  };
  uint8_t values[kCluster][kPanelBytes];  // [block of the round] this CTA's 64 columns of its keys
  Weights own;                            // of this CTA's block; sent from here
  float largest[kCluster][kTileHeads];    // [block of the round]
  alignas(8) uint8_t present[8];          // bit k of byte w: entry 8 w + k of this CTA's block is a key
  uint64_t largest_full, weights_full;
};

// One round of an item as one CTA sees it.
struct Round {
  Item item;
  int first, count;  // block, blocks
  int rank;          // of the CTA
  __device__ bool has_own() const { return rank < count; }
  __device__ int entry(const KeyLists& lists, int block, int row) const {
    return list_entry(lists, item, (first + block) * kBlock + row);
  }
};

// This CTA's block, whole rows: a warp has eight rows of a column half.
__device__ __forceinline__ void gather_keys(Shared& s, const SparseAttentionForward& p, const Round& round) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, half = warp >> 3, first_row = (warp & 7) * 8;
  const uint8_t* kv = static_cast<const uint8_t*>(p.kv);
  const int entry = round.entry(p.lists, round.rank, first_row + (lane & 7));
  const uint32_t present = __ballot_sync(~0u, entry >= 0);
  if (half == 0 && lane == 0) s.present[warp] = static_cast<uint8_t>(present);
  gather_fp8_rows(s.keys[half], first_row, half, kv, entry);
}

// This CTA's columns of all keys of the round, by the upper eight warps: eight lanes a row.
__device__ __forceinline__ void gather_values(Shared& s, const SparseAttentionForward& p, const Round& round) {
  constexpr int kTogether = 4;
  const int unit = threadIdx.x & 7;
  const uint8_t* kv = static_cast<const uint8_t*>(p.kv);
  const bool widened = round.rank < kFp8KeyCodes / 64;
  const uint8_t* column = kv + (widened ? round.rank * 64 + unit * 8 : kFp8KeyCodes + unit * 16);
#pragma unroll 1
  for (int at = (threadIdx.x - 256) >> 3; at < kBlock * kCluster / kTogether; at += 32) {
    const int row = at % kBlock, first = at / kBlock * kTogether;
    if (first >= round.count) break;
    const uint32_t to = shared_address(s.values[first]) + swizzled(row, unit);
    int entry[kTogether];
#pragma unroll
    for (int b = 0; b < kTogether; ++b) entry[b] = first + b < round.count ? round.entry(p.lists, first + b, row) : -1;
    if (widened) {
      uint2 codes[kTogether];
      uint32_t exponent[kTogether];
#pragma unroll
      for (int b = 0; b < kTogether; ++b) {
        codes[b] = make_uint2(0, 0), exponent[b] = 0;
        if (entry[b] < 0) continue;
        codes[b] = __ldg(reinterpret_cast<const uint2*>(column + static_cast<size_t>(entry[b]) * kFp8KeyBytes));
        exponent[b] = __ldg(kv + static_cast<size_t>(entry[b]) * kFp8KeyBytes + kFp8KeyScales + round.rank);
      }
#pragma unroll
      for (int b = 0; b < kTogether; ++b) store_shared_16(to + b * kPanelBytes, widen_eight(codes[b], exponent[b]));
    } else {
#pragma unroll
      for (int b = 0; b < kTogether; ++b)
        copy16(to + b * kPanelBytes, column + static_cast<size_t>(max(entry[b], 0)) * kFp8KeyBytes,
               entry[b] >= 0 ? 16 : 0);
    }
  }
}

// The next round's own block into L2 while this round is computed; there is no room for it in shared memory.
__device__ __forceinline__ void prefetch_keys(const SparseAttentionForward& p, const Round& round) {
  const int row = threadIdx.x >> 3, line = threadIdx.x & 7;
  const int entry = round.entry(p.lists, round.rank + kCluster, row);
  if (entry >= 0 && line * 128 < kFp8KeyBytes)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const uint8_t*>(p.kv) +
                                                  static_cast<size_t>(entry) * kFp8KeyBytes + line * 128));
}

// For descriptors, which the compiler then computes once a warp: four moves a product less.
__device__ __forceinline__ uint32_t uniform_address(const void* shared) {
  return static_cast<uint32_t>(uniform(shared_address(shared)));
}

// Warpgroup 0 of a CTA.
struct Consumer {
  Shared& s;
  float scale2;
  int row;                // this lane's upper one of two heads, eight apart
  float o[32];            // 64 heads x this CTA's 64 columns
  Softmax softmax[2];     // sums of even, of odd blocks; the references of both follow all blocks
  float to[kCluster][2];  // references after the blocks of the round

  __device__ void start() {
#pragma unroll
    for (float& x : o) x = 0.f;
#pragma unroll
    for (Softmax& x : softmax) x.scale2 = scale2, x.clear();
  }

  // Scores of this CTA's block; their largest ones to all CTAs, and theirs from them.
  __device__ void score(const Round& round, uint32_t parity, float (&scores)[32]) {
    const int quad = threadIdx.x & 3;
    if (round.has_own()) {
      product_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half)
        issue_scores(scores, uniform_address(s.q[half]), uniform_address(s.keys[half]), half == 0);
      product_commit();
      product_wait<0>();
      pin(scores);
      hide_absent(scores, s.present);
      float top[2];
      largest_scores(scores, top);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int cta = 0; cta < kCluster / 4; ++cta)
          send_float(shared_address(&s.largest[round.rank][row + 8 * half]), quad * (kCluster / 4) + cta, top[half],
                     shared_address(&s.largest_full));
    }
    barrier_wait_cluster(shared_address(&s.largest_full), parity);
    float reference[2] = {softmax[0].reference[0], softmax[0].reference[1]};
#pragma unroll
    for (int b = 0; b < kCluster; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (b < round.count)
          reference[half] = Softmax::reference_after(reference[half], s.largest[b][row + 8 * half], scale2);
        to[b][half] = reference[half];
      }
  }

  // Not to this CTA, which uses its own ones where they are: memcheck takes a bulk copy to the own CTA for an error.
  __device__ void send_own_weights(const Round& round, float (&scores)[32]) {
    float reference[2] = {to[0][0], to[0][1]};
#pragma unroll
    for (int b = 1; b < kCluster; ++b)
      if (b == round.rank) reference[0] = to[b][0], reference[1] = to[b][1];
    uint32_t weights[4][4];
    make_weights(scores, reference, scale2, weights);
    store_weights(shared_address(s.own.panel), weights, row);
#pragma unroll
    for (int half = 0; half < 2; ++half) s.own.sums[half][threadIdx.x] = sum_of_weights(scores, half);
    async_proxy_fence();
    group_barrier(1, kConsumers);
    const int lane = threadIdx.x & 31, cta = (threadIdx.x >> 5) * 2 + lane;  // two from each warp
    if (lane < 2 && cta != round.rank)
      copy_bulk_at(shared_address(&s.weights[round.rank]), cta, shared_address(&s.own), sizeof(Weights),
                   shared_address(&s.weights_full));
  }

  __device__ void add_blocks(const Round& round, uint32_t parity) {
    barrier_wait(&s.weights_full, parity);
#pragma unroll
    for (int b = 0; b < kCluster; ++b) {
      if (b >= round.count) break;
      const Weights& weights = b == round.rank ? s.own : s.weights[b];
      float factor[2];
      softmax[0].move(to[b], factor);
      softmax[1].move(to[b], factor);
      if (!__all_sync(~0u, factor[0] == 1.f && factor[1] == 1.f)) {
        product_wait<0>();
        pin(o);
#pragma unroll
        for (int i = 0; i < 32; ++i) o[i] *= factor[(i >> 1) & 1];
      }
      product_fence();
#pragma unroll
      for (int step = 0; step < kBlock / 16; ++step)
        wgmma<kColumnsContracted, kRowsContracted>(
            o, tile_descriptor(uniform_address(weights.panel) + step * 32),
            tile_descriptor(uniform_address(s.values[b]) + step * 2048, kPanelBytes), true);
      product_commit();
      Softmax& mine = softmax[b & 1];  // rounds are even: the block's own parity
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mine.rebase(half);
        mine.sum[half] += weights.sums[half][threadIdx.x];
      }
    }
    product_wait<0>();
    pin(o);
  }

  __device__ void finish(const SparseAttentionForward& p, int index, int rank) {
    const int tiles = p.heads / kTileHeads;
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = row + 8 * half;
      float sum[2];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        softmax[odd].rebase(half);
        sum[odd] = softmax[odd].sum[half];
        sum[odd] += __shfl_xor_sync(~0u, sum[odd], 1);
        sum[odd] += __shfl_xor_sync(~0u, sum[odd], 2);
      }
      const RowEnd end = end_of_row(softmax[0].reference[half], sum[0] + sum[1],
                                    __ldg(p.sink + (index & (tiles - 1)) * kTileHeads + head));
      factor[half] = end.factor;
      if (rank == 0 && (threadIdx.x & 3) == 0) p.lse[static_cast<size_t>(index) * kTileHeads + head] = end.lse;
    }
    if (p.rotation != nullptr && rank == kCluster - 1) {
      rotate_back(o, factor, p.rotation, index >> (tiles - 1));
      factor[0] = factor[1] = 1.f;
    }
    store_rows_bf16<8>(
        o, factor[0], factor[1],
        static_cast<__nv_bfloat16*>(p.o) + (static_cast<size_t>(index) * kTileHeads + row) * kDim + rank * 64,
        8 * kDim);
  }
};

__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    clusters_of_eight_kernel(const __grid_constant__ SparseAttentionForward p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const int index = blockIdx.x / kCluster, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    barrier_init(&s.largest_full, 1);
    barrier_init(&s.weights_full, 1);
    barrier_init_fence();
  }
  __syncwarp();  // the first thread arrives on them, but initialising is an instruction of the whole warp
  const uint8_t* heads =
      static_cast<const uint8_t*>(p.q) + static_cast<size_t>(index) * kTileBytes + (warp & 7) * 8 * kRowBytes;
  copy_rows<8>(s.q[warp >> 3], (warp & 7) * 8, heads + (warp >> 3) * 512, lane);
  const Item item = item_at(p.lists, p.heads / kTileHeads, index);
  const int blocks = block_count(item);
  Consumer consumer{s, p.scale * kLog2e, warp * 16 + (lane >> 2)};
  consumer.start();
  uint32_t parity = 0;
  cluster_arrive_relaxed();  // all barriers are there
  for (int first = 0; first < blocks; first += kCluster, parity ^= 1) {
    const Round round{item, first, min(kCluster, blocks - first), static_cast<int>(cluster_rank())};
    if (threadIdx.x == 0) {
      barrier_arrive_expect(shared_address(&s.largest_full), round.count * static_cast<uint32_t>(sizeof(s.largest[0])));
      barrier_arrive_expect(shared_address(&s.weights_full),
                            (round.count - (round.has_own() ? 1 : 0)) * static_cast<uint32_t>(sizeof(Weights)));
    }
    if (round.has_own()) gather_keys(s, p, round);
    copy_commit();
    prefetch_keys(p, round);
    cluster_wait();  // from here on the others may be written to
    copy_wait<0>();
    async_proxy_fence();
    __syncthreads();

    if (warp >= 8) {  // ordinary loads, which the scores need not wait for
      gather_values(s, p, round);
      copy_commit();
    }
    if (threadIdx.x < kConsumers) {
      float scores[32];
      consumer.score(round, parity, scores);
      if (round.has_own()) consumer.send_own_weights(round, scores);
    }
    copy_wait<0>();
    async_proxy_fence();
    __syncthreads();

    if (threadIdx.x < kConsumers) consumer.add_blocks(round, parity);
    __syncthreads();           // keys and values may be overwritten
    cluster_arrive_relaxed();  // what the others sent has been read
  }
  if (threadIdx.x < kConsumers) consumer.finish(p, index, static_cast<int>(cluster_rank()));
  cluster_wait();
}

}  // namespace

cudaError_t launch_clusters_of_eight(const SparseAttentionForward& p, cudaStream_t stream) {
  const auto kernel = clusters_of_eight_kernel;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  const int items = p.queries * (p.heads / kTileHeads);
  kernel<<<items * kCluster, kThreads, sizeof(Shared), stream>>>(p);
  return cudaGetLastError();
}

}  // namespace attention
}  // namespace plumb::kernels
