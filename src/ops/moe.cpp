#include "ops/moe.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/linear_parts.h"
#include "ops/matmul.h"
#include "ops/vector_math.h"

namespace plumb::ops {
namespace {

struct ExpertPoints {
  Point act13, out13, hid, act2, out2;
};
constexpr ExpertPoints kRouted = {Point::act_w13, Point::out_w13, Point::hid_w2, Point::act_w2, Point::out_w2};
constexpr ExpertPoints kShared = {Point::act_s13, Point::out_s13, Point::hid_s2, Point::act_s2, Point::out_s2};

// The adapters of one expert, and where their gradients go.
struct AdapterLists {
  LoraList gate_up;  // one pair for both: b [2f, r]
  LoraList gate, up, down;
};
struct AdapterListGrads {
  std::vector<LoraGrad> gate_up, gate, up, down;
};

// What an expert is, apart from its rows.
struct Expert {
  const ExpertWeights& w;
  float limit;  // of the clamp; 0 = none
  const AdapterLists& lora;
  Numerics numerics;
  const ExpertPoints& points;
  LinearPoints in() const { return {numerics, points.act13, points.out13}; }
  LinearPoints out() const { return {numerics, points.act2, points.out2}; }
};

// ---- clamped SwiGLU
// ----------------------------------------------------------------------------------------------------

struct Clamp {
  explicit Clamp(float limit) : on(limit > 0), top(splat(limit)), bottom(splat(-limit)) {}
  Lanes gate(Lanes g) const { return on ? _mm256_min_ps(top, g) : g; }  // operand order: NaN stays NaN
  Lanes up(Lanes u) const { return on ? _mm256_max_ps(bottom, _mm256_min_ps(top, u)) : u; }
  // Gradients: d, or 0 where the clamp cut the value; at equality the gradient passes.
  Lanes pass_gate(Lanes g, Lanes d) const { return on ? _mm256_and_ps(_mm256_cmp_ps(g, top, _CMP_NGT_UQ), d) : d; }
  Lanes pass_up(Lanes u, Lanes d) const {
    return on ? _mm256_and_ps(_mm256_cmp_ps(u, bottom, _CMP_NLT_UQ), pass_gate(u, d)) : d;
  }
  bool on;
  Lanes top, bottom;
};

Lanes sigmoid(Lanes x) { return splat(1) / (splat(1) + exp(-x)); }

void swiglu_row(const float* gate, const float* up, int64_t f, float weight, const Clamp& clamp, float* hid) {
  for_lanes(f, [&](int64_t i, int64_t n) {
    const Lanes g = clamp.gate(load_part(gate + i, n)), u = clamp.up(load_part(up + i, n));
    store_part(hid + i, splat(weight) * (g * sigmoid(g) * u), n);
  });
}

// -> gradient of the weight
float swiglu_backward_row(const float* d_hid, const float* gate, const float* up, int64_t f, float weight,
                          const Clamp& clamp, float* d_gate, float* d_up) {
  Lanes d_weight = splat(0);
  for_lanes(f, [&](int64_t i, int64_t n) {
    const Lanes raw_g = load_part(gate + i, n), raw_u = load_part(up + i, n), d = load_part(d_hid + i, n);
    const Lanes g = clamp.gate(raw_g), u = clamp.up(raw_u), s = sigmoid(g), silu = g * s;
    d_weight = fma(d, silu * u, d_weight);
    const Lanes dw = d * splat(weight), slope = s * fma(g, splat(1) - s, splat(1));  // of silu
    store_part(d_gate + i, clamp.pass_gate(raw_g, dw * u * slope), n);
    store_part(d_up + i, clamp.pass_up(raw_u, dw * silu), n);
  });
  return sum_lanes(d_weight);
}

// ---- one expert
// --------------------------------------------------------------------------------------------------------

// weight: of each row, or null (1 everywhere).
ExpertHidden expert_hidden(const Tensor& x, const float* weight, const Expert& e) {
  const int64_t rows = x.size(0), d = x.size(1), f = e.w.w1.out;
  ExpertHidden h{Tensor::empty({rows, f}), Tensor::empty({rows, f}), Tensor::empty({rows, f})};
  const Tensor rounded = rounded_input(x, e.in());
  linear_into(rounded.f32(), d, rows, e.w.w1, h.gate.f32(), f);
  linear_into(rounded.f32(), d, rows, e.w.w3, h.up.f32(), f);
  const RowsIn in{x.f32(), d, d};
  const RowsOut gate{h.gate.f32(), f, f}, up{h.up.f32(), f, f};
  add_lora(rows, in, e.lora.gate_up, {gate, up});
  add_lora(rows, in, e.lora.gate, {gate});
  add_lora(rows, in, e.lora.up, {up});
  round_point(e.numerics, e.points.out13, h.gate);
  round_point(e.numerics, e.points.out13, h.up);
  const Clamp clamp(e.limit);
  parallel_for(rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, f)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      swiglu_row(h.gate.f32() + r * f, h.up.f32() + r * f, f, weight ? weight[r] : 1.0f, clamp, h.hid.f32() + r * f);
  });
  round_point(e.numerics, e.points.hid, h.hid);
  return h;
}

