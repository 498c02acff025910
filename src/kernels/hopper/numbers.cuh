// Number formats in registers: pairs of bf16, and quantisation to e4m3 with a power-of-two scale for a block.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace plumb::kernels {

__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// min and max that keep a NaN.
__device__ __forceinline__ float min_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// Running maximum of magnitudes over pairs of bf16.
__device__ __forceinline__ uint32_t max_magnitude(uint32_t running, uint32_t pair) {
  const __nv_bfloat162 r =
      __hmax2(*reinterpret_cast<__nv_bfloat162*>(&running), __habs2(*reinterpret_cast<__nv_bfloat162*>(&pair)));
  return *reinterpret_cast<const uint32_t*>(&r);
}
__device__ __forceinline__ float largest_of_pair(uint32_t pair) { return fmaxf(low_bf16(pair), high_bf16(pair)); }

// The smallest power of two at or above max(amax, 1e-4) / 448.
__device__ __forceinline__ float fp8_scale(float amax) {
  const uint32_t bits = __float_as_uint(__fmul_rn(fmaxf(amax, 1e-4f), 1.0f / 448.0f));
  return __uint_as_float((bits + 0x007fffffu) & 0x7f800000u);
}
__device__ __forceinline__ float inverse_of_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

// Two pairs of bf16 times `inverse` to four e4m3, nearest even, saturating; first value in the low byte.
__device__ __forceinline__ uint32_t quantise_four(uint32_t first, uint32_t second, float inverse) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(low_bf16(first) * inverse, high_bf16(first) * inverse),
                                                __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(low_bf16(second) * inverse, high_bf16(second) * inverse),
                                                 __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

}  // namespace plumb::kernels
