// Of the record of an index vector (indexer.h).
#pragma once
#include <cuda_runtime.h>

#include "kernels/indexer/indexer.h"

namespace plumb::kernels {

// 2^(exponent of block b - the largest one); below FP32's range 0.
__device__ __forceinline__ float relative_power(const IndexTail& tail, int b) {
  const int exponent = static_cast<int>(tail.exponents >> 8 * b & 255);
  const int largest = static_cast<int>(__float_as_uint(tail.power) >> 23);
  return __uint_as_float(static_cast<uint32_t>(max(127 + exponent - largest, 0)) << 23);
}

}  // namespace plumb::kernels
