// What the kernels of this folder share.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/hopper/vectors.cuh"
#include "kernels/hyper_connections/hyper_connections.h"

namespace plumb::kernels::hyper {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kSlice = 256;               // channels of a block that walks over tokens
constexpr int kSums = kHyperOutputs + 1;  // of a token: the mapping's outputs, and the sum of squares

inline bool wrong_shape(int rows, int width) { return rows < 0 || width <= 0 || width % kSlice != 0 || width > 8192; }

inline int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// Blocks of a kernel that walks over tokens: as many a slice as fit, each taking every gridDim.x / slices-th step.
inline int walking_blocks(int width, int steps) {
  const int slices = width / kSlice, groups = multiprocessors() / slices;
  return slices * (groups < 1 ? 1 : groups < steps ? groups : steps);
}

// d += a b, 16 x 8, k = 16, bf16 operands. `a` has rows 0-7 (a[0], a[2]) and 8-15 (a[1], a[3]).
__device__ __forceinline__ void product_16x8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two weights as three pairs of bf16, largest part first; the sum of the parts is the weight.
__device__ __forceinline__ void split_pair(float x, float y, uint32_t (&part)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    part[i] = hopper::pack_bf16(x, y);
    x -= low_bf16(part[i]), y -= high_bf16(part[i]);
  }
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

}  // namespace plumb::kernels::hyper
