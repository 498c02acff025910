// Module names of the adapter layouts; internal to adapter_read.cpp and adapter_write.cpp.
#pragma once
#include <optional>
#include <string>

#include "checkpoint/adapter.h"

namespace plumb {

// What one tensor of an adapter file belongs to.
struct AdapterKey {
  enum class Form {
    plain,           // the pair of `module`
    packed_gate_up,  // gate and up of all routed experts of the layer `module` = "layers.3.": a [E*r, d], b [2f, r*E]
    packed_down,     // down of all of them: a [E*r, f], b [d, r*E]
    expert_gate_up   // gate and up of one expert, `module` = "layers.3.ffn.experts.7.": a [r, d], b [2f, r]
  };
  Form form = Form::plain;
  std::string module;
  bool is_a = false;
  // Whose spelling it is. Attention modules have two owners: peft stands for peft or art, native for native or vllm,
  // and sure is false.
  AdapterLayout layout = AdapterLayout::native;
  bool sure = false;
};

// Nothing if the name is not "...layers.<n>.<module>.lora_A.weight" or lora_B. Unknown modules are returned as they
// are.
std::optional<AdapterKey> parse_adapter_key(const std::string& name);

// "base_model.model.model.layers.3.self_attn.q_a_proj" for the module "layers.3.attn.wq_a".
std::string adapter_module_name(const std::string& module, AdapterLayout layout);

// "layers.3.ffn.experts.7.w1" -> prefix "layers.3.", expert 7, matrix 1; nothing for other modules.
struct ExpertModule {
  std::string layer;
  int expert = 0, matrix = 0;
};
std::optional<ExpertModule> expert_module(const std::string& module);

}  // namespace plumb
