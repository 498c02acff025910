// What the two kernels of few_outputs share: the problem, which rows and weights a block has, and the step of 32 of K.
#pragma once
#include "kernels/hopper/mma.cuh"
#include "kernels/launch.cuh"
#include "kernels/row_linear/planes.cuh"

namespace plumb::kernels::row_linear {

constexpr int kParts = 8;  // of K, added in order

struct Problem {
  const uint16_t* x;
  const int *source_row, *first_row;
  int rows, groups, n, k;
  const uint16_t* planes;
  Adapters adapters;
  float* out;
};
struct Rows {
  int group, first, count;
};

// Group g's blocks of block_rows start at block first_row[g] / block_rows + g: the ranges of groups do not overlap, and
// a few blocks find no rows.
__device__ __forceinline__ Rows rows_of_block(const Problem& p, int block, int block_rows, int lane) {
  if (!p.first_row) return {0, block * block_rows, min(block_rows, p.rows - block * block_rows)};
  int group = 0;
  for (int g = lane; g < p.groups; g += 32)
    if (p.first_row[g] / block_rows + g <= block) group = max(group, g);
  group = __reduce_max_sync(~0u, group);
  const int begin = p.first_row[group], end = p.first_row[group + 1];
  const int first = begin + (block - begin / block_rows - group) * block_rows;
  return {group, first, min(block_rows, end - first)};
}
// Whether one of the rows uses the adapter; the same in all lanes.
__device__ __forceinline__ bool uses_adapter(const Problem& p, const Rows& mine, int adapter, int lane) {
  if (!p.adapters.of_row) return true;
  bool used = false;
  for (int i = lane; i < mine.count; i += 32) used |= p.adapters.of_row[mine.first + i] == adapter;
  return __any_sync(~0u, used);
}
__device__ __forceinline__ const uint16_t* weights_of(const Problem& p, const Rows& mine, int adapter) {
  return (p.adapters.of_row ? p.adapters.planes[adapter] : p.planes) +
         static_cast<size_t>(mine.group) * kPlanes * padded(p.n) * p.k;
}

// d[m] += rows r and r + 8 of row tile m, a lane's eight of K in each, times the same eight of its weight. First all
// first halves, so that products that follow each other belong to different sums.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void multiply_step(float (&d)[kRowTiles][kTiles][4], int tile,
                                              const uint4 (&a)[2 * kRowTiles], const uint4& w) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
    hopper::multiply_16x8(d[m][tile], a[2 * m].x, a[2 * m + 1].x, a[2 * m].y, a[2 * m + 1].y, w.x, w.y);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
    hopper::multiply_16x8(d[m][tile], a[2 * m].z, a[2 * m + 1].z, a[2 * m].w, a[2 * m + 1].w, w.z, w.w);
}

}  // namespace plumb::kernels::row_linear
