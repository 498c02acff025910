// Weights on a GPU: each layer is packed and copied when it is first acquired, and stays.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "model/weights.h"

namespace plumb {

class DeviceWeights : public WeightStore {
 public:
  // Errors name the matrix that the kernels cannot take (ops/device.h). MTP layers are left out.
  explicit DeviceWeights(std::shared_ptr<WeightStore> host);

  Space space() const override { return Space::device; }
  const ModelConfig& config() const override { return host_->config(); }
  const OuterWeights& outer() const override { return outer_; }
  LayerLease acquire(int layer) override;
  const MtpWeights& mtp(int j) const override;
  int mtp_count() const override { return 0; }

 private:
  std::shared_ptr<WeightStore> host_;
  OuterWeights outer_;
  std::mutex mutex_;  // of layers_: a trainer and an engine may share the store
  std::vector<std::shared_ptr<const LayerWeights>> layers_;
};

// What a run computes with, for its first lines.
struct PlacedWeights {
  std::shared_ptr<WeightStore> store;
  std::string device;   // "CPU" or the GPU's name
  std::string warning;  // why `auto` did not choose the GPU that is there, or that its kernels are slow; usually empty
};
// kernels: "reference" = the ops on the CPU; "cuda" = those on the GPU, an error where that is impossible; "auto" = the
// GPU if there is one that the kernels run on and they compute this profile.
PlacedWeights place_weights(std::shared_ptr<ResidentWeights> weights, const std::string& kernels, Numerics numerics);

}  // namespace plumb
