#include "ops/compressor.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/gpu/dispatch.h"
#include "ops/vector_math.h"

namespace plumb::ops {
namespace {

// Up to 8 channels of one pooled row. Absent: value 0, score -inf.
struct Slot {
  Lanes value, score, weight;
};

struct Pooling {
  int64_t rows, width, row_width;  // batch rows, entry width c, co * c
  int ratio, slots;
};

Pooling check_pooling(const CompressionPlan& plan, const ProjectedRows& rows, const Tensor& ape) {
  PLUMB_CHECK(plan.ratio > 0 && (plan.slots == plan.ratio || plan.slots == 2 * plan.ratio));
  PLUMB_CHECK(plan.source.size() == plan.position.size() * static_cast<size_t>(plan.slots));
  const int halves = plan.slots / plan.ratio;
  const int64_t row_width = rows.kv.size(1);
  PLUMB_CHECK(rows.kv.dim() == 2 && rows.kv.shape() == rows.gate.shape() && row_width % halves == 0);
  PLUMB_CHECK(ape.shape() == (Shape{plan.ratio, row_width}), to_string(ape.shape()));
  const int64_t pending = rows.pending_kv.defined() ? rows.pending_kv.size(0) : 0;
  for (int s : plan.source) PLUMB_CHECK(s >= -1 && s < rows.kv.size(0) + pending, "source row " + std::to_string(s));
  return {rows.kv.size(0), row_width / halves, row_width, plan.ratio, plan.slots};
}

// Channel of a projected row that slot s reads for entry channel 0: the first half of the slots, where there are two
// windows, reads the first half of the channels.
int64_t first_channel(const Pooling& shape, int s) {
  return s < shape.slots - shape.ratio ? 0 : shape.row_width - shape.width;
}

// Reads one entry's slots and makes the softmax weights; returns the pooled channels.
Lanes pool(const CompressionPlan& plan, const Pooling& shape, const ProjectedRows& rows, const Tensor& ape, int entry,
           int64_t first, int64_t count, std::vector<Slot>& slot) {
  Lanes top = splat(-std::numeric_limits<float>::infinity());
  for (int s = 0; s < shape.slots; ++s) {
    const int source = plan.source[entry * shape.slots + s];
    if (source < 0) {
      slot[s].value = splat(0);
      slot[s].score = splat(-std::numeric_limits<float>::infinity());
      continue;
    }
    const bool pending = source >= shape.rows;
    const int64_t row = pending ? source - shape.rows : source, channel = first_channel(shape, s) + first;
    const int64_t at = row * shape.row_width + channel;
    const float* bias = ape.f32() + (s % shape.ratio) * shape.row_width + channel;
    const float* value = (pending ? rows.pending_kv : rows.kv).f32() + at;
    const float* gate = (pending ? rows.pending_gate : rows.gate).f32() + at;
    slot[s].value = load_part(value, count);
    slot[s].score = load_part(gate, count) + load_part(bias, count);
    top = _mm256_max_ps(slot[s].score, top);
  }
  Lanes sum = splat(0), entry_channels = splat(0);
  for (int s = 0; s < shape.slots; ++s) {
    slot[s].weight = exp(slot[s].score - top);
    sum += slot[s].weight;
  }
  for (int s = 0; s < shape.slots; ++s) {
    slot[s].weight = slot[s].weight / sum;
    entry_channels = fma(slot[s].weight, slot[s].value, entry_channels);
  }
  return entry_channels;
}

void add_part(float* p, Lanes x, int64_t n) { store_part(p, load_part(p, n) + x, n); }

}  // namespace

Tensor pool_entries(const Compression& compression, const ProjectedRows& rows, const Tensor& ape, const RoundAt& at) {
  PLUMB_ON_GPU(rows.kv, pool_entries(compression, rows, ape, at));
  const CompressionPlan& plan = *compression.plan;
  const Pooling shape = check_pooling(plan, rows, ape);
  Tensor entries = Tensor::empty({plan.new_entries(), shape.width});
  parallel_for(plan.new_entries(), 1, [&](int64_t begin, int64_t end) {
    std::vector<Slot> slot(shape.slots);
    for (int64_t e = begin; e < end; ++e) {
      for (int64_t first = 0; first < shape.width; first += kLanes) {
        const int64_t count = std::min(kLanes, shape.width - first);
        const Lanes pooled = pool(plan, shape, rows, ape, static_cast<int>(e), first, count, slot);
        store_part(entries.f32() + e * shape.width + first, pooled, count);
      }
    }
  });
  round_point(at, entries);
  return entries;
}

// Per channel (spec 4.2): dv_s = w_s de, dscore_s = w_s (v_s - e) de; the score's gradient goes to the gate and to ape.
// Threads share the channels, not the entries: a row may feed several entries (branches of a prefix tree, the two
// halves), and ape is fed by all of them; so every sum runs over the entries in order.
void pool_entries_backward(const Compression& compression, const ProjectedRows& rows, const Tensor& ape,
                           const Tensor& d_entries, const Tensor& d_kv, const Tensor& d_gate, const Tensor& d_ape) {
  PLUMB_ON_GPU(rows.kv, pool_entries_backward(compression, rows, ape, d_entries, d_kv, d_gate, d_ape));
  const CompressionPlan& plan = *compression.plan;
  const Pooling shape = check_pooling(plan, rows, ape);
  PLUMB_CHECK(d_entries.shape() == (Shape{plan.new_entries(), shape.width}), to_string(d_entries.shape()));
  PLUMB_CHECK(d_kv.shape() == rows.kv.shape() && d_gate.shape() == rows.kv.shape());
  PLUMB_CHECK(!d_ape.defined() || d_ape.shape() == ape.shape());
  parallel_for((shape.width + kLanes - 1) / kLanes, 2, [&](int64_t begin, int64_t end) {
    std::vector<Slot> slot(shape.slots);
    for (int e = 0; e < plan.new_entries(); ++e) {
      for (int64_t first = begin * kLanes; first < std::min(end * kLanes, shape.width); first += kLanes) {
        const int64_t count = std::min(kLanes, shape.width - first);
        const Lanes pooled = pool(plan, shape, rows, ape, e, first, count, slot);
        const Lanes de = load_part(d_entries.f32() + e * shape.width + first, count);
        for (int s = 0; s < shape.slots; ++s) {
          const int source = plan.source[e * shape.slots + s];
          if (source < 0 || source >= shape.rows) continue;
          const int64_t channel = first_channel(shape, s) + first, at = source * shape.row_width + channel;
          const Lanes dv = slot[s].weight * de;
          const Lanes dscore = dv * (slot[s].value - pooled);
          add_part(d_kv.f32() + at, dv, count);
          add_part(d_gate.f32() + at, dscore, count);
          if (d_ape.defined()) add_part(d_ape.f32() + (s % shape.ratio) * shape.row_width + channel, dscore, count);
        }
      }
    }
  });
}

}  // namespace plumb::ops
