#include "ops/plan_tensors.h"

#include "ops/indexer.h"

namespace plumb::ops {
namespace {

Tensor numbers(const std::vector<int>& values) { return Tensor::of(values); }
Tensor slots(const std::vector<int>& values) { return values.empty() ? Tensor() : numbers(values); }

Compression compression(const CompressionPlan& plan, const std::vector<float>& frequencies, bool all_visible) {
  Compression c(plan);
  if (plan.ratio == 0) return c;
  c.slot = slots(plan.slot);
  c.pending_row = numbers(plan.pending_row);
  c.pending_slot = numbers(plan.pending_slot);
  c.rotary = rotary_table(plan.position, frequencies);
  if (all_visible) c.attended = visible_entries(plan.visible);
  return c;
}

}  // namespace

RowLists::operator KeyLists() const {
  const Tensor begins = to_host(begin), rows = to_host(row);
  const int32_t *first = begins.ptr<int32_t>(), *number = rows.ptr<int32_t>();
  return {{first, first + begins.numel()}, {number, number + rows.numel()}};
}

PlanTensors plan_tensors(const SequencePlan& plan, const std::vector<float>& window_frequencies,
                         const std::vector<float>& compressed_frequencies) {
  PlanTensors t;
  t.token = numbers(plan.token);
  t.key_slot = slots(plan.key_slot);
  t.wanted = numbers(plan.wanted);
  t.window = plan.window;
  t.window_rotary = rotary_table(plan.position, window_frequencies);
  if (!compressed_frequencies.empty()) t.compressed_rotary = rotary_table(plan.position, compressed_frequencies);
  t.csa = compression(plan.csa, compressed_frequencies, false);
  t.hca = compression(plan.hca, compressed_frequencies, true);
  return t;
}

}  // namespace plumb::ops
