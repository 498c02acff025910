#include <fmt/format.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/json.h"
#include "base/parallel.h"
#include "checkpoint/adapter.h"
#include "checkpoint/adapter_names.h"
#include "checkpoint/inventory.h"
#include "checkpoint/safetensors.h"
#include "config/nearest.h"

namespace plumb {
namespace {
using nlohmann::json;

// ---- adapter_config.json
// ---------------------------------------------------------------------------------------------

bool is_set(const json& config, const char* key) {
  const auto at = config.find(key);
  if (at == config.end() || at->is_null()) return false;
  return at->is_boolean() ? at->get<bool>() : at->is_object() || at->is_array() ? !at->empty() : true;
}

// Options under which the weights would mean something else than alpha / r * b * a.
void refuse_unknown_arithmetic(const json& config, const std::string& where) {
  for (const char* key : {"use_dora", "use_rslora", "use_qalora", "fan_in_fan_out", "lora_bias", "rank_pattern",
                          "alpha_pattern", "modules_to_save", "trainable_token_indices"})
    if (is_set(config, key))
      fail(where, fmt::format("{} = {} is not supported", key, config[key].dump()), "train the adapter as plain LoRA");
  if (is_set(config, "bias") && config["bias"] != "none")
    fail(where, "bias = " + config["bias"].dump() + " is not supported", "train the adapter with bias \"none\"");
}

void read_config(StoredAdapter& adapter, const std::string& folder) {
  const std::string where = folder + "/adapter_config.json";
  const json config = read_json_file(where);
  if (!config.is_object() || config.value("peft_type", json()) != "LORA")
    fail(where, "peft_type is not \"LORA\"", "give a LoRA adapter");
  if (!config.contains("r") || !config["r"].is_number_integer() || config["r"].get<int64_t>() < 1)
    fail(where, "r is missing or no positive number");
  if (!config.contains("lora_alpha") || !config["lora_alpha"].is_number())
    fail(where, "lora_alpha is missing or no number");
  refuse_unknown_arithmetic(config, where);
  adapter.rank = config["r"].get<int>();
  adapter.alpha = config["lora_alpha"].get<double>();
  const auto base = config.find("base_model_name_or_path");
  if (base != config.end() && base->is_string()) adapter.base_model = base->get<std::string>();
}

// ---- Tensors
// ---------------------------------------------------------------------------------------------------------

// [rows, r*E] with column j*E + e -> [E, rows, r].
Tensor unpack_b(const Tensor& packed, int64_t experts, int64_t rank) {
  const int64_t rows = packed.size(0);
  const size_t size = dtype_size(packed.dtype());
  Tensor b = Tensor::empty({experts, rows, rank}, packed.dtype());
  parallel_for(experts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e)
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t j = 0; j < rank; ++j)
          std::memcpy(b.raw() + ((e * rows + row) * rank + j) * size,
                      packed.raw() + ((row * rank + j) * experts + e) * size, size);
  });
  return b;
}

class Reader {
 public:
  Reader(const std::string& folder, const ModelConfig& config)
      : config_(config), files_(Safetensors::open(folder + "/adapter_model.safetensors")) {
    read_config(adapter_, folder);
    for (const InventoryEntry& e : inventory(config)) {
      std::string module = e.name;
      if (e.shape.size() != 2 || !module.ends_with(".weight")) continue;
      module.resize(module.size() - 7);
      if (is_lora_target(module)) shapes_[module] = e.shape;
    }
  }

  StoredAdapter read() {
    for (const StoredTensor& t : files_.tensors()) collect(t);
    for (const auto& [id, pair] : pairs_) {
      if (!pair.a || !pair.b)
        fail(place(pair.a ? *pair.a : *pair.b), pair.a ? "has no lora_B" : "has no lora_A",
             "the adapter is incomplete");
      add(pair);
    }
    if (adapter_.targets.empty()) fail(files_.path(), "holds no adapter tensors", "give the folder of a LoRA adapter");
    return std::move(adapter_);
  }

 private:
  struct Pair {
    AdapterKey key;
    const StoredTensor *a = nullptr, *b = nullptr;
  };

  std::string place(const StoredTensor& t) const { return files_.file_path(t) + ": " + t.name; }

  void collect(const StoredTensor& t) {
    const auto key = parse_adapter_key(t.name);
    if (!key) fail(place(t), "is no LoRA tensor of a layer", "names end in .lora_A.weight or .lora_B.weight");
    if (t.dtype != DType::f32 && t.dtype != DType::bf16)
      fail(place(t), fmt::format("dtype {} found, F32 or BF16 expected", safetensors_dtype(t.dtype)));
    Pair& pair = pairs_[std::to_string(static_cast<int>(key->form)) + key->module];
    const StoredTensor*& slot = key->is_a ? pair.a : pair.b;
    if (slot) fail(place(t), "is the same tensor as " + slot->name, "remove one of the two");
    pair.key = *key;
    slot = &t;
  }