Tensor expert_forward(const Tensor& x, const float* weight, const Expert& e, ExpertHidden* keep) {
  ExpertHidden h = expert_hidden(x, weight, e);
  Tensor y = linear(h.hid, e.w.w2, e.lora.down, e.out());
  if (keep) *keep = std::move(h);
  return y;
}

// kept: the hidden rows, or null: they are recomputed. d_weight [rows] is assigned if not null.
Tensor expert_backward(const Tensor& dy, const Tensor& x, const float* weight, const Expert& e,
                       const ExpertGrads& grads, const AdapterListGrads& lora_grads, const ExpertHidden* kept,
                       float* d_weight) {
  const ExpertHidden h = kept ? *kept : expert_hidden(x, weight, e);
  const Tensor d_hid = linear_backward(dy, h.hid, e.w.w2, e.lora.down, e.out(), lora_grads.down, grads.w2);
  const int64_t rows = x.size(0), f = e.w.w1.out;
  const Tensor d_gate = Tensor::empty({rows, f}), d_up = Tensor::empty({rows, f});
  const Clamp clamp(e.limit);
  parallel_for(rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, f)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t at = r * f;
      const float d = swiglu_backward_row(d_hid.f32() + at, h.gate.f32() + at, h.up.f32() + at, f,
                                          weight ? weight[r] : 1.0f, clamp, d_gate.f32() + at, d_up.f32() + at);
      if (d_weight) d_weight[r] = d;
    }
  });
  const int64_t d = x.size(1);
  Tensor dx = Tensor::empty({rows, d});  // one chain over the outputs of w1, then of w3, then the adapters'
  linear_backward_input(d_gate.f32(), f, rows, e.w.w1, dx.f32(), d, false);
  linear_backward_input(d_up.f32(), f, rows, e.w.w3, dx.f32(), d, true);
  const RowsIn in{x.f32(), d, d}, from_gate{d_gate.f32(), f, f}, from_up{d_up.f32(), f, f};
  const RowsOut to{dx.f32(), d, d};
  lora_backward(rows, {from_gate, from_up}, in, e.lora.gate_up, lora_grads.gate_up, to);
  lora_backward(rows, {from_gate}, in, e.lora.gate, lora_grads.gate, to);
  lora_backward(rows, {from_up}, in, e.lora.up, lora_grads.up, to);
  if (grads.w1.defined() || grads.w3.defined()) {
    const Tensor rounded = rounded_input(x, e.in());
    if (grads.w1.defined()) linear_backward_weight(d_gate.f32(), f, rounded.f32(), d, rows, grads.w1);
    if (grads.w3.defined()) linear_backward_weight(d_up.f32(), f, rounded.f32(), d, rows, grads.w3);
  }
  return dx;
}

// ---- rows by expert
// ----------------------------------------------------------------------------------------------------

struct ExpertRows {
  std::vector<int64_t> begin;      // [E+1]
  std::vector<int64_t> place;      // row * K + slot, ascending within an expert
  std::vector<int> busiest_first;  // experts that have rows, by number of rows
  int64_t count(int e) const { return begin[e + 1] - begin[e]; }
};

