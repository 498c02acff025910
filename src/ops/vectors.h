// What happens to a head, a key, an entry or an index vector between the product that makes it and its use: norm,
// rotation, and the form in which it is stored. One op, because a GPU does it in one pass.
#pragma once
#include "base/tensor.h"
#include "ops/numerics.h"
#include "ops/rope.h"

namespace plumb::ops {

struct VectorSteps {
  bool normed = true;  // RMSNorm over the width, weighted if there is a weight; rounded at `norm`
  float eps = 0;
  Numerics numerics = Numerics::fp32;
  Point norm = Point::none;
  Point rope = Point::none;      // after the rotation
  Point hadamard = Point::none;  // after the transform; where the profile keeps this point, there is no transform
  Point storage = Point::none;   // all channels after a transform, otherwise those in front of the rotated ones
};

// x [rows, vectors, width] -> the same shape; weight f32 [width] or undefined; table: of the rows.
Tensor finish_vectors(const Tensor& x, const Tensor& weight, const RotaryTable& table, const VectorSteps& steps);

// Straight through the roundings. d_y [rows, vectors, width] is used up: the result may share its memory. x: what
// finish_vectors got. dweight f32 [width] += if defined.
Tensor finish_vectors_backward(const Tensor& d_y, const Tensor& x, const Tensor& weight, const RotaryTable& table,
                               const VectorSteps& steps, const Tensor& dweight);

}  // namespace plumb::ops
