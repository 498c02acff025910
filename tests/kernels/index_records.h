// Index vectors on the CPU: values of FP4 with a power of two for each 32 channels, and records of them
// (kernels/indexer/indexer.h) made and read one number at a time.
#pragma once
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "base/float_formats.h"
#include "kernels/indexer/indexer.h"

namespace plumb::kernels {

// Every code of e2m1 is as likely as any other; exponents of blocks are drawn from 0 .. spread.
inline std::vector<float> random_fp4(size_t count, int spread, int seed) {
  constexpr float kValues[] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
  std::mt19937 random(seed);
  std::vector<float> values(count);
  float scale = 1;
  uint32_t bits = 0;
  for (size_t i = 0; i < count; ++i, bits >>= 4) {
    if (i % 32 == 0) scale = std::ldexp(1.0f, static_cast<int>(random() % (spread + 1)));
    if (i % 8 == 0) bits = random();
    values[i] = kValues[bits & 15] * scale;
  }
  return values;
}

// The exponent of a block is the smallest that makes all of its channels multiples of 0.5 up to 6.
inline std::vector<uint8_t> records_of(const std::vector<float>& values) {
  constexpr int kNone = -1000;
  std::vector<uint8_t> records(values.size() / kIndexDim * kIndexRecordBytes);
  for (size_t v = 0; v < values.size() / kIndexDim; ++v) {
    const float* x = &values[v * kIndexDim];
    int exponent[4], high = kNone, low = -kNone;
    for (int b = 0; b < 4; ++b) {
      float top = 0;
      for (int i = 0; i < 32; ++i) top = std::max(top, std::abs(x[32 * b + i]));
      exponent[b] = top > 0 ? static_cast<int>(std::ceil(std::log2(top / 6))) : kNone;
      if (top > 0) high = std::max(high, exponent[b]), low = std::min(low, exponent[b]);
    }
    if (high == kNone) high = 0;
    IndexTail tail{std::ldexp(1.0f, high), 0, 0, 0};
    uint8_t* record = &records[v * kIndexRecordBytes];
    for (int b = 0; b < 4; ++b) {
      const int own = exponent[b] == kNone || high - low <= kFoldedSpan ? high : exponent[b];
      const float step = std::ldexp(0.5f, low), inverse = std::ldexp(1.0f, -own);
      tail.exponents |= static_cast<uint32_t>(own + 127) << 8 * b;
      for (int i = 32 * b; i < 32 * b + 32; ++i) {
        record[i] = __nv_cvt_float_to_fp8(x[i] * inverse, __NV_SATFINITE, __NV_E4M3);
        if (x[i] != 0) tail.length += x[i] / step * (x[i] / step);
      }
    }
    if (high - low > kFoldedSpan) tail.length = INFINITY;
    std::memcpy(record + kIndexDim, &tail, sizeof tail);
  }
  return records;
}

inline IndexTail tail_of(const uint8_t* record) {
  IndexTail tail;
  std::memcpy(&tail, record + kIndexDim, sizeof tail);
  return tail;
}
inline std::vector<uint16_t> values_of_records(const uint8_t* records, size_t vectors) {
  std::vector<uint16_t> values;
  for (size_t v = 0; v < vectors; ++v) {
    const uint8_t* record = records + v * kIndexRecordBytes;
    for (int i = 0; i < kIndexDim; ++i) {
      __nv_fp8_e4m3 code;
      code.__x = record[i];
      values.push_back(float_to_bf16(std::ldexp(
          static_cast<float>(code), static_cast<int>(tail_of(record).exponents >> 8 * (i / 32) & 255) - 127)));
    }
  }
  return values;
}

}  // namespace plumb::kernels
