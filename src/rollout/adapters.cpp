#include "rollout/adapters.h"

#include <algorithm>

#include "base/error.h"

namespace plumb {

namespace {

// Rows and columns of the matrices that an adapter may adapt, by their released names behind "layers.N.".
struct MatrixShape {
  int64_t out = 0, in = 0;
};
std::map<std::string, MatrixShape> matrices_of(const ModelConfig& c, int layer) {
  const int64_t d = c.hidden_size, f = c.moe_intermediate_size, heads = int64_t{c.num_attention_heads} * c.head_dim;
  const int64_t wide = int64_t{c.o_groups} * c.o_lora_rank;
  std::map<std::string, MatrixShape> m = {{"attn.wq_a", {c.q_lora_rank, d}}, {"attn.wq_b", {heads, c.q_lora_rank}},
                                          {"attn.wkv", {c.head_dim, d}},     {"attn.wo_a", {wide, heads / c.o_groups}},
                                          {"attn.wo_b", {d, wide}},          {"ffn.shared_experts.w1", {f, d}},
                                          {"ffn.shared_experts.w3", {f, d}}, {"ffn.shared_experts.w2", {d, f}}};
  if (c.kind(layer) != LayerKind::window) {
    const int64_t width = (c.kind(layer) == LayerKind::csa ? 2 : 1) * c.head_dim;
    m["attn.compressor.wkv"] = m["attn.compressor.wgate"] = {width, d};
  }
  for (int e = 0; e < c.n_routed_experts; ++e) {
    const std::string expert = "ffn.experts." + std::to_string(e);
    m[expert + ".gate_up"] = {2 * f, d}, m[expert + ".w2"] = {d, f};
  }
  return m;
}

void check_matrix(const std::string& where, const Tensor& t, const Shape& expected) {
  if (t.dtype() == DType::f32 && t.shape() == expected) return;
  fail(where,
       "f32 " + to_string(expected) + " expected, " + dtype_name(t.dtype()) + " " + to_string(t.shape()) + " found",
       "load an adapter that was made for this model");
}

}  // namespace

void check_fit(const std::string& name, const Adapter& adapter, const ModelConfig& c) {
  const std::string where = "adapter '" + name + "'";
  if (static_cast<int>(adapter.layers.size()) != c.num_hidden_layers)
    fail(where,
         std::to_string(c.num_hidden_layers) + " layers expected, " + std::to_string(adapter.layers.size()) + " found",
         "load an adapter that was made for this model");
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    LayerLora pairs = adapter.layers[layer];
    const std::string at = where + ", layers." + std::to_string(layer) + ".";
    for (const auto* experts : {&pairs.experts.gate_up, &pairs.experts.down})
      if (!experts->empty() && static_cast<int>(experts->size()) != c.n_routed_experts)
        fail(at + "ffn.experts",
             std::to_string(c.n_routed_experts) + " expected, " + std::to_string(experts->size()) + " found");
    const auto matrices = matrices_of(c, layer);
    LayerLoraGrad unused;
    visit_lora(pairs, unused, [&](const std::string& suffix, const LoraPair& p, LoraGrad&) {
      if (!p.defined()) return;
      const auto matrix = matrices.find(suffix);
      if (matrix == matrices.end()) fail(at + suffix, "the model has no such matrix in this layer");
      const int64_t rank = p.a.dim() == 2 ? p.a.size(0) : 0;
      if (rank < 1) fail(at + suffix + ".a", "[rank, inputs] expected, " + to_string(p.a.shape()) + " found");
      check_matrix(at + suffix + ".a", p.a, {rank, matrix->second.in});
      check_matrix(at + suffix + ".b", p.b, {matrix->second.out, rank});
    });
  }
}

void AdapterRegistry::require_fit(const ModelConfig& config) {
  const std::lock_guard lock(mutex_);
  for (const auto& [name, versions] : snapshots_)
    for (const AdapterRef& a : versions) check_fit(name, *a->adapter, config);
  model_ = config;
}

AdapterRegistry::AdapterRegistry(int keep) : keep_(static_cast<size_t>(std::max(1, keep))) {}

AdapterRef AdapterRegistry::publish(const std::string& name, std::shared_ptr<const Adapter> adapter) {
  if (name.empty()) fail("adapter", "has no name", "give it one");
  PLUMB_CHECK(adapter != nullptr, name);
  const std::lock_guard lock(mutex_);
  if (model_) check_fit(name, *adapter, *model_);
  auto& versions = snapshots_[name];
  versions.push_back(
      std::make_shared<const AdapterSnapshot>(AdapterSnapshot{name, ++last_version_[name], std::move(adapter)}));
  if (versions.size() > keep_) versions.erase(versions.begin());
  return versions.back();
}

const std::vector<AdapterRef>& AdapterRegistry::find(const std::string& name) const {
  const auto it = snapshots_.find(name);
  if (it != snapshots_.end()) return it->second;
  std::string known;
  for (const auto& [other, versions] : snapshots_) known += (known.empty() ? "" : ", ") + other;
  fail("adapter", "'" + name + "' is not loaded", known.empty() ? "none is; load it first" : "loaded: " + known);
}

AdapterRef AdapterRegistry::newest(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return find(name).back();
}

AdapterRef AdapterRegistry::version(const std::string& name, int64_t version) const {
  const std::lock_guard lock(mutex_);
  std::string kept;
  for (const AdapterRef& a : find(name)) {
    if (a->version == version) return a;
    kept += (kept.empty() ? "" : ", ") + std::to_string(a->version);
  }
  fail("adapter", "version " + std::to_string(version) + " of '" + name + "' is not kept", "kept: " + kept);
}

AdapterRef AdapterRegistry::follow(const AdapterRef& current) const {
  const std::lock_guard lock(mutex_);
  const auto it = snapshots_.find(current->name);
  return it != snapshots_.end() && it->second.back()->version > current->version ? it->second.back() : current;
}

bool AdapterRegistry::remove(const std::string& name) {
  const std::lock_guard lock(mutex_);
  return snapshots_.erase(name) > 0;
}

std::vector<AdapterRef> AdapterRegistry::list() const {
  const std::lock_guard lock(mutex_);
  std::vector<AdapterRef> newest;
  for (const auto& [name, versions] : snapshots_) newest.push_back(versions.back());
  return newest;
}

}  // namespace plumb
