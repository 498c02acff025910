#include "checkpoint/adapter.h"

#include "checkpoint/inspect.h"
#include "checkpoint/testing.h"

namespace plumb {
namespace {
using namespace testing_checkpoint;

constexpr int rank = 3;

// Random pairs for every target of the model; gate and up of an expert share their a unless `separate`.
StoredAdapter random_adapter(const ModelConfig& config, DType type = DType::bf16, bool separate = false) {
  StoredAdapter adapter{rank, 32, "some/model", {}};
  for (const InventoryEntry& e : inventory(config)) {
    if (!e.name.ends_with(".weight")) continue;
    const std::string module = e.name.substr(0, e.name.size() - 7);
    if (!is_lora_target(module)) continue;
    LoraTensors pair{random_tensor({module + "a", type, {rank, e.shape[1]}}, 1),
                     random_tensor({module + "b", type, {e.shape[0], rank}}, 2)};
    if (module.ends_with(".w3") && module.find(".experts.") != std::string::npos && !separate)
      pair.a = adapter.targets.at(module.substr(0, module.size() - 1) + "1").a;
    adapter.targets[module] = pair;
  }
  return adapter;
}

void expect_same(const StoredAdapter& a, const StoredAdapter& b) {
  EXPECT_EQ(a.rank, b.rank);
  EXPECT_EQ(a.alpha, b.alpha);
  EXPECT_EQ(a.base_model, b.base_model);
  ASSERT_EQ(a.targets.size(), b.targets.size());
  for (const auto& [module, pair] : a.targets) {
    EXPECT_TRUE(same(pair.a, b.targets.at(module).a)) << module;
    EXPECT_TRUE(same(pair.b, b.targets.at(module).b)) << module;
  }
}

constexpr AdapterLayout layouts[] = {AdapterLayout::peft, AdapterLayout::vllm, AdapterLayout::art,
                                     AdapterLayout::native};

TEST(Adapter, EveryLayoutRoundTrips) {
  const ModelConfig config = small_config();
  for (DType type : {DType::bf16, DType::f32}) {
    const StoredAdapter adapter = random_adapter(config, type);
    EXPECT_EQ(adapter.targets.size(), 3 * (5 + 3 + 3 * 5) + 2 * 2u);  // layers, and two compressors
    for (AdapterLayout layout : layouts) {
      TempFolder f;
      write_adapter(f / "a", adapter, config, layout);
      expect_same(read_adapter(f / "a", config), adapter);
      const AdapterSummary s = summarise_adapter(f / "a");
      EXPECT_EQ(s.layout, layout) << adapter_layout_name(layout);
      EXPECT_EQ(s.layers, 3);
      EXPECT_EQ(s.targets.size(), 5 + 2 + 3 + 1u);
      EXPECT_EQ(parse_adapter_layout(adapter_layout_name(layout)), layout);
    }
  }
}

// Names and shapes as listed in spec/art_runtime.md 3.3 and reference_trainer.md 3.4, for this model's sizes.
TEST(Adapter, NamesAndShapesOfEachLayout) {
  const ModelConfig config = small_config();
  const StoredAdapter adapter = random_adapter(config);
  const auto expect = [&](AdapterLayout layout, const std::vector<std::pair<std::string, Shape>>& tensors) {
    TempFolder f;
    write_adapter(f / "a", adapter, config, layout);
    const Safetensors s = Safetensors::open(f / "a/adapter_model.safetensors");
    for (const auto& [name, shape] : tensors) {
      const StoredTensor* t = s.find("base_model.model.model.layers.1." + name + ".weight");
      ASSERT_TRUE(t) << name;
      EXPECT_EQ(t->shape, shape) << name;
    }
  };
  expect(AdapterLayout::vllm, {{"attn.wq_a.lora_A", {3, 160}},
                               {"attn.wq_a.lora_B", {20, 3}},
                               {"attn.wo_a.lora_A", {3, 48}},  // one group's input
                               {"attn.wo_a.lora_B", {36, 3}},
                               {"attn.compressor.wgate.lora_B", {48, 3}},
                               {"ffn.shared_experts.down_proj.lora_A", {3, 32}},
                               {"ffn.experts.base_layer.lora_A", {15, 160}},
                               {"ffn.experts.base_layer.lora_B", {64, 15}},
                               {"ffn.experts.lora_A", {15, 32}},
                               {"ffn.experts.lora_B", {160, 15}}});
  expect(AdapterLayout::peft, {{"self_attn.q_a_proj.lora_A", {3, 160}},
                               {"self_attn.compressor.kv_proj.lora_B", {48, 3}},
                               {"mlp.shared_experts.gate_proj.lora_B", {32, 3}},
                               {"mlp.experts.base_layer.lora_B", {64, 15}},
                               {"mlp.experts.lora_B", {160, 15}}});
  expect(AdapterLayout::art, {{"self_attn.o_b_proj.lora_B", {160, 3}},
                              {"mlp.shared_expert.up_proj.lora_A", {3, 160}},
                              {"mlp.experts.4.gate_up_proj.lora_A", {3, 160}},
                              {"mlp.experts.4.gate_up_proj.lora_B", {64, 3}},
                              {"mlp.experts.4.down_proj.lora_A", {3, 32}}});
  expect(AdapterLayout::native, {{"attn.wkv.lora_A", {3, 160}}, {"ffn.experts.4.w3.lora_B", {32, 3}}});
}

// Rows e*r + j of a, columns j*E + e of b; gate rows first.
TEST(Adapter, OrderInsidePackedExperts) {
  const ModelConfig config = small_config();
  const StoredAdapter adapter = random_adapter(config, DType::f32);
  TempFolder f;
  write_adapter(f / "a", adapter, config, AdapterLayout::vllm);
  const Safetensors s = Safetensors::open(f / "a/adapter_model.safetensors");
  const std::string prefix = "base_model.model.model.layers.2.ffn.experts.";
  const Tensor a = s.tensor(prefix + "base_layer.lora_A.weight"), b = s.tensor(prefix + "base_layer.lora_B.weight");
  const Tensor down = s.tensor(prefix + "lora_B.weight");
  for (int e = 0; e < 5; ++e) {
    const auto pair = [&](const char* w) {
      return adapter.targets.at("layers.2.ffn.experts." + std::to_string(e) + "." + w);
    };
    for (int j = 0; j < rank; ++j) {
      EXPECT_EQ(a.f32()[(e * rank + j) * 160 + 17], pair("w1").a.f32()[j * 160 + 17]);
      EXPECT_EQ(b.f32()[9 * 15 + j * 5 + e], pair("w1").b.f32()[9 * rank + j]);
      EXPECT_EQ(b.f32()[(32 + 9) * 15 + j * 5 + e], pair("w3").b.f32()[9 * rank + j]);
      EXPECT_EQ(down.f32()[150 * 15 + j * 5 + e], pair("w2").b.f32()[150 * rank + j]);
    }
  }
}

// alpha / r * b * a of a module, [out, in].
std::vector<double> delta(const StoredAdapter& adapter, const std::string& module) {
  const LoraTensors& p = adapter.targets.at(module);
  const int64_t out = p.b.size(0), in = p.a.size(1), r = adapter.rank;
  std::vector<double> d(out * in);
  for (int64_t o = 0; o < out; ++o)
    for (int64_t k = 0; k < r; ++k)
      for (int64_t i = 0; i < in; ++i)
        d[o * in + i] += adapter.alpha / static_cast<double>(r) * p.b.f32()[o * r + k] * p.a.f32()[k * in + i];
  return d;
}

TEST(Adapter, SeparateGateAndUpAreWrittenAtTwiceTheRank) {
  const ModelConfig config = small_config();
  const StoredAdapter adapter = random_adapter(config, DType::f32, true);
  for (AdapterLayout layout : layouts) {
    TempFolder f;
    write_adapter(f / "a", adapter, config, layout);
    const StoredAdapter back = read_adapter(f / "a", config);
    EXPECT_EQ(back.rank, layout == AdapterLayout::native ? rank : 2 * rank);
    for (const char* module : {"layers.0.attn.wkv", "layers.1.ffn.experts.2.w1", "layers.1.ffn.experts.2.w2",
                               "layers.1.ffn.experts.2.w3", "layers.2.ffn.shared_experts.w3"})
      EXPECT_EQ(delta(back, module), delta(adapter, module)) << module;  // same terms in the same order, then zeros
  }
}

TEST(Adapter, OlderSpellingsAreRead) {
  const ModelConfig config = small_config();
  const StoredAdapter adapter = random_adapter(config);
  TempFolder f;
  write_adapter(f / "a", adapter, config, AdapterLayout::vllm);
  const Safetensors s = Safetensors::open(f / "a/adapter_model.safetensors");
  Tensors renamed;
  for (const StoredTensor& t : s.tensors()) {
    std::string name = t.name;
    if (const size_t at = name.find("attn.compressor"); at != std::string::npos) name.insert(at + 5, "mla_attn.");
    if (const size_t at = name.find("ffn.experts"); at != std::string::npos) name.replace(at, 3, "mlp");
    renamed.emplace_back(name, s.tensor(t));
  }
  fs::create_directories(f / "b");
  fs::copy(f / "a/adapter_config.json", f / "b/adapter_config.json");
  write_safetensors(f / "b/adapter_model.safetensors", renamed);
  expect_same(read_adapter(f / "b", config), adapter);
}

TEST(Adapter, BadAdaptersAreRefused) {
  const ModelConfig config = small_config();
  const StoredAdapter adapter = random_adapter(config);
  const auto bad = [&](AdapterLayout layout, const std::function<void(Tensors&, nlohmann::json&)>& damage,
                       const std::vector<std::string>& parts) {
    TempFolder f;
    write_adapter(f / "a", adapter, config, layout);
    Tensors tensors;
    const Safetensors s = Safetensors::open(f / "a/adapter_model.safetensors");
    for (const StoredTensor& t : s.tensors()) tensors.emplace_back(t.name, s.tensor(t));
    nlohmann::json json = nlohmann::json::parse(read_text(f / "a/adapter_config.json"));
    damage(tensors, json);
    fs::create_directories(f / "b");
    write_text(f / "b/adapter_config.json", json.dump());
    write_safetensors(f / "b/adapter_model.safetensors", tensors);
    expect_error([&] { read_adapter(f / "b", config); }, parts);
  };
  const std::string layer = "base_model.model.model.layers.1.";
  const auto rename = [&](const std::string& from, const std::string& to) {
    return [=](Tensors& tensors, nlohmann::json&) {
      for (auto& [name, t] : tensors)
        if (name.starts_with(layer + from + ".lora_")) name.replace(layer.size(), from.size(), to);
    };
  };
  const auto remove = [&](const std::string& start) {
    return [=](Tensors& tensors, nlohmann::json&) {
      std::erase_if(tensors, [&](const auto& t) { return t.first.starts_with(layer + start); });
    };
  };
  const auto set = [](const char* key, nlohmann::json value) {
    return [=](Tensors&, nlohmann::json& json) { json[key] = value; };
  };
  const auto vllm = AdapterLayout::vllm;
  bad(vllm, set("r", 4), {"attn.wkv.lora_A.weight", "shape [4,160] expected, [3,160] found", "r = 4"});
  bad(vllm, rename("attn.wq_a", "attn.wq_c"), {"attn.wq_c.lora_A.weight", "no LoRA target", "layers.1.attn.wq_"});
  bad(vllm, rename("attn.wq_b", "attn.indexer.wq_b"), {"attn.indexer.wq_b", "no LoRA target"});
  bad(vllm, rename("attn.wq_a", "attn.wkv"), {"attn.wkv"});
  bad(vllm, remove("attn.wkv.lora_B"), {"attn.wkv.lora_A.weight", "has no lora_B"});
  bad(vllm, remove("ffn.experts.base_layer"), {"ffn.experts.lora_A.weight", "other packed pair", "missing"});
  bad(AdapterLayout::peft, remove("mlp.experts.lora_"), {"mlp.experts.base_layer.lora_A.weight", "missing"});
  bad(vllm,
      [&](Tensors& t, nlohmann::json&) {
        t.emplace_back(layer + "ffn.experts.0.w2.lora_A.weight", Tensor::zeros({3, 32}));
        t.emplace_back(layer + "ffn.experts.0.w2.lora_B.weight", Tensor::zeros({160, 3}));
      },
      {"two forms"});
  bad(vllm,
      [&](Tensors& t, nlohmann::json&) {
        t.emplace_back("lm_head.lora_A.weight", Tensor::zeros({3, 32}));
      },
      {"lm_head.lora_A.weight", "no LoRA tensor of a layer"});
  bad(vllm, [&](Tensors& t, nlohmann::json&) { t[0].second = Tensor::zeros(t[0].second.shape(), DType::f16); },
      {"dtype F16"});
  bad(vllm, [&](Tensors& t, nlohmann::json&) { t.clear(); }, {"holds no adapter tensors"});
  bad(vllm, set("use_dora", true), {"use_dora = true", "not supported"});
  bad(vllm, set("rank_pattern", {{"wkv", 2}}), {"rank_pattern"});
  bad(vllm, set("bias", "all"), {"bias"});
  bad(vllm, set("peft_type", "IA3"), {"peft_type"});
  bad(vllm, set("lora_alpha", nullptr), {"lora_alpha"});
}

TEST(Adapter, PackedLayoutsNeedAllExperts) {
  const ModelConfig config = small_config();
  StoredAdapter adapter = random_adapter(config);
  adapter.targets.erase("layers.2.ffn.experts.3.w2");
  TempFolder f;
  expect_error([&] { write_adapter(f / "a", adapter, config, AdapterLayout::peft); },
               {"layers.2.ffn.experts.3.w2", "layout native"});
  EXPECT_EQ(f.count(), 0);
  write_adapter(f / "a", adapter, config, AdapterLayout::native);
  expect_same(read_adapter(f / "a", config), adapter);
}

TEST(Adapter, ConfigOfEachLayout) {
  const ModelConfig config = small_config();
  const StoredAdapter adapter = random_adapter(config);
  const auto json = [&](AdapterLayout layout) {
    TempFolder f;
    write_adapter(f / "a", adapter, config, layout);
    return nlohmann::json::parse(read_text(f / "a/adapter_config.json"));
  };
  const nlohmann::json vllm = json(AdapterLayout::vllm), peft = json(AdapterLayout::peft);
  EXPECT_EQ(vllm["art_lora_format"], "vllm");
  EXPECT_EQ(vllm["target_modules"], (nlohmann::json{"down_proj", "experts", "fused_wkv_wgate", "fused_wqa_wkv",
                                                    "gate_up_proj", "wo_a", "wo_b", "wq_b"}));
  EXPECT_FALSE(peft.contains("art_lora_format"));
  EXPECT_EQ(peft["target_parameters"].size(), 6u);
  EXPECT_EQ(peft["target_parameters"][0], "model.layers.0.mlp.experts.gate_up_proj");
  EXPECT_EQ(json(AdapterLayout::art)["target_modules"].size(), 11u);
  for (const char* key : {"r", "lora_alpha", "peft_type", "base_model_name_or_path", "bias"})
    EXPECT_TRUE(vllm.contains(key));
}

TEST(Adapter, Inspect) {
  const ModelConfig config = small_config();
  TempFolder f;
  write_adapter(f / "a", random_adapter(config), config, AdapterLayout::art);
  const Inspection i = inspect(f / "a");
  EXPECT_EQ(i.kind, "adapter");
  EXPECT_EQ(i.layout, "art");
  EXPECT_NE(to_text(i).find("rank         3"), std::string::npos) << to_text(i);
}

}  // namespace
}  // namespace plumb
