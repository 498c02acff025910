// The last step of a weight's gradient, for norms and what rotates after them.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>

#include "kernels/hopper/launch_order.cuh"
#include "kernels/launch.cuh"

namespace plumb::kernels {

// d[i] += the sum of partial[0 .. count)[i]: what blocks of rows leave of a weight's gradient. A warp adds a run of
// them in order, then the runs are added in order. A block has 32 channels.
constexpr int kPartialSumThreads = 512;
static __global__ void __launch_bounds__(kPartialSumThreads)
    add_partial_sums(const float* partial, int count, int width, float* d) {
  hopper::take_turn();
  constexpr int kRuns = kPartialSumThreads / 32;
  __shared__ float sums[kRuns][32];
  const int run = threadIdx.x / 32, lane = threadIdx.x % 32, channel = blockIdx.x * 32 + lane;
  float sum = 0;
#pragma unroll 16
  for (int i = count * run / kRuns; i < count * (run + 1) / kRuns; ++i)
    sum += partial[static_cast<size_t>(i) * width + channel];
  sums[run][lane] = sum;
  __syncthreads();
  if (run != 0) return;
#pragma unroll
  for (int r = 1; r < kRuns; ++r) sum += sums[r][lane];
  d[channel] += sum;
}

}  // namespace plumb::kernels
