// Helpers of the tests of products: random weights in every format, slow products, comparisons.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "base/philox.h"
#include "ops/linear.h"

namespace plumb {

inline Tensor random_tensor(Shape shape, Random& random, float scale = 1) {
  Tensor t = Tensor::empty(std::move(shape));
  for (int64_t i = 0; i < t.numel(); ++i) t.f32()[i] = scale * random.normal();
  return t;
}

inline Linear random_linear(WeightFormat format, int out, int in, Random& random) {
  Linear w;
  w.format = format, w.out = out, w.in = in;
  const auto bytes = [&](Tensor& t, auto&& next) {
    for (int64_t i = 0; i < t.numel(); ++i) t.ptr<uint8_t>()[i] = static_cast<uint8_t>(next());
  };
  switch (format) {
    case WeightFormat::f32:
      w.data = random_tensor({out, in}, random, 0.3f);
      break;
    case WeightFormat::bf16:
      w.data = Tensor::empty({out, in}, DType::bf16);
      for (int64_t i = 0; i < w.data.numel(); ++i) {
        const float v = 0.3f * random.normal();
        uint32_t bits;
        std::memcpy(&bits, &v, 4);
        w.data.ptr<uint16_t>()[i] = static_cast<uint16_t>(bits >> 16);
      }
      break;
    case WeightFormat::fp8:
      w.data = Tensor::empty({out, in}, DType::f8_e4m3);
      w.scale = Tensor::empty({(out + 127) / 128, (in + 127) / 128}, DType::f8_e8m0);
      bytes(w.data, [&] { return random.below(0x7f) | (random.below(2) << 7); });  // all codes but NaN
      bytes(w.scale, [&] { return 118 + random.below(4); });
      break;
    case WeightFormat::fp4:
      w.data = Tensor::empty({out, in / 2}, DType::i8);
      w.scale = Tensor::empty({out, in / 32}, DType::f8_e8m0);
      bytes(w.data, [&] { return random.below(256); });
      bytes(w.scale, [&] { return 121 + random.below(5); });
      break;
  }
  return w;
}

inline const char* format_name(WeightFormat f) {
  const char* names[] = {"f32", "bf16", "fp8", "fp4"};
  return names[static_cast<int>(f)];
}
constexpr WeightFormat kFormats[] = {WeightFormat::f32, WeightFormat::bf16, WeightFormat::fp8, WeightFormat::fp4};

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && std::memcmp(a.raw(), b.raw(), a.bytes()) == 0;
}
inline bool same_bits(const float* a, const float* b, int64_t n) { return std::memcmp(a, b, n * sizeof(float)) == 0; }

inline Tensor take_rows(const Tensor& x, const std::vector<int>& rows) {
  Tensor part = Tensor::empty({static_cast<int64_t>(rows.size()), x.size(1)});
  for (size_t i = 0; i < rows.size(); ++i)
    std::copy_n(x.f32() + rows[i] * x.size(1), x.size(1), part.f32() + static_cast<int64_t>(i) * x.size(1));
  return part;
}

using Doubles = std::vector<double>;
inline Doubles doubles(const Tensor& t) { return Doubles(t.f32(), t.f32() + t.numel()); }

// [m,k] times [n,k] transposed
inline Doubles product(const Doubles& a, const Doubles& b, int64_t m, int64_t n, int64_t k) {
  Doubles c(m * n);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j)
      for (int64_t l = 0; l < k; ++l) c[i * n + j] += a[i * k + l] * b[j * k + l];
  return c;
}

// Largest |a - b| relative to the largest |b|.
inline double relative_error(const Tensor& a, const Doubles& b) {
  double error = 0, top = 1e-30;
  for (size_t i = 0; i < b.size(); ++i) {
    error = std::max(error, std::fabs(a.f32()[i] - b[i]));
    top = std::max(top, std::fabs(b[i]));
  }
  return error / top;
}

// Central difference of `loss` in parameter[i].
template <class Loss>
double slope(Doubles& parameter, size_t i, Loss&& loss, double h = 1e-5) {
  const double keep = parameter[i];
  parameter[i] = keep + h;
  const double up = loss();
  parameter[i] = keep - h;
  const double down = loss();
  parameter[i] = keep;
  return (up - down) / (2 * h);
}

struct RestoreThreads {
  int before = thread_count();
  ~RestoreThreads() { set_thread_count(before); }
};

}  // namespace plumb
