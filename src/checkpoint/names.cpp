#include "checkpoint/names.h"

#include <string_view>

#include "base/error.h"
#include "config/nearest.h"

namespace plumb {
namespace {

struct Pair {
  std::string_view released, state;
};

// Names outside the layers.
constexpr Pair top_names[] = {
    {"embed.weight", "embed_tokens.weight"}, {"head.weight", "lm_head.weight"},   {"norm.weight", "norm.weight"},
    {"hc_head_fn", "hc_head.hc_fn"},         {"hc_head_base", "hc_head.hc_base"}, {"hc_head_scale", "hc_head.hc_scale"},
};

// Names inside a layer, without a final ".weight" or scale suffix. The indexer moves below the compressor and its own
// compressor is flattened into it.
constexpr Pair layer_names[] = {
    {"attn_norm", "input_layernorm"},
    {"ffn_norm", "post_attention_layernorm"},
    {"hc_attn_fn", "attn_hc.fn"},
    {"hc_attn_base", "attn_hc.base"},
    {"hc_attn_scale", "attn_hc.scale"},
    {"hc_ffn_fn", "ffn_hc.fn"},
    {"hc_ffn_base", "ffn_hc.base"},
    {"hc_ffn_scale", "ffn_hc.scale"},
    {"attn.attn_sink", "self_attn.sinks"},
    {"attn.wq_a", "self_attn.q_a_proj"},
    {"attn.q_norm", "self_attn.q_a_norm"},
    {"attn.wq_b", "self_attn.q_b_proj"},
    {"attn.wkv", "self_attn.kv_proj"},
    {"attn.kv_norm", "self_attn.kv_norm"},
    {"attn.wo_a", "self_attn.o_a_proj"},
    {"attn.wo_b", "self_attn.o_b_proj"},
    {"attn.compressor.ape", "self_attn.compressor.position_bias"},
    {"attn.compressor.wkv", "self_attn.compressor.kv_proj"},
    {"attn.compressor.wgate", "self_attn.compressor.gate_proj"},
    {"attn.compressor.norm", "self_attn.compressor.kv_norm"},
    {"attn.indexer.wq_b", "self_attn.compressor.indexer.q_b_proj"},
    {"attn.indexer.weights_proj", "self_attn.compressor.indexer.scorer.weights_proj"},
    {"attn.indexer.weights_proj", "self_attn.compressor.indexer.weights_proj"},  // transformers before `scorer`
    {"attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"},
    {"attn.indexer.compressor.wkv", "self_attn.compressor.indexer.kv_proj"},
    {"attn.indexer.compressor.wgate", "self_attn.compressor.indexer.gate_proj"},
    {"attn.indexer.compressor.norm", "self_attn.compressor.indexer.kv_norm"},
    {"ffn.gate", "mlp.gate"},
    {"ffn.gate.bias", "mlp.gate.e_score_correction_bias"},
    {"ffn.gate.tid2eid", "mlp.gate.tid2eid"},
    {"ffn.shared_experts.w1", "mlp.shared_experts.gate_proj"},
    {"ffn.shared_experts.w2", "mlp.shared_experts.down_proj"},
    {"ffn.shared_experts.w3", "mlp.shared_experts.up_proj"},
    {"ffn.experts.gate_up_proj", "mlp.experts.gate_up_proj"},
    {"ffn.experts.gate_up_proj_scale_inv", "mlp.experts.gate_up_proj_scale_inv"},
    {"ffn.experts.down_proj", "mlp.experts.down_proj"},
    {"ffn.experts.down_proj_scale_inv", "mlp.experts.down_proj_scale_inv"},
};

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

// "layers.12.attn.wkv" -> head "layers.12.", tail "attn.wkv".
bool split_layer(std::string_view name, std::string_view& head, std::string_view& tail) {
  if (!name.starts_with("layers.")) return false;
  const size_t digits = 7, dot = name.find('.', digits);
  if (dot == std::string_view::npos || dot == digits) return false;
  if (name.substr(digits, dot - digits).find_first_not_of("0123456789") != std::string_view::npos) return false;
  head = name.substr(0, dot + 1), tail = name.substr(dot + 1);
  return true;
}

// Takes ".weight", ".scale" or ".weight_scale_inv" off and returns it in the released spelling.
std::string_view take_suffix(std::string_view& stem) {
  if (strip_suffix(stem, ".weight")) return ".weight";
  if (strip_suffix(stem, ".weight_scale_inv") || strip_suffix(stem, ".scale")) return ".scale";
  return "";
}

std::string canonical_in_layer(std::string_view tail) {
  for (const Pair& p : layer_names)
    if (tail == p.state) return std::string(p.released);
  std::string_view stem = tail;
  const std::string suffix(take_suffix(stem));
  if (suffix.empty()) return std::string(tail);
  if (stem == "attn.norm") stem = "attn.kv_norm";  // as save_pretrained writes it
  for (const Pair& p : layer_names)
    if (stem == p.state) return std::string(p.released) + suffix;
  return std::string(stem) + suffix;
}

std::string state_in_layer(std::string_view tail) {
  for (const Pair& p : layer_names)
    if (tail == p.released) return std::string(p.state);
  std::string_view stem = tail;
  const std::string_view suffix = take_suffix(stem);
  for (const Pair& p : layer_names)
    if (stem == p.released) return std::string(p.state) + (suffix == ".scale" ? ".weight_scale_inv" : ".weight");
  return std::string(tail);
}
}  // namespace

const char* layout_name(Layout layout) {
  constexpr const char* names[] = {"released", "hf", "hf-state"};
  return names[static_cast<int>(layout)];
}

Layout parse_layout(const std::string& name) {
  for (Layout l : {Layout::released, Layout::hf, Layout::hf_state})
    if (name == layout_name(l)) return l;
  const std::string guess = nearest(name, {"released", "hf", "hf-state"});
  throw UsageError("layout", "'" + name + "' is none of released, hf, hf-state",
                   guess.empty() ? "" : "did you mean " + guess + "?");
}

Layout layout_of(const std::string& name) {
  for (const char* module : {".self_attn.", ".mlp.", "lm_head.", "_layernorm.", ".attn_hc.", ".ffn_hc."})
    if (name.find(module) != std::string::npos) return Layout::hf_state;
  return name.starts_with("model.") ? Layout::hf : Layout::released;
}

std::string canonical_name(const std::string& name) {
  std::string_view rest = name, head, tail;
  strip_prefix(rest, "model.");
  for (const Pair& p : top_names)
    if (rest == p.state || rest == p.released) return std::string(p.released);
  if (split_layer(rest, head, tail)) return std::string(head) + canonical_in_layer(tail);
  return std::string(rest);
}

std::string spelled(const std::string& canonical, Layout layout) {
  if (layout == Layout::released || canonical.starts_with("mtp.")) return canonical;
  if (canonical == "head.weight") return layout == Layout::hf ? canonical : "lm_head.weight";
  for (const Pair& p : top_names)
    if (canonical == p.released) return "model." + std::string(p.state);
  std::string_view head, tail;
  PLUMB_CHECK(split_layer(canonical, head, tail), canonical);
  if (layout == Layout::hf_state) return "model." + std::string(head) + state_in_layer(tail);
  if (tail == "attn.kv_norm.weight") tail = "attn.norm.weight";
  return "model." + std::string(head) + std::string(tail);
}

std::optional<StackedExpert> stacked_expert(const std::string& canonical) {
  std::string_view head, tail;
  if (!split_layer(canonical, head, tail) || !strip_prefix(tail, "ffn.experts.")) return {};
  const size_t dot = tail.find('.');
  if (dot == 0 || dot == std::string_view::npos || dot > 6) return {};
  const std::string_view digits = tail.substr(0, dot), leaf = tail.substr(dot + 1);
  if (digits.find_first_not_of("0123456789") != std::string_view::npos) return {};
  const bool weight = leaf.ends_with(".weight");
  if (leaf.size() < 3 || (!weight && !leaf.ends_with(".scale"))) return {};
  const std::string_view matrix = leaf.substr(0, 2);
  if (matrix != "w1" && matrix != "w2" && matrix != "w3") return {};
  const bool down = matrix == "w2";
  return StackedExpert{
      std::string(head) + "ffn.experts." + (down ? "down_proj" : "gate_up_proj") + (weight ? "" : "_scale_inv"),
      std::stoi(std::string(digits)), matrix == "w3" ? 1 : 0, down ? 1 : 2};
}

}  // namespace plumb
