#include "ops/linear.h"

#include <algorithm>
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

bool wants_b(const std::vector<LoraGrad>& grads) {
  return std::any_of(grads.begin(), grads.end(), [](const LoraGrad& g) { return g.b.defined(); });
}

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

Tensor linear(const Tensor& x, const Linear& w, const LoraList& lora, const LinearPoints& points, Tensor* low_rank) {
  const int64_t rows = x.size(0);
  const Groups all = one_group(rows);
  const LoraSet set = lora_set(lora, rows);
  const LowRankTerm term =
      low_rank && low_rank->defined() ? low_rank_forward(set, *low_rank) : low_rank_forward(set, {x, {}, all, rows});
  if (low_rank) *low_rank = term.t;
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

void low_rank_together(const Tensor& x, const std::vector<WayDown>& downs) {
  const int64_t rows = x.size(0);
  const Groups all = one_group(rows);
  std::vector<LoraSet> sets;
  std::vector<Tensor*> to;
  const LoraList* first = nullptr;
  for (const WayDown& d : downs) {
    if (d.lora.empty()) continue;
    const auto same_rows = [](const LoraRows& a, const LoraRows& b) { return a.rows == b.rows; };
    if (!first) first = &d.lora;
    if (!std::equal(first->begin(), first->end(), d.lora.begin(), d.lora.end(), same_rows)) continue;  // on its own
    sets.push_back(lora_set(d.lora, rows)), to.push_back(d.low_rank);
  }
  if (sets.size() < 2) return;
  const std::vector<Tensor> t = low_rank_rows(sets, {x, {}, all, rows});
  for (size_t i = 0; i < t.size(); ++i) *to[i] = t[i];
}

Tensor linear_backward(const Tensor& dy, const Tensor& x, const Linear& w, const LoraList& lora, const LinearPoints&,
                       const std::vector<LoraGrad>& lora_grads, const Tensor& dw, const Tensor& low_rank) {
  if (dw.defined()) not_on_gpu("training of a base weight");
  const int64_t rows = x.size(0);
  const Groups all = one_group(rows);
  const Tensor d_out = converted(dy, DType::bf16);
  const LoraSet set = lora_set(lora, rows);
  const LoraRowsIn in{x, {}, all, rows}, out{d_out, {}, all, rows};
  const Tensor t = low_rank.defined() || !wants_b(lora_grads) ? low_rank : low_rank_rows(set, in);
  const LowRankTerm back = low_rank_backward(set, out, t, lora_grads);
  Tensor dx = empty({rows, w.in}, DType::bf16);
  if (is_packed(w))
    gl::linear_backward_input(packed(w, 1), bf16(d_out), wide_work_list(all, rows, w.in).plan, bf16(dx), kStream,
                              back.low_rank);
  else
    rl::linear_backward_input_bf16(bf16(d_out), static_cast<int>(rows), plain(w), bf16(dx), kStream, back.low_rank);
  add_gradients_of_a(set, in, back.t, lora_grads);
  return dx;
}

// ---- wo_a: a row's groups lie beside each other, so `rows` rows of `groups` widths are rows * groups rows of one
// width, group g of row t being number t * groups + g.
namespace {

struct DenseRows {
  int rows, groups;
  int count() const { return rows * groups; }
};

// The adapters for dense rows.
LoraSet dense_set(const LoraSet& set, const LoraList& lora, const DenseRows& d) {
  LoraSet dense = set;
  if (!set.of_row.defined()) return dense;
  std::vector<int> of_row(d.count(), -1);
  for (size_t i = 0; i < lora.size(); ++i) {
    const auto use = [&](int t) { std::fill_n(of_row.begin() + t * d.groups, d.groups, static_cast<int>(i)); };
    if (lora[i].rows)
      for (int t : *lora[i].rows) use(t);
    else
      for (int t = 0; t < d.rows; ++t) use(t);
  }
  dense.of_row = row_numbers(std::move(of_row));
  return dense;
}

}  // namespace

Tensor grouped_output(const Tensor& x, const GroupedWeight& w, const LoraList& lora, const RoundAt& at,
                      Tensor* low_rank) {
  require_kind(at, PointKind::bf16, "grouped_output");
  const rl::Weight weight = grouped(w);
  const DenseRows dense{static_cast<int>(x.size(0)), weight.groups};
  const LoraSet set = lora_set(lora, dense.rows);
  LowRankTerm term;
  if (!set.empty())
    term = low_rank_forward(set, dense_set(set, lora, dense), {x.view({dense.count(), set.in}), {}, {}, dense.count()},
                            dense.groups);
  if (low_rank) *low_rank = term.t;
  return plain_product(x, weight, term, at);
}

Tensor grouped_output_backward(const Tensor& dy, const Tensor& x, const GroupedWeight& w, const LoraList& lora,
                               const std::vector<LoraGrad>& lora_grads, const Tensor& dw, const Tensor& low_rank) {
  if (dw.defined()) not_on_gpu("training of a base weight");
  const rl::Weight weight = grouped(w);
  const DenseRows dense{static_cast<int>(x.size(0)), weight.groups};
  const LoraSet set = lora_set(lora, dense.rows);
  const LoraSet wide = dense_set(set, lora, dense);
  const Tensor wide_x = set.empty() ? x : x.view({dense.count(), set.in});
  const LoraRowsIn in{wide_x, {}, {}, dense.count()};
  const Tensor t = low_rank.defined() || !wants_b(lora_grads) ? low_rank : low_rank_rows(wide, in);
  const LowRankTerm back = low_rank_backward(set, {dy, {}, {}, dense.rows}, t, lora_grads, dense.groups);
  Tensor dx = empty(x.shape(), DType::bf16);
  rl::linear_backward_input_bf16(bf16(dy), dense.rows, weight, bf16(dx), kStream, back.low_rank);
  add_gradients_of_a(wide, in, back.t, lora_grads);
  return dx;
}

}  // namespace plumb::ops::gpu
