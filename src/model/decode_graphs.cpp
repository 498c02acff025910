#include "model/decode_graphs.h"

#ifdef PLUMB_HAS_CUDA
#include "model/gpu/recorded_steps.h"
#endif

namespace plumb {

std::unique_ptr<DecodeGraphs> decode_graphs([[maybe_unused]] WeightStore& weights, [[maybe_unused]] KvCache& cache) {
#ifdef PLUMB_HAS_CUDA
  if (weights.space() == Space::device) return std::make_unique<RecordedSteps>(weights, cache);
#endif
  return nullptr;
}

}  // namespace plumb
