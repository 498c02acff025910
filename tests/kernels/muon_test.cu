// Muon against an FP64 iteration on the host. Tests named Small* also run under compute-sanitizer.
//
// What bf16 costs: the iterate is rounded ten times, its Gram matrix and their polynomial too, 2^-9 of an element each.
// The lifting steps multiply what lies in the directions of small singular values by up to 3.4, errors alike; the last
// two bring all singular values back to 1, and only errors of the directions are left. With these rounding points
// emulated in FP64, Gaussian matrices of these shapes end 0.6 % from the unrounded iteration, square ones (larger
// ratios of singular values) 0.7 %; 1 % is allowed.
#include "kernels/optimizer/muon.h"

#include <gtest/gtest.h>

#include "device_data.cuh"
#include "kernels/optimizer/optimizer.h"

namespace plumb::kernels::optimizer {
namespace {

using Values = std::vector<double>;

Values product(const Values& a, const Values& b, int rows, int columns, int k) {  // a [rows, k], b [k, columns]
  Values c(static_cast<size_t>(rows) * columns, 0.0);
  for (int i = 0; i < rows; ++i)
    for (int l = 0; l < k; ++l)
      for (int j = 0; j < columns; ++j) c[i * columns + j] += a[i * k + l] * b[l * columns + j];
  return c;
}
Values transposed(const Values& a, int rows, int columns) {
  Values t(a.size());
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j) t[j * rows + i] = a[i * columns + j];
  return t;
}
double norm_of(const Values& a) {
  double sum = 0;
  for (const double v : a) sum += v * v;
  return std::sqrt(sum);
}
// The formula as it stands: X <- a X + b (X X^T) X + c (X X^T)^2 X.
Values orthogonalised(Values x, int rows, int columns) {
  const double norm = norm_of(x);
  if (norm == 0) return x;
  for (double& v : x) v /= norm;
  for (int step = 0; step < 10; ++step) {
    const double a = step < 8 ? 3.4445 : 2, b = step < 8 ? -4.7750 : -1.5, c = step < 8 ? 2.0315 : 0.5;
    const Values gram = product(x, transposed(x, rows, columns), rows, rows, columns);
    const Values first = product(gram, x, rows, columns, rows);
    const Values second = product(gram, first, rows, columns, rows);
    for (size_t i = 0; i < x.size(); ++i) x[i] = a * x[i] + b * first[i] + c * second[i];
  }
  return x;
}

struct Case {
  int count, rows, columns, at_once;
};

struct Trial {
  Buffer<float> weight, gradient, momentum;
  Case c;
  Buffer<uint8_t> workspace;
  explicit Trial(const Case& c_)
      : weight(random_floats(size_of(c_), 0.1f, 1)),
        gradient(random_floats(size_of(c_), 1e-3f, 2)),
        momentum(random_floats(size_of(c_), 1e-3f, 3)),
        c(c_),
        workspace(muon_bytes(get(), c_.at_once)) {}
  static size_t size_of(const Case& c) { return static_cast<size_t>(c.count) * c.rows * c.columns; }
  Matrices get() const { return {weight.get(), gradient.get(), momentum.get(), c.count, c.rows, c.columns}; }
  void step(const Muon& o, const double* norm = nullptr) { muon(get(), o, norm, c.at_once, workspace.get(), nullptr); }
};

void check_step(const Case& c) {
  Trial run(c);
  const auto w = run.weight.host(), g = run.gradient.host(), m = run.momentum.host();
  Muon o;
  o.learning_rate = 0.02, o.gradient_scale = 0.5, o.largest_norm = 1e-3;
  const Buffer<double> norm(std::vector<double>{4e-3});  // clips: gradients count an eighth
  run.step(o, norm.get());
  const auto moved = run.weight.host(), velocity = run.momentum.host();
  const double rate = 0.02 * 0.18 * std::sqrt(std::max(c.rows, c.columns));
  const size_t size = static_cast<size_t>(c.rows) * c.columns;
  for (int matrix = 0; matrix < c.count; ++matrix) {
    Values ahead(size), direction(size);
    for (size_t i = 0; i < size; ++i) {
      const size_t at = matrix * size + i;
      const double v = 0.95 * m[at] + 0.125 * g[at];
      ASSERT_NEAR(velocity[at], v, 1e-7 * std::fabs(v) + 1e-12);  // rounded to FP32 once
      ahead[i] = 0.95 * v + 0.125 * g[at];
      direction[i] = (w[at] * (1 - 0.02 * 0.1) - moved[at]) / rate;
    }
    const Values expected = orthogonalised(ahead, c.rows, c.columns);
    Values error(size);
    for (size_t i = 0; i < size; ++i) error[i] = direction[i] - expected[i];
    EXPECT_LE(norm_of(error), 0.01 * norm_of(expected))
        << "matrix " << matrix << " of " << c.count << " [" << c.rows << ", " << c.columns << "]";
  }
}
TEST(Muon, SmallAgainstDoublePrecision) {
  for (const Case c : {Case{2, 64, 64, 1}, {3, 64, 200, 2}, {1, 128, 72, 1}}) check_step(c);
}
// Several tiles, tiles below the diagonal, edges inside a tile; wide and tall.
TEST(Muon, AgainstDoublePrecision) {
  for (const Case c : {Case{1, 320, 600, 1}, {2, 576, 264, 2}}) check_step(c);
}

// A matrix moves the same way alone, in a batch, and in every run.
TEST(Muon, BatchDoesNotMatter) {
  for (const auto& [rows, columns] : {std::pair{320, 520}, {576, 264}}) {
    const int count = 5;
    Trial all({count, rows, columns, count}), some({count, rows, columns, 2});
    Muon o;
    o.learning_rate = 0.02;
    all.step(o), some.step(o);
    const auto result = all.weight.host();
    EXPECT_EQ(differences(some.weight.host(), result), 0u);
    EXPECT_EQ(differences(some.momentum.host(), all.momentum.host()), 0u);
    for (int i = 0; i < 10; ++i) {
      Trial again({count, rows, columns, count});
      again.step(o);
      ASSERT_EQ(differences(again.weight.host(), result), 0u) << "repeat " << i;
    }
  }
}

// A matrix without gradient and momentum only decays; its neighbours do not notice it.
TEST(Muon, SmallZeroMatrix) {
  const int rows = 64, columns = 128, size = rows * columns;
  Trial run({2, rows, columns, 2}), alone({1, rows, columns, 1});
  check(cudaMemset(run.gradient.get() + size, 0, size * sizeof(float)));
  check(cudaMemset(run.momentum.get() + size, 0, size * sizeof(float)));
  Muon o;
  o.learning_rate = 0.5;
  const auto before = run.weight.host();
  run.step(o), alone.step(o);
  const auto after = run.weight.host(), first = alone.weight.host();
  EXPECT_TRUE(std::equal(first.begin(), first.end(), after.begin()));
  for (int i = size; i < 2 * size; ++i) ASSERT_EQ(after[i], static_cast<float>(before[i] * (1 - 0.5 * 0.1)));
}

}  // namespace
}  // namespace plumb::kernels::optimizer
