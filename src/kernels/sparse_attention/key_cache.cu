// Keys into the FP8 form of a cache. A warp has a row: eight channels a lane and column half.
#include "kernels/hopper/vectors.cuh"
#include "kernels/sparse_attention/sparse_attention.h"

namespace plumb::kernels {
namespace attention {
namespace {

constexpr int kWarps = 8;

__global__ void __launch_bounds__(32 * kWarps)
    store_kernel(const uint4* keys, const int* slot, int rows, uint8_t* cache) {
  const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  uint8_t* to = cache + static_cast<size_t>(slot ? slot[row] : row) * kFp8KeyBytes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 x = __ldg(keys + static_cast<size_t>(row) * (kAttentionDim / 8) + half * 32 + lane);
    uint32_t top = max_magnitude(max_magnitude(max_magnitude(max_magnitude(0, x.x), x.y), x.z), x.w);
#pragma unroll
    for (int step = 4; step; step /= 2) top = max_magnitude(top, __shfl_xor_sync(~0u, top, step));  // 64 channels
    const float scale = fp8_scale(largest_of_pair(top)), inverse = inverse_of_power(scale);
    if (half == 1 && lane >= 24) {
      reinterpret_cast<uint4*>(to + kFp8KeyCodes)[lane - 24] = x;
    } else {
      reinterpret_cast<uint2*>(to + half * 256)[lane] =
          make_uint2(quantise_four(x.x, x.y, inverse), quantise_four(x.z, x.w, inverse));
      if (lane % 8 == 0) to[kFp8KeyScales + half * 4 + lane / 8] = static_cast<uint8_t>(__float_as_uint(scale) >> 23);
    }
  }
  if (lane < kFp8KeyBytes - kFp8KeyScales - 7) to[kFp8KeyScales + 7 + lane] = 0;
}

}  // namespace
}  // namespace attention

cudaError_t store_fp8_keys(const void* keys, const int* slot, int rows, void* cache, cudaStream_t stream) {
  using namespace attention;
  if (rows < 0) return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  store_kernel<<<(rows + kWarps - 1) / kWarps, 32 * kWarps, 0, stream>>>(static_cast<const uint4*>(keys), slot, rows,
                                                                         static_cast<uint8_t*>(cache));
  return cudaGetLastError();
}

}  // namespace plumb::kernels
