#include "checkpoint/inventory.h"

#include <cstdlib>

#include "base/error.h"

namespace plumb {
namespace {

class Lister {
 public:
  explicit Lister(const ModelConfig& config) : c_(config) {}

  std::vector<InventoryEntry> list() {
    add("embed.weight", {c_.vocab_size, c_.hidden_size}, Role::dense);
    add("head.weight", {c_.vocab_size, c_.hidden_size}, Role::dense);
    add("norm.weight", {c_.hidden_size}, Role::dense);
    hyper_connection("hc_head", c_.hc_mult, 1);
    for (layer_ = 0; layer_ < c_.num_hidden_layers; ++layer_) block("layers." + std::to_string(layer_) + ".");
    if (!c_.dspark)
      for (int j = 0; j < c_.num_nextn_predict_layers; ++j, ++layer_) mtp("mtp." + std::to_string(j) + ".");
    return std::move(entries_);
  }

 private:
  void add(std::string name, Shape shape, Role role) {
    entries_.push_back({std::move(name), std::move(shape), role, layer_});
  }
  void linear(const std::string& name, int64_t out, int64_t in, Role role = Role::linear) {
    add(name + ".weight", {out, in}, role);
  }
  void norm(const std::string& name, int64_t size) { add(name + ".weight", {size}, Role::dense); }

  // fn [rows, n*d], base [rows], scale [scales]: scales of pre, post and comb, or one for the head's pre.
  void hyper_connection(const std::string& name, int64_t rows, int64_t scales) {
    add(name + "_fn", {rows, int64_t{c_.hc_mult} * c_.hidden_size}, Role::precise);
    add(name + "_base", {rows}, Role::precise);
    add(name + "_scale", {scales}, Role::precise);
  }

  void block(const std::string& p) {
    attention(p + "attn.");
    norm(p + "attn_norm", c_.hidden_size);
    norm(p + "ffn_norm", c_.hidden_size);
    const int64_t mix = int64_t{2 + c_.hc_mult} * c_.hc_mult;
    hyper_connection(p + "hc_attn", mix, 3);
    hyper_connection(p + "hc_ffn", mix, 3);
    experts(p + "ffn.");
  }

  void attention(const std::string& p) {
    const int64_t d = c_.hidden_size, width = int64_t{c_.num_attention_heads} * c_.head_dim;
    const int64_t o_rank = int64_t{c_.o_groups} * c_.o_lora_rank;
    linear(p + "wq_a", c_.q_lora_rank, d);
    norm(p + "q_norm", c_.q_lora_rank);
    linear(p + "wq_b", width, c_.q_lora_rank);
    linear(p + "wkv", c_.head_dim, d);
    norm(p + "kv_norm", c_.head_dim);
    linear(p + "wo_a", o_rank, width / c_.o_groups);  // one block of o_lora_rank rows a group
    linear(p + "wo_b", d, o_rank);
    add(p + "attn_sink", {c_.num_attention_heads}, Role::precise);
    const LayerKind kind = c_.kind(layer_);
    if (kind != LayerKind::window) compressor(p + "compressor.", kind, c_.head_dim);
    if (kind == LayerKind::csa) {
      linear(p + "indexer.wq_b", int64_t{c_.index_n_heads} * c_.index_head_dim, c_.q_lora_rank);
      linear(p + "indexer.weights_proj", c_.index_n_heads, d, Role::dense);
      compressor(p + "indexer.compressor.", kind, c_.index_head_dim);
    }
  }

  // The windows of csa layers overlap, so its projections are two entries wide.
  void compressor(const std::string& p, LayerKind kind, int64_t width) {
    const int64_t wide = width * (kind == LayerKind::csa ? 2 : 1);
    add(p + "ape", {c_.ratio(kind), wide}, Role::precise);
    linear(p + "wkv", wide, c_.hidden_size, Role::dense);
    linear(p + "wgate", wide, c_.hidden_size, Role::dense);
    norm(p + "norm", width);
  }

