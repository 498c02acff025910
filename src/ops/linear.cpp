#include "ops/linear.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "base/float_formats.h"
#include "base/parallel.h"
#include "ops/gpu/dispatch.h"
#include "ops/linear_parts.h"
#include "ops/matmul.h"

namespace plumb::ops {
namespace {

void check_weight(const Linear& w) {
  const int64_t out = w.out, in = w.in;
  DType type = DType::f32;
  Shape data = {out, in}, scale;
  switch (w.format) {
    case WeightFormat::f32:
      break;
    case WeightFormat::bf16:
      type = DType::bf16;
      break;
    case WeightFormat::fp8:
      type = DType::f8_e4m3, scale = {(out + 127) / 128, (in + 127) / 128};
      break;
    case WeightFormat::fp4:
      type = DType::i8, data = {out, in / 2}, scale = {out, in / 32};
      if (in % 32 != 0) fail("linear", "an FP4 weight has " + std::to_string(in) + " inputs", "use a multiple of 32");
      break;
  }
  const auto check = [](const char* name, const Tensor& t, const Shape& shape, DType wanted) {
    if (t.defined() && t.shape() == shape && t.dtype() == wanted) return;
    fail("linear", std::string(name) + " " + dtype_name(wanted) + to_string(shape) + " expected, " +
                       (t.defined() ? dtype_name(t.dtype()) + to_string(t.shape()) : "nothing") + " found");
  };
  check("weight", w.data, data, type);
  if (!scale.empty()) check("scale", w.scale, scale, DType::f8_e8m0);
}

void check_rows(const char* name, const Tensor& x, int64_t width) {
  if (x.dim() != 2 || x.size(1) != width)
    fail("linear",
         std::string(name) + " [rows," + std::to_string(width) + "] expected, " + to_string(x.shape()) + " found");
}

}  // namespace

Tensor linear(const Tensor& x, const Linear& w, const LoraList& lora, const LinearPoints& points, Tensor* low_rank) {
  check_rows("x", x, w.in);
  PLUMB_ON_GPU(x, linear(x, w, lora, points, low_rank));
  const int64_t rows = x.size(0);
  const Tensor rounded = rounded_input(x, points);
  Tensor y = Tensor::empty({rows, w.out});
  linear_into(rounded.f32(), w.in, rows, w, y.f32(), w.out);
  add_lora(rows, {x.f32(), w.in, w.in}, lora, {{y.f32(), w.out, w.out}});
  round_point(points.numerics, points.out, y);
  return y;
}

void low_rank_together(const Tensor& x, const std::vector<WayDown>& downs) {
  for (const WayDown& d : downs) {
    for (const LoraRows& part : d.lora) check_rows("x", x, part.pair->a.size(1));
    *d.low_rank = {};
  }
  PLUMB_ON_GPU(x, low_rank_together(x, downs));
}

void linear_into(const float* x, int64_t ldx, int64_t rows, const Linear& w, float* y, int64_t ldy) {
  check_weight(w);
  matmul(rows, {x, ldx, 1}, panel_of(w, true), y, ldy, false);
}

void linear_backward_input(const float* dy, int64_t lddy, int64_t rows, const Linear& w, float* dx, int64_t lddx,
                           bool accumulate) {
  check_weight(w);
  matmul(rows, {dy, lddy, 1}, panel_of(w, false), dx, lddx, accumulate);
}

void linear_backward_weight(const float* dy, int64_t lddy, const float* x, int64_t ldx, int64_t rows,
                            const Tensor& dw) {
  const int64_t in = dw.size(1);
  matmul(dw.size(0), {dy, 1, lddy}, panel_of(x, ldx, rows, in, false), dw.f32(), in, true);
}

Tensor linear_backward(const Tensor& dy, const Tensor& x, const Linear& w, const LoraList& lora,
                       const LinearPoints& points, const std::vector<LoraGrad>& lora_grads, const Tensor& dw,
                       const Tensor& low_rank) {
  check_rows("x", x, w.in);
  check_rows("dy", dy, w.out);
  PLUMB_ON_GPU(x, linear_backward(dy, x, w, lora, points, lora_grads, dw, low_rank));
  const int64_t rows = x.size(0);
  Tensor dx = Tensor::empty({rows, w.in});
  linear_backward_input(dy.f32(), w.out, rows, w, dx.f32(), w.in, false);
  lora_backward(rows, {{dy.f32(), w.out, w.out}}, {x.f32(), w.in, w.in}, lora, lora_grads, {dx.f32(), w.in, w.in});
  if (dw.defined()) linear_backward_weight(dy.f32(), w.out, rounded_input(x, points).f32(), w.in, rows, dw);
  return dx;
}

Tensor dequantise(const Linear& w) {
  check_weight(w);
  Tensor full = Tensor::empty({w.out, w.in});
  parallel_for(w.out, std::max(1, 16384 / std::max(1, w.in)), [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o)
      for (int64_t i = 0; i < w.in; ++i) {
        const int64_t at = o * w.in + i;
        float& value = full.f32()[at];
        switch (w.format) {
          case WeightFormat::f32:
            value = w.data.f32()[at];
            break;
          case WeightFormat::bf16:
            value = bf16_to_float(w.data.ptr<uint16_t>()[at]);
            break;
          case WeightFormat::fp8:
            value = e4m3_to_float(w.data.ptr<uint8_t>()[at]) *
                    e8m0_to_float(w.scale.ptr<uint8_t>()[o / 128 * w.scale.size(1) + i / 128]);
            break;
          case WeightFormat::fp4:
            value = e2m1_to_float(w.data.ptr<uint8_t>()[at / 2] >> (at % 2 * 4) & 15) *
                    e8m0_to_float(w.scale.ptr<uint8_t>()[at / 32]);
            break;
        }
      }
  });
  return full;
}

}  // namespace plumb::ops
