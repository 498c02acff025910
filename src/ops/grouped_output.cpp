#include "ops/grouped_output.h"

#include "ops/gpu/dispatch.h"
#include "ops/linear_parts.h"

namespace plumb::ops {
namespace {

struct GroupShape {
  int64_t rows, groups, in, out;  // in, out: of one group
  int64_t ld_in, ld_out;          // of whole rows
};
GroupShape group_shape(const Tensor& x, const GroupedWeight& w) {
  const int64_t groups = static_cast<int64_t>(w.group.size());
  return {x.size(0), groups, x.row_size() / groups, w.whole.out / groups, x.row_size(), w.whole.out};
}

// The slices of the pairs that group g uses: the shared A, and B's rows of the group. Not copyable: the list points
// into it.
struct GroupLora {
  GroupLora(const LoraList& whole, int64_t g, int64_t rows) : list(whole) {
    pairs.reserve(whole.size());
    for (LoraRows& part : list) {
      const LoraPair& p = *part.pair;
      part.pair = &pairs.emplace_back(LoraPair{p.a, p.b.rows(g * rows, (g + 1) * rows), p.scale});
    }
  }
  GroupLora(const GroupLora&) = delete;
  std::vector<LoraPair> pairs;
  LoraList list;
};

}  // namespace

Tensor grouped_output(const Tensor& x, const GroupedWeight& w, const LoraList& lora, const RoundAt& at,
                      Tensor* low_rank) {
  PLUMB_ON_GPU(x, grouped_output(x, w, lora, at, low_rank));
  const GroupShape s = group_shape(x, w);
  Tensor u = Tensor::empty({s.rows, s.ld_out});
  for (int64_t g = 0; g < s.groups; ++g) {
    const GroupLora own(lora, g, s.out);
    const float* in = x.f32() + g * s.in;
    float* out = u.f32() + g * s.out;
    linear_into(in, s.ld_in, s.rows, w.group[g], out, s.ld_out);
    add_lora(s.rows, {in, s.ld_in, s.in}, own.list, {{out, s.ld_out, s.out}});
    round_point(at.numerics, at.point, out, s.rows, s.out, s.ld_out);
  }
  return u;
}

Tensor grouped_output_backward(const Tensor& dy, const Tensor& x, const GroupedWeight& w, const LoraList& lora,
                               const std::vector<LoraGrad>& lora_grads, const Tensor& dw, const Tensor& low_rank) {
  PLUMB_ON_GPU(x, grouped_output_backward(dy, x, w, lora, lora_grads, dw, low_rank));
  const GroupShape s = group_shape(x, w);
  Tensor dx = Tensor::empty(x.shape());
  for (int64_t g = 0; g < s.groups; ++g) {
    const GroupLora own(lora, g, s.out);
    const float *in = x.f32() + g * s.in, *d_out = dy.f32() + g * s.out;
    float* d_in = dx.f32() + g * s.in;
    std::vector<LoraGrad> own_grads = lora_grads;
    for (LoraGrad& grad : own_grads)
      if (grad.b.defined()) grad.b = grad.b.rows(g * s.out, (g + 1) * s.out);
    linear_backward_input(d_out, s.ld_out, s.rows, w.group[g], d_in, s.ld_in, false);
    lora_backward(s.rows, {{d_out, s.ld_out, s.out}}, {in, s.ld_in, s.in}, own.list, own_grads, {d_in, s.ld_in, s.in});
    if (dw.defined()) linear_backward_weight(d_out, s.ld_out, in, s.ld_in, s.rows, dw.rows(g * s.out, (g + 1) * s.out));
  }
  return dx;
}

}  // namespace plumb::ops
