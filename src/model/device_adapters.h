// Adapters where the weights are. Ranks are filled up with zeros to a multiple of four, and the pairs of a layer's
// experts lie one behind the other, as ops/gpu/lora.h wants them.
#pragma once
#include <memory>
#include <vector>

#include "model/lora.h"

namespace plumb {

bool on_device(const Adapter& adapter);

// What a pass on the device reads. Adapters that are there already (train_on_device) are used as they are, with their
// gradients. The others are snapshots that do not change any more: their copies, of one rank for the whole batch, are
// kept while the adapter lives. Error: gradients are wanted of an adapter in the host's memory.
AdapterBatch device_batch(const AdapterBatch& batch);

// An adapter in training: it and its gradients, all zero, are on the device from the first step to the last.
struct DeviceAdapter {
  std::shared_ptr<Adapter> adapter;
  AdapterGrads grads;
  std::vector<Tensor> gradient_memory;  // what grads consists of, in a few large pieces
};
DeviceAdapter train_on_device(const Adapter& host);

// The values of an adapter on the device, or of its gradients, into tensors of the host that are there (rank as it
// was).
void bring_home(const Adapter& device, const Adapter& host);
void bring_home(const AdapterGrads& device, const AdapterGrads& host);

}  // namespace plumb
