// What the passes over a backward's items share with the kernels around them (backward_parts.cuh): the workspace, and
// how terms are counted.
#pragma once

#include "kernels/sparse_attention/tile.cuh"

namespace plumb::kernels::attention {

constexpr float kBoundUnit = 16384.f;            // bounds count 2^14 steps of the fixed-point format
constexpr float kLargestUnits = 274877906944.f;  // 2^38: a term's units saturate here, so that sums fit 64 bits

struct Control {
  uint32_t run;                      // the next pass of the main kernel is needed
  float scale;                       // of its fixed-point sums, a power of two
  uint32_t largest_input;            // bits of max |dO| over the sample
  uint32_t largest_term;             // bits of the largest |term| of the pass, NaN if one was NaN
  unsigned long long largest_bound;  // over rows
};

struct Workspace {
  Control* control;
  float* delta;               // [queries, heads] D
  float* sink_partial;        // [ceil(queries / 128), heads]
  int* sums;                  // [rows, 512] fixed point
  unsigned long long* bound;  // [rows]
  uint8_t* end;
};

__host__ __device__ inline int item_count(const SparseAttentionBackward& p) {
  return p.queries * (p.heads / kTileHeads);
}

__device__ __forceinline__ unsigned long long bound_units(float largest, float scale) {
  return __float2ull_rd(fminf(largest * scale * (1.f / kBoundUnit), kLargestUnits)) + 1;
}

}  // namespace plumb::kernels::attention