ExpertRows group_rows(const Tensor& expert, int64_t experts) {
  ExpertRows g;
  const int32_t* chosen = expert.ptr<int32_t>();
  g.begin.assign(experts + 1, 0);
  for (int64_t i = 0; i < expert.numel(); ++i) {
    PLUMB_CHECK(chosen[i] >= 0 && chosen[i] < experts, "routing names an expert that does not exist");
    ++g.begin[chosen[i] + 1];
  }
  std::partial_sum(g.begin.begin(), g.begin.end(), g.begin.begin());
  g.place.resize(expert.numel());
  std::vector<int64_t> next(g.begin.begin(), g.begin.end() - 1);
  for (int64_t i = 0; i < expert.numel(); ++i) g.place[next[chosen[i]]++] = i;
  for (int e = 0; e < experts; ++e)
    if (g.count(e) > 0) g.busiest_first.push_back(e);
  std::stable_sort(g.busiest_first.begin(), g.busiest_first.end(),
                   [&](int a, int b) { return g.count(a) > g.count(b); });
  return g;
}

// Experts side by side, the busiest first; or, when there are few of them with many rows each, one after the other with
// every product on all threads.
void for_experts(const ExpertRows& g, const std::function<void(int expert)>& body) {
  constexpr int64_t many_rows = 64;
  const int64_t n = static_cast<int64_t>(g.busiest_first.size());
  const bool inside = n < 2 * thread_count() && static_cast<int64_t>(g.place.size()) > n * many_rows;
  if (inside) {
    for (int e : g.busiest_first) body(e);
  } else {
    parallel_for(n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(g.busiest_first[i]);
    });
  }
}

// The adapters as one expert sees them: rows are numbers within the expert's own rows. Not copyable: the lists point
// into it.
struct ExpertAdapters {
  ExpertAdapters(const std::vector<ExpertLoraRows>& lora, const std::vector<ExpertLoraGrad>& grad, int expert,
                 const ExpertRows& g, int64_t k) {
    rows.reserve(lora.size());
    for (size_t i = 0; i < lora.size(); ++i) {
      rows.push_back(own_rows(lora[i].rows, expert, g, k));
      if (rows.back().empty()) continue;
      const ExpertLoraGrad* wanted = grad.empty() ? nullptr : &grad[i];
      const ExpertLora& l = *lora[i].lora;
      if (!l.gate_up.empty() && l.gate_up[expert].defined())
        add(lists.gate_up, grads.gate_up, l.gate_up[expert],
            wanted && !wanted->gate_up.empty() ? wanted->gate_up[expert] : LoraGrad{});
      if (!l.down.empty() && l.down[expert].defined())
        add(lists.down, grads.down, l.down[expert],
            wanted && !wanted->down.empty() ? wanted->down[expert] : LoraGrad{});
    }
  }
  ExpertAdapters(const ExpertAdapters&) = delete;

  std::vector<std::vector<int>> rows;
  AdapterLists lists;
  AdapterListGrads grads;

 private:
  static std::vector<int> own_rows(const std::vector<int>* wanted, int expert, const ExpertRows& g, int64_t k) {
    std::vector<int> own;
    for (int64_t i = 0; i < g.count(expert); ++i) {
      const int row = static_cast<int>(g.place[g.begin[expert] + i] / k);
      if (!wanted || std::binary_search(wanted->begin(), wanted->end(), row)) own.push_back(static_cast<int>(i));
    }
    return own;
  }
  void add(LoraList& list, std::vector<LoraGrad>& grad_list, const LoraPair& pair, LoraGrad grad) {
    list.push_back({&pair, &rows.back()});
    grad_list.push_back(std::move(grad));
  }
};

// Rows of x that an expert works on, and their routing weights.
struct ExpertInput {
  Tensor x;
  std::vector<float> weight;
};
Tensor gather_rows(const Tensor& x, const ExpertRows& g, int expert, int64_t k) {
  const int64_t width = x.size(1), n = g.count(expert);
  Tensor part = Tensor::empty({n, width});
  for (int64_t i = 0; i < n; ++i)
    std::copy_n(x.f32() + g.place[g.begin[expert] + i] / k * width, width, part.f32() + i * width);
  return part;
}
ExpertInput gather_input(const Tensor& x, const Routing& r, const ExpertRows& g, int expert) {
  ExpertInput in{gather_rows(x, g, expert, r.expert.size(1)), {}};
  for (int64_t i = g.begin[expert]; i < g.begin[expert + 1]; ++i) in.weight.push_back(r.weight.f32()[g.place[i]]);
  return in;
}

