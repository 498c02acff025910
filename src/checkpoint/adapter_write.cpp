#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/files.h"
#include "base/parallel.h"
#include "checkpoint/adapter.h"
#include "checkpoint/adapter_names.h"
#include "checkpoint/safetensors.h"

namespace plumb {
namespace {

bool same_matrix(const Tensor& x, const Tensor& y) {
  if (x.raw() == y.raw()) return true;
  return x.dtype() == y.dtype() && x.shape() == y.shape() && std::memcmp(x.raw(), y.raw(), x.bytes()) == 0;
}

// ---- One a for gate and up
// -------------------------------------------------------------------------------------------

bool shares_gate_up(const StoredAdapter& adapter) {
  for (const auto& [module, pair] : adapter.targets) {
    if (!module.ends_with(".w1") || !expert_module(module)) continue;
    const auto up = adapter.targets.find(module.substr(0, module.size() - 1) + "3");
    if (up != adapter.targets.end() && !same_matrix(pair.a, up->second.a)) return false;
  }
  return true;
}

// [rows of x; rows of y]; an undefined one counts as zeros of the other's shape.
Tensor stack_rows(const Tensor& x, const Tensor& y) {
  const Tensor& shape = x.defined() ? x : y;
  Tensor t = Tensor::zeros({2 * shape.size(0), shape.size(1)}, shape.dtype());
  if (x.defined()) std::memcpy(t.raw(), x.raw(), x.bytes());
  if (y.defined()) std::memcpy(t.raw() + shape.bytes(), y.raw(), y.bytes());
  return t;
}

// [out, r] -> [out, 2r] with the columns in the first or the second half.
Tensor widen_columns(const Tensor& b, bool second) {
  Tensor t = Tensor::zeros({b.size(0), 2 * b.size(1)}, b.dtype());
  const size_t row = static_cast<size_t>(b.size(1)) * dtype_size(b.dtype());
  for (int64_t r = 0; r < b.size(0); ++r) std::memcpy(t.raw() + (2 * r + second) * row, b.raw() + r * row, row);
  return t;
}

// The same function at twice the rank, in which gate and up of each routed expert have one a.
StoredAdapter share_gate_up(const StoredAdapter& adapter) {
  StoredAdapter wide{2 * adapter.rank, 2 * adapter.alpha, adapter.base_model, {}};
  for (const auto& [module, pair] : adapter.targets) {
    const auto e = expert_module(module);
    if (!e || e->matrix == 2) {
      wide.targets[module] = {stack_rows(pair.a, {}), widen_columns(pair.b, false)};
      continue;
    }
    const bool up = e->matrix == 3;
    const std::string stem = module.substr(0, module.size() - 1);
    const auto partner = adapter.targets.find(stem + (up ? "1" : "3"));
    const Tensor other = partner == adapter.targets.end() ? Tensor() : partner->second.a;
    const auto done = wide.targets.find(stem + "1");
    const Tensor a = up && done != wide.targets.end() ? done->second.a
                     : up                             ? stack_rows(other, pair.a)
                                                      : stack_rows(pair.a, other);
    wide.targets[module] = {a, widen_columns(pair.b, up)};
  }
  return wide;
}

// ---- The routed experts of a layer
// -----------------------------------------------------------------------------------

// The pairs of one matrix of all experts, in order; all must exist and have the same dtype.
std::vector<const LoraTensors*> all_experts(const StoredAdapter& adapter, const std::string& layer, int matrix,
                                            int experts) {
  std::vector<const LoraTensors*> pairs;
  for (int e = 0; e < experts; ++e) {
    const std::string module = fmt::format("{}ffn.experts.{}.w{}", layer, e, matrix);
    const auto at = adapter.targets.find(module);
    if (at == adapter.targets.end())
      fail(module, "has no adapter, other routed experts of its layer have one",
           "packed layouts hold all experts: use layout native");
    pairs.push_back(&at->second);
    if (pairs.back()->a.dtype() != pairs[0]->a.dtype() || pairs.back()->b.dtype() != pairs[0]->b.dtype())
      fail(module, "has another dtype than the other experts");
  }
  return pairs;
}

// [E*r, in], expert after expert.
Tensor pack_a(const std::vector<const LoraTensors*>& pairs) {
  const Tensor& first = pairs[0]->a;
  Tensor t = Tensor::empty({static_cast<int64_t>(pairs.size()) * first.size(0), first.size(1)}, first.dtype());
  for (size_t e = 0; e < pairs.size(); ++e) std::memcpy(t.raw() + e * first.bytes(), pairs[e]->a.raw(), first.bytes());
  return t;
}

// [sum of outs, r*E], column j*E + e; gate rows before up rows.
Tensor pack_b(const std::vector<std::vector<const LoraTensors*>>& parts) {
  const Tensor& first = parts[0][0]->b;
  const int64_t out = first.size(0), rank = first.size(1), experts = static_cast<int64_t>(parts[0].size());
  const size_t size = dtype_size(first.dtype());
  Tensor t = Tensor::empty({static_cast<int64_t>(parts.size()) * out, rank * experts}, first.dtype());
  parallel_for(t.size(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t j = 0; j < rank; ++j)
        for (int64_t e = 0; e < experts; ++e)
          std::memcpy(t.raw() + ((row * rank + j) * experts + e) * size,
                      parts[row / out][e]->b.raw() + (row % out * rank + j) * size, size);
  });
  return t;
}

// ---- Files
// -----------------------------------------------------------------------------------------------------------

// The tensors of a file by name, each made when its turn comes.
struct Item {
  TensorSpec spec;
  std::function<Tensor()> make;
};
using Items = std::map<std::string, Item>;

void add_item(Items& items, const std::string& name, DType type, Shape shape, std::function<Tensor()> make) {
  items[name] = {{name, type, std::move(shape)}, std::move(make)};
}
void add_tensor(Items& items, const std::string& name, const Tensor& t) {
  add_item(items, name, t.dtype(), t.shape(), [t] { return t; });
}

void add_packed(Items& items, const StoredAdapter& adapter, const ModelConfig& config, const std::string& layer,
                AdapterLayout layout) {
  const std::string name =
      "base_model.model.model." + layer + (layout == AdapterLayout::vllm ? "ffn.experts" : "mlp.experts");
  const int experts = config.n_routed_experts;
  const auto add = [&](const std::string& module, const std::vector<std::vector<const LoraTensors*>>& parts) {
    const LoraTensors& first = *parts[0][0];
    add_item(items, module + ".lora_A.weight", first.a.dtype(), {experts * first.a.size(0), first.a.size(1)},
             [pairs = parts[0]] { return pack_a(pairs); });
    add_item(items, module + ".lora_B.weight", first.b.dtype(),
             {static_cast<int64_t>(parts.size()) * first.b.size(0), first.b.size(1) * experts},
             [parts] { return pack_b(parts); });
  };
  add(name + ".base_layer", {all_experts(adapter, layer, 1, experts), all_experts(adapter, layer, 3, experts)});
  add(name, {all_experts(adapter, layer, 2, experts)});
}

void add_art_experts(Items& items, const StoredAdapter& adapter, const ModelConfig& config, const std::string& layer) {
  const auto gate = all_experts(adapter, layer, 1, config.n_routed_experts);
  const auto up = all_experts(adapter, layer, 3, config.n_routed_experts);
  const auto down = all_experts(adapter, layer, 2, config.n_routed_experts);
  for (int e = 0; e < config.n_routed_experts; ++e) {
    const std::string name = fmt::format("base_model.model.model.{}mlp.experts.{}.", layer, e);
    const LoraTensors *g = gate[e], *u = up[e];
    add_tensor(items, name + "gate_up_proj.lora_A.weight", g->a);
    add_item(items, name + "gate_up_proj.lora_B.weight", g->b.dtype(), {2 * g->b.size(0), g->b.size(1)},
             [g, u] { return stack_rows(g->b, u->b); });
    add_tensor(items, name + "down_proj.lora_A.weight", down[e]->a);
    add_tensor(items, name + "down_proj.lora_B.weight", down[e]->b);
  }
}

Items list_items(const StoredAdapter& adapter, const ModelConfig& config, AdapterLayout layout) {
  Items items;
  std::set<std::string> expert_layers;
  for (const auto& [module, pair] : adapter.targets) {
    const auto e = expert_module(module);
    if (e && layout != AdapterLayout::native) {
      expert_layers.insert(e->layer);
      continue;
    }
    const std::string name = adapter_module_name(module, layout);
    add_tensor(items, name + ".lora_A.weight", pair.a);
    add_tensor(items, name + ".lora_B.weight", pair.b);
  }
  for (const std::string& layer : expert_layers) {
    if (layout == AdapterLayout::art)
      add_art_experts(items, adapter, config, layer);
    else
      add_packed(items, adapter, config, layer, layout);
  }
  return items;
}

// The module names that each reader wants to see in adapter_config.json.
nlohmann::json target_modules(const StoredAdapter& adapter, AdapterLayout layout, nlohmann::json& parameters) {
  std::set<std::string> modules, stacks;
  for (const auto& [module, pair] : adapter.targets) {
    const auto e = expert_module(module);
    const std::string leaf = module.substr(module.rfind('.') + 1);
    const bool compressor = module.find(".compressor.") != std::string::npos;
    const bool shared = module.find(".shared_experts.") != std::string::npos;
    if (layout == AdapterLayout::peft) {
      if (e)
        stacks.insert("model." + e->layer + "mlp.experts." + (e->matrix == 2 ? "down_proj" : "gate_up_proj"));
      else
        modules.insert(adapter_module_name(module, layout).substr(std::strlen("base_model.model.")));
    } else if (layout == AdapterLayout::vllm) {
      if (e) modules.insert("experts");
      if (e || shared) modules.insert(leaf == "w2" ? "down_proj" : "gate_up_proj");
      if (compressor) modules.insert("fused_wkv_wgate");
      if (!e && !shared && !compressor) modules.insert(leaf == "wq_a" || leaf == "wkv" ? "fused_wqa_wkv" : leaf);
    } else if (e) {
      modules.insert("experts");
    } else {
      const std::string name = adapter_module_name(module, layout);
      const std::string last = name.substr(name.rfind('.') + 1);
      modules.insert(compressor ? "compressor." + last : last);
    }
  }
  // PEFT wraps parameters in this order, and the packed names depend on it: gate_up is the base layer of down.
  for (const char* matrix : {".gate_up_proj", ".down_proj"})
    for (const std::string& s : stacks)
      if (s.ends_with(matrix)) parameters.push_back(s);
  return modules;
}

std::string config_text(const StoredAdapter& adapter, AdapterLayout layout) {
  nlohmann::json parameters = nlohmann::json::array();
  nlohmann::json j = {{"base_model_name_or_path", adapter.base_model},
                      {"bias", "none"},
                      {"fan_in_fan_out", false},
                      {"inference_mode", true},
                      {"lora_dropout", 0.0},
                      {"peft_type", "LORA"},
                      {"r", adapter.rank},
                      {"target_modules", target_modules(adapter, layout, parameters)},
                      {"task_type", nullptr}};
  j["target_parameters"] = parameters.empty() ? nlohmann::json() : parameters;
  const bool whole = adapter.alpha == std::floor(adapter.alpha) && std::fabs(adapter.alpha) < 1e9;
  j["lora_alpha"] = whole ? nlohmann::json(static_cast<int64_t>(adapter.alpha)) : nlohmann::json(adapter.alpha);
  if (layout == AdapterLayout::vllm) j["art_lora_format"] = "vllm";
  return j.dump(2) + "\n";
}
}  // namespace

void write_adapter(const std::string& out, const StoredAdapter& adapter, const ModelConfig& config,
                   AdapterLayout layout) {
  if (layout != AdapterLayout::native && !shares_gate_up(adapter))
    return write_adapter(out, share_gate_up(adapter), config, layout);
  const Items items = list_items(adapter, config, layout);
  FolderWriter folder(out);
  std::vector<TensorSpec> specs;
  for (const auto& [name, item] : items) specs.push_back(item.spec);
  SafetensorsWriter writer(folder.partial() + "/adapter_model.safetensors", std::move(specs), {{"format", "pt"}});
  for (const auto& [name, item] : items) writer.append(item.make());
  writer.commit();
  write_text(folder.partial() + "/adapter_config.json", config_text(adapter, layout));
  folder.commit();
}

}  // namespace plumb
