#include "checkpoint/inspect.h"

#include "checkpoint/testing.h"
#include "config/presets.h"

namespace plumb {
namespace {
using namespace testing_checkpoint;

// spec: model.md A14.
TEST(Inspect, ParametersOfTheReleasedModels) {
  const ParameterCounts flash = count_parameters(preset("flash")), pro = count_parameters(preset("pro"));
  EXPECT_NEAR(static_cast<double>(flash.backbone), 284.33e9, 0.005e9);
  EXPECT_NEAR(static_cast<double>(flash.active), 13.27e9, 0.005e9);
  EXPECT_NEAR(static_cast<double>(flash.mtp), 6.61e9, 0.005e9);
  EXPECT_NEAR(static_cast<double>(pro.backbone), 1573.0e9, 0.05e9);
  EXPECT_NEAR(static_cast<double>(pro.active), 48.85e9, 0.005e9);
  EXPECT_NEAR(static_cast<double>(pro.mtp), 25.84e9, 0.005e9);
}

TEST(Inspect, CheckpointByPurposeAndFormat) {
  TempFolder f;
  const ModelConfig config = small_config();
  write_checkpoint(f.path(), config, random_tensors(config));
  const Inspection i = inspect(f.path());
  EXPECT_EQ(i.kind, "checkpoint");
  EXPECT_EQ(i.layout, "released");
  EXPECT_EQ(i.problem_count, 0u);
  int64_t tensors = 0, bytes = 0;
  for (const TensorSpec& s : released_tensors(config)) ++tensors, bytes += static_cast<int64_t>(s.bytes());
  EXPECT_EQ(i.total.tensors, tensors);
  EXPECT_EQ(i.total.bytes, bytes);
  const ParameterCounts n = count_parameters(config);
  EXPECT_EQ(i.total.parameters, n.backbone + n.mtp);
  for (const auto& [name, group] : i.groups) {
    if (name != "routed experts") continue;
    EXPECT_EQ(group.tensors, 3 * 5 * 3 * 2);  // layers, experts, matrices, data and scale
    EXPECT_EQ(group.parameters, 3 * 5 * 3 * 160 * 32);
    EXPECT_EQ(group.bytes, 3 * 5 * (3 * 160 * 16 + 2 * 32 * 5 + 160));  // half a byte a value, one scale for 32 inputs
    EXPECT_EQ(group.formats.size(), 1u);
  }
  const std::string text = to_text(i);
  for (const char* part :
       {"3 layers (1 window, 1 csa, 1 hca; 1 with hash routing) + 1 MTP", "routed experts", "no problems"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
  EXPECT_EQ(to_json(i)["groups"]["MTP"]["parameters"], n.mtp);
}

TEST(Inspect, ProblemsAreListedNotThrown) {
  TempFolder f;
  const ModelConfig config = small_config();
  Tensors tensors = random_tensors(config);
  std::erase_if(tensors, [](const auto& t) { return t.first == "norm.weight"; });
  tensors.emplace_back("layers.0.attn.wkw.weight", Tensor::zeros({1}));
  write_checkpoint(f.path(), config, tensors);
  const Inspection i = inspect(f.path());
  EXPECT_EQ(i.problem_count, 2u);
  EXPECT_NE(to_text(i).find("2 problems"), std::string::npos);
  write_text(f / "config.json", "{\"model_type\": \"llama\"}");
  const Inspection other = inspect(f.path());
  EXPECT_EQ(other.problem_count, 1u);
  EXPECT_FALSE(other.config);
  EXPECT_EQ(other.total.tensors, static_cast<int64_t>(tensors.size()));
}

TEST(Inspect, DeepFindsBadValues) {
  TempFolder f;
  const ModelConfig config = small_config();
  const auto bad = [&](const char* name, const std::function<void(Tensor&)>& damage, const char* part) {
    Tensors tensors = random_tensors(config);
    for (auto& [n, t] : tensors)
      if (n == name) damage(t);
    write_checkpoint(f.path(), config, tensors);
    EXPECT_EQ(inspect(f.path()).problem_count, 0u);
    const std::string text = to_text(inspect(f.path(), true));
    EXPECT_NE(text.find(std::string(name) + ": " + part), std::string::npos) << text;
  };
  bad(
      "layers.1.ffn.experts.4.w2.scale", [](Tensor& t) { t.ptr<uint8_t>()[3] = 255; }, "element 3 of [160,1] is NaN");
  bad(
      "layers.1.attn.wkv.weight", [](Tensor& t) { t.ptr<uint8_t>()[9] = 0xff; }, "element 9");
  bad(
      "norm.weight", [](Tensor& t) { t.ptr<uint16_t>()[7] = 0x7f80; }, "element 7");
  bad(
      "layers.1.ffn.gate.bias", [](Tensor& t) { t.f32()[2] = NAN; }, "element 2");
  bad(
      "layers.0.ffn.gate.tid2eid", [](Tensor& t) { t.ptr<int64_t>()[2] = -1; }, "element 2 of [40,2] is no expert");
  EXPECT_EQ(inspect(f.path(), true).problem_count, 1u);
}

TEST(Inspect, BareTensorsAndNothing) {
  TempFolder f;
  write_safetensors(f / "a.safetensors", {{"x", Tensor::zeros({3})}, {"y", Tensor::zeros({2}, DType::i64)}});
  const Inspection i = inspect(f / "a.safetensors");
  EXPECT_EQ(i.kind, "tensors");
  EXPECT_EQ(i.groups.size(), 2u);
  EXPECT_EQ(i.total.bytes, 28);
  expect_error([&] { inspect(f / "none"); }, {"none"});
}

TEST(Inspect, HumanNumbers) {
  EXPECT_EQ(human_count(812), "812");
  EXPECT_EQ(human_count(284330000000), "284.33 B");
  EXPECT_EQ(human_bytes(159609485896), "159.61 GB");
}

}  // namespace
}  // namespace plumb
