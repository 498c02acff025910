// The work list of a plan: how its workspace is laid out, and the device's part of filling it.
#pragma once
#include <algorithm>

#include "kernels/device.h"
#include "kernels/grouped_linear/grouped_linear.h"
#include "kernels/grouped_linear/problem.cuh"

namespace plumb::kernels::grouped_linear {

// {count of record tiles, of block tiles, queue}, the stash of the wide kernel, the tiles of 256 weight rows and, for
// the wide kernel, those of 128.
struct Workspace {
  int* counters;
  uint4* stash;
  Tile *record_tiles, *block_tiles;
};
constexpr size_t kCounterBytes = 256;

inline size_t stash_bytes(int width) {
  return width == kWideRows ? static_cast<size_t>(multiprocessors()) * kStashVectors * sizeof(uint4) : 0;
}
inline int64_t tile_capacity(int groups, int rows, int n, int width) {
  // Every group may end in a tile that is not full.
  return (static_cast<int64_t>(rows / width) + std::min(groups, rows)) * (n / kRecordRows);
}
inline Workspace workspace_of(const Plan& plan) {
  auto* bytes = static_cast<uint8_t*>(plan.workspace);
  auto* tiles = reinterpret_cast<Tile*>(bytes + kCounterBytes + stash_bytes(plan.width));
  const int64_t records = tile_capacity(plan.groups, plan.rows, plan.n, plan.width);
  return {reinterpret_cast<int*>(bytes), reinterpret_cast<uint4*>(bytes + kCounterBytes), tiles, tiles + records};
}

// Row tiles that meet all weights of a group before the next ones do: their rows stay in L2.
constexpr int kBandTiles = 16;

// A group's rows, and the tiles that its weight has.
struct GroupTiles {
  int group, first_row, rows, width, weight_tiles;
};
// Lists the tiles of one group, a share of them for each of `threads`. Tiles that share weights follow each other, so
// that blocks which run at the same time share them in L2.
__device__ __forceinline__ void list_tiles(const GroupTiles& g, int thread, int threads, Tile* tiles) {
  const int row_tiles = (g.rows + g.width - 1) / g.width;
  for (int i = thread; i < row_tiles * g.weight_tiles; i += threads) {
    const int band = i / (kBandTiles * g.weight_tiles), in_band = i % (kBandTiles * g.weight_tiles);
    const int band_tiles = min(kBandTiles, row_tiles - band * kBandTiles);
    const int row = (band * kBandTiles + in_band % band_tiles) * g.width;
    tiles[i] = {g.group, g.first_row + row, min(g.width, g.rows - row), in_band / band_tiles};
  }
}

}  // namespace plumb::kernels::grouped_linear
