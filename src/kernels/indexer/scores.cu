// Index scores. Entries are the 64 rows of a product, the heads of queries its columns: then the sum over heads runs
// along a lane's own accumulators, and four lanes share the rest. A persistent block takes one group of rows after the
// other, the longest first: their queries stay in shared memory, their head weights in registers, while one warp
// streams tiles of keys through a ring. Two warpgroups: with groups of eight, each has four queries (256 columns) and
// both read every tile; with groups of one they take alternate tiles. While one of them reduces, the other's products
// run.
#include <algorithm>

#include "kernels/hopper/barrier.cuh"
#include "kernels/hopper/numbers.cuh"
#include "kernels/hopper/tma.cuh"
#include "kernels/hopper/wgmma_bf16.cuh"
#include "kernels/indexer/indexer.h"

namespace plumb::kernels {
namespace indexer {
namespace {

using namespace hopper;

constexpr int kThreads = 384, kStages = 4;
constexpr int kHalfColumns = 64;  // of a swizzled tile: 128 bytes
constexpr int kKeyHalfBytes = kIndexTile * 128, kKeyBytes = 2 * kKeyHalfBytes;

template <int kQueries>  // of a warpgroup: 4 or 1
struct Shared {
  static constexpr int kColumns = kQueries * kIndexHeads;
  static constexpr int kHalfBytes = kColumns * 128;
  static constexpr int kCopies = kQueries == 4 ? 2 : 1;  // one each, or one query for both
  alignas(1024) uint8_t q[kCopies][2][kHalfBytes];       // [warpgroup][half of the channels]
  uint8_t keys[kStages][kKeyBytes];
  alignas(8) uint64_t q_full[kCopies], q_empty[kCopies], keys_full[kStages], keys_empty[kStages];
};

struct Arguments {
  const float* w;
  IndexGroupsDevice groups;
  float* scores;
  int first_group, last_group, rows, columns, topk;
  int splits;  // blocks that share the tiles of a group, each taking every splits-th
};

// One group, or its share of a split.
struct Item {
  int group, group_tile;  // its first tile in the plan
  int first, tiles;       // this item's tiles: first, first + splits, ...; none if all rows take all that they see
};
template <int kGroupRows>
__device__ __forceinline__ Item item_at(const Arguments& p, int index) {
  const int group = p.last_group - 1 - index / p.splits, first = index % p.splits;
  bool selects = false;
#pragma unroll
  for (int i = 0; i < kGroupRows; ++i) {
    const int row = group * kGroupRows + i;
    selects |= row < p.rows && __ldg(p.groups.visible_count + row) > p.topk;
  }
  const int group_tile = __ldg(p.groups.tile_begin + group),
            count = __ldg(p.groups.tile_begin + group + 1) - group_tile;
  return {group, group_tile, first, selects && first < count ? (count - first + p.splits - 1) / p.splits : 0};
}

// Sum over a lane's heads of one query, rows r and r + 8 of the product; 16 accumulators a row, in order.
__device__ __forceinline__ void weigh(const float* d, const float (&w)[16], float& upper, float& lower) {
  upper = lower = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      upper = fmaf(w[2 * i + b], max_nan(d[4 * i + b], 0.f), upper);
      lower = fmaf(w[2 * i + b], max_nan(d[4 * i + 2 + b], 0.f), lower);
    }
}

// What a warpgroup does with a group. step: tiles that passed through the ring before.
template <int kQueries>
__device__ __forceinline__ void consume(Shared<kQueries>& s, const Arguments& p, const Item& item, uint32_t step,
                                        uint32_t number) {
  constexpr int kGroupRows = kQueries == 4 ? 8 : 1;
  const int warpgroup = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, quad = lane % 4;
  const int first_query = item.group * kGroupRows + (kQueries == 4 ? warpgroup * 4 : 0);
  const int copy = kQueries == 4 ? warpgroup : 0;
  float w[kQueries][16];
#pragma unroll
  for (int j = 0; j < kQueries; ++j)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int query = min(first_query + j, p.rows - 1);
      const float2 pair =
          __ldg(reinterpret_cast<const float2*>(p.w + static_cast<size_t>(query) * kIndexHeads) + 4 * i + quad);
      w[j][2 * i] = pair.x, w[j][2 * i + 1] = pair.y;
    }
  const uint32_t q = shared_address(s.q[copy]);
  barrier_wait(&s.q_full[copy], number & 1);
  const int query = first_query + (kQueries == 4 ? quad : 0);  // whose scores this lane writes
  float* out = p.scores + static_cast<size_t>(query - p.first_group * kGroupRows) * p.columns + warp * 16 + lane / 4;
  const bool writes = query < p.rows && (kQueries == 4 || quad == 0);
  for (int n = 0; n < item.tiles; ++n) {
    if (kQueries == 1 && (step + n) % 2 != static_cast<uint32_t>(warpgroup)) continue;  // a stage has one reader
    const int stage = ring_slot<kStages>(step + n);
    barrier_wait(&s.keys_full[stage], ring_parity<kStages>(step + n));
    float d[kQueries * 32];
    const uint32_t keys = shared_address(s.keys[stage]);
    // In turns: while one warpgroup's products run, the other reduces; left alone both would do the same at a time.
    if (kQueries == 4 && (warpgroup == 1 || step + n > 0)) group_barrier(1 + warpgroup, 256);
    product_fence();
#pragma unroll
    for (int k = 0; k < kIndexDim / 16; ++k) {
      const uint32_t inside = k % 4 * 32;
      wgmma<kColumnsContracted, kColumnsContracted>(d, tile_descriptor(keys + k / 4 * kKeyHalfBytes + inside),
                                                    tile_descriptor(q + k / 4 * Shared<kQueries>::kHalfBytes + inside),
                                                    k > 0);
    }
    product_commit();
    if (kQueries == 4) group_arrive(2 - warpgroup, 256);
    product_wait<0>();
    pin(d);
    barrier_arrive(&s.keys_empty[stage]);
    if (kQueries == 4 && n == item.tiles - 1) barrier_arrive(&s.q_empty[copy]);  // before the reduction
    float upper[kQueries], lower[kQueries];
#pragma unroll
    for (int j = 0; j < kQueries; ++j) weigh(d + 32 * j, w[j], upper[j], lower[j]);
    float* to = out + (item.first + n * p.splits) * kIndexTile;
    if constexpr (kQueries == 4) {
      // Over the four lanes, which share the queries out among them: lane `quad` ends with query `quad`.
      const bool high = quad & 2, odd = quad & 1;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* v = half ? lower : upper;
        const float a = (high ? v[2] : v[0]) + __shfl_xor_sync(~0u, high ? v[0] : v[2], 2);
        const float b = (high ? v[3] : v[1]) + __shfl_xor_sync(~0u, high ? v[1] : v[3], 2);
        const float sum = (odd ? b : a) + __shfl_xor_sync(~0u, odd ? a : b, 1);
        if (writes) to[8 * half] = sum;
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = half ? lower[0] : upper[0];
        sum += __shfl_xor_sync(~0u, sum, 2);
        sum += __shfl_xor_sync(~0u, sum, 1);
        if (writes) to[8 * half] = sum;
      }
    }
  }
  if (kQueries == 1) barrier_arrive(&s.q_empty[copy]);
}

