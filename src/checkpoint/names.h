// Three spellings of the same tensors (spec/model.md 2.3, spec/hf_oracle.md 9). The released one is canonical: the rest
// of the program knows no other.
#pragma once
#include <optional>
#include <string>

namespace plumb {

enum class Layout {
  released,  // layers.0.attn.wq_a.weight, layers.0.ffn.experts.7.w1.weight: what DeepSeek publishes
  hf,        // model.layers.0.attn.wq_a.weight: the files that transformers' save_pretrained writes
  hf_state,  // model.layers.0.self_attn.q_a_proj.weight: transformers' state_dict, routed experts stacked
};
const char* layout_name(Layout layout);            // "released", "hf", "hf-state"
Layout parse_layout(const std::string& name);      // UsageError names the nearest
Layout layout_of(const std::string& tensor_name);  // by its prefix and module names

// Any spelling -> the released name. Scales end in ".scale". A stacked expert tensor becomes
// "layers.0.ffn.experts.gate_up_proj" or ".down_proj" (scales: + "_scale_inv"). Unknown names lose a "model." prefix
// and are returned otherwise unchanged.
std::string canonical_name(const std::string& name);

// Released name -> the spelling of `layout`. Not for routed experts in layout hf_state: see stacked_expert.
// Tensors under mtp. have no other spelling (transformers drops them).
std::string spelled(const std::string& canonical, Layout layout);

// Where a stacked tensor holds one routed expert's matrix: block `part` of `parts` equal blocks of rows of expert
// `expert`. gate_up_proj [E, 2f, d] = w1 (gate) above w3 (up); down_proj [E, d, f] = w2.
struct StackedExpert {
  std::string tensor;  // canonical name of the stack
  int expert = 0, part = 0, parts = 1;
};
// For "layers.0.ffn.experts.7.w1.weight" and its scale; nothing for other names (mtp. included).
std::optional<StackedExpert> stacked_expert(const std::string& canonical);

}  // namespace plumb
