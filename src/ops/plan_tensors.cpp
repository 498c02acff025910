#include "ops/plan_tensors.h"

#include "ops/gpu/dispatch.h"
#include "ops/indexer.h"

namespace plumb::ops {
namespace {

// i32 where the ops run.
Tensor numbers(const std::vector<int>& values, Space space) {
  const Tensor t = Tensor::of(values);
  return space == Space::device ? to_device(t) : t;
}
Tensor slots(const std::vector<int>& values, Space space) { return values.empty() ? Tensor() : numbers(values, space); }
RowLists lists(const KeyLists& l, Space space) { return {numbers(l.begin, space), numbers(l.row, space)}; }

Compression compression(const CompressionPlan& plan, const std::vector<float>& frequencies, bool all_visible,
                        Space space) {
  Compression c(plan);
  if (plan.ratio == 0) return c;
  c.slot = slots(plan.slot, space);
  c.pending_row = numbers(plan.pending_row, space);
  c.pending_slot = numbers(plan.pending_slot, space);
  c.rotary = rotary_table(plan.position, frequencies, space);
  if (all_visible) c.attended = lists(visible_entries(plan.visible), space);
#ifdef PLUMB_HAS_CUDA
  if (space == Space::device) {
    gpu::upload_sources(c);
    if (!all_visible) c.visible = gpu::visibility(plan.visible);
  }
#endif
  return c;
}

}  // namespace

RowLists::operator KeyLists() const {
  const Tensor begins = to_host(begin), rows = to_host(row);
  const int32_t *first = begins.ptr<int32_t>(), *number = rows.ptr<int32_t>();
  return {{first, first + begins.numel()}, {number, number + rows.numel()}};
}

PlanTensors plan_tensors(const SequencePlan& plan, const std::vector<float>& window_frequencies,
                         const std::vector<float>& compressed_frequencies, Space space) {
  PlanTensors t;
  t.token = numbers(plan.token, space);
  t.key_slot = slots(plan.key_slot, space);
  t.wanted = numbers(plan.wanted, space);
  t.window = lists(plan.window, space);
  t.window_rotary = rotary_table(plan.position, window_frequencies, space);
  if (!compressed_frequencies.empty()) t.compressed_rotary = rotary_table(plan.position, compressed_frequencies, space);
  t.csa = compression(plan.csa, compressed_frequencies, false, space);
  t.hca = compression(plan.hca, compressed_frequencies, true, space);
  return t;
}

}  // namespace plumb::ops
