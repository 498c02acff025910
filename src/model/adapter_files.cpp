#include "model/adapter_files.h"

#include <cstring>
#include <set>

#include "checkpoint/codecs.h"

namespace plumb {
namespace {

Tensor floats(const Tensor& t) { return decode({t, {}}); }

// The canonical target (lora_targets) of a released module name behind "layers.N.".
std::string target_of(const std::string& suffix) {
  static const std::pair<const char*, const char*> table[] = {{"attn.wq_a", "q_a_proj"},
                                                              {"attn.wq_b", "q_b_proj"},
                                                              {"attn.wkv", "kv_proj"},
                                                              {"attn.wo_a", "o_a_proj"},
                                                              {"attn.wo_b", "o_b_proj"},
                                                              {"attn.compressor.wkv", "compressor.kv_proj"},
                                                              {"attn.compressor.wgate", "compressor.gate_proj"},
                                                              {"ffn.shared_experts.w1", "gate_proj"},
                                                              {"ffn.shared_experts.w3", "up_proj"},
                                                              {"ffn.shared_experts.w2", "down_proj"}};
  for (const auto& [name, target] : table)
    if (suffix == name) return target;
  return "experts";
}

Tensor stack_rows(const Tensor& top, const Tensor& bottom) {
  Tensor t = Tensor::empty({top.size(0) + bottom.size(0), top.size(1)});
  std::memcpy(t.raw(), top.raw(), top.bytes());
  std::memcpy(t.raw() + top.bytes(), bottom.raw(), bottom.bytes());
  return t;
}

// Columns [at, at + b.size(1)) of rows [row, row + b.size(0)) of `to`.
void place(const Tensor& b, const Tensor& to, int64_t row, int64_t at) {
  for (int64_t i = 0; i < b.size(0); ++i)
    std::memcpy(to.f32() + (row + i) * to.size(1) + at, b.f32() + i * b.size(1), b.size(1) * sizeof(float));
}

// Gate and up of one routed expert as one pair with b [2f, r].
LoraPair join_gate_up(const LoraTensors* w1, const LoraTensors* w3, int64_t f, float scale) {
  if (!w1 && !w3) return {};
  const LoraTensors& any = w1 ? *w1 : *w3;
  const int64_t r = any.a.size(0);
  const Tensor a1 = floats(any.a), a3 = w1 && w3 ? floats(w3->a) : a1;
  const bool shared = a1.bytes() == a3.bytes() && std::memcmp(a1.raw(), a3.raw(), a1.bytes()) == 0;
  Tensor b = Tensor::zeros({2 * f, shared ? r : 2 * r});
  if (w1) place(floats(w1->b), b, 0, 0);
  if (w3) place(floats(w3->b), b, f, shared ? 0 : r);
  return {shared ? a1 : stack_rows(a1, a3), b, scale};
}

// The plain pairs of a layer with their released suffixes.
template <class F>
void visit_plain(LayerLora& l, F&& f) {
  LayerLoraGrad unused;
  visit_lora(l, unused, [&](const std::string& name, LoraPair& p, LoraGrad&) {
    if (!name.starts_with("ffn.experts.")) f(name, p);
  });
}

}  // namespace

std::shared_ptr<Adapter> adapter_from(const StoredAdapter& stored, const ModelConfig& c) {
  auto adapter = std::make_shared<Adapter>();
  adapter->rank = stored.rank;
  adapter->alpha = static_cast<float>(stored.alpha);
  const float scale = static_cast<float>(stored.alpha / stored.rank);
  auto find = [&](const std::string& name) {
    const auto it = stored.targets.find(name);
    return it == stored.targets.end() ? nullptr : &it->second;
  };
  std::set<std::string> targets;
  for (const auto& [name, pair] : stored.targets) targets.insert(target_of(name.substr(name.find('.', 7) + 1)));
  for (const std::string& t : lora_targets())
    if (targets.contains(t)) adapter->targets.push_back(t);
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    LayerLora& l = adapter->layers.emplace_back();
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    visit_plain(l, [&](const std::string& name, LoraPair& p) {
      if (const LoraTensors* t = find(prefix + name)) p = {floats(t->a), floats(t->b), scale};
    });
    std::vector<LoraPair> gate_up, down;
    bool any_gate_up = false, any_down = false;
    for (int e = 0; e < c.n_routed_experts; ++e) {
      const std::string expert = prefix + "ffn.experts." + std::to_string(e) + ".";
      gate_up.push_back(join_gate_up(find(expert + "w1"), find(expert + "w3"), c.moe_intermediate_size, scale));
      const LoraTensors* w2 = find(expert + "w2");
      down.push_back(w2 ? LoraPair{floats(w2->a), floats(w2->b), scale} : LoraPair{});
      any_gate_up = any_gate_up || gate_up.back().defined();
      any_down = any_down || down.back().defined();
    }
    if (any_gate_up) l.experts.gate_up = gate_up;
    if (any_down) l.experts.down = down;
  }
  return adapter;
}

StoredAdapter stored_from(const Adapter& adapter, const ModelConfig& c, const std::string& base_model) {
  StoredAdapter stored;
  stored.rank = adapter.rank;
  stored.alpha = adapter.alpha;
  stored.base_model = base_model;
  const int64_t f = c.moe_intermediate_size;
  for (size_t layer = 0; layer < adapter.layers.size(); ++layer) {
    LayerLora l = adapter.layers[layer];
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    visit_plain(l, [&](const std::string& name, LoraPair& p) {
      if (p.defined()) stored.targets[prefix + name] = {p.a, p.b};
    });
    for (size_t e = 0; e < l.experts.gate_up.size(); ++e) {
      const std::string expert = prefix + "ffn.experts." + std::to_string(e) + ".";
      const LoraPair& p = l.experts.gate_up[e];
      if (!p.defined()) continue;
      stored.targets[expert + "w1"] = {p.a, p.b.rows(0, f)};
      stored.targets[expert + "w3"] = {p.a, p.b.rows(f, 2 * f)};
    }
    for (size_t e = 0; e < l.experts.down.size(); ++e)
      if (l.experts.down[e].defined())
        stored.targets[prefix + "ffn.experts." + std::to_string(e) + ".w2"] = {l.experts.down[e].a,
                                                                               l.experts.down[e].b};
  }
  return stored;
}

std::shared_ptr<const Adapter> load_adapter(const std::string& folder, const ModelConfig& config) {
  return adapter_from(read_adapter(folder, config), config);
}

}  // namespace plumb
