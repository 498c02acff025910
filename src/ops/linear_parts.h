// The parts of `linear` on raw rows with strides, for callers whose rows are slices of wider rows or whose adapters
// span several products. Internal to ops and model.
#pragma once
#include <initializer_list>
#include <vector>

#include "ops/linear.h"

namespace plumb::ops {

// Rows of `width` floats that lie `ld` floats apart.
struct RowsIn {
  const float* data;
  int64_t ld, width;
};
struct RowsOut {
  float* data;
  int64_t ld, width;
};

// x as it meets the product: x itself where nothing is rounded.
Tensor rounded_input(const Tensor& x, const LinearPoints& points);

// y += (scale * x A^T) B^T for the rows of each adapter: the chains that the base product began go on over k = 0..r-1.
// ys: y in one piece, or in slices; B's rows belong to them in order.
void add_lora(int64_t rows, const RowsIn& x, const LoraList& lora, std::initializer_list<RowsOut> ys);

// Backward of add_lora: dx += (scale * dy B) A, the chains of dx going on; grads: one for each element of `lora` or
// empty.
void lora_backward(int64_t rows, std::initializer_list<RowsIn> dys, const RowsIn& x, const LoraList& lora,
                   const std::vector<LoraGrad>& grads, const RowsOut& dx);

}  // namespace plumb::ops
