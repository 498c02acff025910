// Sums of gradients and of partial results, and multiples, element by element.
#pragma once
#include <cstdint>
#include <vector>

#include "base/tensor.h"

namespace plumb::ops {

// into += x, n elements, on the calling thread.
void add(const float* x, int64_t n, float* into);
// The same for whole tensors of one size, on all threads: the terms in order. On a GPU bf16 sums are rounded once.
void add(const std::vector<Tensor>& terms, const Tensor& into);
void add(const Tensor& x, const Tensor& into);
// -> x * factor, f32
Tensor scaled(const Tensor& x, float factor);

}  // namespace plumb::ops
