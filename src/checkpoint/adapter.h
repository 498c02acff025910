// LoRA adapters on disk: adapter_model.safetensors and adapter_config.json in the layouts that other programs write and
// read (spec/art_runtime.md 3, spec/reference_trainer.md 3.2-3.5).
#pragma once
#include <map>
#include <string>
#include <vector>

#include "base/tensor.h"
#include "config/model_config.h"

namespace plumb {

// Key prefix of all: "base_model.model.model.layers.<L>.". Module names and the form of the routed experts differ:
enum class AdapterLayout {
  peft,   // self_attn.q_a_proj, mlp.shared_experts.gate_proj; experts packed under mlp.experts: what PEFT itself writes
  vllm,   // attn.wq_a, ffn.shared_experts.gate_proj; experts packed under ffn.experts: what vLLM and ART serve
  art,    // self_attn.q_a_proj, mlp.shared_expert.gate_proj, mlp.experts.<e>.gate_up_proj: ART's training layout
  native  // attn.wq_a, ffn.shared_experts.w1, ffn.experts.<e>.w1: every matrix on its own
};
const char* adapter_layout_name(AdapterLayout layout);  // "peft", "vllm", "art", "native"
AdapterLayout parse_adapter_layout(const std::string& name);

// One low-rank pair: the weight [out, in] is changed by (alpha / rank) * b * a. f32 or bf16.
struct LoraTensors {
  Tensor a;  // [r, in]
  Tensor b;  // [out, r]
};

struct StoredAdapter {
  int rank = 0;
  double alpha = 0;
  std::string base_model;
  // By the released name of the module: "layers.3.attn.wq_a", "layers.3.ffn.experts.7.w1" (w1 gate, w3 up, w2 down).
  // attn.wo_a has one a [r, in of a group] for all its groups; its b has o_lora_rank rows for each group.
  std::map<std::string, LoraTensors> targets;
};

// Modules that an adapter may change: attn.{wq_a,wq_b,wkv,wo_a,wo_b}, attn.compressor.{wkv,wgate},
// ffn.shared_experts.{w1,w2,w3}, ffn.experts.<e>.{w1,w2,w3} of the backbone.
bool is_lora_target(const std::string& module);

// Reads any of the layouts (recognised by its names) and checks every shape against the model. Memory is the mapping
// where the file holds a matrix as it is. In packed and ART experts, gate and up share one a. Errors name file and
// tensor: unknown module, wrong shape, a without b, part of the experts, options that change the arithmetic (DoRA,
// rank patterns, rsLoRA, bias).
StoredAdapter read_adapter(const std::string& folder, const ModelConfig& config);

// Writes the folder `out` (whole or not at all), tensors with the dtype they have. The layouts peft, vllm and art have
// one a for gate and up of a routed expert: if the adapter has two different ones, everything is written at twice the
// rank and alpha (a = [a_gate; a_up], b padded with zeros), which is the same function.
void write_adapter(const std::string& out, const StoredAdapter& adapter, const ModelConfig& config,
                   AdapterLayout layout);

// What can be said without the model.
struct AdapterSummary {
  AdapterLayout layout = AdapterLayout::peft;
  int rank = 0;
  double alpha = 0;
  std::string base_model;
  int layers = 0;                    // layers with at least one target
  std::vector<std::string> targets;  // "attn.wq_a", "ffn.experts", ...
};
AdapterSummary summarise_adapter(const std::string& folder);

}  // namespace plumb
