// What the kernels of few_outputs share: the problem, which rows and weights a block has, and the step of 32 of K.
#pragma once
#include "kernels/hopper/mma.cuh"
#include "kernels/launch.cuh"
#include "kernels/row_linear/planes.cuh"

namespace plumb::kernels::row_linear {

constexpr int kParts = 8;                        // of K, added in order
constexpr int kMostTiles = kMostFewOutputs / 8;  // of a launch

// Eight outputs of one product, or fewer. The products of a launch read the same rows, and nothing else connects their
// tiles.
struct OutputTile {
  const uint16_t* planes;             // of its first output in group 0
  const uint16_t* const* of_adapter;  // or: its product's planes of each adapter, and then where its own begin
  size_t begin, plane;                // from one plane to the next; both in elements
  float* out;                         // [rows, stride], from its first output on
  int columns, stride;
};
struct Problem {
  const uint16_t* x;
  const int *source_row, *first_row;
  int rows, groups, k;
  const int* adapter;  // of a row, or null
  int adapters, tiles;
  OutputTile tile[kMostTiles];
};
struct Rows {
  int group, first, count;
};

// A block takes up to block_rows rows of one group. Group g's blocks start at block first_row[g] / block_rows + g: the
// ranges of groups do not overlap, and a few blocks find no rows. If rows are fewer than that, a block a row: it finds
// some if its row is the first of a block.
__host__ __device__ inline bool block_a_row(const Problem& p, int block_rows) {
  return p.first_row && p.rows < (p.rows + block_rows - 1) / block_rows + p.groups;
}
inline int row_blocks(const Problem& p, int block_rows) {
  return block_a_row(p, block_rows) ? p.rows : (p.rows + block_rows - 1) / block_rows + (p.first_row ? p.groups : 0);
}
__device__ __forceinline__ Rows rows_of_block(const Problem& p, int block, int block_rows, int lane) {
  if (!p.first_row) return {0, block * block_rows, min(block_rows, p.rows - block * block_rows)};
  const bool a_row = block_a_row(p, block_rows);
  int group = 0;
  for (int g = lane; g < p.groups; g += 32)
    if ((a_row ? p.first_row[g] : p.first_row[g] / block_rows + g) <= block) group = max(group, g);
  group = __reduce_max_sync(~0u, group);
  const int begin = p.first_row[group], end = p.first_row[group + 1];
  if (a_row && (block - begin) % block_rows != 0) return {group, block, 0};
  const int first = a_row ? block : begin + (block - begin / block_rows - group) * block_rows;
  return {group, first, min(block_rows, end - first)};
}
// Whether one of the rows uses the adapter; the same in all lanes.
__device__ __forceinline__ bool uses_adapter(const Problem& p, const Rows& mine, int adapter, int lane) {
  if (!p.adapter) return true;
  bool used = false;
  for (int i = lane; i < mine.count; i += 32) used |= p.adapter[mine.first + i] == adapter;
  return __any_sync(~0u, used);
}
__device__ __forceinline__ const uint16_t* weights_of(const OutputTile& tile, int group, int adapter) {
  return (tile.of_adapter ? tile.of_adapter[adapter] + tile.begin : tile.planes) + group * kPlanes * tile.plane;
}

// d[t][m] += rows r and r + 8 of row tile m, a lane's eight of K in each, times the same eight of weight tile t. First
// all first halves, so that products that follow each other belong to different sums.
template <int kTiles, int kRowTiles>
__device__ __forceinline__ void multiply_step(float (&d)[kTiles][kRowTiles][4], const uint4 (&a)[2 * kRowTiles],
                                              const uint4 (&w)[kTiles]) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
      hopper::multiply_16x8(d[t][m], a[2 * m].x, a[2 * m + 1].x, a[2 * m].y, a[2 * m + 1].y, w[t].x, w[t].y);
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
      hopper::multiply_16x8(d[t][m], a[2 * m].z, a[2 * m + 1].z, a[2 * m].w, a[2 * m + 1].w, w[t].z, w[t].w);
}

}  // namespace plumb::kernels::row_linear
