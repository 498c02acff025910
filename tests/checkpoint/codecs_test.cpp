#include "checkpoint/codecs.h"

#include "checkpoint/testing.h"

namespace plumb {
namespace {
using namespace testing_checkpoint;

// Decoded by hand: the formula of the format in double arithmetic, element by element.
double fp8_element(const Weight& w, int64_t r, int64_t c) {
  const uint8_t code = w.data.ptr<uint8_t>()[r * w.data.size(1) + c];
  const int e = code >> 3 & 15, m = code & 7;
  const double value = e == 0 ? std::ldexp(m, -9) : std::ldexp(8 + m, e - 10);
  const uint8_t scale = w.scale.ptr<uint8_t>()[r / 128 * w.scale.size(1) + c / 128];
  return std::ldexp(code & 128 ? -value : value, scale - 127);
}
double fp4_element(const Weight& w, int64_t r, int64_t c) {
  const uint8_t byte = w.data.ptr<uint8_t>()[r * w.data.size(1) + c / 2];
  const int code = c % 2 == 0 ? byte & 15 : byte >> 4;
  const int e = code >> 1 & 3, m = code & 1;
  const double value = e == 0 ? 0.5 * m : std::ldexp(2 + m, e - 2);
  const uint8_t scale = w.scale.ptr<uint8_t>()[r * w.scale.size(1) + c / 32];
  return std::ldexp(code & 8 ? -value : value, scale - 127);
}

Weight random_weight(Codec codec, int64_t out, int64_t in) {
  return {random_tensor({"data", data_dtype(codec), data_shape(codec, out, in)}, 1),
          random_tensor({"scale", DType::f8_e8m0, scale_shape(codec, out, in)}, 2)};
}

TEST(Codecs, DecodeFollowsTheFormatWithPartialBlocks) {
  for (auto [out, in] : {std::pair{128, 128}, {130, 300}, {1, 2}, {257, 96}, {5, 40}}) {
    const Weight w8 = random_weight(Codec::fp8, out, in), w4 = random_weight(Codec::fp4, out, in);
    const Tensor x8 = decode(w8), x4 = decode(w4);
    ASSERT_EQ(x8.shape(), (Shape{out, in}));
    for (int64_t r = 0; r < out; ++r)
      for (int64_t c = 0; c < in; ++c) {
        ASSERT_EQ(x8.f32()[r * in + c], fp8_element(w8, r, c));
        ASSERT_EQ(x4.f32()[r * in + c], fp4_element(w4, r, c));
      }
  }
}

// Whatever the scales were: values that a block can hold come back as they are.
TEST(Codecs, EncodingDecodedWeightsKeepsEveryValue) {
  for (Codec codec : {Codec::fp8, Codec::fp4}) {
    const Tensor x = decode(random_weight(codec, 133, 332));
    const Weight again = encode(x, codec, "x");
    EXPECT_EQ(again.data.shape(), data_shape(codec, 133, 332));
    EXPECT_TRUE(same(decode(again), x));
  }
}

// The scale is the smallest power of two that fits, and no code is further than half a step away.
TEST(Codecs, EncodingTakesTheSmallestScaleAndTheNearestCode) {
  Tensor x = Tensor::empty({130, 70});
  Random random(5);
  for (int64_t i = 0; i < x.numel(); ++i) x.f32()[i] = random.normal() * std::exp2(static_cast<float>(i % 7));
  const auto check = [&](Codec codec, double largest, int rows, int columns, int mantissa, int lowest, auto element) {
    const Weight w = encode(x, codec, "x");
    const Tensor y = decode(w);
    for (int64_t r0 = 0; r0 < 130; r0 += rows)
      for (int64_t c0 = 0; c0 < 70; c0 += columns) {
        double amax = 0;
        for (int64_t r = r0; r < std::min<int64_t>(130, r0 + rows); ++r)
          for (int64_t c = c0; c < std::min<int64_t>(70, c0 + columns); ++c)
            amax = std::max<double>(amax, std::fabs(x.f32()[r * 70 + c]));
        const double scale = std::ldexp(1, w.scale.ptr<uint8_t>()[r0 / rows * w.scale.size(1) + c0 / columns] - 127);
        EXPECT_LE(amax, largest * scale);
        EXPECT_GT(amax, largest * scale / 2);
        for (int64_t r = r0; r < std::min<int64_t>(130, r0 + rows); ++r)
          for (int64_t c = c0; c < std::min<int64_t>(70, c0 + columns); ++c) {
            const double value = x.f32()[r * 70 + c], got = y.f32()[r * 70 + c];
            EXPECT_EQ(got, element(w, r, c));
            const int exponent = std::max(lowest, std::ilogb(value / scale));
            EXPECT_LE(std::fabs(got - value), std::ldexp(scale, exponent - mantissa - 1));
          }
      }
  };
  check(Codec::fp8, 448, 128, 128, 3, -6, fp8_element);
  check(Codec::fp4, 6, 1, 32, 1, 0, fp4_element);
}

TEST(Codecs, ZerosAndTinyValues) {
  Tensor x = Tensor::zeros({2, 64});
  x.f32()[64] = 0x1p-140f;  // subnormal: the scale stops at 2^-126
  for (Codec codec : {Codec::fp8, Codec::fp4}) {
    const Weight w = encode(x, codec, "x");
    EXPECT_EQ(find_nan_scale(w.scale), -1);
    EXPECT_EQ(decode(w).f32()[0], 0);
    EXPECT_LE(std::fabs(decode(w).f32()[64]), 0x1p-126f);
  }
}

TEST(Codecs, WhatNoFormatHoldsIsRefused) {
  Tensor x = Tensor::zeros({3, 64});
  x.f32()[70] = INFINITY;
  expect_error([&] { encode(x, Codec::fp8, "layers.0.attn.wkv.weight"); },
               {"layers.0.attn.wkv.weight", "[1,6]", "inf"});
  expect_error([&] { encode(Tensor::zeros({2, 3}), Codec::fp4, "w"); }, {"w", "odd"});
  expect_error([&] { encode(Tensor::zeros({4}), Codec::fp8, "w"); }, {"w", "no matrix"});
  expect_error([&] { codec_of(DType::f16); }, {"f16"});
  Tensor scale = random_tensor({"s", DType::f8_e8m0, {3, 4}}, 1);
  scale.ptr<uint8_t>()[7] = 255;
  EXPECT_EQ(find_nan_scale(scale), 7);
}

}  // namespace
}  // namespace plumb