// part [rows of the expert, d] -> slots [rows*K, d]
void place_rows(const Tensor& part, const ExpertRows& g, int expert, const Tensor& slots) {
  const int64_t width = part.size(1);
  for (int64_t i = 0; i < part.size(0); ++i)
    std::copy_n(part.f32() + i * width, width, slots.f32() + g.place[g.begin[expert] + i] * width);
}

// slots [rows*K, d] -> [rows, d], summed in slot order whatever the order in which experts were computed.
Tensor sum_slots(const Tensor& slots, int64_t rows, int64_t k) {
  const int64_t d = slots.size(1);
  Tensor sum = Tensor::zeros({rows, d});
  parallel_for(rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, d * k)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t j = 0; j < k; ++j) add_scaled(slots.f32() + (r * k + j) * d, 1, sum.f32() + r * d, d);
  });
  return sum;
}

}  // namespace

Tensor routed_experts(const Tensor& x, const Routing& r, const std::vector<ExpertWeights>& experts, float limit,
                      const std::vector<ExpertLoraRows>& lora, Numerics numerics, std::vector<ExpertHidden>* keep) {
  if (keep) keep->assign(experts.size(), {});
  const int64_t rows = x.size(0), k = r.expert.size(1);
  const ExpertRows g = group_rows(r.expert, static_cast<int64_t>(experts.size()));
  const Tensor slots = Tensor::empty({rows * k, x.size(1)});
  for_experts(g, [&](int e) {
    const ExpertAdapters adapters(lora, {}, e, g, k);
    const ExpertInput in = gather_input(x, r, g, e);
    const Expert expert{experts[e], limit, adapters.lists, numerics, kRouted};
    place_rows(expert_forward(in.x, in.weight.data(), expert, keep ? &(*keep)[e] : nullptr), g, e, slots);
  });
  return sum_slots(slots, rows, k);
}

RoutedBackward routed_experts_backward(const Tensor& d_sum, const Tensor& x, const Routing& r,
                                       const std::vector<ExpertWeights>& experts, float limit,
                                       const std::vector<ExpertLoraRows>& lora, Numerics numerics,
                                       const std::vector<ExpertGrads>& grads,
                                       const std::vector<ExpertLoraGrad>& lora_grads,
                                       const std::vector<ExpertHidden>* kept) {
  const int64_t rows = x.size(0), k = r.expert.size(1);
  const ExpertRows g = group_rows(r.expert, static_cast<int64_t>(experts.size()));
  const Tensor slots = Tensor::empty({rows * k, x.size(1)});
  RoutedBackward result{{}, Tensor::empty({rows, k})};
  for_experts(g, [&](int e) {
    const ExpertAdapters adapters(lora, lora_grads, e, g, k);
    const ExpertInput in = gather_input(x, r, g, e);
    const Expert expert{experts[e], limit, adapters.lists, numerics, kRouted};
    std::vector<float> d_weight(in.weight.size());
    const Tensor dx = expert_backward(gather_rows(d_sum, g, e, k), in.x, in.weight.data(), expert,
                                      grads.empty() ? ExpertGrads{} : grads[e], adapters.grads,
                                      kept ? &(*kept)[e] : nullptr, d_weight.data());
    place_rows(dx, g, e, slots);
    for (size_t i = 0; i < d_weight.size(); ++i) result.d_weight.f32()[g.place[g.begin[e] + i]] = d_weight[i];
  });
  result.dx = sum_slots(slots, rows, k);
  return result;
}

Tensor shared_expert(const Tensor& x, const ExpertWeights& w, float limit, const SharedLora& lora, Numerics numerics,
                     ExpertHidden* keep) {
  const AdapterLists lists{{}, lora.gate, lora.up, lora.down};
  return expert_forward(x, nullptr, {w, limit, lists, numerics, kShared}, keep);
}

Tensor shared_expert_backward(const Tensor& dy, const Tensor& x, const ExpertWeights& w, float limit,
                              const SharedLora& lora, Numerics numerics, const ExpertGrads& grads,
                              const SharedLoraGrad& lora_grads, const ExpertHidden* kept) {
  const AdapterLists lists{{}, lora.gate, lora.up, lora.down};
  return expert_backward(dy, x, nullptr, {w, limit, lists, numerics, kShared}, grads,
                         {{}, lora_grads.gate, lora_grads.up, lora_grads.down}, kept, nullptr);
}

}  // namespace plumb::ops
