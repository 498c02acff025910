// A weight of FP32 as three bf16 numbers, high + middle + low: what few_outputs and the mHC mapping read.
#pragma once
#include <cuda_bf16.h>

#include "kernels/grouped_linear/weight_format.h"
#include "kernels/launch.cuh"
#include "kernels/row_linear/row_linear.h"

namespace plumb::kernels::row_linear {

constexpr int kPlanes = 3;

__host__ __device__ constexpr int padded(int n) { return (n + 7) / 8 * 8; }

__host__ __device__ inline size_t items_of(const Split& p) {
  return static_cast<size_t>(p.groups) * (padded(p.n) / 8) * (p.k / 2);
}
inline void check_planes(const Split& p) {
  require(p.groups > 0 && p.n > 0 && p.k > 0 && p.k % 2 == 0 &&
              (!p.source.gate_up || p.k % grouped_linear::kRecordRows == 0) && aligned(p.weight, 16) &&
              aligned(p.to, 4),
          "row_linear: split_weight",
          "groups, n and k must be positive, k even (gate and up: a multiple of 256), the weight aligned to 16 bytes");
}

// Item i: two neighbours of K of eight outputs.
__device__ __forceinline__ void split_item(const Split& p, size_t i) {
  const int pairs = p.k / 2, tiles = padded(p.n) / 8, place = static_cast<int>(i % pairs) * 2;
  const int first = static_cast<int>(i / pairs % tiles) * 8;
  const size_t group = i / pairs / tiles, plane = static_cast<size_t>(padded(p.n)) * p.k;
  float v[2][8] = {};
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const int at = p.source.gate_up ? grouped_linear::natural_row(place + b, p.k) : place + b;
    const float* from =
        p.weight + (p.source.transposed ? (group * p.k + at) * p.n + first : (group * p.n + first) * p.k + at);
    if (p.source.transposed && p.n % 4 == 0) {
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        if (first + j >= p.n) break;
        const float4 four = __ldg(reinterpret_cast<const float4*>(from + j));
        v[b][j] = four.x, v[b][j + 1] = four.y, v[b][j + 2] = four.z, v[b][j + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (first + j < p.n) v[b][j] = __ldg(from + (p.source.transposed ? j : static_cast<size_t>(j) * p.k));
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float low = __fmul_rn(v[0][j], p.scale), high = __fmul_rn(v[1][j], p.scale);
#pragma unroll
    for (int part = 0; part < kPlanes; ++part) {
      const __nv_bfloat162 rounded = __floats2bfloat162_rn(low, high);
      *reinterpret_cast<__nv_bfloat162*>(p.to + (group * kPlanes + part) * plane +
                                         static_cast<size_t>(first + j) * p.k + place) = rounded;
      low = __fsub_rn(low, __low2float(rounded)), high = __fsub_rn(high, __high2float(rounded));
    }
  }
}

}  // namespace plumb::kernels::row_linear