template <int kQueries>
__device__ __forceinline__ void produce(Shared<kQueries>& s, const Arguments& p, const Item& item, uint32_t step,
                                        uint32_t number, const CUtensorMap* queries, const CUtensorMap* keys) {
  constexpr int kGroupRows = kQueries == 4 ? 8 : 1;
  const auto load_keys = [&](int n) {
    const int stage = ring_slot<kStages>(step + n);
    const int entry = __ldg(p.groups.tile_first + item.group_tile + item.first + n * p.splits);
    barrier_wait(&s.keys_empty[stage], ring_parity<kStages>(step + n) ^ 1);
    const uint32_t full = shared_address(&s.keys_full[stage]);
    barrier_arrive_expect(full, kKeyBytes);
    for (int half = 0; half < 2; ++half)
      copy_tensor_2d(shared_address(s.keys[stage]) + half * kKeyHalfBytes, keys, half * kHalfColumns, entry, full);
  };
  load_keys(0);
  for (int copy = 0; copy < Shared<kQueries>::kCopies; ++copy) {
    barrier_wait(&s.q_empty[copy], (number & 1) ^ 1);
    const uint32_t full = shared_address(&s.q_full[copy]);
    barrier_arrive_expect(full, sizeof(s.q[copy]));
    for (int half = 0; half < 2; ++half)
      copy_tensor_2d(shared_address(s.q[copy][half]), queries, half * kHalfColumns,
                     (item.group * kGroupRows + copy * kQueries) * kIndexHeads, full);
  }
  for (int n = 1; n < item.tiles; ++n) load_keys(n);
}

