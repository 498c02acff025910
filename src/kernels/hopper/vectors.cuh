// Rows of bf16 in registers, eight channels (16 bytes) at a time, and sums over a warp and a block in one fixed order.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/hopper/numbers.cuh"
#include "kernels/hopper/shared_memory.cuh"

namespace plumb::kernels {

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
__device__ __forceinline__ void unpack(const uint4& from, float (&to)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = low_bf16(word_of(from, i));
    to[2 * i + 1] = high_bf16(word_of(from, i));
  }
}
__device__ __forceinline__ uint4 pack(const float (&v)[8]) {
  return make_uint4(hopper::pack_bf16(v[0], v[1]), hopper::pack_bf16(v[2], v[3]), hopper::pack_bf16(v[4], v[5]),
                    hopper::pack_bf16(v[6], v[7]));
}
__device__ __forceinline__ float round_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// Eight floats from memory, as two loads.
__device__ __forceinline__ void load_eight(const float* from, float (&to)[8]) {
  const float4 a = __ldg(reinterpret_cast<const float4*>(from)), b = __ldg(reinterpret_cast<const float4*>(from) + 1);
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// to[i] = sum over the warp of v[i]. Lanes first share the values out among them (two sums a shuffle) while their
// number can be halved; the tree is that of warp_sum.
template <int kCount>
__device__ __forceinline__ void warp_sums(float (&v)[kCount], float* to) {
  constexpr int kHalvings = kCount % 4 == 0 ? 2 : kCount % 2 == 0 ? 1 : 0;
  const int lane = threadIdx.x % 32;
  int first = 0;
#pragma unroll
  for (int h = 0; h < kHalvings; ++h) {
    const int half = kCount >> (h + 1);
    const bool upper = lane & (16 >> h);
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float keep = upper ? v[i + half] : v[i], give = upper ? v[i] : v[i + half];
      v[i] = keep + __shfl_xor_sync(~0u, give, 16 >> h);
    }
    first += upper ? half : 0;
  }
#pragma unroll
  for (int step = 16 >> kHalvings; step; step /= 2)
#pragma unroll
    for (int i = 0; i < kCount >> kHalvings; ++i) v[i] += __shfl_xor_sync(~0u, v[i], step);
  if (lane % (32 >> kHalvings) == 0)
#pragma unroll
    for (int i = 0; i < kCount >> kHalvings; ++i) to[first + i] = v[i];
}

// Sum i of a block of kWarps warps; partial [kWarps][count] as warp_sums left them, after __syncthreads.
template <int kWarps>
__device__ __forceinline__ float block_sum(const float* partial, int count, int i) {
  float sum = partial[i];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += partial[w * count + i];
  return sum;
}

// 1 / sqrt(x) in FP64, rounded to FP32: a step of third order from the FP32 approximation, whose error of 2^-22 becomes
// one of FP64's roundings. Far fewer instructions than FP64's root and division, and for every x the same bits
// (tests/kernels/norm_test.cu compares all).
__device__ __forceinline__ float inverse_root(float x) {
  const float guess = rsqrtf(x);
  if (!(guess > 0 && guess < INFINITY)) return guess;  // of infinity, zero, NaN
  const double y = guess, error = fma(-static_cast<double>(x) * y, y, 1.0);
  return static_cast<float>(fma(y * error, fma(error, 0.375, 0.5), y));
}
// (mean(x^2) + eps)^(-1/2) from the sum of squares.
__device__ __forceinline__ float inverse_rms(float square_sum, int width, float eps) {
  return inverse_root(square_sum / static_cast<float>(width) + eps);
}

// FP8 codes of 128-channel blocks, each half of a warp one block, eight channels a lane: values and scales as the
// grouped linear reads them (weight_format.h, k_of_place: four neighbours stay together). All lanes take part.
// values and scales: of the row; channel: first of the lane's eight.
constexpr int fp8_scale_stride(int width) { return (width / 128 + 3) / 4 * 4; }
__device__ __forceinline__ void store_fp8_block(const uint4& x, int channel, uint8_t* values, float* scales) {
  uint32_t top = max_magnitude(max_magnitude(max_magnitude(max_magnitude(0, x.x), x.y), x.z), x.w);
#pragma unroll
  for (int step = 8; step; step /= 2) top = max_magnitude(top, __shfl_xor_sync(~0u, top, step));
  const float scale = fp8_scale(largest_of_pair(top)), inverse = inverse_of_power(scale);
  const int lane = threadIdx.x % 16;
  uint8_t* to = values + channel / 128 * 128 + lane % 4 * 32 + lane / 4 * 4;
  *reinterpret_cast<uint32_t*>(to) = quantise_four(x.x, x.y, inverse);
  *reinterpret_cast<uint32_t*>(to + 16) = quantise_four(x.z, x.w, inverse);
  if (lane == 0) scales[channel / 128] = scale;
}

}  // namespace plumb::kernels
