// The tensors of a plan on the device: its numbers lie in one block, so that one copy brings them there, and so that
// the numbers of another plan of the same sizes can take their place (a recorded step reads them where they are).
#pragma once
#include <vector>

#include "kernels/compressor/compressor.h"
#include "kernels/indexer/indexer.h"
#include "ops/plan_tensors.h"

namespace plumb::ops::gpu {

// What the indexer's kernel reads of the ranges.
struct DeviceVisibility {
  kernels::IndexGroups groups;  // the sizes of launches and lists follow from these
  int topk = 0;
  Tensor tile_begin, tile_first, visible, visible_count;
  Tensor list_begin;  // [rows + 1] where each row's list of min(topk, visible) entries begins
};

// What is worked out from a plan before it goes to the device.
struct PlanNumbers {
  KeyLists attended;            // HCA: all that each row may see
  kernels::IndexGroups groups;  // CSA
  std::vector<int> list_begin;
  kernels::SlotTargetLists csa_targets, hca_targets;  // of plans without a cache: only they have a backward pass
};
// group_rows: as for make_index_groups.
PlanNumbers plan_numbers(const SequencePlan& plan, int index_topk, int group_rows = 0);

// The longest lists of one row for which there is room. Rows, entries and wanted rows are always those of the plan.
struct ListRoom {
  int window = 0, attended = 0, index_tiles = 0;
  bool operator==(const ListRoom&) const = default;
};

class PlanBuffers {
 public:
  // room: null = what the plan itself needs; else the numbers must be of groups of one row, and what the host reads of
  // them (DeviceVisibility::groups) is that of the longest lists. The plan must outlive the tensors.
  PlanBuffers(const SequencePlan& plan, const PlanNumbers& numbers, const RotaryFrequencies& frequencies,
              int index_topk, const ListRoom* room = nullptr);

  // Enqueues the copy of another plan's numbers. Error: a list does not fit, or sizes differ.
  void fill(const SequencePlan& plan, const PlanNumbers& numbers);
  // Enqueues the making of the rotary tables from the positions.
  void make_tables() const;
  const PlanTensors& tensors() const { return tensors_; }
  size_t bytes() const { return block_.bytes(); }

 private:
  template <class F>
  void visit(const SequencePlan& plan, const PlanNumbers& numbers, F&& f);

  RotaryFrequencies frequencies_;
  ListRoom room_;
  bool fixed_ = false;
  Tensor host_, block_;
  Tensor position_, csa_position_, hca_position_, window_frequency_, compressed_frequency_;
  std::shared_ptr<DeviceVisibility> visible_ = std::make_shared<DeviceVisibility>();
  PlanTensors tensors_;
};

}  // namespace plumb::ops::gpu
