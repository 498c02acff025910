#include "base/float_formats.h"

namespace plumb {

float e4m3_to_float(uint8_t code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  float value = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                              : (1.0f + static_cast<float>(mantissa) / 8.0f) * exp2_int(exponent - 7);
  if ((code & 0x7f) == 0x7f) value = std::numeric_limits<float>::quiet_NaN();
  return code & 0x80 ? -value : value;
}

uint8_t float_to_e4m3(float x) {
  if (std::isnan(x)) return 0x7f;
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float a = std::fabs(x);
  if (a >= 448.0f) return sign | 0x7e;
  const float r = round_e4m3(a);
  if (r == 0) return sign;
  const int exponent = static_cast<int>(std::bit_cast<uint32_t>(r) >> 23) - 127;
  if (exponent < -6) return sign | static_cast<uint8_t>(r * 0x1p9f);
  const int mantissa = static_cast<int>((std::bit_cast<uint32_t>(r) >> 20) & 7);
  return sign | static_cast<uint8_t>((exponent + 7) << 3 | mantissa);
}

float e2m1_to_float(uint8_t nibble) {
  static constexpr float magnitude[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return nibble & 8 ? -magnitude[nibble & 7] : magnitude[nibble & 7];
}

uint8_t float_to_e2m1(float x) {
  const uint8_t sign = std::signbit(x) ? 8 : 0;
  const float a = std::fabs(x);
  const float r = a >= 6.0f ? 6.0f : round_e2m1(a);
  for (uint8_t c = 0; c < 8; ++c)
    if (e2m1_to_float(c) == r) return sign | c;
  return sign;  // NaN: FP4 has none
}

}  // namespace plumb
