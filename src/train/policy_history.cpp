#include "train/policy_history.h"

#include <fmt/format.h>

#include <algorithm>

#include "model/adapter_files.h"

namespace plumb {

PolicyHistory::PolicyHistory(const RlKeys& keys, bool needs_reference, const Adapter& first, const ModelConfig& model)
    : keys_(keys), lagging_(needs_reference && keys.kl_reference == "lag") {
  if (!needs_reference) return;
  if (keys.kl_reference == "adapter") reference_ = load_adapter(keys.kl_ref_adapter_path, model);
  if (keys.kl_reference == "start") reference_ = copy_adapter(first);
}

std::string PolicyHistory::name(int64_t step) { return fmt::format("policy-{}", step); }

int64_t PolicyHistory::sampler_step(int64_t step) const { return std::max<int64_t>(0, step - 1 - keys_.steps_behind); }
int64_t PolicyHistory::reference_step(int64_t step) const {
  return std::max<int64_t>(0, step - 1 - keys_.kl_penalty_step_lag);
}
int64_t PolicyHistory::oldest_needed(int64_t step) const {
  return std::min(sampler_step(step), lagging_ ? reference_step(step) : step - 1);
}

std::shared_ptr<const Adapter> PolicyHistory::reference(int64_t step) const {
  return lagging_ ? history_.at(reference_step(step)) : reference_;
}

void PolicyHistory::publish(int64_t step, std::shared_ptr<const Adapter> adapter) {
  registry_->publish(name(step), adapter);
  history_[step] = std::move(adapter);
  while (!history_.empty() && history_.begin()->first < oldest_needed(step + 1)) {
    registry_->remove(name(history_.begin()->first));
    history_.erase(history_.begin());
  }
}

NamedTensors PolicyHistory::tensors(int64_t step) const {
  NamedTensors list;
  for (const auto& [at, adapter] : history_) {
    if (at == step) continue;  // the masters
    for (size_t l = 0; l < adapter->layers.size(); ++l) {
      LayerLora layer = adapter->layers[l];
      LayerLoraGrad none;
      visit_lora(layer, none, [&, at = at](const std::string& name, LoraPair& p, LoraGrad&) {
        if (!p.defined()) return;
        list.emplace_back(fmt::format("history.{}.layers.{}.{}.a", at, l, name), p.a);
        list.emplace_back(fmt::format("history.{}.layers.{}.{}.b", at, l, name), p.b);
      });
    }
  }
  return list;
}

void PolicyHistory::make_places(int64_t step, const Adapter& shape) {
  for (int64_t s = oldest_needed(step + 1); s < step; ++s) history_[s] = copy_adapter(shape);
}

void PolicyHistory::publish_read() {
  for (const auto& [step, adapter] : history_) registry_->publish(name(step), adapter);
}

}  // namespace plumb
