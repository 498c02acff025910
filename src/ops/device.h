// The GPU, seen from the rooms above: whether there is one, and weights in the form in which its kernels read them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "ops/linear.h"
#include "ops/moe.h"

namespace plumb::ops {

struct DeviceStatus {
  bool present = false, usable = false;
  std::string what;          // its name, or why there is none that can be used
  std::string warning = "";  // that its kernels are the portable ones
};
// Looks for a GPU: 9.0 (Hopper) has the fast kernels, everything else from compute capability 8.0 on the portable ones
// (docs/kernels/portable.md). The first call makes its memory available to tensors.
DeviceStatus open_device();
// Bytes of an open device that nobody has asked for.
int64_t free_device_memory();

// Weights on the device. FP8 and FP4 matrices are packed for kernels/grouped_linear; bf16 and FP32 ones are copied.
// Errors name the matrix: FP4 scales that span more exponents than the kernels' e4m3 operands can hold, NaNs, sizes
// that are no multiple of 256 x 128.
Linear upload_linear(const Linear& w, const std::string& name);
// As bf16, into which e4m3 values times a power of two fit exactly.
Linear upload_bf16(const Linear& w, const std::string& name);
// Experts one behind the other, gate and up of each together in w1 (w3 is not defined): see ops/gpu/packed.h.
std::vector<ExpertWeights> upload_experts(const std::vector<ExpertWeights>& experts, const std::string& name);

}  // namespace plumb::ops
