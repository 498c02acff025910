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
  // change any more: their copies are kept while the adapter lives.
  explicit DeviceAdapters(const AdapterBatch& host);
  DeviceAdapters(const DeviceAdapters&) = delete;

  const AdapterBatch& batch() const { return batch_; }
  // Adds what a backward pass left on the device to the gradients of the host's batch.
  void add_gradients() const;

 private:
  const AdapterBatch& host_;
  AdapterBatch batch_;
  std::vector<std::unique_ptr<AdapterGrads>> grads_;  // one a part, or nullptr
};

}  // namespace plumb
