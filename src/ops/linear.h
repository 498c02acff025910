// linear: the only way a weight matrix is applied. Each output is one chain of FP32 fused multiply-adds over k =
// 0..in-1 on the widened weight, whatever the number of rows, threads or the vector width of the machine: a row has the
// same bits in any batch. Weights stay packed in memory and are widened inside the product.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "base/tensor.h"
#include "ops/numerics.h"

namespace plumb {

enum class WeightFormat : uint8_t {
  f32,
  bf16,
  fp8,
  fp4
};  // fp8: scale e8m0 [ceil(out/128), ceil(in/128)]; fp4: [out, in/32]

// y = x W^T. data: f32/bf16/f8_e4m3 [out,in] or i8 [out,in/2] (two FP4 codes, low nibble = even element); scale:
// f8_e8m0 or undefined.
struct Linear {
  Tensor data, scale;
  WeightFormat format = WeightFormat::f32;
  int out = 0, in = 0;
  bool defined() const { return data.defined(); }
};

// On a GPU: what its kernels read of a pair, made when it is first needed (ops/gpu/lora.cpp).
struct PreparedPair {
  Tensor planes, factor, factor_address;  // A in two parts, B packed, and where the latter is
  Tensor joined_a, joined_b;              // gate and up of the shared expert together
};

// One low-rank pair: y += scale * (x A^T) B^T. Unmerged everywhere, FP32.
struct LoraPair {
  Tensor a;         // f32 [r, in]
  Tensor b;         // f32 [out, r]
  float scale = 1;  // alpha / r
  // Of a pair on a GPU that does not change any more, so that decoding steps need not prepare it each time; of experts'
  // pairs one behind the other: that of the first, for all of them. Or null.
  std::shared_ptr<PreparedPair> prepared = nullptr;
  bool defined() const { return a.defined(); }
};
// Gradients of a LoraPair, accumulated (+=); undefined = not wanted.
struct LoraGrad {
  Tensor a, b;
};

// The adapters of a batch, seen by one matrix: rows in `rows` (ascending; empty = all rows) get `pair`. No row occurs
// twice.
struct LoraRows {
  const LoraPair* pair = nullptr;
  const std::vector<int>* rows = nullptr;  // nullptr = all rows
};
using LoraList = std::vector<LoraRows>;  // empty = base model

// Where the input and the output of a product are rounded.
struct LinearPoints {
  Numerics numerics = Numerics::fp32;
  Point act = Point::none, out = Point::none;
};

namespace ops {

// x [rows,in] -> [rows,out]: y = round_out( round_act(x) W^T + sum of the adapters' deltas on the unrounded x ).
// low_rank: if not null, a GPU leaves x A^T of the adapters there for the backward pass, or takes it from there if
// low_rank_together has made it; a CPU leaves it as it is.
Tensor linear(const Tensor& x, const Linear& w, const LoraList& lora = {}, const LinearPoints& points = {},
              Tensor* low_rank = nullptr);

// x A^T of the adapters of several products that read x, for `linear` and in one pass over x: decoding waits for one
// launch, training reads x once. The same bits as without this. A CPU, and an empty list, leave theirs undefined.
struct WayDown {
  const LoraList& lora;
  Tensor* low_rank;
};
void low_rank_together(const Tensor& x, const std::vector<WayDown>& downs);

// The plain product on raw memory: y[r, 0..out) (+)= x[r, 0..in) W^T, with row strides; for views into wider rows.
void linear_into(const float* x, int64_t ldx, int64_t rows, const Linear& w, float* y, int64_t ldy);

// Input gradient: dx [rows,in] (+)= dy [rows,out] W; one chain over o = 0..out-1.
void linear_backward_input(const float* dy, int64_t lddy, int64_t rows, const Linear& w, float* dx, int64_t lddx,
                           bool accumulate);
// Weight gradient: dw f32 [out,in] += dy^T x; one chain over the rows in order.
void linear_backward_weight(const float* dy, int64_t lddy, const float* x, int64_t ldx, int64_t rows, const Tensor& dw);

// Everything of `linear`'s backward with the straight-through estimator at its points. x: the unrounded input of the
// forward pass. Returns dx [rows,in]. lora_grads: one for each element of `lora` (or empty: none wanted). dw: undefined
// = frozen. low_rank: what the forward pass left; undefined: made again.
Tensor linear_backward(const Tensor& dy, const Tensor& x, const Linear& w, const LoraList& lora,
                       const LinearPoints& points, const std::vector<LoraGrad>& lora_grads, const Tensor& dw,
                       const Tensor& low_rank = {});

// The weight as FP32 [out,in]: exact (scales are powers of two).
Tensor dequantise(const Linear& w);

}  // namespace ops
}  // namespace plumb