template <int kQueries>
__global__ void __launch_bounds__(kThreads, 1)
    scores_kernel(const __grid_constant__ Arguments p, const __grid_constant__ CUtensorMap queries,
                  const __grid_constant__ CUtensorMap keys) {
  extern __shared__ __align__(1024) uint8_t raw[];
  using S = Shared<kQueries>;
  S& s = *reinterpret_cast<S*>(raw);
  constexpr int kGroupRows = kQueries == 4 ? 8 : 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kCopies; ++i) {
      barrier_init(&s.q_full[i], 1);
      barrier_init(&s.q_empty[i], kQueries == 4 ? 128 : 256);
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.keys_full[i], 1);
      barrier_init(&s.keys_empty[i], kQueries == 4 ? 256 : 128);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int items = (p.last_group - p.first_group) * p.splits;
  // Items get shorter; going back and forth over the blocks gives each the same number of tiles.
  const auto item_of_round = [&](int round) {
    return round * static_cast<int>(gridDim.x) + static_cast<int>(round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  };
  uint32_t step = 0, number = 0;  // tiles and items so far
  if (threadIdx.x < 128) {
    give_registers<24>();
    if (threadIdx.x != 0) return;
    for (int round = 0; item_of_round(round) < items; ++round) {
      const Item item = item_at<kGroupRows>(p, item_of_round(round));
      if (item.tiles == 0) continue;
      produce<kQueries>(s, p, item, step, number, &queries, &keys);
      step += item.tiles, ++number;
    }
  } else {
    take_registers<240>();
    for (int round = 0; item_of_round(round) < items; ++round) {
      const Item item = item_at<kGroupRows>(p, item_of_round(round));
      if (item.tiles == 0) continue;
      consume<kQueries>(s, p, item, step, number);
      step += item.tiles, ++number;
    }
    if (kQueries == 4 && threadIdx.x < 256 && step > 0) group_barrier(1, 256);  // takes the other's last turn
  }
}

CUtensorMap bf16_map(const void* matrix, int rows, int box_rows) {
  return matrix_map(matrix, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, rows, kIndexDim, box_rows, kHalfColumns,
                    CU_TENSOR_MAP_SWIZZLE_128B);
}

template <int kQueries>
cudaError_t launch(const IndexSelection& s, const Arguments& a, int blocks, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(scores_kernel<kQueries>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 sizeof(Shared<kQueries>));
  if (error != cudaSuccess) return error;
  scores_kernel<kQueries><<<blocks, kThreads, sizeof(Shared<kQueries>), stream>>>(
      a, bf16_map(s.q, s.groups->rows * kIndexHeads, Shared<kQueries>::kColumns),
      bf16_map(s.keys, s.entries, kIndexTile));
  return cudaGetLastError();
}

}  // namespace
}  // namespace indexer

cudaError_t index_scores(const IndexSelection& s, int first_group, int groups, int columns, float* scores,
                         cudaStream_t stream) {
  using namespace indexer;
  if (groups <= 0 || s.entries <= 0) return cudaErrorInvalidValue;
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  // Few groups: several blocks share a group's tiles. Scores do not notice.
  const int splits = std::clamp(2 * processors / groups, 1, std::max(1, columns / kIndexTile / 4));
  const Arguments a{s.w, s.device, scores, first_group, first_group + groups, s.groups->rows, columns, s.topk, splits};
  const int blocks = std::min(processors, groups * splits);
  return s.groups->group_rows == 8 ? launch<4>(s, a, blocks, stream) : launch<1>(s, a, blocks, stream);
}

}  // namespace plumb::kernels
