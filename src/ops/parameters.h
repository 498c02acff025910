// What an optimizer does with all parameters of a run at once, on the device that they are on.
#pragma once
#include <vector>

#include "base/tensor.h"

namespace plumb::ops {

// Of one parameter, f32 on a device, of one shape; first, second: Adam's moments, undefined if only the norm is wanted.
struct ParameterTensors {
  Tensor weight, gradient, first, second;
};
// Their addresses, where the kernels read them. The tensors must live as long.
struct ParameterTable {
  Tensor pieces;
  int count = 0;
};
ParameterTable parameter_table(const std::vector<ParameterTensors>& parameters);

// sqrt of the sum of squares over all gradients, in double, in an order that depends on the shapes alone.
double gradient_norm(const ParameterTable& table);

struct AdamWStep {  // formula and meaning: train/adamw.h
  double beta1, beta2, eps, weight_decay, learning_rate, gradient_scale;
  int64_t step;
};
void adamw(const ParameterTable& table, const AdamWStep& step);

}  // namespace plumb::ops
