// Two channels in a register, as bf16.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

namespace plumb::kernels {

using Pair = __nv_bfloat162;
__device__ __forceinline__ Pair as_pair(uint32_t bits) { return *reinterpret_cast<const Pair*>(&bits); }
__device__ __forceinline__ uint32_t bits_of(Pair pair) { return *reinterpret_cast<const uint32_t*>(&pair); }

}  // namespace plumb::kernels
