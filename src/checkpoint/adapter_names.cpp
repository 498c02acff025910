#include "checkpoint/adapter_names.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "checkpoint/names.h"
#include "config/nearest.h"

namespace plumb {
namespace {

constexpr std::string_view key_prefix = "base_model.model.";

bool strip_prefix(std::string_view& s, std::string_view prefix) {
  if (!s.starts_with(prefix)) return false;
  s.remove_prefix(prefix.size());
  return true;
}
bool strip_suffix(std::string_view& s, std::string_view suffix) {
  if (!s.ends_with(suffix)) return false;
  s.remove_suffix(suffix.size());
  return true;
}

// "layers.3.x.y" -> length of "layers.3.", 0 if it does not start so.
size_t layer_prefix(std::string_view s) {
  if (!s.starts_with("layers.")) return 0;
  const size_t end = s.find_first_not_of("0123456789", 7);
  return end != 7 && end != std::string_view::npos && s[end] == '.' ? end + 1 : 0;
}

// "7.w1" -> 7 and "w1"; -1 if it does not start with a number.
int split_number(std::string_view s, std::string_view& rest) {
  const size_t end = s.find_first_not_of("0123456789");
  if (end == 0 || end == std::string_view::npos || s[end] != '.' || end > 6) return -1;
  rest = s.substr(end + 1);
  return std::atoi(std::string(s.substr(0, end)).c_str());
}

const char* released_matrix(std::string_view leaf) {
  if (leaf == "gate_proj" || leaf == "w1") return "w1";
  if (leaf == "down_proj" || leaf == "w2") return "w2";
  if (leaf == "up_proj" || leaf == "w3") return "w3";
  return nullptr;
}
const char* long_matrix(std::string_view leaf) {
  return leaf == "w1" ? "gate_proj" : leaf == "w2" ? "down_proj" : "up_proj";
}

void set_plain(AdapterKey& key, std::string module, AdapterLayout layout, bool sure) {
  key.module = std::move(module), key.layout = layout, key.sure = sure;
}

// Routed and shared experts; false if `tail` is neither.
bool parse_experts(AdapterKey& key, const std::string& layer, std::string_view tail) {
  const bool hugging_face = tail.starts_with("mlp.");
  if (!strip_prefix(tail, "mlp.") && !strip_prefix(tail, "ffn.")) return false;
  if (tail == "experts.base_layer" || tail == "experts") {
    key.form = tail == "experts" ? AdapterKey::Form::packed_down : AdapterKey::Form::packed_gate_up;
    set_plain(key, layer, hugging_face ? AdapterLayout::peft : AdapterLayout::vllm, true);
    return true;
  }
  const bool singular = strip_prefix(tail, "shared_expert.");
  if (singular || strip_prefix(tail, "shared_experts.")) {
    const char* matrix = released_matrix(tail);
    if (!matrix) return false;
    const AdapterLayout layout = singular         ? AdapterLayout::art
                                 : hugging_face   ? AdapterLayout::peft
                                 : tail == matrix ? AdapterLayout::native
                                                  : AdapterLayout::vllm;
    set_plain(key, layer + "ffn.shared_experts." + matrix, layout, true);
    return true;
  }
  std::string_view leaf;
  if (!strip_prefix(tail, "experts.")) return false;
  const int expert = split_number(tail, leaf);
  if (expert < 0) return false;
  const std::string module = layer + "ffn.experts." + std::to_string(expert) + ".";
  if (leaf == "gate_up_proj") {
    key.form = AdapterKey::Form::expert_gate_up;
    set_plain(key, module, AdapterLayout::art, true);
    return true;
  }
  const char* matrix = released_matrix(leaf);
  if (!matrix) return false;
  set_plain(key, module + matrix, leaf == matrix ? AdapterLayout::native : AdapterLayout::art, true);
  return true;
}
}  // namespace

std::optional<AdapterKey> parse_adapter_key(const std::string& name) {
  std::string_view rest = name;
  AdapterKey key;
  strip_prefix(rest, key_prefix);
  strip_prefix(rest, "model.");
  if (!strip_suffix(rest, ".weight")) return {};
  strip_suffix(rest, ".default");  // the adapter's name, when PEFT's state dict was saved by hand
  key.is_a = rest.ends_with(".lora_A");
  if (!strip_suffix(rest, ".lora_A") && !strip_suffix(rest, ".lora_B")) return {};
  const size_t split = layer_prefix(rest);
  if (split == 0) return {};
  const std::string layer(rest.substr(0, split));
  std::string_view tail = rest.substr(split);
  if (parse_experts(key, layer, tail)) return key;
  if (strip_prefix(tail, "attn.mla_attn.")) {  // older vLLM wraps the compressor
    set_plain(key, layer + "attn." + std::string(tail), AdapterLayout::vllm, true);
    return key;
  }
  std::string canonical = canonical_name(layer + std::string(tail) + ".weight");
  canonical.resize(canonical.size() - std::string_view(".weight").size());
  set_plain(key, canonical, tail.starts_with("self_attn.") ? AdapterLayout::peft : AdapterLayout::native, false);
  return key;
}

std::optional<ExpertModule> expert_module(const std::string& module) {
  const size_t split = layer_prefix(module);
  std::string_view tail = std::string_view(module).substr(split), leaf;
  if (split == 0 || !strip_prefix(tail, "ffn.experts.")) return {};
  const int expert = split_number(tail, leaf);
  if (expert < 0 || leaf.size() != 2 || leaf[0] != 'w' || leaf[1] < '1' || leaf[1] > '3') return {};
  return ExpertModule{module.substr(0, split), expert, leaf[1] - '0'};
}

std::string adapter_module_name(const std::string& module, AdapterLayout layout) {
  const std::string prefix = std::string(key_prefix) + "model.";
  if (layout == AdapterLayout::native) return prefix + module;
  const std::string layer = module.substr(0, layer_prefix(module));
  std::string_view tail = std::string_view(module).substr(layer.size());
  if (const auto e = expert_module(module))  // ART's name; packed layouts have none for a single expert
    return prefix + layer + "mlp.experts." + std::to_string(e->expert) + "." +
           long_matrix(tail.substr(tail.size() - 2));
  if (strip_prefix(tail, "ffn.shared_experts.")) {
    const char* parent = layout == AdapterLayout::vllm  ? "ffn.shared_experts."
                         : layout == AdapterLayout::art ? "mlp.shared_expert."
                                                        : "mlp.shared_experts.";
    return prefix + layer + parent + long_matrix(tail);
  }
  if (layout == AdapterLayout::vllm) return prefix + module;
  std::string name = spelled(module + ".weight", Layout::hf_state);
  name.resize(name.size() - std::string_view(".weight").size());
  return std::string(key_prefix) + name;
}

const char* adapter_layout_name(AdapterLayout layout) {
  constexpr const char* names[] = {"peft", "vllm", "art", "native"};
  return names[static_cast<int>(layout)];
}

AdapterLayout parse_adapter_layout(const std::string& name) {
  const std::vector<std::string> names = {"peft", "vllm", "art", "native"};
  const auto at = std::find(names.begin(), names.end(), name);
  if (at != names.end()) return static_cast<AdapterLayout>(at - names.begin());
  const std::string guess = nearest(name, names);
  throw UsageError("adapter layout", "'" + name + "' is none of peft, vllm, art, native",
                   guess.empty() ? "" : "did you mean " + guess + "?");
}

bool is_lora_target(const std::string& module) {
  if (expert_module(module)) return true;
  const std::string_view tail = std::string_view(module).substr(layer_prefix(module));
  if (tail.size() == module.size()) return false;
  for (const char* target :
       {"attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "attn.compressor.wkv", "attn.compressor.wgate",
        "ffn.shared_experts.w1", "ffn.shared_experts.w2", "ffn.shared_experts.w3"})
    if (tail == target) return true;
  return false;
}

}  // namespace plumb
