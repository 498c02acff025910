// The rate of the tensor cores on bf16, measured with nothing around the products.
#pragma once
#include "gpu_bench.cuh"
#include "kernels/hopper/barrier.cuh"
#include "kernels/hopper/wgmma_bf16.cuh"

namespace gpu_bench {

// Both operands in shared memory, 64 x 256 x 16 products, two warpgroups an SM: the tensor cores' rate on random data.
constexpr int kPeakSteps = 4096;
__global__ void __launch_bounds__(256, 1) peak_kernel(const uint4* random, float* out) {
  using namespace plumb::kernels::hopper;
  extern __shared__ __align__(1024) uint8_t tile[];
  for (int i = threadIdx.x; i < 4096; i += 256) reinterpret_cast<uint4*>(tile)[i] = random[i];
  async_proxy_fence();
  __syncthreads();
  float d[128] = {};
  const uint32_t base = shared_address(tile);
  for (int step = 0; step < kPeakSteps; step += 4) {
    product_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma<kColumnsContracted, kColumnsContracted>(d, tile_descriptor(base + k * 32),
                                                    tile_descriptor(base + 4 * 8192 + k * 32), true);
    product_commit();
    product_wait<1>();
  }
  product_wait<0>();
  pin(d);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 128; ++i) sum += d[i];
  out[blockIdx.x * 256 + threadIdx.x] = sum;
}
inline double peak_tflops(int processors) {
  Normal<Bf16> random(32768, 9);
  Buffer<float> out(processors * 256);
  check(cudaFuncSetAttribute(peak_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536));
  const double ms = median_ms(9, [&](int) {
    for (int i = 0; i < 4; ++i)
      peak_kernel<<<processors, 256, 65536>>>(reinterpret_cast<const uint4*>(random.data), out.data);
  });
  return 4.0 * processors * 2 * kPeakSteps * 2 * 64 * 256 * 16 / ms * 1e-9;
}

}  // namespace gpu_bench
