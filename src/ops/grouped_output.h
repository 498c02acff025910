// The grouped output projection wo_a, spec 3.3: group g of heads meets the rows [g*d_g, (g+1)*d_g) of the weight only.
#pragma once
#include <vector>

#include "base/tensor.h"
#include "ops/linear.h"

namespace plumb::ops {

struct GroupedWeight {
  const Linear& whole;               // [groups * d_g, in / groups]
  const std::vector<Linear>& group;  // the same cut into its groups
};

// x [rows, in], in any shape with `rows` rows -> [rows, groups * d_g], rounded at `at`. lora: one A for all groups, B
// [groups * d_g, r]. low_rank as in linear.
Tensor grouped_output(const Tensor& x, const GroupedWeight& w, const LoraList& lora, const RoundAt& at,
                      Tensor* low_rank = nullptr);
// -> dx, the shape of x. lora_grads, dw and low_rank as in linear_backward.
Tensor grouped_output_backward(const Tensor& dy, const Tensor& x, const GroupedWeight& w, const LoraList& lora,
                               const std::vector<LoraGrad>& lora_grads, const Tensor& dw, const Tensor& low_rank = {});

}  // namespace plumb::ops
