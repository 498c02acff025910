// DecodeGraphs with CUDA. A graph serves all steps of one shape: so many rows, so long lists, these adapters. What a
// step has less is filled up so that no bit of a result changes, and what differs from step to step lies in fixed
// device memory that one copy refreshes.
#pragma once
#include <list>
#include <vector>

#include "model/decode_graphs.h"
#include "ops/gpu/plan_buffers.h"
#include "ops/gpu/recording.h"

namespace plumb {

// What a graph is made for. Two steps of one shape differ in numbers on the device only.
struct StepShape {
  StepSize size;                         // rows, and entries: as many as rows, or none
  ops::gpu::ListRoom room;               // powers of two
  bool one_for_all = false;              // one adapter for all rows
  std::vector<const Adapter*> adapters;  // ascending
  bool operator==(const StepShape&) const = default;
};

class RecordedSteps : public DecodeGraphs {
 public:
  RecordedSteps(WeightStore& weights, KvCache& cache) : weights_(weights), cache_(cache) {}
  Tensor forward(const SequencePlan& plan, const ForwardOptions& options) override;
  DecodeGraphStats stats() const override;

 private:
  // A step as a graph wants it.
  struct Step {
    SequencePlan plan;  // padded
    ops::gpu::PlanNumbers numbers;
    StepShape shape;
    std::vector<std::shared_ptr<const Adapter>> adapters;  // as in the shape
    std::vector<int> part;                                 // [rows] number of the row's adapter, or -1
  };
  struct Graph {
    StepShape shape;
    int uses = 0;
    std::vector<std::weak_ptr<const Adapter>> adapters;  // a graph does not keep old versions alive
    // From here on: once it is recorded.
    SequencePlan plan;
    AdapterBatch batch;  // copies on the device
    std::vector<LayerLease> layers;
    std::unique_ptr<ops::gpu::PlanBuffers> inputs;
    std::vector<int> recorded_part, part;  // of each row when recorded, and now
    Tensor hidden;                         // [rows, d]
    std::unique_ptr<ops::gpu::Recording> recording;
  };

  bool fits(const SequencePlan& plan, const ForwardOptions& o) const;
  Step make_step(const SequencePlan& plan, const ForwardOptions& o) const;
  Graph& graph_of(const Step& step);
  Tensor record(Graph& g, Step& step, const ForwardOptions& o);
  static void set_adapters(Graph& g, const std::vector<int>& part);

  WeightStore& weights_;
  KvCache& cache_;
  std::shared_ptr<ops::gpu::RecordedMemory> memory_ = std::make_shared<ops::gpu::RecordedMemory>();
  std::list<Graph> graphs_;  // the latest used first
  int64_t recordings_ = 0, replays_ = 0;
};

}  // namespace plumb
