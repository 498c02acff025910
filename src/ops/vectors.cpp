#include "ops/vectors.h"

#include "base/error.h"
#include "ops/gpu/dispatch.h"
#include "ops/norm.h"

namespace plumb::ops {
namespace {

bool transformed(const VectorSteps& steps) { return point_kind(steps.numerics, steps.hadamard) != PointKind::keep; }

void check_vectors(const Tensor& x, const RotaryTable& table) {
  PLUMB_CHECK(x.dim() == 3 && x.size(0) == table.rows, to_string(x.shape()) + " for " + std::to_string(table.rows));
}

Tensor as_rows(const Tensor& x) { return x.view({x.size(0) * x.size(1), x.size(2)}); }

}  // namespace

Tensor finish_vectors(const Tensor& x, const Tensor& weight, const RotaryTable& table, const VectorSteps& steps) {
  check_vectors(x, table);
  PLUMB_ON_GPU(x, finish_vectors(x, weight, table, steps));
  const int64_t width = x.size(2), count = x.size(0) * x.size(1);
  const Tensor y =
      steps.normed ? rms_norm(as_rows(x), weight, steps.eps, {steps.numerics, steps.norm}).view(x.shape()) : x.clone();
  rotate(y.f32(), x.size(1), width, table, false);
  round_point(steps.numerics, steps.rope, y);
  if (steps.hadamard == Point::none) {
    round_point(steps.numerics, steps.storage, y.f32(), count, width - 2 * table.pairs, width);
    return y;
  }
  if (transformed(steps)) hadamard(y.f32(), count, width);
  round_point(steps.numerics, steps.hadamard, y);
  round_point(steps.numerics, steps.storage, y);
  return y;
}

Tensor finish_vectors_backward(const Tensor& d_y, const Tensor& x, const Tensor& weight, const RotaryTable& table,
                               const VectorSteps& steps, const Tensor& dweight) {
  check_vectors(d_y, table);
  PLUMB_ON_GPU(d_y, finish_vectors_backward(d_y, x, weight, table, steps, dweight));
  if (transformed(steps)) hadamard(d_y.f32(), d_y.size(0) * d_y.size(1), d_y.size(2));
  rotate(d_y.f32(), d_y.size(1), d_y.size(2), table, true);
  if (!steps.normed) return d_y;
  return rms_norm_backward(as_rows(d_y), as_rows(x), weight, steps.eps, dweight).view(d_y.shape());
}

}  // namespace plumb::ops
