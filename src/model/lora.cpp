#include "model/lora.h"

namespace plumb {

const std::vector<std::string>& lora_targets() {
  static const std::vector<std::string> names = {
      "q_a_proj",  "q_b_proj", "kv_proj",   "o_a_proj", "o_b_proj", "compressor.kv_proj", "compressor.gate_proj",
      "gate_proj", "up_proj",  "down_proj", "experts"};
  return names;
}

AdapterGrads zero_grads(const Adapter& adapter) {
  AdapterGrads grads;
  for (LayerLora layer : adapter.layers)
    visit_lora(layer, grads.layers.emplace_back(), [](const std::string&, LoraPair& p, LoraGrad& g) {
      if (p.defined()) g = {Tensor::zeros(p.a.shape()), Tensor::zeros(p.b.shape())};
    });
  return grads;
}

}  // namespace plumb
