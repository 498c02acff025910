// main of every GPU test: without a Hopper GPU the tests are skipped (exit code 77, which CTest reports as skipped).
// --portable: what has portable kernels (kernels/portable) computes with these.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string_view>

#include "kernels/device.h"

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);  // lines appear even if a kernel hangs
  testing::InitGoogleTest(&argc, argv);
  cudaDeviceProp device;
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major != 9 || device.minor != 0) {
    std::printf("skipped: no GPU of compute capability 9.0\n");
    return 77;
  }
  plumb::kernels::use_portable_for_test(argc > 1 && std::string_view(argv[1]) == "--portable");
  return RUN_ALL_TESTS();
}
