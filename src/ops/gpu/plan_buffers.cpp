#include "ops/gpu/plan_buffers.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "kernels/rotary/rotary.h"
#include "ops/gpu/support.h"
#include "ops/indexer.h"

namespace plumb::ops::gpu {
namespace {

// The groups that need most: every row has `tiles` tiles, all visible.
kernels::IndexGroups fullest_groups(int rows, int tiles) {
  kernels::IndexGroups g;
  g.rows = rows, g.group_rows = 1;
  for (int row = 0; row <= rows; ++row) g.tile_begin.push_back(row * tiles);
  g.visible_count.assign(rows, tiles * kernels::kIndexTile);
  return g;
}

RotaryTable room_for_table(size_t rows, const std::vector<float>& frequencies) {
  if (2 * frequencies.size() != kernels::kRotaryChannels)
    fail("rotary table", std::to_string(2 * frequencies.size()) + " rotated channels",
         "the GPU kernels rotate 64; use kernels = \"reference\"");
  RotaryTable t;
  t.rows = static_cast<int64_t>(rows), t.pairs = static_cast<int64_t>(frequencies.size());
  t.device = empty({t.rows, t.pairs, 2}, DType::f32);
  return t;
}

void make_table(const Tensor& position, const Tensor& frequency, const RotaryTable& table) {
  if (!table.device.defined() || table.rows == 0) return;
  check(kernels::rotary_table(i32(position), f32(frequency), static_cast<int>(table.rows), table.device.raw(), kStream),
        "rotary table");
}

}  // namespace

PlanNumbers plan_numbers(const SequencePlan& plan, int index_topk, int group_rows) {
  PlanNumbers n;
  const bool trains = plan.key_slot.empty();
  if (plan.csa.ratio > 0) {
    std::vector<kernels::IndexRange> range;
    for (const EntryRange& r : plan.csa.visible.range) range.push_back({r.first, r.last});
    n.groups = kernels::make_index_groups(plan.csa.visible.begin, range, group_rows);
    n.list_begin.push_back(0);
    for (int count : n.groups.visible_count) n.list_begin.push_back(n.list_begin.back() + std::min(count, index_topk));
    if (trains) n.csa_targets = kernels::slot_targets(plan.csa.source, plan.rows(), plan.csa.ratio, plan.csa.slots);
  }
  if (plan.hca.ratio > 0) {
    n.attended = visible_entries(plan.hca.visible);
    if (trains) n.hca_targets = kernels::slot_targets(plan.hca.source, plan.rows(), plan.hca.ratio, plan.hca.slots);
  }
  return n;
}

// Calls f(values, room, tensor) for all that goes into the block, in its order.
template <class F>
void PlanBuffers::visit(const SequencePlan& plan, const PlanNumbers& n, F&& f) {
  const auto whole = [&](const auto& values, Tensor& tensor) { f(values, values.size(), tensor); };
  const auto list = [&](const auto& values, int longest, Tensor& tensor) {
    f(values, fixed_ ? static_cast<size_t>(plan.rows()) * longest : values.size(), tensor);
  };
  whole(plan.token, tensors_.token);
  whole(plan.position, position_);
  whole(plan.wanted, tensors_.wanted);
  if (!plan.key_slot.empty()) whole(plan.key_slot, tensors_.key_slot);
  whole(plan.window.begin, tensors_.window.begin);
  list(plan.window.row, room_.window, tensors_.window.row);
  whole(frequencies_.window, window_frequency_);
  whole(frequencies_.compressed, compressed_frequency_);
  const auto entries = [&](const CompressionPlan& c, const kernels::SlotTargetLists& targets, Compression& t,
                           Tensor& place) {
    if (c.ratio == 0) return;
    whole(c.position, place);
    if (!c.slot.empty()) whole(c.slot, t.slot);
    whole(c.pending_row, t.pending_row);
    whole(c.pending_slot, t.pending_slot);
    whole(c.source, t.source);
    if (targets.begin.empty()) return;
    whole(targets.target, t.target);
    whole(targets.key, t.joined);
    whole(targets.begin, t.part_begin);
    t.parts = targets.parts();
  };
  entries(plan.csa, n.csa_targets, tensors_.csa, csa_position_);
  entries(plan.hca, n.hca_targets, tensors_.hca, hca_position_);
  if (plan.csa.ratio > 0) {
    whole(n.groups.tile_begin, visible_->tile_begin);
    list(n.groups.tile_first, room_.index_tiles, visible_->tile_first);
    list(n.groups.visible, room_.index_tiles, visible_->visible);
    whole(n.groups.visible_count, visible_->visible_count);
    whole(n.list_begin, visible_->list_begin);
  }
  if (plan.hca.ratio > 0) {
    whole(n.attended.begin, tensors_.hca.attended.begin);
    list(n.attended.row, room_.attended, tensors_.hca.attended.row);
  }
}

namespace {

constexpr size_t kAlignment = 64;  // of each tensor of the block

template <class T>
DType type_of(const std::vector<T>&) {
  return sizeof(T) == 8 ? DType::i64 : std::is_floating_point_v<T> ? DType::f32 : DType::i32;
}

}  // namespace

PlanBuffers::PlanBuffers(const SequencePlan& plan, const PlanNumbers& numbers, const RotaryFrequencies& frequencies,
                         int index_topk, const ListRoom* room)
    : frequencies_(frequencies), room_(room ? *room : ListRoom{}), fixed_(room != nullptr) {
  tensors_.csa = Compression(plan.csa), tensors_.hca = Compression(plan.hca);
  size_t bytes = kAlignment;
  const auto place = [&](const auto& values, size_t count) {
    return std::exchange(bytes, (bytes + count * sizeof(values[0]) + kAlignment - 1) / kAlignment * kAlignment);
  };
  visit(plan, numbers, [&](const auto& values, size_t count, Tensor&) { place(values, count); });
  block_ = empty({static_cast<int64_t>(bytes)}, DType::u8);
  host_ = Tensor::empty(block_.shape(), DType::u8);
  bytes = kAlignment;
  visit(plan, numbers, [&](const auto& values, size_t count, Tensor& tensor) {
    const auto begin = static_cast<int64_t>(place(values, count));
    tensor = block_.rows(begin, begin + static_cast<int64_t>(count * sizeof(values[0])))
                 .view({static_cast<int64_t>(count)}, type_of(values));
  });

  tensors_.window_rotary = room_for_table(plan.position.size(), frequencies.window);
  if (!frequencies.compressed.empty())
    tensors_.compressed_rotary = room_for_table(plan.position.size(), frequencies.compressed);
  for (Compression* c : {&tensors_.csa, &tensors_.hca})
    if (c->plan->ratio > 0) c->rotary = room_for_table(c->plan->position.size(), frequencies.compressed);
  if (plan.csa.ratio > 0) {
    visible_->groups = room ? fullest_groups(plan.rows(), room->index_tiles) : numbers.groups;
    visible_->topk = index_topk;
    tensors_.csa.visible.device = visible_;
  }
  fill(plan, numbers);
}

void PlanBuffers::fill(const SequencePlan& plan, const PlanNumbers& numbers) {
  visit(plan, numbers, [&](const auto& values, size_t, Tensor& tensor) {
    const size_t size = values.size() * sizeof(values[0]), begin = tensor.raw() - block_.raw();
    PLUMB_CHECK(size <= tensor.bytes(), std::to_string(values.size()) + " numbers for " + to_string(tensor.shape()));
    if (size > 0) std::memcpy(host_.raw() + begin, values.data(), size);
  });
  copy_bytes(block_, host_);
}

void PlanBuffers::make_tables() const {
  make_table(position_, window_frequency_, tensors_.window_rotary);
  make_table(position_, compressed_frequency_, tensors_.compressed_rotary);
  make_table(csa_position_, compressed_frequency_, tensors_.csa.rotary);
  make_table(hca_position_, compressed_frequency_, tensors_.hca.rotary);
}

PlanTensors plan_tensors(const SequencePlan& plan, const RotaryFrequencies& frequencies, int index_topk) {
  const PlanBuffers buffers(plan, plan_numbers(plan, index_topk), frequencies, index_topk);
  buffers.make_tables();
  return buffers.tensors();
}

}  // namespace plumb::ops::gpu
