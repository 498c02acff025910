#include "checkpoint/codecs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/float_formats.h"
#include "base/parallel.h"

namespace plumb {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

const std::array<float, 256>& e4m3_table() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> t{};
    for (int c = 0; c < 256; ++c) t[c] = e4m3_to_float(static_cast<uint8_t>(c));
    return t;
  }();
  return table;
}

// Smallest power of two s with amax / s <= largest, not below 2^-126. A block of zeros gets the scale that the
// activation quantiser gives it (zero_scale), by custom.
float block_scale(float amax, float largest, float zero_scale) {
  if (amax == 0) return zero_scale;
  return pow2_ceil(std::max(amax / largest, 0x1p-126f));
}

void require_matrix(const Tensor& w, const std::string& where) {
  if (w.dim() != 2) fail(where, "shape " + to_string(w.shape()) + " is no matrix, only matrices have block scales");
}

// amax of rows [r0, r1), columns [c0, c1); refuses values that no format holds.
float block_amax(const Tensor& w, int64_t r0, int64_t r1, int64_t c0, int64_t c1, const std::string& where) {
  float amax = 0;
  for (int64_t r = r0; r < r1; ++r) {
    const float* row = w.f32() + r * w.size(1);
    for (int64_t c = c0; c < c1; ++c) {
      if (!std::isfinite(row[c]))
        fail(where, "element [" + std::to_string(r) + "," + std::to_string(c) + "] is " + std::to_string(row[c]),
             "a quantised format cannot hold it: repair the checkpoint or keep the format");
      amax = std::max(amax, std::fabs(row[c]));
    }
  }
  return amax;
}

Weight encode_fp8(const Tensor& w, const std::string& where) {
  const int64_t out = w.size(0), in = w.size(1), blocks = ceil_div(in, fp8_block);
  Weight q{Tensor::empty({out, in}, DType::f8_e4m3), Tensor::empty(scale_shape(Codec::fp8, out, in), DType::f8_e8m0)};
  uint8_t *data = q.data.ptr<uint8_t>(), *scale = q.scale.ptr<uint8_t>();
  parallel_for(ceil_div(out, fp8_block), 1, [&](int64_t begin, int64_t end) {
    for (int64_t band = begin; band < end; ++band)
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t r0 = band * fp8_block, r1 = std::min(out, r0 + fp8_block);
        const int64_t c0 = b * fp8_block, c1 = std::min(in, c0 + fp8_block);
        const float s = block_scale(block_amax(w, r0, r1, c0, c1, where), 448, fp8_scale(0));
        scale[band * blocks + b] = pow2_to_e8m0(s);
        for (int64_t r = r0; r < r1; ++r)
          for (int64_t c = c0; c < c1; ++c) data[r * in + c] = float_to_e4m3(w.f32()[r * in + c] / s);
      }
  });
  return q;
}

Weight encode_fp4(const Tensor& w, const std::string& where) {
  const int64_t out = w.size(0), in = w.size(1), groups = ceil_div(in, fp4_group);
  if (in % 2 != 0) fail(where, "FP4 packs pairs of inputs, shape " + to_string(w.shape()) + " has an odd number");
  Weight q{Tensor::empty({out, in / 2}, DType::i8), Tensor::empty({out, groups}, DType::f8_e8m0)};
  uint8_t *data = q.data.ptr<uint8_t>(), *scale = q.scale.ptr<uint8_t>();
  parallel_for(out, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t c0 = g * fp4_group, c1 = std::min(in, c0 + fp4_group);
        const float s = block_scale(block_amax(w, r, r + 1, c0, c1, where), 6, fp4_scale(0));
        scale[r * groups + g] = pow2_to_e8m0(s);
        const float* row = w.f32() + r * in;
        for (int64_t c = c0; c < c1; c += 2)
          data[(r * in + c) / 2] = static_cast<uint8_t>(float_to_e2m1(row[c] / s) | float_to_e2m1(row[c + 1] / s) << 4);
      }
  });
  return q;
}

