#include "kernels/device.h"

#include <cuda_runtime.h>

namespace plumb::kernels {

int device_count() {
  int n = 0;
  return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}

}  // namespace plumb::kernels
