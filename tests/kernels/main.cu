// main of every GPU test: without a Hopper GPU the tests are skipped (exit code 77, which CTest reports as skipped).
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdio>

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);  // lines appear even if a kernel hangs
  testing::InitGoogleTest(&argc, argv);
  cudaDeviceProp device;
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major != 9 || device.minor != 0) {
    std::printf("skipped: no GPU of compute capability 9.0\n");
    return 77;
  }
  return RUN_ALL_TESTS();
}
