// What ops read of a SequencePlan, made once a pass and used by all layers: row numbers and key lists as tensors where
// the ops run, and the rotary tables of rows and entries.
#pragma once
#include <memory>
#include <vector>

#include "base/tensor.h"
#include "ops/lists.h"
#include "ops/rope.h"
#include "plan/sequence_plan.h"

namespace plumb::ops {

// Which entries each row of a batch may see, for the indexer. The ranges must outlive it.
struct Visibility {
  const EntryRanges* ranges = nullptr;
  Visibility() = default;
  Visibility(const EntryRanges& ranges) : ranges(&ranges) {}
  std::shared_ptr<const void> device;  // what the GPU's kernel reads of them (ops/gpu/plan_buffers.h)
};

// The compressed entries of one ratio. Made from a CompressionPlan alone it serves the ops that pool and select.
struct Compression {
  const CompressionPlan* plan = nullptr;
  Tensor slot;                       // i32 [new entries] or undefined (identity)
  Tensor pending_row, pending_slot;  // i32; see CompressionPlan
  RotaryTable rotary;                // of the new entries
  RowLists attended;                 // ratio of HCA layers: the entries that each row attends to, all it may see
  Visibility visible;                // ratio of CSA layers
  Tensor source;                     // on a GPU: i32, the plan's sources
  // On a GPU, of a plan that trains: where the gradients of slots go, i32 (kernels::SlotTargets), and how many parts.
  Tensor target, joined, part_begin;
  int parts = 0;
  Compression() = default;
  Compression(const CompressionPlan& plan) : plan(&plan), visible(plan.visible) {}
};

struct PlanTensors {
  Tensor token;                                  // i32 [rows]
  Tensor key_slot;                               // i32 [rows] or undefined (identity)
  Tensor wanted;                                 // i32
  RowLists window;                               // [rows]
  RotaryTable window_rotary, compressed_rotary;  // of the rows, in layers of ratio 0 and in the others
  Compression csa, hca;                          // ratio 0: not made
};

// Of the layers of ratio 0, and of the others (empty: there are none).
struct RotaryFrequencies {
  std::vector<float> window, compressed;
};
// index_topk: how many entries the indexer will select, for the device's lists. The plan must outlive the result.
PlanTensors plan_tensors(const SequencePlan& plan, const RotaryFrequencies& frequencies, int index_topk,
                         Space space = Space::host);

}  // namespace plumb::ops
