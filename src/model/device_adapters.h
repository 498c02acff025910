// Adapters where the weights are: copies on the device of what a pass uses, and the way of their gradients back.
//
// Ranks are filled up with zeros to one multiple of four for the whole batch, and the pairs of a layer's experts lie
// one behind the other, as ops/gpu/lora.h wants them.
#pragma once
#include <memory>
#include <vector>

#include "model/lora.h"

namespace plumb {

class DeviceAdapters {
 public:
  // Parts with gradients are copied anew, since their adapter is being trained. Parts without are snapshots that do not
  // change any more: their copies are kept while the adapter lives. host must live as long.
  explicit DeviceAdapters(const AdapterBatch& host);
  DeviceAdapters(const DeviceAdapters&) = delete;

  const AdapterBatch& host() const { return host_; }
  const AdapterBatch& batch() const { return batch_; }

  // Around a backward pass: gradients of zero on the device for all that the host's batch wants; then they are added to
  // the host's and given back.
  void begin_gradients();
  void finish_gradients();

 private:
  // Gradients of pairs of the same sizes: a [pairs * rank, in], b [pairs * out, rank], undefined if nobody wants them.
  struct GradientStack {
    Tensor a, b;
    std::vector<LoraGrad> host;
  };
  std::vector<LoraGrad> add_stack(const std::vector<LoraPair>& pairs, const std::vector<LoraGrad>& wanted);

  const AdapterBatch& host_;
  AdapterBatch batch_;
  std::vector<std::unique_ptr<AdapterGrads>> grads_;  // during a backward pass: one a part, or nullptr
  std::vector<GradientStack> stacks_;                 // their memory
};

}  // namespace plumb