void decode_fp8_row(const Weight& w, int64_t r, float* out) {
  const int64_t in = w.data.size(1);
  const uint8_t* row = w.data.ptr<uint8_t>() + r * in;
  const uint8_t* scale = w.scale.ptr<uint8_t>() + r / fp8_block * w.scale.size(1);
  const auto& value = e4m3_table();
  for (int64_t b = 0; b * fp8_block < in; ++b) {
    const float s = e8m0_to_float(scale[b]);
    for (int64_t c = b * fp8_block; c < std::min(in, (b + 1) * fp8_block); ++c) out[c] = value[row[c]] * s;
  }
}

void decode_fp4_row(const Weight& w, int64_t r, float* out) {
  const int64_t in = 2 * w.data.size(1);
  const uint8_t* row = w.data.ptr<uint8_t>() + r * w.data.size(1);
  const uint8_t* scale = w.scale.ptr<uint8_t>() + r * w.scale.size(1);
  for (int64_t g = 0; g * fp4_group < in; ++g) {
    const float s = e8m0_to_float(scale[g]);
    for (int64_t c = g * fp4_group; c < std::min(in, (g + 1) * fp4_group); c += 2) {
      out[c] = e2m1_to_float(row[c / 2] & 15) * s;
      out[c + 1] = e2m1_to_float(row[c / 2] >> 4) * s;
    }
  }
}
}  // namespace

const char* codec_name(Codec c) {
  constexpr const char* names[] = {"fp32", "bf16", "fp8", "fp4"};
  return names[static_cast<int>(c)];
}

DType data_dtype(Codec c) {
  constexpr DType types[] = {DType::f32, DType::bf16, DType::f8_e4m3, DType::i8};
  return types[static_cast<int>(c)];
}

Shape data_shape(Codec c, int64_t out, int64_t in) { return {out, c == Codec::fp4 ? in / 2 : in}; }

Shape scale_shape(Codec c, int64_t out, int64_t in) {
  if (c == Codec::fp8) return {ceil_div(out, fp8_block), ceil_div(in, fp8_block)};
  if (c == Codec::fp4) return {out, ceil_div(in, fp4_group)};
  return {};
}

Codec codec_of(DType data) {
  switch (data) {
    case DType::f32:
      return Codec::f32;
    case DType::bf16:
      return Codec::bf16;
    case DType::f8_e4m3:
      return Codec::fp8;
    case DType::i8:
    case DType::u8:
      return Codec::fp4;
    default:
      fail("weight", std::string("dtype ") + dtype_name(data) + " is no weight format",
           "weights are stored as F32, BF16, F8_E4M3 or I8 (packed FP4)");
  }
}

Tensor decode(const Weight& w) {
  const Codec codec = codec_of(w.data.dtype());
  if (codec == Codec::f32) return w.data;
  if (codec == Codec::bf16) {
    Tensor t = Tensor::empty(w.data.shape());
    const uint16_t* from = w.data.ptr<uint16_t>();
    float* to = t.f32();
    parallel_for(t.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = bf16_to_float(from[i]);
    });
    return t;
  }
  const int64_t out = w.data.size(0), in = w.data.size(1) * (codec == Codec::fp4 ? 2 : 1);
  PLUMB_CHECK(w.scale.shape() == scale_shape(codec, out, in), to_string(w.data.shape()));
  Tensor t = Tensor::empty({out, in});
  parallel_for(out, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      (codec == Codec::fp8 ? decode_fp8_row : decode_fp4_row)(w, r, t.f32() + r * in);
  });
  return t;
}

Weight encode(const Tensor& w, Codec codec, const std::string& where) {
  if (codec == Codec::f32) return {w, {}};
  if (codec == Codec::bf16) {
    Tensor t = Tensor::empty(w.shape(), DType::bf16);
    const float* from = w.f32();
    uint16_t* to = t.ptr<uint16_t>();
    parallel_for(t.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = float_to_bf16(from[i]);
    });
    return {t, {}};
  }
  require_matrix(w, where);
  return codec == Codec::fp8 ? encode_fp8(w, where) : encode_fp4(w, where);
}

int64_t find_nan_scale(const Tensor& scale) {
  const void* at = std::memchr(scale.raw(), 255, scale.bytes());
  return at ? static_cast<const std::byte*>(at) - scale.raw() : -1;
}

}  // namespace plumb
