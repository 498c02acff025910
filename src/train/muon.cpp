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
  Tensor y = Tensor::empty({x.size(1), x.size(0)});
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < x.size(1); ++j) y.f32()[j * x.size(0) + i] = x.f32()[i * x.size(1) + j];
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
  for (int64_t i = 0; i < mix.numel(); ++i) mix.f32()[i] = k.b * gram.f32()[i] + k.c * mix.f32()[i];
  Tensor next = Tensor::empty(x.shape());
  ops::linear_backward_input(mix.f32(), rows, rows, as_weight(x), next.f32(), cols, false);  // mix x
  for (int64_t i = 0; i < next.numel(); ++i) next.f32()[i] += k.a * x.f32()[i];
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
    for (int64_t i = 0; i < m.numel(); ++i) {
      const double scaled = grad_scale * g.f32()[i], moved = o.momentum * m.f32()[i] + scaled;
      m.f32()[i] = static_cast<float>(moved);
      ahead.f32()[i] = static_cast<float>(o.momentum * moved + scaled);
    }
    const Tensor direction = orthogonalise(ahead);
    for (int64_t i = 0; i < part.numel(); ++i)
      part.f32()[i] = static_cast<float>(part.f32()[i] * keep - rate * direction.f32()[i]);
  }
}

}  // namespace plumb
