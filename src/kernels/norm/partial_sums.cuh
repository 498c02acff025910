// The last step of a weight's gradient, for norms and what rotates after them.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>

namespace plumb::kernels {

// d[i] += the sum of partial[0 .. count)[i] in order: what blocks of rows leave of a weight's gradient. Blocks of 64,
// whose lanes have neighbouring channels.
static __global__ void __launch_bounds__(64) add_partial_sums(const float* partial, int count, int width, float* d) {
  const int channel = blockIdx.x * 64 + threadIdx.x;
  float sum = 0;
#pragma unroll 16
  for (int i = 0; i < count; ++i) sum += partial[static_cast<size_t>(i) * width + channel];
  d[channel] += sum;
}

}  // namespace plumb::kernels