  void experts(const std::string& p) {
    const int64_t d = c_.hidden_size, f = c_.moe_intermediate_size;
    linear(p + "gate", c_.n_routed_experts, d, Role::dense);
    if (c_.is_hash_layer(layer_))
      add(p + "gate.tid2eid", {c_.vocab_size, c_.num_experts_per_tok}, Role::table);
    else
      add(p + "gate.bias", {c_.n_routed_experts}, Role::precise);
    for (int e = 0; e < c_.n_routed_experts; ++e) expert(p + "experts." + std::to_string(e) + ".", d, f, Role::expert);
    expert(p + "shared_experts.", d, f, Role::linear);
  }

  void expert(const std::string& p, int64_t d, int64_t f, Role role) {
    linear(p + "w1", f, d, role);  // gate
    linear(p + "w3", f, d, role);  // up
    linear(p + "w2", d, f, role);  // down
  }

  void mtp(const std::string& p) {
    block(p);
    linear(p + "e_proj", c_.hidden_size, c_.hidden_size);
    linear(p + "h_proj", c_.hidden_size, c_.hidden_size);
    for (const char* n : {"enorm", "hnorm", "norm"}) norm(p + n, c_.hidden_size);
    hyper_connection(p + "hc_head", c_.hc_mult, 1);
  }

  const ModelConfig& c_;
  int layer_ = -1;
  std::vector<InventoryEntry> entries_;
};
}  // namespace

std::vector<InventoryEntry> inventory(const ModelConfig& config) { return Lister(config).list(); }

Codec released_codec(const ModelConfig& config, Role role) {
  switch (role) {
    case Role::linear:
      return config.expert_dtype == ExpertDtype::bf16 ? Codec::bf16 : Codec::fp8;
    case Role::expert:
      return config.expert_dtype == ExpertDtype::bf16  ? Codec::bf16
             : config.expert_dtype == ExpertDtype::fp8 ? Codec::fp8
                                                       : Codec::fp4;
    case Role::dense:
      return Codec::bf16;
    case Role::precise:
      return Codec::f32;
    case Role::table:
      break;
  }
  PLUMB_CHECK(role != Role::table);
  return Codec::f32;
}

std::string scale_name(const std::string& data_name) {
  const std::string suffix = ".weight";
  PLUMB_CHECK(data_name.ends_with(suffix), data_name);
  return data_name.substr(0, data_name.size() - suffix.size()) + ".scale";
}

std::vector<TensorSpec> released_tensors(const ModelConfig& config) {
  std::vector<TensorSpec> specs;
  for (const InventoryEntry& e : inventory(config)) {
    if (e.role == Role::table) {
      specs.push_back({e.name, DType::i64, e.shape});
      continue;
    }
    const Codec codec = released_codec(config, e.role);
    if (codec == Codec::f32 || codec == Codec::bf16) {
      specs.push_back({e.name, data_dtype(codec), e.shape});
      continue;
    }
    specs.push_back({e.name, data_dtype(codec), data_shape(codec, e.shape[0], e.shape[1])});
    specs.push_back({scale_name(e.name), DType::f8_e8m0, scale_shape(codec, e.shape[0], e.shape[1])});
  }
  return specs;
}

ParameterCounts count_parameters(const ModelConfig& config) {
  ParameterCounts n;
  int64_t routed = 0;
  for (const InventoryEntry& e : inventory(config)) {
    if (e.role == Role::table) continue;
    const int64_t values = numel_of(e.shape);
    if (e.name.starts_with("mtp.")) {
      n.mtp += values;
      continue;
    }
    n.backbone += values;
    if (e.role == Role::expert)
      routed += values;
    else if (e.name != "embed.weight")
      n.active += values;
  }
  n.active += routed / config.n_routed_experts * config.num_experts_per_tok;
  return n;
}

bool is_extra_mtp(const std::string& canonical, const ModelConfig& config) {
  if (!canonical.starts_with("mtp.")) return false;
  if (config.dspark || std::atoi(canonical.c_str() + 4) >= config.num_nextn_predict_layers) return true;
  for (const char* module : {"main_proj", "confidence_head", "markov", "dspark"})
    if (canonical.find(module) != std::string::npos) return true;
  return false;
}

}  // namespace plumb
