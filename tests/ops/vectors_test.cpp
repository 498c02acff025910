// From a product to what the attention meets: the order of the steps, their rounding points, and the way back.
#include "ops/vectors.h"

#include <gtest/gtest.h>

#include <numeric>

#include "attention_fixtures.h"
#include "base/float_formats.h"

namespace plumb::ops {
namespace {

constexpr int kRows = 3, kVectors = 2, kWidth = 16, kPairs = 4;

RotaryTable table() {
  std::vector<int> position(kRows);
  std::iota(position.begin(), position.end(), 5);
  return rotary_table(position, rotary_frequencies(2 * kPairs, 10000, nullptr));
}

VectorSteps steps(bool normed, bool transformed) {
  VectorSteps s;
  s.normed = normed, s.eps = 1e-6f, s.numerics = Numerics::released;
  s.norm = Point::norm_kv, s.rope = Point::rope_kv;
  s.hadamard = transformed ? Point::had_ik : Point::none;
  s.storage = transformed ? Point::sim_ik : Point::sim_kv;
  return s;
}

bool is_bf16(float x) { return round_bf16(x) == x; }

// Norm, then rotation, then storage in front of the rotated channels; one vector in FP64 but for the roundings.
TEST(FinishVectors, NormComesBeforeRotationAndStorageSparesTheRotatedChannels) {
  const Tensor x = random_tensor({kRows, kVectors, kWidth}, 1), w = random_tensor({kWidth}, 2);
  const Tensor y = finish_vectors(x, w, table(), steps(true, false));
  const std::vector<float> freq = rotary_frequencies(2 * kPairs, 10000, nullptr);
  for (int v = 0; v < kRows * kVectors; ++v) {
    const float *in = x.f32() + v * kWidth, *out = y.f32() + v * kWidth;
    double square = 0;
    for (int i = 0; i < kWidth; ++i) square += double{in[i]} * in[i];
    const double rho = 1 / std::sqrt(square / kWidth + 1e-6);
    std::vector<double> normed(kWidth);
    for (int i = 0; i < kWidth; ++i) normed[i] = round_bf16(static_cast<float>(in[i] * rho * w.f32()[i]));
    double largest = 1e-4;
    for (int i = 0; i < kWidth - 2 * kPairs; ++i) largest = std::max(largest, std::fabs(normed[i]));
    // A step of e4m3 is at most 2^-3 of the value: half of that, of the largest one.
    for (int i = 0; i < kWidth - 2 * kPairs; ++i) EXPECT_NEAR(out[i], normed[i], largest / 16);
    for (int j = 0; j < kPairs; ++j) {
      const int at = kWidth - 2 * kPairs + 2 * j;
      const double angle = (5 + v / kVectors) * double{freq[j]}, c = std::cos(angle), s = std::sin(angle);
      // bf16 twice: 2^-8 of the pair's length is room enough.
      const double size = std::hypot(normed[at], normed[at + 1]) * 0x1p-8;
      EXPECT_NEAR(out[at], normed[at] * c - normed[at + 1] * s, size);
      EXPECT_NEAR(out[at + 1], normed[at] * s + normed[at + 1] * c, size);
      EXPECT_TRUE(is_bf16(out[at]) && is_bf16(out[at + 1]));
    }
  }
}

// FP4: at most 15 different magnitudes times a power of two in a block, over all channels.
TEST(FinishVectors, TransformedVectorsAreStoredWhole) {
  const Tensor x = random_tensor({kRows, kVectors, kWidth}, 3);
  const Tensor y = finish_vectors(x, {}, table(), steps(false, true));
  for (int v = 0; v < kRows * kVectors; ++v) {
    const float* out = y.f32() + v * kWidth;
    float largest = 0;
    for (int i = 0; i < kWidth; ++i) largest = std::max(largest, std::fabs(out[i]));
    const float unit = exp2_int(static_cast<int>(std::floor(std::log2(largest))) - 2);  // 4 and 6 have exponent 2
    for (int i = 0; i < kWidth; ++i) {
      const float halves = std::fabs(out[i]) / unit * 2;
      EXPECT_EQ(halves, std::round(halves)) << out[i];
    }
  }
}

TEST(FinishVectors, GradientsMatchDifferences) {
  for (bool normed : {false, true})
    for (bool transformed : {false, true}) {
      VectorSteps s = steps(normed, transformed);
      const Tensor x = random_tensor({kRows, kVectors, kWidth}, 4), d = random_tensor(x.shape(), 5);
      const Tensor w = normed ? random_tensor({kWidth}, 6) : Tensor();
      const Tensor dw = normed ? Tensor::zeros({kWidth}) : Tensor();
      // The transform exists in the released profile only, whose roundings hide small differences: without it, fp32.
      if (!transformed) s.numerics = Numerics::fp32;
      const Tensor dx = finish_vectors_backward(d.clone(), x, w, table(), s, dw);
      if (transformed) {  // orthogonal: the way back is the transposed way, so lengths stay (without a norm)
        double before = 0, after = 0;
        for (int64_t i = 0; i < d.numel(); ++i)
          before += double{d.f32()[i]} * d.f32()[i], after += double{dx.f32()[i]} * dx.f32()[i];
        if (!normed) {
          EXPECT_NEAR(after, before, 1e-4 * before);
        }
        continue;
      }
      const auto value = [&] {
        const Tensor y = finish_vectors(x, w, table(), s);
        double sum = 0;
        for (int64_t i = 0; i < y.numel(); ++i) sum += double{y.f32()[i]} * d.f32()[i];
        return sum;
      };
      const auto slope = [&](float& at) {
        const float before = at, step = 1e-2f;
        at = before + step;
        const double up = value();
        at = before - step;
        const double down = value();
        at = before;
        return (up - down) / (2 * step);
      };
      // Differences of FP32 sums, and the third derivative times 1e-4.
      for (int64_t i = 0; i < x.numel(); i += 5) EXPECT_NEAR(dx.f32()[i], slope(x.f32()[i]), 3e-3);
      for (int64_t i = 0; normed && i < kWidth; ++i) EXPECT_NEAR(dw.f32()[i], slope(w.f32()[i]), 3e-3);
    }
}

}  // namespace
}  // namespace plumb::ops
