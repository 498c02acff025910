// The arithmetic between two products, the same instructions in every kernel that does it: clamped SwiGLU with the
// route weight, and quantisation of a block (of a number: hopper/numbers.cuh).
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

// A warp's 128 hidden units of a record, 128 gates and 128 ups (bf16): the four of a lane lie at places 4 lane .. of
// the next product's K, and come from rows 16 (lane % 8) + 2 (lane / 8) + {0, 1} and the same + 8 (place_of_row).
__device__ __forceinline__ uint2 swiglu_record(const uint16_t* gate_up, int lane, float limit, float weight) {
  const uint16_t *gate = gate_up + lane % 8 * 16 + lane / 8 * 2, *up = gate + 128;
  const auto pair = [](const uint16_t* from) { return *reinterpret_cast<const uint32_t*>(from); };
  const uint32_t gates[2] = {pair(gate), pair(gate + 8)}, ups[2] = {pair(up), pair(up + 8)};
  return make_uint2(swiglu_pair(gates[0], ups[0], limit, weight), swiglu_pair(gates[1], ups[1], limit, weight));
}

// Quantises the warp's 128 values, four a lane at places 4 lane ..., and returns the scale.
__device__ __forceinline__ float quantise_block(uint32_t first, uint32_t second, uint8_t* out) {
  float amax = largest_of_pair(max_magnitude(max_magnitude(0, first), second));
#pragma unroll
  for (int step = 16; step; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
  const float scale = fp8_scale(amax);
  reinterpret_cast<uint32_t*>(out)[threadIdx.x % 32] = quantise_four(first, second, inverse_of_power(scale));
  return scale;
}

}  // namespace plumb::kernels
