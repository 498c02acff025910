#include "checkpoint/checkpoint.h"

#include "base/float_formats.h"
#include "checkpoint/testing.h"

namespace plumb {
namespace {
using namespace testing_checkpoint;

Tensor& find(Tensors& tensors, const std::string& name) {
  for (auto& [n, t] : tensors)
    if (n == name) return t;
  ADD_FAILURE() << name;
  return tensors[0].second;
}

// The same model under the names of transformers' state_dict, experts stacked by hand.
Tensors stacked(const ModelConfig& c, const Tensors& released) {
  Tensors out;
  std::map<std::string, Tensor> stacks;
  for (const auto& [name, t] : released) {
    if (name.starts_with("mtp.")) continue;
    const auto s = stacked_expert(name);
    if (!s) {
      out.emplace_back(spelled(name, Layout::hf_state), t);
      continue;
    }
    Tensor& stack = stacks[spelled(s->tensor, Layout::hf_state)];
    if (!stack.defined()) stack = Tensor::empty({c.n_routed_experts, t.size(0) * s->parts, t.size(1)}, t.dtype());
    std::memcpy(stack.raw() + (s->expert * s->parts + s->part) * t.bytes(), t.raw(), t.bytes());
  }
  for (const auto& [name, t] : stacks) out.emplace_back(name, t);
  return out;
}

void expect_holds(const Checkpoint& c, const Tensors& released) {
  for (const auto& [name, t] : released) {
    if (!name.ends_with(".scale") && c.has(name)) {
      EXPECT_TRUE(same(c.weight(name).data, t)) << name;
    }
    if (!name.ends_with(".scale")) continue;
    const std::string data = name.substr(0, name.size() - 5) + "weight";
    if (c.has(data)) {
      EXPECT_TRUE(same(c.weight(data).scale, t)) << name;
    }
  }
}

TEST(Checkpoint, ReleasedLayout) {
  for (ExpertDtype experts : {ExpertDtype::fp4, ExpertDtype::fp8, ExpertDtype::bf16}) {
    TempFolder f;
    const ModelConfig config = small_config(experts);
    const Tensors tensors = random_tensors(config);
    write_checkpoint(f.path(), config, tensors);
    const Checkpoint c = Checkpoint::open(f.path());
    EXPECT_EQ(c.config(), config);
    EXPECT_EQ(c.layout(), Layout::released);
    EXPECT_TRUE(c.has_mtp(0));
    EXPECT_EQ(c.entries().size(), inventory(config).size());
    expect_holds(c, tensors);
    // Memory is the mapping: two calls give the same address.
    EXPECT_EQ(c.weight("layers.1.ffn.experts.2.w1.weight").data.raw(),
              c.weight("layers.1.ffn.experts.2.w1.weight").data.raw());
    for (const InventoryEntry& e : c.entries()) c.drop(e.name);
    expect_holds(c, tensors);
  }
}

TEST(Checkpoint, HuggingFaceLayouts) {
  const ModelConfig config = small_config();
  const Tensors tensors = random_tensors(config);
  TempFolder f;
  Tensors file;
  for (const auto& [name, t] : tensors)
    if (!name.starts_with("mtp.")) file.emplace_back(spelled(name, Layout::hf), t);
  write_checkpoint(f / "file", config, file);
  const Checkpoint a = Checkpoint::open(f / "file");
  EXPECT_EQ(a.layout(), Layout::hf);
  EXPECT_FALSE(a.has_mtp(0));
  expect_error([&] { a.weight("mtp.0.norm.weight"); }, {"mtp.0.norm.weight", "not in this checkpoint"});
  expect_holds(a, tensors);

  write_checkpoint(f / "state", config, stacked(config, tensors));
  const Checkpoint b = Checkpoint::open(f / "state");
  EXPECT_EQ(b.layout(), Layout::hf_state);
  expect_holds(b, tensors);
  EXPECT_EQ(b.weight("layers.1.ffn.experts.2.w3.weight").data.raw(),
            b.weight("layers.1.ffn.experts.2.w3.weight").data.raw());
}

TEST(Checkpoint, TablesAndFloats) {
  TempFolder f;
  const ModelConfig config = small_config();
  Tensors tensors = random_tensors(config);
  write_checkpoint(f / "a", config, tensors);
  const Checkpoint c = Checkpoint::open(f / "a");
  const Tensor table = c.table("layers.0.ffn.gate.tid2eid");
  EXPECT_EQ(table.ptr<int32_t>()[3], find(tensors, "layers.0.ffn.gate.tid2eid").ptr<int64_t>()[3]);
  EXPECT_EQ(c.floats("norm.weight").f32()[5], bf16_to_float(find(tensors, "norm.weight").ptr<uint16_t>()[5]));
  find(tensors, "layers.0.ffn.gate.tid2eid").ptr<int64_t>()[7] = 5;
  write_checkpoint(f / "b", config, tensors);
  expect_error([&] { Checkpoint::open(f / "b").table("layers.0.ffn.gate.tid2eid"); },
               {"tid2eid", "token 3", "expert 5"});
}

// The -Base releases keep their scales in FP32.
TEST(Checkpoint, ScalesInFp32) {
  TempFolder f;
  const ModelConfig config = small_config();
  Tensors tensors = random_tensors(config), wide = tensors;
  for (auto& [name, t] : wide)
    if (name.ends_with(".scale")) {
      Tensor s = Tensor::empty(t.shape());
      for (int64_t i = 0; i < s.numel(); ++i) s.f32()[i] = std::ldexp(1.0f, t.ptr<uint8_t>()[i] - 127);
      t = s;
    }
  write_checkpoint(f / "a", config, wide);
  expect_holds(Checkpoint::open(f / "a"), tensors);
  find(wide, "layers.0.attn.wkv.scale").f32()[1] = 0.3f;
  write_checkpoint(f / "b", config, wide);
  expect_error([&] { Checkpoint::open(f / "b").weight("layers.0.attn.wkv.weight"); },
               {"layers.0.attn.wkv.scale", "[0,1]", "0.3", "no power of two"});
}

TEST(Checkpoint, BadCheckpointsAreRefusedWithNamesAndShapes) {
  const ModelConfig config = small_config();
  const auto bad = [&](const std::function<void(Tensors&)>& damage, const std::vector<std::string>& parts) {
    TempFolder f;
    Tensors tensors = random_tensors(config);
    damage(tensors);
    write_checkpoint(f.path(), config, tensors);
    expect_error([&] { Checkpoint::open(f.path()); }, parts);
  };
  const auto without = [](const std::string& name) {
    return [name](Tensors& t) { std::erase_if(t, [&](const auto& x) { return x.first == name; }); };
  };
  const std::string wkv = "layers.1.attn.wkv.weight";
  bad(
      [&](Tensors& t) {
        find(t, wkv) = Tensor::zeros({24, 161});
      },
      {"model.safetensors: " + wkv, "[24,160] expected", "[24,161] found"});
  bad([&](Tensors& t) { find(t, wkv) = Tensor::zeros({24, 160}, DType::f16); }, {wkv, "F16 found", "F8_E4M3"});
  bad([&](Tensors& t) { find(t, "norm.weight") = Tensor::zeros({160}, DType::f8_e4m3); },
      {"norm.weight", "F8_E4M3 found"});
  bad(without("layers.1.attn.wkv.scale"), {wkv, "scale layers.1.attn.wkv.scale is missing"});
  bad(without(wkv), {wkv, "is missing", "[24,160] expected"});
  bad(without("mtp.0.e_proj.weight"), {"mtp.0.e_proj.weight", "is missing"});
  bad(
      [&](Tensors& t) {
        find(t, "layers.1.attn.wkv.scale") = Tensor::zeros({2, 2}, DType::f8_e8m0);
      },
      {"layers.1.attn.wkv.scale", "[1,2] expected", "[2,2] found"});
  bad([&](Tensors& t) { t.emplace_back("layers.1.attn.wvk.weight", Tensor::zeros({1})); },
      {"layers.1.attn.wvk.weight", "no tensor of this model", "nearest known name is " + wkv});
  bad([&](Tensors& t) { t.emplace_back("model.norm.weight", Tensor::zeros({160})); },
      {"norm.weight", "is the same tensor as"});
  bad(
      [&](Tensors& t) {
        find(t, wkv) = Tensor::zeros({24, 160});
      },
      {"layers.1.attn.wkv.scale", "scale of a tensor that is not quantised"});
  bad(
      [&](Tensors& t) {
        without("norm.weight")(t);
        without(wkv)(t);
        without("layers.1.attn.wkv.scale")(t);
      },
      {"norm.weight", "is missing", "and 1 more problem"});
}

TEST(Checkpoint, NanScaleIsRefusedAtLoad) {
  TempFolder f;
  const ModelConfig config = small_config();
  Tensors tensors = random_tensors(config);
  find(tensors, "layers.2.ffn.experts.3.w2.scale").ptr<uint8_t>()[9] = 255;
  write_checkpoint(f.path(), config, tensors);
  const Checkpoint c = Checkpoint::open(f.path());
  c.weight("layers.2.ffn.experts.2.w2.weight");
  expect_error([&] { c.weight("layers.2.ffn.experts.3.w2.weight"); },
               {"layers.2.ffn.experts.3.w2.scale", "[9,0]", "NaN"});
}

TEST(Checkpoint, DrafterTensorsAreReportedAndNotUsed) {
  TempFolder f;
  const ModelConfig config = small_config();
  Tensors tensors = random_tensors(config);
  tensors.emplace_back("mtp.0.main_proj.weight", Tensor::zeros({2, 2}));
  tensors.emplace_back("mtp.2.attn.wkv.weight", Tensor::zeros({2, 2}));
  write_checkpoint(f.path(), config, tensors);
  EXPECT_EQ(Checkpoint::open(f.path()).extras(),
            (std::vector<std::string>{"mtp.0.main_proj.weight", "mtp.2.attn.wkv.weight"}));
}

}  // namespace
}  // namespace plumb
