// What the tests of the attention ops share: inputs and comparisons.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "base/parallel.h"
#include "base/philox.h"
#include "base/tensor.h"

namespace plumb::ops {

// The filler of the golden numbers in spec A: fill(n, seed)_k = sin(1.7 seed + 0.9 k).
inline std::vector<float> fill(int n, int seed) {
  std::vector<float> v(n);
  for (int k = 0; k < n; ++k) v[k] = static_cast<float>(std::sin(1.7 * seed + 0.9 * k));
  return v;
}
// Rows fill(width, seed), fill(width, seed + 1), ...
inline Tensor fill_rows(int rows, int width, int seed) {
  Tensor t = Tensor::empty({rows, width});
  for (int r = 0; r < rows; ++r) {
    const auto v = fill(width, seed + r);
    std::copy(v.begin(), v.end(), t.f32() + r * width);
  }
  return t;
}

inline Tensor random_tensor(Shape shape, uint64_t seed, float scale = 1) {
  Tensor t = Tensor::empty(std::move(shape));
  Random random(seed, 0);
  for (int64_t i = 0; i < t.numel(); ++i) t.f32()[i] = scale * static_cast<float>(random.normal());
  return t;
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() && std::memcmp(a.raw(), b.raw(), a.bytes()) == 0;
}

// Largest |a - b| over the tensor, divided by the largest |b| (1 if that is smaller).
inline double worst(const Tensor& a, const std::vector<double>& b) {
  EXPECT_EQ(a.numel(), static_cast<int64_t>(b.size()));
  double difference = 0, size = 1;
  for (size_t i = 0; i < b.size(); ++i) {
    if (std::isnan(a.f32()[i]) != std::isnan(b[i])) return INFINITY;
    difference = std::max(difference, std::abs(a.f32()[i] - b[i]));
    size = std::max(size, std::abs(b[i]));
  }
  return difference / size;
}

inline std::vector<double> doubles(const Tensor& t) { return {t.f32(), t.f32() + t.numel()}; }

// Gradient of f by central differences in FP64: error about step^2, 1e-9 for smooth functions of size 1.
inline std::vector<double> gradient(std::vector<double> x, const std::function<double(const std::vector<double>&)>& f) {
  constexpr double step = 1e-5;
  std::vector<double> g(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    x[i] = at + step;
    const double up = f(x);
    x[i] = at - step;
    g[i] = (up - f(x)) / (2 * step);
    x[i] = at;
  }
  return g;
}

// Runs f with 1, 2 and 3 threads and expects the same bits from all.
inline void expect_thread_invariant(const std::function<std::vector<Tensor>()>& f) {
  const int before = thread_count();
  set_thread_count(1);
  const std::vector<Tensor> one = f();
  for (int threads : {2, 3}) {
    set_thread_count(threads);
    const std::vector<Tensor> more = f();
    for (size_t i = 0; i < one.size(); ++i)
      EXPECT_TRUE(same_bits(one[i], more[i])) << threads << " threads, result " << i;
  }
  set_thread_count(before);
}

}  // namespace plumb::ops
