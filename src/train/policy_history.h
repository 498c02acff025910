// The adapters of earlier steps that a run of reinforcement learning still needs: to sample with (rl.steps_behind) and
// to measure against (rl.kl_reference).
#pragma once
#include <map>
#include <memory>
#include <string>

#include "config/run_config.h"
#include "rollout/adapters.h"
#include "train/checkpoints.h"

namespace plumb {

class PolicyHistory {
 public:
  // needs_reference: whether the loss looks at a reference at all. Error: rl.kl_ref_adapter_path cannot be read.
  // first: the adapter that the run begins with, before a checkpoint replaces it.
  PolicyHistory(const RlKeys& keys, bool needs_reference, const Adapter& first, const ModelConfig& model);

  std::shared_ptr<AdapterRegistry> registry() const { return registry_; }
  static std::string name(int64_t step);  // of the adapter after that step, in the registry

  // The step after which the adapter was made that samples for `step`.
  int64_t sampler_step(int64_t step) const;
  // What the policy of `step` is measured against; nullptr = the base model.
  std::shared_ptr<const Adapter> reference(int64_t step) const;

  // The adapter after `step`. What no later step needs is let go.
  void publish(int64_t step, std::shared_ptr<const Adapter> adapter);

  // For checkpoints: the values of the adapters that are needed after `step`, but for that of `step` itself.
  // make_places goes before reading them into tensors(), and publish_read after.
  NamedTensors tensors(int64_t step) const;
  void make_places(int64_t step, const Adapter& shape);
  void publish_read();

 private:
  int64_t reference_step(int64_t step) const;
  int64_t oldest_needed(int64_t step) const;  // the oldest step whose adapter step `step` and later ones need
  const RlKeys& keys_;
  bool lagging_;                              // the reference is the adapter of some steps ago
  std::shared_ptr<const Adapter> reference_;  // if not lagging
  std::map<int64_t, std::shared_ptr<const Adapter>> history_;
  std::shared_ptr<AdapterRegistry> registry_ = std::make_shared<AdapterRegistry>();
};

}  // namespace plumb
