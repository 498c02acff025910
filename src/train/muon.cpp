#include "train/muon.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "ops/linear.h"

namespace plumb {
namespace {

struct Coefficients {
  float a, b, c;
};

Tensor transposed(const Tensor& x) {
  const int64_t rows = x.size(0), cols = x.size(1);
  Tensor y = Tensor::empty({cols, rows});
  const float* from = x.f32();
  float* to = y.f32();
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) to[j * rows + i] = from[i * cols + j];
  return y;
}

Linear as_weight(const Tensor& x) {
  return {x, {}, WeightFormat::f32, static_cast<int>(x.size(0)), static_cast<int>(x.size(1))};
}

// x [rows, cols] with rows <= cols, so that the products are small: a x + (b G + c G^2) x with G = x x^T.
void newton_schulz_step(Tensor& x, const Coefficients& k) {
  const int64_t rows = x.size(0), cols = x.size(1);
  const Tensor gram = ops::linear(x, as_weight(x));
  Tensor mix = ops::linear(gram, as_weight(gram));  // G is symmetric to the bit: G G^T = G^2
  const float* g = gram.f32();  // taken once: the elementwise work is as much as the products otherwise
  float* m = mix.f32();
  for (int64_t i = 0, n = mix.numel(); i < n; ++i) m[i] = k.b * g[i] + k.c * m[i];
  Tensor next = Tensor::empty(x.shape());
  ops::linear_backward_input(mix.f32(), rows, rows, as_weight(x), next.f32(), cols, false);  // mix x
  const float* from = x.f32();
  float* to = next.f32();
  for (int64_t i = 0, n = next.numel(); i < n; ++i) to[i] += k.a * from[i];
  x = next;
}

}  // namespace

Tensor orthogonalise(const Tensor& m) {
  double sum = 0;
  for (int64_t i = 0; i < m.numel(); ++i) sum += double(m.f32()[i]) * m.f32()[i];
  if (sum == 0) return m.clone();
  const bool tall = m.size(0) > m.size(1);
  Tensor x = tall ? transposed(m) : m.clone();
  const double inverse = 1 / std::sqrt(sum);
  for (int64_t i = 0; i < x.numel(); ++i) x.f32()[i] = static_cast<float>(x.f32()[i] * inverse);
  for (int step = 0; step < 8; ++step) newton_schulz_step(x, {3.4445f, -4.7750f, 2.0315f});
  for (int step = 0; step < 2; ++step) newton_schulz_step(x, {2, -1.5f, 0.5f});
  return tall ? transposed(x) : x;
}

void muon_step(const Tensor& w, const Tensor& grad, const Tensor& momentum, int blocks, const MuonOptions& o, double lr,
               double grad_scale) {
  PLUMB_CHECK(w.dim() == 2 && w.size(0) % blocks == 0, to_string(w.shape()));
  const int64_t rows = w.size(0) / blocks, cols = w.size(1);
  const double keep = 1 - lr * o.weight_decay, rate = lr * 0.18 * std::sqrt(static_cast<double>(std::max(rows, cols)));
  for (int block = 0; block < blocks; ++block) {
    const Tensor part = w.rows(block * rows, (block + 1) * rows), g = grad.rows(block * rows, (block + 1) * rows);
    const Tensor m = momentum.rows(block * rows, (block + 1) * rows);
    Tensor ahead = Tensor::empty({rows, cols});  // Nesterov
    const float* gradient = g.f32();
    float *velocity = m.f32(), *looked = ahead.f32();
    for (int64_t i = 0; i < rows * cols; ++i) {
      const double scaled = grad_scale * gradient[i], moved = o.momentum * velocity[i] + scaled;
      velocity[i] = static_cast<float>(moved);
      looked[i] = static_cast<float>(o.momentum * moved + scaled);
    }
    const Tensor direction = orthogonalise(ahead);
    const float* step = direction.f32();
    float* weight = part.f32();
    for (int64_t i = 0; i < rows * cols; ++i) weight[i] = static_cast<float>(weight[i] * keep - rate * step[i]);
  }
}

}  // namespace plumb
