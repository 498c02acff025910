#include "ops/gpu/lora.h"

#include <deque>
#include <mutex>
#include <string>
#include <utility>

#include "kernels/glue/glue.h"
#include "kernels/row_linear/row_linear.h"
#include "ops/gpu/recording.h"

namespace plumb::ops::gpu {
namespace {

namespace rl = kernels::row_linear;
namespace lo = kernels::lora;

// Addresses on the device.
Tensor address_table(const std::vector<Tensor>& tensors) {
  std::vector<uint64_t> addresses;
  for (const Tensor& t : tensors) addresses.push_back(reinterpret_cast<uintptr_t>(t.raw()));
  if (recording()) return recorded_constant(Tensor::of(std::vector<int64_t>(addresses.begin(), addresses.end())));
  const Tensor table = workspace(addresses.size() * sizeof(uint64_t));
  kernels::glue::write_words(addresses.data(), static_cast<int>(addresses.size()),
                             reinterpret_cast<uint64_t*>(table.raw()), kStream);
  return table;
}

// Calls make() for a kept tensor that is not there yet, or for one that is not kept (null).
template <class F>
Tensor kept(Tensor* place, F&& make) {
  if (!place) return make();
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (!place->defined()) {
    require_not_recording("what is kept of an adapter");
    *place = make();
  }
  return *place;
}

std::vector<Tensor> planes_of(const LoraSet& set, bool of_b, int groups, int width) {
  std::vector<Tensor> planes;
  for (const LoraSet::Item& item : set.items) {
    const auto make = [&] {
      Tensor p = workspace(rl::split_bytes(groups, set.rank, width));
      // U = dy B contracts over B's outputs: B [out, r] is the transposed weight of that product.
      rl::split_weight(f32(of_b ? item.b : item.a), groups, set.rank, width, item.scale,
                       reinterpret_cast<uint16_t*>(p.raw()), kStream, {of_b, of_b && set.gate_up});
      return p;
    };
    planes.push_back(kept(item.prepared && !of_b ? &item.prepared->planes : nullptr, make));
  }
  return planes;
}

std::vector<Tensor> factors_of(const LoraSet& set, bool of_a, int groups, int outputs) {
  std::vector<Tensor> factors;
  for (const LoraSet::Item& item : set.items) {
    const auto make = [&] {
      Tensor f = workspace(lo::factor_bytes(groups, outputs, set.rank));
      lo::pack_factor(f32(of_a ? item.a : item.b), groups, outputs, set.rank, of_a, !of_a && set.gate_up,
                      reinterpret_cast<uint32_t*>(f.raw()), kStream);
      return f;
    };
    factors.push_back(kept(item.prepared && !of_a ? &item.prepared->factor : nullptr, make));
  }
  return factors;
}

}  // namespace

LoraSet lora_set(const LoraList& lora, int64_t rows, bool gate_up) {
  LoraSet set;
  set.gate_up = gate_up;
  std::vector<int> of_row(rows, -1);
  bool some = false;
  for (const LoraRows& part : lora) {
    const LoraPair& p = *part.pair;
    const int number = static_cast<int>(set.items.size());
    const int rank = static_cast<int>(p.a.size(0));
    if (!set.items.empty() && rank != set.rank)
      fail("adapters", "ranks " + std::to_string(set.rank) + " and " + std::to_string(rank) + " in one batch");
    if (rank > rl::kMostFewOutputs)
      fail("adapters", "rank " + std::to_string(rank),
           "the GPU kernels take ranks up to " + std::to_string(rl::kMostFewOutputs));
    set.rank = rank, set.in = static_cast<int>(p.a.size(1)), set.out = static_cast<int>(p.b.size(0));
    set.items.push_back({p.a, p.b, p.scale, p.prepared});
    some = some || part.rows;
    if (part.rows)
      for (int r : *part.rows) of_row[r] = number;
    else
      of_row.assign(rows, number);
  }
  if (some || set.items.size() > 1) set.of_row = row_numbers(std::move(of_row));
  return set;
}

Tensor row_numbers(std::vector<int> values) {
  if (recording()) return recorded_row_numbers(values);
  constexpr size_t kKept = 4;  // dense ones, and those of wo_a in both directions
  static std::mutex mutex;
  static auto& known = *new std::deque<std::pair<std::vector<int>, Tensor>>;  // the newest first; never freed
  std::lock_guard lock(mutex);
  for (const auto& [host, device] : known)
    if (host == values) return device;
  Tensor there = upload(values);
  known.emplace_front(std::move(values), there);
  if (known.size() > kKept) known.pop_back();
  return there;
}

std::vector<Tensor> planes_of_a(const LoraSet& set, int groups) { return planes_of(set, false, groups, set.in); }
std::vector<Tensor> planes_of_b(const LoraSet& set, int groups, int out) { return planes_of(set, true, groups, out); }
std::vector<Tensor> factors_of_b(const LoraSet& set, int groups, int out) {
  return factors_of(set, false, groups, out);
}
std::vector<Tensor> factors_of_a(const LoraSet& set, int groups) { return factors_of(set, true, groups, set.in); }

Tensor go_down(const LoraSet& set, const LoraRowsIn& x, const std::vector<Tensor>& planes, int width) {
  Tensor t = empty({x.rows, set.rank}, DType::f32);
  const rl::SplitWeight weight{reinterpret_cast<const uint16_t*>(planes[0].raw()), x.groups.count, set.rank, width};
  rl::Adapters adapters;
  Tensor table;
  if (set.of_row.defined()) {
    table = address_table(planes);
    adapters = {reinterpret_cast<const uint16_t* const*>(table.raw()), i32(set.of_row),
                static_cast<int>(planes.size())};
  }
  rl::few_outputs(bf16(x.x), i32(x.source_row), x.groups.count > 1 ? i32(x.groups.first_row) : nullptr,
                  static_cast<int>(x.rows), weight, f32(t), kStream, adapters);
  return t;
}

LowRankTerm term_of(const LoraSet& set, Tensor t, int t_stride, std::vector<Tensor> factors) {
  LowRankTerm term;
  term.t = std::move(t);
  term.factors = std::move(factors);
  const bool alone =
      set.items.size() == 1 && set.items[0].prepared && set.items[0].prepared->factor.raw() == term.factors[0].raw();
  term.factor_table =
      kept(alone ? &set.items[0].prepared->factor_address : nullptr, [&] { return address_table(term.factors); });
  term.of_row = set.of_row;
  term.low_rank = {set.rank, f32(term.t), t_stride, reinterpret_cast<const uint32_t* const*>(term.factor_table.raw()),
                   i32(term.of_row)};
  return term;
}

LowRankTerm low_rank_forward(const LoraSet& set, const LoraRowsIn& x) {
  if (set.empty()) return {};
  return term_of(set, low_rank_rows(set, x), set.rank, factors_of_b(set, x.groups.count, set.out));
}

Tensor low_rank_rows(const LoraSet& set, const LoraRowsIn& x) {
  return go_down(set, x, planes_of_a(set, x.groups.count), set.in);
}

LowRankTerm low_rank_backward(const LoraSet& set, const LoraRowsIn& dy) {
  if (set.empty()) return {};
  const int groups = dy.groups.count;
  return term_of(set, go_down(set, dy, planes_of_b(set, groups, set.out), set.out), set.rank,
                 factors_of_a(set, groups));
}

void add_gradient(const lo::Gradient& g) {
  if (g.rows == 0) return;
  const Tensor memory = workspace(lo::gradient_bytes(g));
  lo::add_gradient(g, memory.raw(), kStream);
}

void add_lora_gradients(const LoraSet& set, const LoraRowsIn& x, const LoraRowsIn& dy, const Tensor& t, const Tensor& u,
                        const std::vector<LoraGrad>& grads) {
  if (set.empty() || grads.empty()) return;
  const int rows = static_cast<int>(x.rows), groups = x.groups.count;
  const int* first_row = groups > 1 ? i32(x.groups.first_row) : nullptr;
  for (size_t i = 0; i < grads.size(); ++i) {
    const int which = static_cast<int>(i);
    if (grads[i].b.defined())
      add_gradient({bf16(dy.x), i32(dy.source_row), f32(t), set.rank, set.rank, rows, set.out, first_row, groups,
                    i32(set.of_row), which, false, set.gate_up, f32(grads[i].b)});
    if (grads[i].a.defined())
      add_gradient({bf16(x.x), i32(x.source_row), f32(u), set.rank, set.rank, rows, set.in, first_row, groups,
                    i32(set.of_row), which, true, false, f32(grads[i].a)});
  }
}

}  // namespace plumb::ops::gpu
