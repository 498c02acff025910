// Index scores for any GPU. A block has a row's queries and a tile of 64 keys in shared memory; a thread makes the
// products of sixteen heads with one key, in order.
#include <cuda_fp8.h>

#include "kernels/hopper/numbers.cuh"
#include "kernels/indexer/scores.h"
#include "kernels/portable/product.cuh"

namespace plumb::kernels::indexer {
namespace {

constexpr int kThreads = 256, kShares = kThreads / kIndexTile, kPitch = kIndexDim + 2;  // keys in different banks

// Channel c of a vector as bf16, which holds it exactly (indexer.h).
__device__ __forceinline__ uint16_t channel(const void* vectors, IndexForm form, int64_t vector, int c) {
  if (form == IndexForm::bf16) return static_cast<const uint16_t*>(vectors)[vector * kIndexDim + c];
  const uint8_t* record = static_cast<const uint8_t*>(vectors) + vector * kIndexRecordBytes;
  const IndexTail& tail = *reinterpret_cast<const IndexTail*>(record + kIndexDim);
  const float power = __uint_as_float((tail.exponents >> 8 * (c / 32) & 255) << 23);
  return portable::to_bf16(__half2float(__half(__nv_cvt_fp8_to_halfraw(record[c], __NV_E4M3))) * power);
}
// 64 vectors from `first` on; those that do not exist are zeros.
__device__ __forceinline__ void load(uint16_t (&to)[kIndexTile][kPitch], const void* vectors, IndexForm form,
                                     int64_t first, int64_t count) {
  for (int i = threadIdx.x; i < kIndexTile * kIndexDim; i += kThreads) {
    const int64_t vector = first + i / kIndexDim;
    to[i / kIndexDim][i % kIndexDim] = vector < count ? channel(vectors, form, vector, i % kIndexDim) : 0;
  }
}

// Grid: (groups, splits), see Walk.
__global__ void __launch_bounds__(kThreads)
    scores_kernel(const Arguments p, const void* queries, const void* key_vectors, int entries, IndexForm form,
                  int group_rows) {
  static_assert(kIndexHeads == kIndexTile);
  __shared__ __align__(4) uint16_t q[kIndexHeads][kPitch], keys[kIndexTile][kPitch];
  __shared__ float weight[kIndexHeads], part[kShares][kIndexTile];
  const Walk walk = walk_of(p, group_rows);
  const int key = threadIdx.x % kIndexTile, share = threadIdx.x / kIndexTile;
  for (int member = 0; member < group_rows && walk.tiles > 0; ++member) {
    const int row = walk.group * group_rows + member;
    if (row >= p.rows) break;
    __syncthreads();
    load(q, queries, form, int64_t{row} * kIndexHeads, int64_t{p.rows} * kIndexHeads);
    if (threadIdx.x < kIndexHeads) weight[threadIdx.x] = p.w[static_cast<size_t>(row) * kIndexHeads + threadIdx.x];
    float* out = p.scores + static_cast<size_t>(row - p.first_group * group_rows) * p.columns;
    for (int n = 0; n < walk.tiles; ++n) {
      const int tile = walk.first_tile + n * static_cast<int>(gridDim.y);
      __syncthreads();
      load(keys, key_vectors, form, p.groups.tile_first[walk.tile_begin + tile], entries);
      __syncthreads();
      float sum = 0;
      for (int head = share * (kIndexHeads / kShares); head < (share + 1) * (kIndexHeads / kShares); ++head) {
        float product = 0;
#pragma unroll 8
        for (int c = 0; c < kIndexDim; c += 2) {
          const uint32_t a = *reinterpret_cast<const uint32_t*>(&q[head][c]),
                         b = *reinterpret_cast<const uint32_t*>(&keys[key][c]);
          product = fmaf(high_bf16(a), high_bf16(b), fmaf(low_bf16(a), low_bf16(b), product));
        }
        sum = fmaf(weight[head], max_nan(product, 0.f), sum);
      }
      part[share][key] = sum;
      __syncthreads();
      if (threadIdx.x >= kIndexTile) continue;
      for (int other = 1; other < kShares; ++other) sum = __fadd_rn(sum, part[other][key]);
      out[tile * kIndexTile + key] = sum;
    }
  }
}

}  // namespace

cudaError_t scores_portable(const IndexSelection& s, const Arguments& a, int splits, cudaStream_t stream) {
  scores_kernel<<<dim3(a.last_group - a.first_group, splits), kThreads, 0, stream>>>(a, s.q, s.keys, s.entries, s.form,
                                                                                     s.groups->group_rows);
  return cudaGetLastError();
}

}  // namespace plumb::kernels::indexer
