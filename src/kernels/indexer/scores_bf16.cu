// Index scores of bf16 vectors. Entries are the 64 rows of a product, the heads of queries its columns: then the sum
// over heads runs along a lane's own accumulators, and four lanes share the rest. A block has a group of rows; its
// queries stay in shared memory and their head weights in registers, while one warp streams tiles of keys through a
// ring. Two warpgroups: with groups of eight, each has four queries (256 columns) and both read every tile; with groups
// of one they take alternate tiles. While one of them reduces, the other's products run.
#include <algorithm>

#include "kernels/hopper/barrier.cuh"
#include "kernels/hopper/numbers.cuh"
#include "kernels/hopper/tma.cuh"
#include "kernels/hopper/wgmma_bf16.cuh"
#include "kernels/indexer/scores.h"

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
  alignas(8) uint64_t q_full[kCopies], keys_full[kStages], keys_empty[kStages];
};

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

template <int kQueries>
__device__ __forceinline__ void consume(Shared<kQueries>& s, const Arguments& p, int group, int first_tile, int tiles) {
  constexpr int kGroupRows = kQueries == 4 ? 8 : 1;
  const int warpgroup = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, quad = lane % 4;
  const int first_query = group * kGroupRows + (kQueries == 4 ? warpgroup * 4 : 0);
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
  const uint32_t q = shared_address(s.q[kQueries == 4 ? warpgroup : 0]);
  barrier_wait(&s.q_full[kQueries == 4 ? warpgroup : 0], 0);
  const int query = first_query + (kQueries == 4 ? quad : 0);  // whose scores this lane writes
  float* out = p.scores + static_cast<size_t>(query - p.first_group * kGroupRows) * p.columns + warp * 16 + lane / 4;
  const bool writes = query < p.rows && (kQueries == 4 || quad == 0);
  const int stride = kQueries == 4 ? 1 : 2;
  for (int n = kQueries == 4 ? 0 : warpgroup; n < tiles; n += stride) {
    const int stage = ring_slot<kStages>(n);
    barrier_wait(&s.keys_full[stage], ring_parity<kStages>(n));
    float d[kQueries * 32];
    const uint32_t keys = shared_address(s.keys[stage]);
    // In turns: while one warpgroup's products run, the other reduces; left alone both would do the same at a time.
    if (kQueries == 4 && (warpgroup == 1 || n > 0)) group_barrier(1 + warpgroup, 256);
    product_fence();
#pragma unroll
    for (int step = 0; step < kIndexDim / 16; ++step) {
      const uint32_t inside = step % 4 * 32;
      wgmma<kColumnsContracted, kColumnsContracted>(
          d, tile_descriptor(keys + step / 4 * kKeyHalfBytes + inside),
          tile_descriptor(q + step / 4 * Shared<kQueries>::kHalfBytes + inside), step > 0);
    }
    product_commit();
    if (kQueries == 4 && (warpgroup == 0 || n + 1 < tiles)) group_arrive(2 - warpgroup, 256);
    product_wait<0>();
    pin(d);
    barrier_arrive_if(lane == 0, shared_address(&s.keys_empty[stage]));
    float upper[kQueries], lower[kQueries];
#pragma unroll
    for (int j = 0; j < kQueries; ++j) weigh(d + 32 * j, w[j], upper[j], lower[j]);
    float* to = out + (first_tile + n * static_cast<int>(gridDim.y)) * kIndexTile;
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
}

template <int kQueries>
__global__ void __launch_bounds__(kThreads, 1)
    scores_kernel(const __grid_constant__ Arguments p, const __grid_constant__ CUtensorMap queries,
                  const __grid_constant__ CUtensorMap keys) {
  extern __shared__ __align__(1024) uint8_t raw[];
  using S = Shared<kQueries>;
  S& s = *reinterpret_cast<S*>(raw);
  constexpr int kGroupRows = kQueries == 4 ? 8 : 1;
  const Walk walk = walk_of(p, kGroupRows);
  if (walk.tiles <= 0) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kCopies; ++i) barrier_init(&s.q_full[i], 1);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.keys_full[i], 1);
      barrier_init(&s.keys_empty[i], kQueries == 4 ? 8 : 4);  // warps
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<24>();
    if (threadIdx.x != 0) return;
    const auto load_queries = [&](int copy) {
      const uint32_t full = shared_address(&s.q_full[copy]);
      barrier_arrive_expect(full, sizeof(s.q[copy]));
      for (int half = 0; half < 2; ++half)
        copy_tensor_2d(shared_address(s.q[copy][half]), &queries, half * kHalfColumns,
                       (walk.group * kGroupRows + copy * kQueries) * kIndexHeads, full);
    };
    const auto load_keys = [&](int n) {
      const int stage = ring_slot<kStages>(n);
      const int entry =
          __ldg(p.groups.tile_first + walk.tile_begin + walk.first_tile + n * static_cast<int>(gridDim.y));
      barrier_wait(&s.keys_empty[stage], ring_parity<kStages>(n) ^ 1);
      const uint32_t full = shared_address(&s.keys_full[stage]);
      barrier_arrive_expect(full, kKeyBytes);
      for (int half = 0; half < 2; ++half)
        copy_tensor_2d(shared_address(s.keys[stage]) + half * kKeyHalfBytes, &keys, half * kHalfColumns, entry, full);
    };
    load_keys(0);
    for (int copy = 0; copy < S::kCopies; ++copy) load_queries(copy);
    for (int n = 1; n < walk.tiles; ++n) load_keys(n);
  } else {
    take_registers<240>();
    consume<kQueries>(s, p, walk.group, walk.first_tile, walk.tiles);
  }
}

CUtensorMap bf16_map(const void* matrix, int rows, int box_rows) {
  return matrix_map(matrix, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, rows, kIndexDim, box_rows, kHalfColumns,
                    CU_TENSOR_MAP_SWIZZLE_128B);
}

template <int kQueries>
cudaError_t launch(const IndexSelection& s, const Arguments& a, int splits, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(scores_kernel<kQueries>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 sizeof(Shared<kQueries>));
  if (error != cudaSuccess) return error;
  scores_kernel<kQueries><<<dim3(a.last_group - a.first_group, splits), kThreads, sizeof(Shared<kQueries>), stream>>>(
      a, bf16_map(s.q, s.groups->rows * kIndexHeads, Shared<kQueries>::kColumns),
      bf16_map(s.keys, s.entries, kIndexTile));
  return cudaGetLastError();
}

}  // namespace

cudaError_t scores_of_bf16(const IndexSelection& s, const Arguments& a, int splits, cudaStream_t stream) {
  return s.groups->group_rows == 8 ? launch<4>(s, a, splits, stream) : launch<1>(s, a, splits, stream);
}

}  // namespace indexer
}  // namespace plumb::kernels
