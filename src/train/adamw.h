// AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay and bias correction.
#pragma once
#include <cstdint>

#include "base/tensor.h"

namespace plumb {

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.99, eps = 1e-13, weight_decay = 0;
};

// Step number `step` (from 1) of one parameter, all tensors f32 of one shape. With g = grad_scale * grad:
//   m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g^2
//   w = w (1 - lr weight_decay) - lr (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)
// Each element is computed in double and then rounded.
void adamw_step(const Tensor& w, const Tensor& grad, const Tensor& m, const Tensor& v, const AdamWOptions& options,
                double lr, double grad_scale, int64_t step);

}  // namespace plumb
