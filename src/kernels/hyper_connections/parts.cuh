// What the kernels of this folder share.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/device.h"
#include "kernels/hopper/mma.cuh"
#include "kernels/hopper/vectors.cuh"
#include "kernels/hyper_connections/hyper_connections.h"

namespace plumb::kernels::hyper {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kSlice = 256;               // channels of a block that walks over tokens
constexpr int kSums = kHyperOutputs + 1;  // of a token: the mapping's outputs, and the sum of squares

inline bool wrong_shape(int rows, int width) { return rows < 0 || width <= 0 || width % kSlice != 0 || width > 8192; }

// Blocks of a kernel that walks over tokens: as many a slice as fit, each taking every gridDim.x / slices-th step.
inline int walking_blocks(int width, int steps) {
  const int slices = width / kSlice, groups = multiprocessors() / slices;
  return slices * (groups < 1 ? 1 : groups < steps ? groups : steps);
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
