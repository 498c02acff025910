// How an op of src/ops hands over to its kernel: PLUMB_ON_GPU(x, call); returns gpu::call if x is on the device.
#pragma once
#include "ops/gpu/gpu_ops.h"
#ifdef PLUMB_HAS_CUDA
#define PLUMB_ON_GPU(x, call) \
  if ((x).on_device()) return gpu::call
#else
// Without CUDA no tensor can be on a device (base/tensor.h). What is discarded is compiled and needs no definition.
#define PLUMB_ON_GPU(x, call) \
  if constexpr (false) return gpu::call
#endif
