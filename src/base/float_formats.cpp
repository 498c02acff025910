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
  if (a < 0x1p-6f) return sign | static_cast<uint8_t>(std::nearbyintf(a * 0x1p9f));  // 8 is the first normal code
  const uint32_t u = std::bit_cast<uint32_t>(a);
  const uint32_t kept = (u + 0x7ffffu + (u >> 20 & 1)) >> 20;  // exponent and 3 bits of mantissa, to nearest even
  return sign | static_cast<uint8_t>(kept - (120u << 3));      // the biases differ by 127 - 7
}

float e2m1_to_float(uint8_t nibble) {
  static constexpr float magnitude[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return nibble & 8 ? -magnitude[nibble & 7] : magnitude[nibble & 7];
}

uint8_t float_to_e2m1(float x) {
  const uint8_t sign = std::signbit(x) ? 8 : 0;
  const float a = std::fabs(x);  // NaN compares false: code 0, FP4 has none
  const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return sign | static_cast<uint8_t>(code);  // midpoints belong to the even code
}

}  // namespace plumb
