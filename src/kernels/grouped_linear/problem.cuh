// What the product kernels receive, and what they share.
#pragma once
#include <cuda.h>

#include "kernels/grouped_linear/grouped_linear.h"
#include "kernels/hopper/shared_memory.cuh"
#include "kernels/lora/low_rank.cuh"

namespace plumb::kernels::grouped_linear {

enum class Epilogue { bf16, swiglu };

// One entry of a work list: a weight tile of a group times up to `width` of its activation rows. A weight tile is a
// record row (256 rows), or 128 rows in the wide kernel without SwiGLU: with less to do at a time, tiles that share
// weights run closer together and find them in L2.
struct Tile {
  int group, first_row, rows, weight_tile;
};

struct Problem {
  const uint8_t* records;
  const float* bases;
  const float* token_scales;  // [rows, block_stride]
  const Tile* tiles;
  const int* tile_count;
  int* queue;  // the wide kernel's counter of tiles taken, zero at launch
  int n, k_blocks, block_stride, hidden_stride;
  uint16_t* out;    // Epilogue::bf16
  uint8_t* hidden;  // Epilogue::swiglu
  float* hidden_scales;
  const float* route_weight;
  float limit;
  lora::LowRank low_rank;
  bool settled;  // tiles and weights are older than the launch before this one: see Plan
  uint4* stash;  // the wide kernel's gates on their way to the epilogue, kStashVectors a block
};

constexpr int kWideRows = 256, kWideThreads = 512, kWideConsumers = 256;
constexpr int kStashVectors = 16 * kWideConsumers;  // 256 rows x 128 gates in bf16

// tiles: how many the list can hold.
void launch_wide(WeightFormat format, Epilogue epilogue, int64_t tiles, int multiprocessors, const CUtensorMap& tokens,
                 const CUtensorMap& scales, const Problem& problem, cudaStream_t stream);
void launch_narrow(int width, const Weights& weights, const Activations& activations, Epilogue epilogue, int64_t tiles,
                   const Problem& problem, cudaStream_t stream);
// p.n, p.k_blocks are the weight's; p.out: dx.
void launch_backward_input(WeightFormat format, int64_t tiles, int multiprocessors, const CUtensorMap& dy,
                           const Problem& problem, cudaStream_t stream);
constexpr int kWideScaleBox = 8;   // K blocks that a copy of scales takes
constexpr int kWideTokenBox = 64;  // rows a copy of the wide kernel takes; the narrow kernel takes `width`

// ---- FP4 operands --------------------------------------------------------------------------------------------------
// A thread's codes of one slab and 128 of K, and the two exponent offsets of its rows (upper: bits 0-7, lower: 8-15).
struct RawSlab {
  uint4 first, second;
  uint32_t offsets;
};
__device__ __forceinline__ RawSlab load_slab(uint32_t codes, uint32_t offsets) {
  return {hopper::load_shared_16(codes), hopper::load_shared_16(codes + kSlabCodeBytes / 2),
          hopper::load_shared_2(offsets)};
}
// -> the thread's operand registers of four m64k32 products, four each.
__device__ __forceinline__ void expand_slab(uint32_t (&operand)[16], const RawSlab& raw) {
  const uint32_t words[8] = {raw.first.x,  raw.first.y,  raw.first.z,  raw.first.w,
                             raw.second.x, raw.second.y, raw.second.z, raw.second.w};
  const MagnitudeTable table[2] = {magnitude_table(raw.offsets & 255), magnitude_table(raw.offsets >> 8)};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    operand[4 * (i / 2) + (i & 1)] = expand_first(table[i & 1], words[i]);
    operand[4 * (i / 2) + 2 + (i & 1)] = expand_second(table[i & 1], words[i]);
  }
}

}  // namespace plumb::kernels::grouped_linear
