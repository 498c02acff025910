// RMSNorm, spec 3.1: y = w * x * (mean(x^2) + eps)^(-1/2), FP32 inside. Sums over channels in one fixed order.
#pragma once
#include "base/tensor.h"
#include "ops/numerics.h"

namespace plumb::ops {

// x [rows,width]; weight f32 [width] or undefined (unweighted: query heads). -> [rows,width], rounded at `at`
Tensor rms_norm(const Tensor& x, const Tensor& weight, float eps, const RoundAt& at = {});

// -> dx; dweight f32 [width] += if defined.
Tensor rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, float eps, const Tensor& dweight);

}  // namespace plumb::ops
