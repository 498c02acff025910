// How an op of src/ops hands over to its kernel: PLUMB_ON_GPU(x, call); returns gpu::call if x is on the device.
#pragma once
#ifdef PLUMB_HAS_CUDA
#include "ops/gpu/gpu_ops.h"
#define PLUMB_ON_GPU(x, call) \
  if ((x).on_device()) return gpu::call
#else
// Without CUDA no tensor can be on a device (base/tensor.h).
#define PLUMB_ON_GPU(x, call) static_cast<void>(0)
#endif