  // Shape [out, in] of a module; the error names the nearest.
  Shape shape_of(const std::string& module, const Pair& pair) const {
    const auto at = shapes_.find(module);
    if (at != shapes_.end()) return at->second;
    std::vector<std::string> known;
    for (const auto& [name, shape] : shapes_) known.push_back(name);
    const std::string guess = nearest(module, known);
    fail(place(*pair.a), module + " is no LoRA target of this model",
         guess.empty() ? "targets are attention, compressor, shared and routed experts" : "the nearest is " + guess);
  }

  Tensor take(const StoredTensor& t, const Shape& expected) const {
    if (t.shape != expected)
      fail(place(t), fmt::format("shape {} expected, {} found", to_string(expected), to_string(t.shape)),
           fmt::format("adapter_config.json says r = {}; check that the adapter is for this model", adapter_.rank));
    return files_.tensor(t);
  }

  void put(const std::string& module, Tensor a, Tensor b, const Pair& pair) {
    if (!adapter_.targets.emplace(module, LoraTensors{std::move(a), std::move(b)}).second)
      fail(place(*pair.a), module + " occurs in two forms, packed and on its own", "keep one of them");
  }

  void add(const Pair& pair) {
    const int64_t r = adapter_.rank;
    const std::string& module = pair.key.module;
    switch (pair.key.form) {
      case AdapterKey::Form::plain: {
        const Shape s = shape_of(module, pair);
        const Tensor a = take(*pair.a, {r, s[1]}), b = take(*pair.b, {s[0], r});
        return put(module, a, b, pair);
      }
      case AdapterKey::Form::expert_gate_up: {
        const Shape s = shape_of(module + "w1", pair);
        const Tensor a = take(*pair.a, {r, s[1]}), b = take(*pair.b, {2 * s[0], r});
        put(module + "w1", a, b.rows(0, s[0]), pair);
        return put(module + "w3", a, b.rows(s[0], 2 * s[0]), pair);
      }
      case AdapterKey::Form::packed_gate_up:
        require_partner(pair, AdapterKey::Form::packed_down);
        return add_packed(pair, {"w1", "w3"});
      case AdapterKey::Form::packed_down:
        require_partner(pair, AdapterKey::Form::packed_gate_up);
        return add_packed(pair, {"w2"});
    }
  }

  void require_partner(const Pair& pair, AdapterKey::Form other) const {
    if (!pairs_.contains(std::to_string(static_cast<int>(other)) + pair.key.module))
      fail(place(*pair.a), "is packed, but the other packed pair of this layer is missing",
           "experts.base_layer (gate and up) and experts (down) belong together");
  }

  void add_packed(const Pair& pair, const std::vector<std::string>& matrices) {
    const std::string experts_of = pair.key.module + "ffn.experts.";
    const Shape s = shape_of(experts_of + "0." + matrices[0], pair);
    const int64_t r = adapter_.rank, experts = config_.n_routed_experts, parts = static_cast<int64_t>(matrices.size());
    const Tensor a = take(*pair.a, {experts * r, s[1]}), packed = take(*pair.b, {parts * s[0], r * experts});
    const Tensor b = unpack_b(packed, experts, r).view({experts * parts * s[0], r});
    for (int64_t e = 0; e < experts; ++e)
      for (int64_t p = 0; p < parts; ++p)
        put(experts_of + std::to_string(e) + "." + matrices[p], a.rows(e * r, (e + 1) * r),
            b.rows((e * parts + p) * s[0], (e * parts + p + 1) * s[0]), pair);
  }

  const ModelConfig& config_;
  Safetensors files_;
  StoredAdapter adapter_;
  std::map<std::string, Shape> shapes_;
  std::map<std::string, Pair> pairs_;
};
}  // namespace

StoredAdapter read_adapter(const std::string& folder, const ModelConfig& config) {
  return Reader(folder, config).read();
}

AdapterSummary summarise_adapter(const std::string& folder) {
  StoredAdapter adapter;
  read_config(adapter, folder);
  AdapterSummary s;
  s.rank = adapter.rank, s.alpha = adapter.alpha, s.base_model = adapter.base_model;
  const Safetensors files = Safetensors::open(folder + "/adapter_model.safetensors");
  std::set<std::string> layers, targets;
  bool sure = false;
  for (const StoredTensor& t : files.tensors()) {
    const auto key = parse_adapter_key(t.name);
    if (!key)
      fail(files.file_path(t) + ": " + t.name, "is no LoRA tensor of a layer",
           "names end in .lora_A.weight or .lora_B.weight");
    if (!sure) s.layout = key->layout, sure = key->sure;
    const size_t layer_end = key->module.find('.', 7) + 1;
    layers.insert(key->module.substr(0, layer_end));
    const std::string tail = key->module.substr(layer_end);
    targets.insert(tail.empty() || tail.starts_with("ffn.experts.") ? "ffn.experts" : tail);
  }
  s.layers = static_cast<int>(layers.size());
  s.targets.assign(targets.begin(), targets.end());
  return s;
}

}  // namespace plumb
