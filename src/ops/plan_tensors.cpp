#include "ops/plan_tensors.h"

#include "base/error.h"
#include "ops/gpu/dispatch.h"
#include "ops/indexer.h"

namespace plumb::ops {
namespace {

Tensor slots(const std::vector<int>& values) { return values.empty() ? Tensor() : Tensor::of(values); }

Compression compression(const CompressionPlan& plan, const std::vector<float>& frequencies, bool all_visible) {
  Compression c(plan);
  if (plan.ratio == 0) return c;
  c.slot = slots(plan.slot);
  c.pending_row = Tensor::of(plan.pending_row);
  c.pending_slot = Tensor::of(plan.pending_slot);
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

PlanTensors plan_tensors(const SequencePlan& plan, const RotaryFrequencies& frequencies,
                         [[maybe_unused]] int index_topk, Space space) {
#ifdef PLUMB_HAS_CUDA
  if (space == Space::device) return gpu::plan_tensors(plan, frequencies, index_topk);
#endif
  PLUMB_CHECK(space == Space::host);
  PlanTensors t;
  t.token = Tensor::of(plan.token);
  t.key_slot = slots(plan.key_slot);
  t.wanted = Tensor::of(plan.wanted);
  t.window = plan.window;
  t.window_rotary = rotary_table(plan.position, frequencies.window);
  if (!frequencies.compressed.empty()) t.compressed_rotary = rotary_table(plan.position, frequencies.compressed);
  t.csa = compression(plan.csa, frequencies.compressed, false);
  t.hca = compression(plan.hca, frequencies.compressed, true);
  return t;
}

}  // namespace plumb::ops
