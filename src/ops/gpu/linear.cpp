#include "ops/linear.h"

#include <string>

#include "kernels/row_linear/row_linear.h"
#include "ops/gpu/gpu_ops.h"
#include "ops/gpu/lora.h"
#include "ops/gpu/packed.h"

namespace plumb::ops::gpu {
namespace {

namespace gl = kernels::grouped_linear;
namespace rl = kernels::row_linear;

rl::Weight plain(const Linear& w) {
  if (w.format != WeightFormat::bf16)
    fail("linear", "a weight of FP32 on the GPU", "use a checkpoint in bf16, FP8 and FP4, or kernels = \"reference\"");
  return {bf16(w.data), w.out, w.in, 1};
}
rl::Weight grouped(const GroupedWeight& w) {
  rl::Weight weight = plain(w.whole);
  weight.groups = static_cast<int>(w.group.size());
  weight.n /= weight.groups;
  return weight;
}

bool is_packed(const Linear& w) { return w.format == WeightFormat::fp8 || w.format == WeightFormat::fp4; }

// Product of a weight in bf16, rounded or not as the point of the result says.
Tensor plain_product(const Tensor& x, const rl::Weight& w, const LowRankTerm& lora, const RoundAt& at) {
  const int rows = static_cast<int>(x.size(0));
  const bool rounded = point_kind(at.numerics, at.point) == PointKind::bf16;
  Tensor y = empty({rows, int64_t{w.groups} * w.n}, rounded ? DType::bf16 : DType::f32);
  const size_t size = rl::workspace_bytes(rows, w);
  const Tensor memory = size ? workspace(size) : Tensor();
  void* scratch = size ? memory.raw() : nullptr;
  if (rounded)
    rl::linear_bf16(bf16(x), rows, w, bf16(y), scratch, kStream, lora.low_rank);
  else
    rl::linear(bf16(x), rows, w, f32(y), scratch, kStream, lora.low_rank);
  return y;
}

}  // namespace

Tensor linear(const Tensor& x, const Linear& w, const LoraList& lora, const LinearPoints& points) {
  const int64_t rows = x.size(0);
  const Groups all = one_group(rows);
  const LowRankTerm term = low_rank_forward(lora_set(lora, rows), {x, {}, all, rows});
  if (!is_packed(w)) {
    require_kind({points.numerics, points.act}, PointKind::keep, "linear");
    return plain_product(x, plain(w), term, {points.numerics, points.out});
  }
  require_kind({points.numerics, points.act}, PointKind::fp8x128, "linear");
  require_kind({points.numerics, points.out}, PointKind::bf16, "linear");
  const Quantised q = quantise(x);
  Tensor y = empty({rows, w.out}, DType::bf16);
  gl::linear(packed(w, 1), q.activations(), work_list(all, rows, w.out).plan, bf16(y), kStream, term.low_rank);
  return y;
}

Tensor linear_backward(const Tensor& dy, const Tensor& x, const Linear& w, const LoraList& lora, const LinearPoints&,
                       const std::vector<LoraGrad>& lora_grads, const Tensor& dw) {
  if (dw.defined()) not_on_gpu("training of a base weight");
  const int64_t rows = x.size(0);
  const Groups all = one_group(rows);
  const Tensor d_out = converted(dy, DType::bf16);
  const LoraSet set = lora_set(lora, rows);
  const LoraRowsIn in{x, {}, all, rows}, out{d_out, {}, all, rows};
  const LowRankTerm back = low_rank_backward(set, out);
  Tensor dx = empty({rows, w.in}, DType::bf16);
  if (is_packed(w))
    gl::linear_backward_input(packed(w, 1), bf16(d_out), wide_work_list(all, rows, w.in).plan, bf16(dx), kStream,
                              back.low_rank);
  else
    rl::linear_backward_input_bf16(bf16(d_out), static_cast<int>(rows), plain(w), bf16(dx), kStream, back.low_rank);
  if (!set.empty() && !lora_grads.empty()) add_lora_gradients(set, in, out, low_rank_rows(set, in), back.t, lora_grads);
  return dx;
}

// ---- wo_a: a row's groups lie beside each other, so `rows` rows of `groups` widths are rows * groups rows of one
// width, group g of row t being number t * groups + g.
namespace {

struct DenseRows {
  int rows, groups;
  int count() const { return rows * groups; }
};

// Which adapter each dense row uses. With one set of planes a group (B), group g of adapter i is number i * groups + g.
Tensor dense_adapters(const LoraList& lora, const DenseRows& d, bool by_group) {
  std::vector<int> of_row(d.count(), -1);
  const auto set = [&](int adapter, int t) {
    for (int g = 0; g < d.groups; ++g) of_row[t * d.groups + g] = by_group ? adapter * d.groups + g : adapter;
  };
  for (size_t i = 0; i < lora.size(); ++i)
    if (lora[i].rows)
      for (int t : *lora[i].rows) set(static_cast<int>(i), t);
    else
      for (int t = 0; t < d.rows; ++t) set(static_cast<int>(i), t);
  return row_numbers(std::move(of_row));
}

// T [rows, groups * rank], and the factor of all outputs together.
LowRankTerm grouped_forward(const LoraSet& set, const LoraList& lora, const Tensor& x, const DenseRows& d) {
  if (set.empty()) return {};
  LoraSet dense = set;
  if (set.of_row.defined()) dense.of_row = dense_adapters(lora, d, false);
  const Tensor t = go_down(dense, {x.view({d.count(), set.in}), {}, {}, d.count()}, planes_of_a(set, 1), set.in);
  return term_of(set, t, d.groups * set.rank, factors_of_b(set, 1, set.out));
}

// U [rows, groups * rank], and the factor A.
LowRankTerm grouped_backward(const LoraSet& set, const LoraList& lora, const Tensor& dy, const DenseRows& d) {
  if (set.empty()) return {};
  const int out = set.out / d.groups;
  std::vector<Tensor> planes;  // of each adapter's groups
  for (const Tensor& all : planes_of_b(set, d.groups, out))
    for (int g = 0; g < d.groups; ++g) {
      const int64_t bytes = all.numel() / d.groups;
      planes.push_back(all.rows(g * bytes, (g + 1) * bytes));
    }
  LoraSet dense = set;
  dense.of_row = dense_adapters(lora, d, true);
  const Tensor u = go_down(dense, {dy.view({d.count(), out}), {}, {}, d.count()}, planes, out);
  return term_of(set, u, d.groups * set.rank, factors_of_a(set, 1));
}

}  // namespace

Tensor grouped_output(const Tensor& x, const GroupedWeight& w, const LoraList& lora, const RoundAt& at) {
  require_kind(at, PointKind::bf16, "grouped_output");
  const rl::Weight weight = grouped(w);
  const DenseRows dense{static_cast<int>(x.size(0)), weight.groups};
  return plain_product(x, weight, grouped_forward(lora_set(lora, x.size(0)), lora, x, dense), at);
}

Tensor grouped_output_backward(const Tensor& dy, const Tensor& x, const GroupedWeight& w, const LoraList& lora,
                               const std::vector<LoraGrad>& lora_grads, const Tensor& dw) {
  if (dw.defined()) not_on_gpu("training of a base weight");
  const rl::Weight weight = grouped(w);
  const DenseRows dense{static_cast<int>(x.size(0)), weight.groups};
  const LoraSet set = lora_set(lora, dense.rows);
  const LowRankTerm back = grouped_backward(set, lora, dy, dense);
  Tensor dx = empty(x.shape(), DType::bf16);
  rl::linear_backward_input_bf16(bf16(dy), dense.rows, weight, bf16(dx), kStream, back.low_rank);
  if (set.empty() || lora_grads.empty()) return dx;
  const LowRankTerm forward = grouped_forward(set, lora, x, dense);
  const int rank = set.rank, stride = dense.groups * rank, out = set.out / dense.groups;
  std::vector<int> numbers;
  for (int g = 0; g < dense.groups; ++g)
    for (int t = 0; t < dense.rows; ++t) numbers.push_back(t * dense.groups + g);
  const Tensor by_group = upload(numbers);
  for (size_t i = 0; i < lora_grads.size(); ++i)
    for (int g = 0; g < dense.groups; ++g) {
      const int which = static_cast<int>(i), *rows_of_group = i32(by_group) + g * dense.rows;
      if (lora_grads[i].b.defined())
        add_gradient({bf16(dy), rows_of_group, f32(forward.t) + g * rank, stride, rank, dense.rows, out, nullptr, 1,
                      i32(set.of_row), which, false, false,
                      f32(lora_grads[i].b) + static_cast<int64_t>(g) * out * rank});
      if (lora_grads[i].a.defined())
        add_gradient({bf16(x), rows_of_group, f32(back.t) + g * rank, stride, rank, dense.rows, set.in, nullptr, 1,
                      i32(set.of_row), which, true, false, f32(lora_grads[i].a)});
    }
  return dx;
}

}  // namespace plumb::ops::gpu
