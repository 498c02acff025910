#include "ops/norm.h"

#include <cmath>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/gpu/dispatch.h"
#include "ops/vector_math.h"

namespace plumb::ops {
namespace {

// (mean(x^2) + eps)^(-1/2): FP32 sum, the root in FP64 and rounded once.
float inverse_rms(const float* x, int64_t width, float eps) {
  const float mean = dot(x, x, width) / static_cast<float>(width) + eps;
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(mean)));
}

void check_norm(const Tensor& x, const Tensor& weight) {
  PLUMB_CHECK(x.dim() == 2 && x.dtype() == DType::f32, to_string(x.shape()));
  PLUMB_CHECK(!weight.defined() || weight.shape() == Shape{x.size(1)}, to_string(weight.shape()));
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, float eps, const RoundAt& at) {
  PLUMB_ON_GPU(x, rms_norm(x, weight, eps, at));
  check_norm(x, weight);
  const int64_t width = x.size(1);
  Tensor y = Tensor::empty(x.shape());
  const float* w = weight.defined() ? weight.f32() : nullptr;
  parallel_for(x.size(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* in = x.f32() + r * width;
      float* out = y.f32() + r * width;
      const float rho = inverse_rms(in, width, eps);
      for_lanes(width, [&](int64_t i, int64_t n) {
        const Lanes normed = load_part(in + i, n) * splat(rho);
        store_part(out + i, w == nullptr ? normed : normed * load_part(w + i, n), n);
      });
    }
  });
  round_point(at, y);
  return y;
}

// With g = w * dy and xn = rho x: dx = rho (g - xn mean(g xn)), dw = sum over rows of dy xn (spec 4.2).
Tensor rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, float eps, const Tensor& dweight) {
  PLUMB_ON_GPU(x, rms_norm_backward(dy, x, weight, eps, dweight));
  check_norm(x, weight);
  PLUMB_CHECK(dy.shape() == x.shape());
  const int64_t rows = x.size(0), width = x.size(1);
  Tensor dx = Tensor::empty(x.shape());
  std::vector<float> rho(rows);
  const float* w = weight.defined() ? weight.f32() : nullptr;
  parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float *in = x.f32() + r * width, *g = dy.f32() + r * width;
      float* out = dx.f32() + r * width;
      rho[r] = inverse_rms(in, width, eps);
      for_lanes(width, [&](int64_t i, int64_t n) {
        const Lanes part = load_part(g + i, n);
        store_part(out + i, w == nullptr ? part : part * load_part(w + i, n), n);
      });
      const float slope = dot(out, in, width) * rho[r] * rho[r] / static_cast<float>(width);
      for_lanes(width, [&](int64_t i, int64_t n) {
        store_part(out + i, splat(rho[r]) * (load_part(out + i, n) - load_part(in + i, n) * splat(slope)), n);
      });
    }
  });
  if (!dweight.defined()) return dx;
  PLUMB_CHECK(dweight.shape() == Shape{width});
  parallel_for(width, 64, [&](int64_t begin, int64_t end) {  // each channel sums over the rows in order
    float* dw = dweight.f32() + begin;
    for (int64_t r = 0; r < rows; ++r) {
      const float *in = x.f32() + r * width + begin, *g = dy.f32() + r * width + begin;
      for_lanes(end - begin, [&](int64_t i, int64_t n) {
        const Lanes normed = load_part(in + i, n) * splat(rho[r]);
        store_part(dw + i, fma(load_part(g + i, n), normed, load_part(dw + i, n)), n);
      });
    }
  });
  return dx;
}

}  // namespace plumb::ops
