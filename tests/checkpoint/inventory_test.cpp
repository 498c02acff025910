#include "checkpoint/inventory.h"

#include <set>

#include "checkpoint/names.h"
#include "checkpoint/testing.h"
#include "config/presets.h"

namespace plumb {
namespace {
using namespace testing_checkpoint;

// The published figures of both releases (spec: model.md A13).
TEST(Inventory, CountsOfTheReleasedModels) {
  const auto totals = [](const char* name) {
    uint64_t count = 0, elements = 0, bytes = 0;
    for (const TensorSpec& t : released_tensors(preset(name)))
      ++count, elements += static_cast<uint64_t>(numel_of(t.shape)), bytes += t.bytes();
    return std::tuple(count, elements, bytes);
  };
  EXPECT_EQ(totals("flash"), std::tuple(69187u, 158069433298u, 159609485896u));
  const auto [count, elements, bytes] = totals("pro");
  EXPECT_EQ(count, 145116u);
  EXPECT_EQ(elements, 861608274846u);
  EXPECT_NEAR(static_cast<double>(bytes) / (1 << 30), 805.32, 0.005);
}

// Names and shapes of a model as transformers holds and writes it (made by another program).
struct HfNames {
  std::map<std::string, Shape> state, file;
};
HfNames hf_names() {
  HfNames names;
  std::ifstream in(PLUMB_SOURCE_DIR "/tests/golden/checkpoint/hf_names.txt");
  for (std::string line; std::getline(in, line);) {
    if (line[0] == '#') continue;
    std::istringstream words(line);
    std::string kind, name, sizes;
    words >> kind >> name >> sizes;
    Shape shape;
    std::istringstream list(sizes);
    for (std::string s; std::getline(list, s, ',');) shape.push_back(std::stoll(s));
    (kind == "state" ? names.state : names.file)[name] = shape;
  }
  return names;
}

TEST(Names, CoverATransformersModelBothWays) {
  const HfNames hf = hf_names();
  const ModelConfig config = load_model_config(PLUMB_SOURCE_DIR "/tests/golden/checkpoint/hf_config.json");
  std::map<std::string, Shape> file, state;
  for (const InventoryEntry& e : inventory(config)) {
    if (e.name.starts_with("mtp.")) continue;
    file[spelled(e.name, Layout::hf)] = e.shape;
    EXPECT_EQ(canonical_name(spelled(e.name, Layout::hf)), e.name);
    EXPECT_EQ(canonical_name(e.name), e.name);
    if (const auto stack = stacked_expert(e.name)) {
      const std::string name = spelled(stack->tensor, Layout::hf_state);
      state[name] = {config.n_routed_experts, e.shape[0] * stack->parts, e.shape[1]};
      EXPECT_EQ(canonical_name(name), stack->tensor);
    } else {
      state[spelled(e.name, Layout::hf_state)] = e.shape;
      EXPECT_EQ(canonical_name(spelled(e.name, Layout::hf_state)), e.name);
    }
  }
  EXPECT_EQ(file, hf.file);
  EXPECT_EQ(state, hf.state);
}

TEST(Names, Scales) {
  EXPECT_EQ(canonical_name("model.layers.3.self_attn.q_a_proj.weight_scale_inv"), "layers.3.attn.wq_a.scale");
  EXPECT_EQ(spelled("layers.3.attn.wq_a.scale", Layout::hf_state),
            "model.layers.3.self_attn.q_a_proj.weight_scale_inv");
  EXPECT_EQ(spelled("layers.3.attn.wq_a.scale", Layout::hf), "model.layers.3.attn.wq_a.scale");
  EXPECT_EQ(canonical_name("model.layers.3.attn_hc.scale"), "layers.3.hc_attn_scale");
  EXPECT_EQ(scale_name("layers.3.attn.wq_a.weight"), "layers.3.attn.wq_a.scale");
  EXPECT_EQ(stacked_expert("layers.3.ffn.experts.12.w3.scale")->tensor, "layers.3.ffn.experts.gate_up_proj_scale_inv");
  EXPECT_EQ(canonical_name("model.layers.3.mlp.experts.down_proj_scale_inv"),
            "layers.3.ffn.experts.down_proj_scale_inv");
}

TEST(Names, ExpertsInStacks) {
  const auto w3 = stacked_expert("layers.3.ffn.experts.12.w3.weight");
  ASSERT_TRUE(w3);
  EXPECT_EQ(w3->tensor, "layers.3.ffn.experts.gate_up_proj");
  EXPECT_EQ(std::tuple(w3->expert, w3->part, w3->parts), std::tuple(12, 1, 2));
  EXPECT_EQ(stacked_expert("layers.3.ffn.experts.12.w2.weight")->parts, 1);
  for (const char* name : {"mtp.0.ffn.experts.1.w1.weight", "layers.0.ffn.shared_experts.w1.weight",
                           "layers.0.ffn.experts.x.w1.weight", "layers.0.ffn.experts.1.w4.weight"})
    EXPECT_FALSE(stacked_expert(name)) << name;
}

TEST(Names, UnknownOnesAndLayouts) {
  EXPECT_EQ(canonical_name("model.layers.3.foo.weight"), "layers.3.foo.weight");
  EXPECT_EQ(canonical_name("mtp.0.e_proj.scale"), "mtp.0.e_proj.scale");
  EXPECT_EQ(layout_of("layers.0.attn.wkv.weight"), Layout::released);
  EXPECT_EQ(layout_of("model.layers.0.attn.wkv.weight"), Layout::hf);
  EXPECT_EQ(layout_of("model.layers.0.self_attn.kv_proj.weight"), Layout::hf_state);
  for (Layout l : {Layout::released, Layout::hf, Layout::hf_state}) EXPECT_EQ(parse_layout(layout_name(l)), l);
  EXPECT_THROW(parse_layout("realeased"), UsageError);
}

TEST(Inventory, ExtraMtpTensors) {
  ModelConfig c = small_config();
  EXPECT_TRUE(is_extra_mtp("mtp.1.attn.wkv.weight", c));
  EXPECT_TRUE(is_extra_mtp("mtp.0.main_proj.weight", c));
  EXPECT_FALSE(is_extra_mtp("mtp.0.typo.weight", c));
  EXPECT_FALSE(is_extra_mtp("layers.0.main_proj.weight", c));
  c.dspark = DSpark{};
  EXPECT_TRUE(is_extra_mtp("mtp.0.anything", c));
  for (const InventoryEntry& e : inventory(c)) EXPECT_FALSE(e.name.starts_with("mtp.")) << e.name;
}

}  // namespace
}  // namespace plumb
