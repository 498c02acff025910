#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "base/philox.h"
#include "train/adamw.h"
#include "train/muon.h"
#include "train/schedule.h"
#include "train/step.h"

namespace plumb {
namespace {

// ---- AdamW ----------------------------------------------------------------------------------------------------------

TEST(AdamW, FollowsTorch) {
  // torch.optim.AdamW in float64, lr 0.01, betas 0.9 and 0.95, eps 1e-8, weight decay 0.1.
  const std::vector<std::vector<float>> grads = {
      {0.1f, -2.0f, 0.03f, 0}, {0.2f, 1.0f, -0.5f, 0}, {-0.4f, 0.5f, 0.01f, 1e-6f}};
  const std::vector<std::vector<double>> expected = {{0.489500001, -1.238750000, 1.988000003, 0},
                                                     {0.479430643, -1.234827556, 1.992952866, 0},
                                                     {0.480855124, -1.232967564, 1.996265816, -0.006128721}};
  Tensor w = Tensor::of<float>({0.5f, -1.25f, 2.0f, 0}), m = Tensor::zeros({4}), v = Tensor::zeros({4});
  for (int step = 0; step < 3; ++step) {
    adamw_step(w, Tensor::of(grads[step]), m, v, {0.9, 0.95, 1e-8, 0.1}, 0.01, 1, step + 1);
    for (int i = 0; i < 4; ++i)  // the state is rounded to FP32: a few ulp of the largest weight
      EXPECT_NEAR(w.f32()[i], expected[step][i], 5e-7) << "step " << step + 1 << " weight " << i;
  }
}

TEST(AdamW, GradScaleIsAScaledGradient) {
  Tensor a = Tensor::of<float>({1, -2}), b = a.clone();
  Tensor ma = Tensor::zeros({2}), va = Tensor::zeros({2}), mb = Tensor::zeros({2}), vb = Tensor::zeros({2});
  adamw_step(a, Tensor::of<float>({4, -8}), ma, va, {}, 0.1, 0.25, 1);
  adamw_step(b, Tensor::of<float>({1, -2}), mb, vb, {}, 0.1, 1, 1);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(a.f32()[i], b.f32()[i]);
}

TEST(AdamW, NoGradientMovesNothingWithTheTinyEpsilonOfPretraining) {
  Tensor w = Tensor::of<float>({3}), m = Tensor::zeros({1}), v = Tensor::zeros({1});
  for (int step = 1; step <= 3; ++step) adamw_step(w, Tensor::zeros({1}), m, v, {0.9, 0.95, 1e-20, 0}, 0.1, 1, step);
  EXPECT_EQ(w.f32()[0], 3);
}

// ---- Muon -----------------------------------------------------------------------------------------------------------

TEST(Muon, SingularValuesOfADiagonal) {
  // Singular values of a matrix of norm 1 and what the ten steps make of them: spec/model.md 9.1.
  const double rest = std::sqrt(1 - 0.7 * 0.7 - 0.3 * 0.3 - 0.1 * 0.1 - 0.01 * 0.01 - 0.001 * 0.001);
  const std::vector<double> s = {0.001, 0.01, 0.1, 0.3, 0.7, rest};
  const std::vector<double> expected = {1.000001, 1.000019, 1.000061, 1.000130, 1.000467};
  Tensor x = Tensor::zeros({6, 8});
  for (int i = 0; i < 6; ++i) x.f32()[i * 8 + i] = static_cast<float>(s[i]);
  const Tensor y = orthogonalise(x);
  for (int i = 0; i < 6; ++i)
    for (int j = 0; j < 8; ++j) {
      if (i == 5) continue;
      // FP32 in place of exact arithmetic: ten steps of a few roundings of 6e-8 each.
      EXPECT_NEAR(y.f32()[i * 8 + j], i == j ? expected[i] : 0, i == j ? 4e-6 : 0) << s[i];
    }
}

Tensor random_matrix(int64_t rows, int64_t cols, uint64_t seed) {
  Random g(seed);
  Tensor t = Tensor::empty({rows, cols});
  for (int64_t i = 0; i < t.numel(); ++i) t.f32()[i] = g.normal();
  return t;
}

TEST(Muon, RowsOrColumnsBecomeOrthonormal) {
  for (const Shape& shape : {Shape{5, 12}, Shape{12, 5}}) {
    const Tensor y = orthogonalise(random_matrix(shape[0], shape[1], 1));
    const bool tall = shape[0] > shape[1];
    const int64_t n = std::min(shape[0], shape[1]), k = std::max(shape[0], shape[1]);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < n; ++j) {
        double dot = 0;
        for (int64_t l = 0; l < k; ++l)
          dot +=
              tall ? double(y.f32()[l * n + i]) * y.f32()[l * n + j] : double(y.f32()[i * k + l]) * y.f32()[j * k + l];
        EXPECT_NEAR(dot, i == j, 2e-3);  // the polynomial ends within 5e-4 of 1 for each singular value
      }
  }
}

TEST(Muon, StepHasTheScaleOfAdamW) {
  Tensor w = Tensor::zeros({16, 64}), m = Tensor::zeros({16, 64});
  muon_step(w, random_matrix(16, 64, 2), m, 1, {0.95, 0}, 1, 1);
  double sum = 0;
  for (int64_t i = 0; i < w.numel(); ++i) sum += double(w.f32()[i]) * w.f32()[i];
  EXPECT_NEAR(std::sqrt(sum / w.numel()), 0.18, 1e-3);  // sqrt(16 / (16 * 64)) * 0.18 * sqrt(64)
}

TEST(Muon, BlocksAreIndependent) {
  const Tensor grad = random_matrix(8, 6, 3);
  Tensor whole = Tensor::full({8, 6}, 0.5f), m = Tensor::zeros({8, 6});
  muon_step(whole, grad, m, 2, {}, 0.1, 0.5);
  for (int block = 0; block < 2; ++block) {
    Tensor part = Tensor::full({4, 6}, 0.5f), pm = Tensor::zeros({4, 6});
    muon_step(part, grad.rows(4 * block, 4 * block + 4), pm, 1, {}, 0.1, 0.5);
    for (int i = 0; i < 24; ++i) EXPECT_EQ(part.f32()[i], whole.f32()[24 * block + i]);
  }
}

TEST(Muon, NesterovMomentumAndDecay) {
  // One row: the direction is the normalised vector mu M + g.
  Tensor w = Tensor::of<float>({1, 1}, {1, 2}), m = Tensor::zeros({1, 2});
  const MuonOptions o{0.5, 0.1};
  muon_step(w, Tensor::of<float>({3, 4}, {1, 2}), m, 1, o, 0.1, 1);
  const double update = 0.1 * 0.18 * std::sqrt(2.0);
  EXPECT_NEAR(w.f32()[0], 0.99 - update * 0.6, 2e-5);
  muon_step(w, Tensor::of<float>({0, 0}, {1, 2}), m, 1, o, 0.1, 1);  // momentum goes on: 0.5 * 0.5 * (3, 4)
  EXPECT_NEAR(m.f32()[0], 1.5, 0);
  EXPECT_NEAR(w.f32()[1], (0.99 - update * 0.8) * 0.99 - update * 0.8, 4e-5);
}

TEST(Muon, ZeroMatrixStays) {
  Tensor w = Tensor::full({3, 4}, 2), m = Tensor::zeros({3, 4});
  muon_step(w, Tensor::zeros({3, 4}), m, 1, {0.95, 0}, 0.1, 1);
  for (int i = 0; i < 12; ++i) EXPECT_EQ(w.f32()[i], 2);
}

// ---- Learning rate, clipping ----------------------------------------------------------------------------------------

TEST(Schedule, WarmUpAndDecay) {
  TrainKeys k;
  k.learning_rate = 2;
  k.warmup_steps = 4;
  EXPECT_DOUBLE_EQ(learning_rate(k, 1, 10), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(k, 4, 10), 2);
  EXPECT_DOUBLE_EQ(learning_rate(k, 10, 10), 2);
  k.decay = "linear", k.final_lr_ratio = 0.1;
  EXPECT_DOUBLE_EQ(learning_rate(k, 4, 10), 2);
  EXPECT_DOUBLE_EQ(learning_rate(k, 7, 10), 1.1);
  EXPECT_DOUBLE_EQ(learning_rate(k, 10, 10), 0.2);
  k.decay = "cosine", k.final_lr_ratio = 0;
  EXPECT_DOUBLE_EQ(learning_rate(k, 7, 10), 1);
  EXPECT_NEAR(learning_rate(k, 10, 10), 0, 1e-15);
  k.warmup_steps = 0;
  EXPECT_DOUBLE_EQ(learning_rate(k, 1, 10), 2);
  EXPECT_DOUBLE_EQ(learning_rate(k, 1, 1), 2);
}

TEST(Clip, Factor) {
  EXPECT_EQ(clip_factor(0.5, 1), 1);
  EXPECT_EQ(clip_factor(4, 1), 0.25);
  EXPECT_EQ(clip_factor(4, 0), 1);
}

}  // namespace
}  // namespace plumb
