#include "ops/rope.h"

#include <gtest/gtest.h>

#include <complex>

#include "base/error.h"
#include "ops/attention_fixtures.h"
#include "ops/vector_math.h"

namespace plumb::ops {
namespace {

constexpr Yarn kReleased{16, 65536, 32, 1};

// Table A6 of the spec, printed with 7 digits (half a unit of the last: up to 5e-7).
TEST(Rope, YarnTableOfTheReleasedModel) {
  const std::vector<double> table = {
      1,           .687656,     .4728708,    .3251725,    .2236068,    .1537646,    .1057371,    .07271077,
      .05,         .0343828,    .02364354,   .01625862,   .01118034,   7.688228e-3, 5.286856e-3, 3.635539e-3,
      2.265625e-3, 1.396801e-3, 8.496897e-4, 5.080820e-4, 2.969778e-4, 1.681800e-4, 9.086784e-5, 4.544423e-5,
      1.953125e-5, 5.372313e-6, 3.694303e-6, 2.540410e-6, 1.746928e-6, 1.201286e-6, 8.260713e-7, 5.680529e-7};
  const std::vector<float> w = rotary_frequencies(64, 160000, &kReleased);
  ASSERT_EQ(w.size(), table.size());
  for (size_t j = 0; j < table.size(); ++j) EXPECT_NEAR(w[j] / table[j], 1, 5e-7) << j;
}

TEST(Rope, PlainTableAndYarnWithoutOriginalLength) {
  const std::vector<float> w = rotary_frequencies(64, 10000, nullptr);
  for (auto [j, value] : {std::pair{0, 1.0}, {1, .7498942}, {15, .01333521}, {31, 1.333521e-4}})
    EXPECT_NEAR(w[j] / value, 1, 1e-6);
  const Yarn off{16, 0, 32, 1};
  EXPECT_EQ(rotary_frequencies(64, 10000, &off), w);
}

// Each pair is one complex number times exp(i angle), the angle rounded to FP32.
TEST(Rope, RotatesInterleavedPairsOfTheLastChannels) {
  const std::vector<float> freq = rotary_frequencies(8, 160000, &kReleased);
  const Tensor before = random_tensor({3, 2, 12}, 1);
  const std::vector<int> position = {0, 77, 1048575};
  Tensor x = before.clone();
  rotate(x.f32(), 3, 2, 12, position, freq, false);
  for (int v = 0; v < 6; ++v) {
    const float *a = before.f32() + v * 12, *b = x.f32() + v * 12;
    for (int i = 0; i < 4; ++i) EXPECT_EQ(a[i], b[i]);
    for (int j = 0; j < 4; ++j) {
      const double angle = static_cast<float>(position[v / 2]) * freq[j];
      const auto z = std::complex<double>(a[4 + 2 * j], a[5 + 2 * j]) * std::polar(1.0, angle);
      EXPECT_NEAR(b[4 + 2 * j], z.real(), 4e-7);  // three roundings of values up to 3
      EXPECT_NEAR(b[5 + 2 * j], z.imag(), 4e-7);
    }
  }
}

TEST(Rope, KeepsTheNormAndInverseUndoes) {  // no magnitude factor, spec T17
  const std::vector<float> freq = rotary_frequencies(64, 160000, &kReleased);
  const Tensor before = random_tensor({4, 1, 64}, 2);
  const std::vector<int> position = {1, 127, 4096, 65537};
  Tensor x = before.clone();
  rotate(x.f32(), 4, 1, 64, position, freq, false);
  for (int r = 0; r < 4; ++r) {
    const float *a = before.f32() + r * 64, *b = x.f32() + r * 64;
    EXPECT_NEAR(dot(b, b, 64) / dot(a, a, 64), 1, 5e-7);
  }
  rotate(x.f32(), 4, 1, 64, position, freq, true);
  EXPECT_LT(worst(x, doubles(before)), 5e-7);
}

// The backward of an orthogonal map is its inverse: <R x, y> = <x, R^-1 y>.
TEST(Rope, InverseIsTheBackward) {
  const std::vector<float> freq = rotary_frequencies(16, 10000, nullptr);
  const Tensor x = random_tensor({5, 3, 24}, 3), y = random_tensor({5, 3, 24}, 4);
  Tensor forward = x.clone(), back = y.clone();
  const std::vector<int> position = {3, 1, 4, 1, 59};
  rotate(forward.f32(), 5, 3, 24, position, freq, false);
  rotate(back.f32(), 5, 3, 24, position, freq, true);
  EXPECT_NEAR(dot(forward.f32(), y.f32(), 360), dot(x.f32(), back.f32(), 360), 2e-5);
}

TEST(Rope, ProductOfQueryAndKeyDependsOnTheDistanceAlone) {  // spec B1
  const std::vector<float> freq = rotary_frequencies(32, 10000, nullptr);
  const Tensor q = random_tensor({1, 32}, 5), k = random_tensor({1, 32}, 6);
  const auto product = [&](int at, int distance) {
    Tensor a = q.clone(), b = k.clone();
    rotate(a.f32(), 1, 1, 32, {at}, freq, false);
    rotate(b.f32(), 1, 1, 32, {at - distance}, freq, false);
    return dot(a.f32(), b.f32(), 32);
  };
  for (int distance : {0, 1, 9, 100}) EXPECT_NEAR(product(120, distance), product(1120, distance), 5e-4);
}

TEST(Rope, RowBitsDoNotDependOnBatchOrThreads) {
  const std::vector<float> freq = rotary_frequencies(16, 160000, &kReleased);
  std::vector<int> position(50);
  for (int i = 0; i < 50; ++i) position[i] = i * i;
  const Tensor before = random_tensor({50, 2, 24}, 7);
  const auto all = [&] {
    Tensor x = before.clone();
    rotate(x.f32(), 50, 2, 24, position, freq, false);
    hadamard(x.f32(), 150, 16);
    return std::vector<Tensor>{x};
  };
  expect_thread_invariant(all);
  Tensor one = before.rows(49, 50).clone(), batch = before.clone();
  rotate(one.f32(), 1, 2, 24, {49 * 49}, freq, false);
  rotate(batch.f32(), 50, 2, 24, position, freq, false);
  EXPECT_TRUE(same_bits(one, batch.rows(49, 50)));
}

// Element (i, j) of the Sylvester matrix is (-1)^(number of ones in i & j).
TEST(Hadamard, EqualsTheSylvesterMatrix) {
  for (int n : {1, 2, 16, 128}) {
    const Tensor x = random_tensor({2, n}, n);
    Tensor y = x.clone();
    hadamard(y.f32(), 2, n);
    std::vector<double> expected;
    for (int r = 0; r < 2; ++r)
      for (int i = 0; i < n; ++i) {
        double sum = 0;
        for (int j = 0; j < n; ++j) sum += (__builtin_popcount(i & j) % 2 ? -1.0 : 1.0) * x.f32()[r * n + j];
        expected.push_back(sum / std::sqrt(n));
      }
    EXPECT_LT(worst(y, expected), 1e-6);
    hadamard(y.f32(), 2, n);
    EXPECT_LT(worst(y, doubles(x)), 1e-6);
  }
}

TEST(Hadamard, KeepsScores) {  // spec B10
  Tensor q = random_tensor({1, 128}, 8), k = random_tensor({1, 128}, 9);
  const float before = dot(q.f32(), k.f32(), 128);
  hadamard(q.f32(), 1, 128);
  hadamard(k.f32(), 1, 128);
  EXPECT_NEAR(dot(q.f32(), k.f32(), 128), before, 2e-5);
}

TEST(Hadamard, WidthMustBeAPowerOfTwo) {
  Tensor x = Tensor::zeros({1, 12});
  EXPECT_THROW(hadamard(x.f32(), 1, 12), Error);
}

}  // namespace
}  // namespace plumb::ops
