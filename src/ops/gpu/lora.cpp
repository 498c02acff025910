#include "ops/gpu/lora.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <string>
#include <utility>

#include "kernels/glue/glue.h"
#include "kernels/lora/prepare.h"
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

// What a product reads of a set's pairs: of item i the planes of one matrix and the factor of the other.
struct Forms {
  std::vector<Tensor> planes, factors;
  Tensor planes_table, factor_table;  // addresses; of planes only where rows name their adapters
};

// Forward: A's planes and B's factor, which a pair that does not change keeps; backward: B's planes and A's factor.
// parts: of B's outputs, each with planes of its own.
struct Wanted {
  bool forward;
  int groups, parts = 1;
  bool factors = true, planes = true;
};

// Both of one item in one launch, which also writes their addresses (device words, or null).
void make_forms(const LoraSet& set, const LoraSet::Item& item, const Wanted& w, Tensor& planes, Tensor& factor,
                const lo::Addresses& addresses) {
  const Tensor &down = w.forward ? item.a : item.b, &up = w.forward ? item.b : item.a;
  // U = dy B contracts over B's outputs: B [out, r] is the transposed weight of that product.
  rl::Split p{f32(down), w.groups * w.parts, set.rank, w.forward ? set.in : set.out / w.parts, item.scale, {}, nullptr};
  p.source = {!w.forward, !w.forward && set.gate_up};
  if (w.planes) {
    planes = workspace(rl::split_bytes(p.groups, p.n, p.k));
    p.to = reinterpret_cast<uint16_t*>(planes.raw());
  }
  lo::Factor f{f32(up), w.groups, w.forward ? set.out : set.in, set.rank, !w.forward, w.forward && set.gate_up,
               nullptr};
  if (w.factors) {
    factor = workspace(lo::factor_bytes(f.groups, f.n, f.rank));
    f.packed = reinterpret_cast<uint32_t*>(factor.raw());
  }
  lo::prepare(f, p, addresses, kStream);
}

lo::Addresses addresses_at(const Tensor& factors, const Tensor& planes, size_t i) {
  return {reinterpret_cast<const uint32_t**>(factors.raw()) + i,
          planes.defined() ? reinterpret_cast<const uint16_t**>(planes.raw()) + i : nullptr};
}

Forms forms_of(const LoraSet& set, const Wanted& wanted) {
  static std::mutex mutex;
  const size_t count = set.items.size();
  Forms forms{std::vector<Tensor>(count), std::vector<Tensor>(count), workspace(count * 8), workspace(count * 8)};
  bool some_kept = false;
  for (size_t i = 0; i < count; ++i) {
    PreparedPair* kept = wanted.forward ? set.items[i].prepared.get() : nullptr;
    if (!kept) {
      make_forms(set, set.items[i], wanted, forms.planes[i], forms.factors[i],
                 addresses_at(forms.factor_table, forms.planes_table, i));
      continue;
    }
    std::lock_guard lock(mutex);
    if (!kept->planes.defined()) {
      require_not_recording("what is kept of an adapter");
      kept->factor_address = workspace(8);
      make_forms(set, set.items[i], {true, wanted.groups}, kept->planes, kept->factor,
                 addresses_at(kept->factor_address, {}, 0));
    }
    forms.planes[i] = kept->planes, forms.factors[i] = kept->factor;
    if (count == 1) forms.factor_table = kept->factor_address;
    some_kept = true;
  }
  if (some_kept && set.of_row.defined()) forms.planes_table = address_table(forms.planes);
  if (some_kept && count > 1) forms.factor_table = address_table(forms.factors);
  return forms;
}

// x A^T of each set; forms: its own. All have the same rows for their items.
std::vector<Tensor> go_down(const std::vector<LoraSet>& sets, const LoraRowsIn& x, const std::vector<Forms>& forms) {
  std::vector<Tensor> t;
  std::vector<rl::Down> downs;
  for (size_t i = 0; i < sets.size(); ++i) {
    t.push_back(empty({x.rows, sets[i].rank}, DType::f32));
    downs.push_back({reinterpret_cast<const uint16_t*>(forms[i].planes[0].raw()),
                     reinterpret_cast<const uint16_t* const*>(forms[i].planes_table.raw()), sets[i].rank, f32(t[i])});
  }
  rl::few_outputs(bf16(x.x), i32(x.source_row), x.groups.count > 1 ? i32(x.groups.first_row) : nullptr,
                  static_cast<int>(x.rows), x.groups.count, sets[0].in, downs, kStream, i32(sets[0].of_row),
                  static_cast<int>(sets[0].items.size()));
  return t;
}

