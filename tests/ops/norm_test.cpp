#include "ops/norm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/attention_fixtures.h"

namespace plumb::ops {
namespace {

constexpr float kEps = 1e-6f;

std::vector<double> reference(const std::vector<double>& x, const std::vector<double>& w) {
  double square = 0;
  for (double v : x) square += v * v;
  const double rho = 1 / std::sqrt(square / static_cast<double>(x.size()) + kEps);
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * rho * (w.empty() ? 1 : w[i]);
  return y;
}

// FP32 sums of up to 4096 squares of size 1: relative error below 1e-6.
TEST(Norm, ForwardEqualsFp64AtEveryWidth) {
  for (int width : {1, 3, 7, 8, 9, 31, 32, 100, 512, 4096}) {
    const Tensor x = random_tensor({3, width}, width), w = random_tensor({width}, width + 1);
    for (const Tensor& weight : {w, Tensor()}) {
      const Tensor y = rms_norm(x, weight, kEps);
      for (int r = 0; r < 3; ++r)
        EXPECT_LT(worst(y.rows(r, r + 1), reference(doubles(x.rows(r, r + 1)),
                                                    weight.defined() ? doubles(weight) : std::vector<double>{})),
                  1e-6);
    }
  }
}

TEST(Norm, BackwardEqualsFiniteDifferences) {
  const int rows = 3, width = 11;
  const Tensor x = random_tensor({rows, width}, 1), dy = random_tensor({rows, width}, 2), w = random_tensor({width}, 3);
  for (const Tensor& weight : {w, Tensor()}) {
    std::vector<double> all = doubles(x);
    const std::vector<double> wd = doubles(w);
    all.insert(all.end(), wd.begin(), wd.end());
    const auto loss = [&](const std::vector<double>& v) {
      double sum = 0;
      for (int r = 0; r < rows; ++r) {
        const auto y = reference(
            {v.begin() + r * width, v.begin() + (r + 1) * width},
            weight.defined() ? std::vector<double>(v.begin() + rows * width, v.end()) : std::vector<double>{});
        for (int i = 0; i < width; ++i) sum += y[i] * dy.f32()[r * width + i];
      }
      return sum;
    };
    const std::vector<double> g = gradient(all, loss);
    Tensor dw = weight.defined() ? Tensor::full({width}, 2) : Tensor();
    const Tensor dx = rms_norm_backward(dy, x, weight, kEps, dw);
    EXPECT_LT(worst(dx, {g.begin(), g.begin() + rows * width}), 2e-6);
    if (!weight.defined()) continue;
    std::vector<double> expected(g.begin() + rows * width, g.end());
    for (double& v : expected) v += 2;  // gradients are added
    EXPECT_LT(worst(dw, expected), 2e-6);
  }
}

TEST(Norm, ZeroRowStaysZeroAndFinite) {
  const Tensor x = Tensor::zeros({2, 16});
  EXPECT_TRUE(same_bits(rms_norm(x, Tensor(), kEps), x));
  const Tensor dx = rms_norm_backward(Tensor::full({2, 16}, 1), x, Tensor(), kEps, Tensor());
  EXPECT_NEAR(dx.f32()[0], 1000, 0.01);  // eps^(-1/2)
}

TEST(Norm, RowBitsDependOnTheRowAlone) {
  const Tensor x = random_tensor({67, 72}, 5), w = random_tensor({72}, 6), all = rms_norm(x, w, kEps);
  for (int r : {0, 15, 16, 66}) EXPECT_TRUE(same_bits(rms_norm(x.rows(r, r + 1), w, kEps), all.rows(r, r + 1)));
  expect_thread_invariant([&] {
    Tensor dw = Tensor::zeros({72});
    const Tensor dx = rms_norm_backward(all, x, w, kEps, dw);
    return std::vector<Tensor>{rms_norm(x, w, kEps), dx, dw};
  });
}

TEST(Norm, NoRowsIsLegal) { EXPECT_EQ(rms_norm(Tensor::empty({0, 8}), Tensor(), kEps).shape(), (Shape{0, 8})); }

}  // namespace
}  // namespace plumb::ops
