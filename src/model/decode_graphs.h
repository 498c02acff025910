// Decoding on a GPU without the host's part of it: steps that repeat are recorded once and then replayed as a CUDA
// graph. docs/engine.md says how.
#pragma once
#include <cstdint>
#include <memory>

#include "model/forward.h"

namespace plumb {

struct DecodeGraphStats {
  int graphs = 0;
  int64_t recordings = 0, replays = 0;  // steps, since the start
  int64_t bytes = 0;                    // of the device: the graphs, what they read, what they compute in
};

class DecodeGraphs {
 public:
  virtual ~DecodeGraphs() = default;
  // As forward(...).hidden, with the same bits in it and in the cache. Of steps with one row a sequence, all wanted and
  // nothing else asked for, the second one of each size is recorded and later ones are replays; all others go the
  // usual way. The result may be overwritten by the next call. Error: something cannot be recorded.
  virtual Tensor forward(const SequencePlan& plan, const ForwardOptions& options) = 0;
  virtual DecodeGraphStats stats() const = 0;
};
// For steps over `cache`; both must outlive it. null: the weights are on the host.
std::unique_ptr<DecodeGraphs> decode_graphs(WeightStore& weights, KvCache& cache);

}  // namespace plumb
