#include "kernels/device.h"

#include <cuda_runtime.h>

#include <atomic>

namespace plumb::kernels {
namespace {

std::atomic<bool> portable_for_test = false;

// An attribute of the current device, -1 where there is none.
int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  const bool known =
      cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&value, which, device) == cudaSuccess;
  return known ? value : -1;
}

}  // namespace

int device_count() {
  int n = 0;
  return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}

bool is_hopper() {
  static const bool found =
      attribute(cudaDevAttrComputeCapabilityMajor) == 9 && attribute(cudaDevAttrComputeCapabilityMinor) == 0;
  return found && !portable_for_test;
}

int multiprocessors() {
  static const int count = attribute(cudaDevAttrMultiProcessorCount);
  return count;
}

int shared_memory_limit() {
  static const int bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return bytes;
}

void use_portable_for_test(bool portable) { portable_for_test = portable; }

}  // namespace plumb::kernels