LowRankTerm term_of(const LoraSet& set, Tensor t, int t_stride, Forms forms) {
  LowRankTerm term;
  term.t = std::move(t);
  term.factors = std::move(forms.factors);
  term.factor_table = std::move(forms.factor_table);
  term.of_row = set.of_row;
  term.low_rank = {set.rank, f32(term.t), t_stride, reinterpret_cast<const uint32_t* const*>(term.factor_table.raw()),
                   i32(term.of_row)};
  return term;
}

// What the gradients of item `which` have in common.
lo::Gradient gradient_of(const LoraSet& set, const LoraRowsIn& y, const Tensor& t, int t_stride, int which) {
  lo::Gradient g{};
  g.y = bf16(y.x), g.source_row = i32(y.source_row), g.rows = static_cast<int>(y.rows);
  g.first_row = y.groups.count > 1 ? i32(y.groups.first_row) : nullptr, g.groups = y.groups.count;
  g.t = f32(t), g.t_stride = t_stride, g.rank = set.rank;
  g.adapter = i32(set.of_row), g.which = which;
  g.parts = 1;
  return g;
}

void add_gradient(const lo::Gradient& g) {
  if (g.rows == 0) return;
  const Tensor memory = workspace(lo::gradient_bytes(g));
  lo::add_gradient(g, memory.raw(), kStream);
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

LowRankTerm low_rank_forward(const LoraSet& set, const LoraRowsIn& x) { return low_rank_forward(set, set, x, 1); }

LowRankTerm low_rank_forward(const LoraSet& set, const LoraSet& of_parts, const LoraRowsIn& x, int parts) {
  if (set.empty()) return {};
  const std::vector<Forms> forms{forms_of(of_parts, {true, x.groups.count})};
  return term_of(set, go_down({of_parts}, x, forms)[0], parts * set.rank, forms[0]);
}

LowRankTerm low_rank_forward(const LoraSet& set, const Tensor& t) {
  return term_of(set, t, set.rank, forms_of(set, {true, 1, 1, true, false}));
}

Tensor low_rank_rows(const LoraSet& set, const LoraRowsIn& x) { return low_rank_rows(std::vector{set}, x)[0]; }

std::vector<Tensor> low_rank_rows(const std::vector<LoraSet>& sets, const LoraRowsIn& x) {
  std::vector<Forms> forms;
  for (const LoraSet& set : sets) forms.push_back(forms_of(set, {true, x.groups.count, 1, false}));
  return go_down(sets, x, forms);
}

LowRankTerm low_rank_backward(const LoraSet& set, const LoraRowsIn& dy, const Tensor& t,
                              const std::vector<LoraGrad>& grads, int parts) {
  if (set.empty()) return {};
  const int groups = dy.groups.count, stride = parts * set.rank;
  Tensor u = empty({dy.rows, stride}, DType::f32);
  Forms forms = forms_of(set, {false, groups, parts});
  for (size_t i = 0; i < set.items.size(); ++i) {
    lo::Gradient g = gradient_of(set, dy, t, stride, static_cast<int>(i));
    g.columns = set.out, g.gate_up = set.gate_up, g.parts = parts;
    g.out = t.defined() && !grads.empty() ? f32(grads[i].b) : nullptr;
    g.planes = reinterpret_cast<const uint16_t*>(forms.planes[i].raw()), g.u = f32(u);
    add_gradient(g);
  }
  return term_of(set, std::move(u), stride, std::move(forms));
}

void add_gradients_of_a(const LoraSet& set, const LoraRowsIn& x, const Tensor& u, const std::vector<LoraGrad>& grads) {
  for (size_t i = 0; i < std::min(grads.size(), set.items.size()); ++i) {
    if (!grads[i].a.defined()) continue;
    lo::Gradient g = gradient_of(set, x, u, set.rank, static_cast<int>(i));
    g.columns = set.in, g.transposed = true, g.out = f32(grads[i].a);
    add_gradient(g);
  }
}

}  // namespace plumb::ops::gpu
