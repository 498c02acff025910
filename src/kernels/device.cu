#include "kernels/device.h"

#include <cuda_runtime.h>

#include <atomic>

namespace plumb::kernels {
namespace {

std::atomic<bool> portable_for_test = false;

}  // namespace

int device_count() {
  int n = 0;
  return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}

bool is_hopper() {
  static const bool found = [] {
    int device = 0, major = 0, minor = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
           minor == 0;
  }();
  return found && !portable_for_test;
}

void use_portable_for_test(bool portable) { portable_for_test = portable; }

}  // namespace plumb::kernels
