// Products with packed weights on the device, in the pieces that linear.cpp and mixture.cpp put together.
//
// On the device a Linear of format fp8 or fp4 holds what kernels/grouped_linear reads: data = records (u8), scale =
// bases (f32); weights.cpp makes them. Experts of a layer lie one behind the other, so expert 0 stands for all of them.
// A Linear of gate and up together has both outputs: its rows are in record order (kernels/grouped_linear).
#pragma once
#include "kernels/grouped_linear/grouped_linear.h"
#include "ops/gpu/support.h"
#include "ops/linear.h"

namespace plumb::ops::gpu {

// Which rows of a product belong to which weight: all to one, or runs of rows to experts.
struct Groups {
  int count = 1;
  Tensor first_row;  // i32 [count + 1]
};
Groups one_group(int64_t rows);

struct Quantised {
  Tensor values, scales;
  kernels::grouped_linear::Activations activations() const;
};
// x bf16 [*, k], in rows source_row (i32 [rows]) or all of them.
Quantised quantise(const Tensor& x, const Tensor& source_row = {});
Quantised empty_quantised(int64_t rows, int64_t k);

kernels::grouped_linear::Weights packed(const Linear& w, int groups);

// A work list of a product with `outputs` outputs; holds its memory.
struct WorkList {
  kernels::grouped_linear::Plan plan;
  Tensor memory;
};
WorkList work_list(const Groups& groups, int64_t rows, int outputs);
WorkList empty_work_list(int groups, int64_t rows, int outputs);  // for whoever fills it: make_plan, sort_by_expert
WorkList wide_work_list(const Groups& groups, int64_t rows, int outputs);  // of an input gradient

}  // namespace plumb::ops::gpu
