#include "ops/vector_math.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "ops/attention_fixtures.h"

namespace plumb::ops {
namespace {

// Distance of y to the exact value in units of the last place of FP32 at that value.
double ulps(float y, double exact) {
  const float f = static_cast<float>(exact);
  if (std::isinf(f) || f == 0) return y == f ? 0 : INFINITY;
  const double ulp = std::max(std::ldexp(1.0, std::ilogb(exact) - 23), std::ldexp(1.0, -149));
  return std::abs(y - exact) / ulp;
}

TEST(VectorMath, ExpIsWithinAnUlpOfFp64) {
  double most = 0;
  for (uint64_t bits = 0; bits < (1ull << 32); bits += 1021 * 8) {  // both signs, all exponents, subnormals too
    alignas(32) float x[kLanes], y[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = std::bit_cast<float>(static_cast<uint32_t>(bits + 1021 * i));
    store(y, exp(load(x)));
    for (int i = 0; i < kLanes; ++i) {
      if (std::isnan(x[i])) {
        ASSERT_TRUE(std::isnan(y[i]));
      } else {
        most = std::max(most, ulps(y[i], std::exp(static_cast<double>(x[i]))));
      }
    }
  }
  EXPECT_LT(most, 1.1);
}

TEST(VectorMath, ExpAtSpecialPoints) {
  EXPECT_EQ(exp1(0), 1);
  EXPECT_EQ(exp1(-0.0f), 1);
  EXPECT_EQ(exp1(-INFINITY), 0);
  EXPECT_EQ(exp1(INFINITY), INFINITY);
  EXPECT_EQ(exp1(-200), 0);
  EXPECT_EQ(exp1(200), INFINITY);
  EXPECT_TRUE(std::isfinite(exp1(88.7228f)));
  EXPECT_GT(exp1(-103), 0);
}

TEST(VectorMath, ExpIsDenseNearTheReductionBoundaries) {
  double most = 0;
  for (int i = -2000000; i <= 2000000; i += 3) {
    const float x = static_cast<float>(i) * 4.4e-5f;
    most = std::max(most, ulps(exp1(x), std::exp(static_cast<double>(x))));
  }
  EXPECT_LT(most, 1.1);
}

TEST(VectorMath, DotOfEveryLengthEqualsFp64) {
  const Tensor a = random_tensor({200}, 1), b = random_tensor({200}, 2);
  for (int n = 0; n <= 200; ++n) {
    double exact = 0;
    for (int i = 0; i < n; ++i) exact += static_cast<double>(a.f32()[i]) * b.f32()[i];
    EXPECT_NEAR(dot(a.f32(), b.f32(), n), exact, 2e-5) << n;  // 200 roundings of values up to about 10
  }
}

TEST(VectorMath, LanesAreSummedInThePublishedTree) {
  const float v[] = {1e8f, 1, -1e8f, 1, 3, 0.1f, 0.2f, 1e-9f};
  const float expected = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  EXPECT_EQ(sum_lanes(load(v)), expected);
  EXPECT_EQ(max_lanes(load(v)), 1e8f);
}

}  // namespace
}  // namespace plumb::ops
