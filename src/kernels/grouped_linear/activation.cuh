// The arithmetic between two products, the same instructions in every kernel that does it: clamped SwiGLU with the
// route weight; quantisation is in hopper/numbers.cuh.
#pragma once
#include <cstdint>

#include "kernels/hopper/numbers.cuh"
#include "kernels/hopper/shared_memory.cuh"

namespace plumb::kernels {

// g / (1 + exp(-g)) * u * weight after the clamps, relative error below 2^-19 for |g| < 20: well under the bf16
// rounding that follows. No contraction: explicit roundings make the bits independent of the surrounding code.
__device__ __forceinline__ float swiglu(float g, float u, float limit, float weight) {
  g = min_nan(g, limit);
  u = max_nan(min_nan(u, limit), -limit);
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(g, -1.4426950408889634f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(__fadd_rn(1.0f, e)));
  return __fmul_rn(__fmul_rn(__fmul_rn(g, r), u), weight);
}
// Pairs of bf16.
__device__ __forceinline__ uint32_t swiglu_pair(uint32_t gate, uint32_t up, float limit, float weight) {
  return hopper::pack_bf16(swiglu(low_bf16(gate), low_bf16(up), limit, weight),
                           swiglu(high_bf16(gate), high_bf16(up), limit, weight));
}

}  // namespace plumb::kernels
