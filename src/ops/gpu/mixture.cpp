#include "ops/mixture.h"

#include <numeric>

#include "kernels/glue/glue.h"
#include "kernels/grouped_linear/grouped_linear.h"
#include "kernels/grouped_linear/route.h"
#include "kernels/router/router.h"
#include "kernels/row_linear/row_linear.h"
#include "kernels/rows/rows.h"
#include "ops/gpu/gpu_ops.h"
#include "ops/gpu/lora.h"
#include "ops/gpu/packed.h"

namespace plumb::ops::gpu {
namespace {

namespace gl = kernels::grouped_linear;
namespace rt = kernels::router;

rt::Sizes sizes_of(const Routing& r) {
  return {static_cast<int>(r.expert.size(0)), static_cast<int>(r.logits.size(1)), static_cast<int>(r.expert.size(1))};
}

}  // namespace

Routing route(const Tensor& x, const Tensor& token, const RouterWeights& w, const RouterOptions& o,
              const Tensor& forced) {
  const int64_t rows = x.size(0), k = o.experts_per_token;
  Routing r{empty({rows, k}, DType::i32), empty({rows, k}, DType::f32), empty({rows, w.gate.out}, DType::f32),
            linear(x, w.gate, {}, {})};
  Tensor table = w.tid2eid, row = token;
  if (forced.defined()) {
    std::vector<int> self(rows);
    std::iota(self.begin(), self.end(), 0);
    table = forced.space() == Space::device ? forced : to_device(forced), row = upload(self);
  }
  const rt::Choice choice{table.defined() ? nullptr : f32(w.bias), table.defined() ? i32(row) : nullptr, i32(table),
                          table.defined() ? static_cast<int>(table.size(0)) : 0, o.scale};
  rt::route(f32(r.logits), sizes_of(r), choice, i32(r.expert), f32(r.weight), f32(r.score), kStream);
  return r;
}

Tensor route_backward(const Tensor& d_weight, const Tensor& d_score_extra, const Tensor& x, const RouterWeights& w,
                      const Routing& r, const RouterOptions& o, const Tensor& d_gate) {
  if (d_gate.defined()) not_on_gpu("training of a router");
  const rt::Sizes sizes = sizes_of(r);
  const Tensor d_logit = empty(d_weight.shape(), DType::f32);
  rt::route_backward(f32(d_weight), f32(r.logits), i32(r.expert), sizes, o.scale, f32(d_logit), kStream);
  if (d_score_extra.defined()) {  // then all experts have a gradient
    const Tensor d_logits = empty(r.logits.shape(), DType::f32);
    rt::all_logits_backward(f32(d_logit), f32(d_score_extra), f32(r.logits), i32(r.expert), sizes, f32(d_logits),
                            kStream);
    return linear_backward(d_logits, x, w.gate, {}, {}, {}, {}, {});
  }
  Tensor dx = empty(x.shape(), DType::f32);
  rt::route_backward_input(f32(d_logit), i32(r.expert), sizes, bf16(w.gate.data), w.gate.in, false, f32(dx), kStream);
  return dx;
}

// On the host: a loss of full training that costs a layer the way of its scores there and back.
double balance_loss(const Routing& r, const std::vector<int>& document, float coefficient, const Tensor& d_score) {
  const Routing host{to_host(r.expert), {}, to_host(r.score), {}};
  const Tensor d = d_score.defined() ? Tensor::zeros(r.score.shape()) : Tensor();
  const double loss = ops::balance_loss(host, document, coefficient, d);
  if (d.defined()) add({to_device(d)}, d_score);
  return loss;
}

// ---- One mixture: the routed experts are E groups of rows, the shared one is one group of all rows.
namespace {

// One of the two: where its rows come from, what belongs to it.
struct Side {
  const Tensor& x;      // bf16 [rows of the batch, d]
  Tensor source_row;    // i32 or undefined: rows as they are
  Tensor route_weight;  // f32 or undefined: 1
  Groups groups;
  int64_t rows;
  const ExpertWeights& w;  // of the first expert; see packed.h
  LoraSet gate_up, down;
  WorkList list;                            // for products with outputs() outputs, or empty: not made yet
  int outputs() const { return w.w1.out; }  // gates and ups
  LoraRowsIn input() const { return {x, source_row, groups, rows}; }
};

// plan: a work list of the sorted rows to be filled as well, or null.
SortedPairs sort_pairs(const Routing& r, int64_t experts, const gl::Plan* plan = nullptr) {
  const int64_t rows = r.expert.size(0), k = r.expert.size(1);
  SortedPairs p{empty({experts + 1}, DType::i32), empty({rows * k}, DType::i32), empty({rows * k}, DType::f32),
                empty({rows, k}, DType::i32)};
  const gl::Choices choices{i32(r.expert), f32(r.weight), static_cast<int>(rows), static_cast<int>(k),
                            static_cast<int>(experts)};
  const Tensor memory = workspace(gl::sort_bytes(choices));
  gl::sort_by_expert(choices, {i32(p.first_row), i32(p.source_row), f32(p.route_weight), i32(p.row_of_slot)},
                     memory.raw(), kStream, plan);
  return p;
}

// Adapters of the routed experts: those of the batch's rows, for the sorted rows.
LoraSet routed_set(const std::vector<ExpertLoraRows>& lora, std::vector<LoraPair> ExpertLora::*pairs, int64_t rows,
                   const SortedPairs& sorted, int64_t experts, bool gate_up) {
  LoraList list;
  for (const ExpertLoraRows& part : lora)
    if (const auto& of_experts = part.lora->*pairs; !of_experts.empty()) {
      PLUMB_CHECK(static_cast<int64_t>(of_experts.size()) == experts &&
                      of_experts.back().a.raw() == of_experts[0].a.raw() + (experts - 1) * of_experts[0].a.bytes(),
                  "adapters of experts must lie one behind the other");
      list.push_back({&of_experts[0], part.rows});
    }
  LoraSet set = lora_set(list, rows, gate_up);
  if (set.of_row.defined()) {
    const Tensor of_pair = empty(sorted.source_row.shape(), DType::i32);
    kernels::glue::gather_words(set.of_row.raw(), i32(sorted.source_row), static_cast<int>(of_pair.numel()),
                                of_pair.raw(), kStream);
    set.of_row = of_pair;
  }
  return set;
}

// Products take eight of the rank at a time (kernels/lora/low_rank.cuh). Each half of a joined pair begins a new eight,
// or a result would depend on the rank to which a batch of several adapters fills them up.
int64_t joined_half(int64_t rank) { return (rank + 7) / 8 * 8; }

// Adapters of the shared expert: gate and up, which have an A each, become one of both ranks with zeros in B.
LoraSet shared_gate_up(const SharedLora& lora, int64_t rows) {
  const LoraList& some = lora.gate.empty() ? lora.up : lora.gate;
  if (some.empty()) return {};
  if (!lora.gate.empty() && !lora.up.empty() && lora.gate.size() != lora.up.size())
    fail("adapters", "some adapt gate_proj or up_proj of the shared expert, others both",
         "give all adapters of a batch the same targets");
  LoraSet set = lora_set(some, rows, true);
  const int64_t r = set.rank, h = joined_half(r), f = set.out;
  set.rank = static_cast<int>(2 * h), set.out *= 2;
  if (set.rank > kernels::row_linear::kMostFewOutputs)
    fail("adapters", "rank " + std::to_string(r) + " on the shared expert's gate and up",
         "the GPU kernels take ranks up to " + std::to_string(kernels::row_linear::kMostFewOutputs / 2) + " there");
  for (size_t i = 0; i < set.items.size(); ++i) {
    LoraSet::Item& item = set.items[i];
    PreparedPair* prepared = item.prepared.get();
    if (prepared && prepared->joined_a.defined()) {
      item.a = prepared->joined_a, item.b = prepared->joined_b;
      continue;
    }
    item.a = zeros({2 * h, set.in}, DType::f32), item.b = zeros({2 * f, 2 * h}, DType::f32);
    for (int half = 0; half < 2; ++half) {
      const LoraList& list = half ? lora.up : lora.gate;
      if (list.empty()) continue;
      const LoraPair& pair = *list[i].pair;
      copy_bytes(item.a.rows(half * h, half * h + r), pair.a);
      kernels::glue::place_columns(f32(pair.b), static_cast<int>(f), static_cast<int>(r),
                                   f32(item.b.rows(half * f, (half + 1) * f)), static_cast<int>(2 * h),
                                   static_cast<int>(half * h), kStream);
    }
    if (prepared) prepared->joined_a = item.a, prepared->joined_b = item.b;
  }
  return set;
}

Side routed_side(const Tensor& x, const SortedPairs& p, const MixtureWeights& w, const MixtureLora& lora,
                 const WorkList& list = {}) {
  const int64_t experts = static_cast<int64_t>(w.experts.size());
  return {x,
          p.source_row,
          p.route_weight,
          {static_cast<int>(experts), p.first_row},
          p.source_row.numel(),
          w.experts[0],
          routed_set(lora.routed, &ExpertLora::gate_up, x.size(0), p, experts, true),
          routed_set(lora.routed, &ExpertLora::down, x.size(0), p, experts, false),
          list};
}
Side shared_side(const Tensor& x, const MixtureWeights& w, const MixtureLora& lora) {
  const int64_t rows = x.size(0);
  return {
      x, {}, {}, one_group(rows), rows, w.shared, shared_gate_up(lora.shared, rows), lora_set(lora.shared.down, rows),
      {}};
}

// The work list of products with so many outputs. Asked for before the launches that make the products' rows, so that
// it is settled when they begin.
WorkList settled_list(const Side& s, int outputs) {
  WorkList list = s.list.memory.defined() && s.list.plan.n == outputs ? s.list : work_list(s.groups, s.rows, outputs);
  list.plan.settled = true;
  return list;
}

// Up to SwiGLU: what the backward pass needs but t_down. h: the hidden rows in FP8, or null: not wanted.
ExpertRows first_half(const Side& s, float limit, const Quantised* h) {
  const WorkList list = settled_list(s, s.outputs());
  const Quantised in = quantise(s.x, s.source_row);
  const LowRankTerm first = low_rank_forward(s.gate_up, s.input());
  const int rows = static_cast<int>(s.rows), n = s.outputs();
  ExpertRows e{empty({rows, n}, DType::bf16), {}, first.t, {}};
  gl::linear(packed(s.w.w1, s.groups.count), in.activations(), list.plan, bf16(e.gate_up), kStream, first.low_rank);
  if (!s.down.empty()) e.hidden = empty({rows, n / 2}, DType::bf16);
  if (h || !s.down.empty())
    gl::swiglu_quantise(bf16(e.gate_up), rows, n, f32(s.route_weight), limit, h ? bytes(h->values) : nullptr,
                        h ? f32(h->scales) : nullptr, kStream, bf16(e.hidden));
  return e;
}

// -> [rows, d]. saved: becomes what the backward pass needs, or null.
Tensor side_forward(const Side& s, float limit, ExpertRows* saved) {
  const int hidden = s.outputs() / 2, rows = static_cast<int>(s.rows);
  const Quantised h = empty_quantised(rows, hidden);
  const WorkList list = settled_list(s, s.w.w2.out);
  LowRankTerm second;
  if (saved || !s.down.empty()) {
    ExpertRows e = first_half(s, limit, &h);
    second = low_rank_forward(s.down, {e.hidden, {}, s.groups, s.rows});
    e.t_down = second.t;
    if (saved) *saved = e;
  } else {
    const WorkList both = s.outputs() == s.w.w2.out ? list : settled_list(s, s.outputs());
    const Quantised in = quantise(s.x, s.source_row);
    const LowRankTerm first = low_rank_forward(s.gate_up, s.input());
    gl::linear_swiglu(packed(s.w.w1, s.groups.count), in.activations(), both.plan, f32(s.route_weight), limit,
                      bytes(h.values), f32(h.scales), kStream, first.low_rank);
  }
  const gl::Weights w2 = packed(s.w.w2, s.groups.count);
  Tensor y = empty({rows, s.w.w2.out}, DType::bf16);
  gl::linear(w2, h.activations(), list.plan, bf16(y), kStream, second.low_rank);
  return y;
}

// What side_backward adds to: gradients in the order of the adapters' lists.
struct SideGrads {
  std::vector<LoraGrad> gate_up, down;
};

// dy [rows, d] of the side's rows -> dx of the side's rows. saved: of the forward pass, or empty. d_route [rows]:
// gradient of the route weights, or undefined.
Tensor side_backward(const Side& s, const Tensor& dy, ExpertRows saved, float limit, const SideGrads& grads,
                     const Tensor& d_route) {
  if (!saved.gate_up.defined()) {
    saved = first_half(s, limit, nullptr);
    if (!s.down.empty()) saved.t_down = low_rank_rows(s.down, {saved.hidden, {}, s.groups, s.rows});
  }
  const int rows = static_cast<int>(s.rows), n = s.outputs();
  const LoraRowsIn out{dy, {}, s.groups, s.rows};
  const LowRankTerm back2 = low_rank_backward(s.down, out, saved.t_down, grads.down);
  const Tensor d_hidden = empty({rows, n / 2}, DType::bf16);
  gl::linear_backward_input(packed(s.w.w2, s.groups.count), bf16(dy), wide_work_list(s.groups, rows, n / 2).plan,
                            bf16(d_hidden), kStream, back2.low_rank);
  add_gradients_of_a(s.down, {saved.hidden, {}, s.groups, s.rows}, back2.t, grads.down);
  const Tensor d_both = empty({rows, n}, DType::bf16);
  gl::swiglu_backward(bf16(d_hidden), bf16(saved.gate_up), rows, n, f32(s.route_weight), limit, bf16(d_both),
                      f32(d_route), kStream);
  const LoraRowsIn both{d_both, {}, s.groups, s.rows};
  const LowRankTerm back1 = low_rank_backward(s.gate_up, both, saved.t_gate_up, grads.gate_up);
  Tensor dx = empty({rows, s.w.w1.in}, DType::bf16);
  gl::linear_backward_input(packed(s.w.w1, s.groups.count), bf16(d_both),
                            wide_work_list(s.groups, rows, s.w.w1.in).plan, bf16(dx), kStream, back1.low_rank);
  add_gradients_of_a(s.gate_up, s.input(), back1.t, grads.gate_up);
  return dx;
}

// Stacked gradients of the routed experts: that of expert 0 stands for all of them.
std::vector<LoraGrad> stacked(const std::vector<ExpertLoraRows>& lora, const std::vector<ExpertLoraGrad>& grads,
                              std::vector<LoraPair> ExpertLora::*pairs, std::vector<LoraGrad> ExpertLoraGrad::*member) {
  std::vector<LoraGrad> list;
  for (size_t i = 0; i < grads.size(); ++i)
    if (!(lora[i].lora->*pairs).empty())
      list.push_back((grads[i].*member).empty() ? LoraGrad{} : (grads[i].*member)[0]);
  return list;
}

// Gradients of the shared expert's gate and up go through a pair of both, whose parts are then added.
struct SharedGradients {
  SharedGradients(const LoraSet& set, const SharedLoraGrad& wanted) : set_(set), wanted_(wanted) {
    if (wanted.gate.empty() && wanted.up.empty()) return;
    for (const LoraSet::Item& item : set.items)
      both_.push_back({zeros(item.a.shape(), DType::f32), zeros(item.b.shape(), DType::f32)});
  }
  const std::vector<LoraGrad>& both() const { return both_; }
  void finish() const {
    const int64_t h = set_.rank / 2, f = set_.out / 2;
    for (size_t i = 0; i < both_.size(); ++i)
      for (int half = 0; half < 2; ++half) {
        const std::vector<LoraGrad>& list = half ? wanted_.up : wanted_.gate;
        if (list.empty()) continue;
        if (list[i].a.defined()) add(std::vector{both_[i].a.rows(half * h, half * h + list[i].a.size(0))}, list[i].a);
        if (list[i].b.defined())
          kernels::glue::add_columns(f32(both_[i].b.rows(half * f, (half + 1) * f)), static_cast<int>(f),
                                     static_cast<int>(2 * h), static_cast<int>(half * h), f32(list[i].b),
                                     static_cast<int>(list[i].b.size(1)), kStream);
      }
  }

