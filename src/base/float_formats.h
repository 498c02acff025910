// The narrow number formats of the model, one scalar at a time: bf16, FP8 e4m3, FP4 e2m1 and the power-of-two scale
// e8m0. Source: spec/model.md 2.2; ties go to even everywhere. Exhaustively tested against ml-dtypes (tests/base).
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace plumb {

inline float bf16_to_float(uint16_t b) { return std::bit_cast<float>(static_cast<uint32_t>(b) << 16); }
inline uint16_t float_to_bf16(float f) {  // nearest even; NaN stays NaN
  const uint32_t u = std::bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
inline float round_bf16(float f) { return bf16_to_float(float_to_bf16(f)); }

// 2^e for -126 <= e <= 127.
inline float exp2_int(int e) { return std::bit_cast<float>(static_cast<uint32_t>(e + 127) << 23); }

// e8m0: value 2^(code-127); code 255 is NaN, code 0 is 2^-127 (subnormal in FP32).
inline float e8m0_to_float(uint8_t code) {
  if (code == 255) return std::numeric_limits<float>::quiet_NaN();
  return code == 0 ? std::bit_cast<float>(0x00400000u) : std::bit_cast<float>(static_cast<uint32_t>(code) << 23);
}

// Smallest power of two >= x, for finite normal x > 0.
inline float pow2_ceil(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((u + 0x007fffffu) & 0x7f800000u);
}
inline uint8_t pow2_to_e8m0(float power) { return static_cast<uint8_t>(std::bit_cast<uint32_t>(power) >> 23); }

// Nearest multiple of the grid with `mantissa_bits` bits whose exponent is at least `lowest` (below that evenly
// spaced). Magnitudes above the format's largest value must be clamped by the caller.
inline float round_to_grid(float x, int lowest, int mantissa_bits) {
  if (x == 0 || !std::isfinite(x)) return x;
  int exponent = static_cast<int>((std::bit_cast<uint32_t>(x) >> 23) & 0xffu) - 127;
  if (exponent < lowest) exponent = lowest;
  const float step = exp2_int(exponent - mantissa_bits);
  return std::nearbyintf(x / step) * step;  // x / step is exact: a division by a power of two
}
inline float round_e4m3(float x) { return round_to_grid(x, -6, 3); }
inline float round_e2m1(float x) { return round_to_grid(x, 0, 1); }

float e4m3_to_float(uint8_t code);  // 0x7f and 0xff are NaN
uint8_t float_to_e4m3(float x);     // nearest even, saturating at 448; NaN -> 0x7f
float e2m1_to_float(uint8_t nibble);
uint8_t float_to_e2m1(float x);  // nearest even, saturating at 6

// Scales of the dynamic quantisers, spec 2.2: the power of two at or above amax / largest value of the format.
inline float fp8_scale(float amax) { return pow2_ceil((amax < 1e-4f ? 1e-4f : amax) * (1.0f / 448.0f)); }
inline float fp4_scale(float amax) {
  constexpr float floor = 6 * 0x1p-126f;
  return pow2_ceil((amax < floor ? floor : amax) * (1.0f / 6.0f));
}

}  // namespace plumb