 private:
  const LoraSet& set_;
  const SharedLoraGrad& wanted_;
  std::vector<LoraGrad> both_;
};

Tensor combined(const Tensor& routed, const SortedPairs& p, const Tensor& shared) {
  Tensor sum = empty(shared.shape(), DType::bf16);
  gl::combine(bf16(routed), i32(p.row_of_slot), bf16(shared), static_cast<int>(shared.size(0)),
              static_cast<int>(p.row_of_slot.size(1)), static_cast<int>(shared.size(1)), bf16(sum), kStream);
  return sum;
}

}  // namespace

Tensor mixture(const Tensor& x, const Routing& r, const MixtureWeights& w, const MixtureLora& lora, Numerics numerics,
               MixtureSaved* saved) {
  require_kind({numerics, Point::act_w13}, PointKind::fp8x128, "mixture");
  const int experts = static_cast<int>(w.experts.size());
  const WorkList list = empty_work_list(experts, r.expert.numel(), w.experts[0].w1.out);
  const SortedPairs pairs = sort_pairs(r, experts, &list.plan);
  const Tensor routed =
      side_forward(routed_side(x, pairs, w, lora, list), w.limit, saved ? &saved->routed_rows : nullptr);
  const Tensor shared = side_forward(shared_side(x, w, lora), w.limit, saved ? &saved->shared_rows : nullptr);
  if (saved) saved->pairs = pairs;
  return combined(routed, pairs, shared);
}

RoutedBackward mixture_backward(const Tensor& d_sum, const Tensor& x, const Routing& r, const MixtureWeights& w,
                                const MixtureLora& lora, Numerics, const MixtureGrads& grads,
                                const MixtureSaved& saved) {
  if (!grads.experts.empty() || grads.shared.w1.defined()) not_on_gpu("training of the experts' base weights");
  const SortedPairs pairs =
      saved.pairs.first_row.defined() ? saved.pairs : sort_pairs(r, static_cast<int64_t>(w.experts.size()));
  const Side routed = routed_side(x, pairs, w, lora);
  const Tensor dy = empty({routed.rows, x.size(1)}, DType::bf16), d_route = zeros({routed.rows}, DType::f32);
  kernels::rows::copy(d_sum.raw(), i32(pairs.source_row), dy.raw(), nullptr, static_cast<int>(routed.rows),
                      x.size(1) * sizeof(uint16_t), kStream);
  const SideGrads routed_grads{stacked(lora.routed, grads.routed_lora, &ExpertLora::gate_up, &ExpertLoraGrad::gate_up),
                               stacked(lora.routed, grads.routed_lora, &ExpertLora::down, &ExpertLoraGrad::down)};
  const Tensor dx_routed = side_backward(routed, dy, saved.routed_rows, w.limit, routed_grads, d_route);

  const Side shared = shared_side(x, w, lora);
  const SharedGradients both(shared.gate_up, grads.shared_lora);
  const Tensor dx_shared =
      side_backward(shared, d_sum, saved.shared_rows, w.limit, {both.both(), grads.shared_lora.down}, {});
  both.finish();

  RoutedBackward result{combined(dx_routed, pairs, dx_shared), empty(r.weight.shape(), DType::f32)};
  kernels::glue::gather_words(d_route.raw(), i32(pairs.row_of_slot), static_cast<int>(r.weight.numel()),
                              result.d_weight.raw(), kStream);
  return result;
}

}  // namespace plumb::ops::gpu
