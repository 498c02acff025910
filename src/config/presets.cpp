#include "config/presets.h"

#include <fmt/format.h>

#include <initializer_list>

#include "base/error.h"
#include "config/nearest.h"

namespace plumb {
namespace {

std::vector<LayerKind> kinds_of(std::initializer_list<int> ratios) {
  std::vector<LayerKind> kinds;
  for (int r : ratios) kinds.push_back(r == 0 ? LayerKind::window : r == 4 ? LayerKind::csa : LayerKind::hca);
  return kinds;
}

// `first` twice, then csa and hca in turn up to the last backbone layer, which is csa, then the MTP layer.
std::vector<LayerKind> released_kinds(LayerKind first, int layers) {
  std::vector<LayerKind> kinds(2, first);
  for (int layer = 2; layer < layers; ++layer) kinds.push_back(layer % 2 == 0 ? LayerKind::csa : LayerKind::hca);
  kinds.push_back(LayerKind::window);
  return kinds;
}

ModelConfig flash() {
  ModelConfig c;
  c.vocab_size = 129280;
  c.hidden_size = 4096;
  c.num_hidden_layers = 43;
  c.num_nextn_predict_layers = 1;
  c.num_attention_heads = 64;
  c.head_dim = 512;
  c.qk_rope_head_dim = 64;
  c.q_lora_rank = 1024;
  c.o_groups = 8;
  c.o_lora_rank = 1024;
  c.sliding_window = 128;
  c.compress_rope_theta = 160000;
  c.yarn = Yarn{};
  c.layer_kinds = released_kinds(LayerKind::window, c.num_hidden_layers);
  c.index_n_heads = 64;
  c.index_head_dim = 128;
  c.index_topk = 512;
  c.moe_intermediate_size = 2048;
  c.n_routed_experts = 256;
  c.num_experts_per_tok = 6;
  c.num_hash_layers = 3;
  c.routed_scaling_factor = 1.5;
  c.swiglu_limit = 10;
  c.expert_dtype = ExpertDtype::fp4;
  return c;
}

ModelConfig flash_4layer() {
  ModelConfig c = flash();
  c.num_hidden_layers = 4;
  c.layer_kinds = kinds_of({0, 4, 128, 4, 0});
  c.num_hash_layers = 2;  // so both kinds of routing meet a csa layer
  return c;
}

ModelConfig pro() {
  ModelConfig c = flash();
  c.hidden_size = 7168;
  c.num_hidden_layers = 61;
  c.num_attention_heads = 128;
  c.q_lora_rank = 1536;
  c.o_groups = 16;
  c.layer_kinds = released_kinds(LayerKind::hca, c.num_hidden_layers);
  c.index_topk = 1024;
  c.moe_intermediate_size = 3072;
  c.n_routed_experts = 384;
  c.routed_scaling_factor = 2.5;
  return c;
}

ModelConfig tiny() {
  ModelConfig c = flash();
  c.vocab_size = 1280;
  c.hidden_size = 128;
  c.num_hidden_layers = 5;
  c.max_position_embeddings = 4096;
  c.num_attention_heads = 4;
  c.head_dim = 64;
  c.qk_rope_head_dim = 16;
  c.q_lora_rank = 64;
  c.o_groups = 2;
  c.o_lora_rank = 32;
  c.sliding_window = 32;
  c.yarn->original_max_position_embeddings = 256;
  c.layer_kinds = kinds_of({0, 0, 4, 128, 4, 0});
  c.index_n_heads = 16;  // fewer would make ties between scores frequent
  c.index_head_dim = 32;
  c.index_topk = 16;
  c.moe_intermediate_size = 128;
  c.n_routed_experts = 8;
  c.num_experts_per_tok = 2;
  c.num_hash_layers = 2;
  c.initializer_range = 0.06;  // about 1 / sqrt(2 * hidden size): 0.02 suits widths of thousands
  return c;
}

}  // namespace

const std::vector<std::string>& preset_names() {
  static const std::vector<std::string> names = {"tiny", "flash", "flash-4layer", "pro"};
  return names;
}

ModelConfig preset(const std::string& name) {
  if (name == "tiny") return tiny();
  if (name == "flash") return flash();
  if (name == "flash-4layer") return flash_4layer();
  if (name == "pro") return pro();
  const std::string close = nearest(name, preset_names());
  fail("preset " + name, "there is no such preset",
       close.empty() ? fmt::format("there are {}", fmt::join(preset_names(), ", ")) : "did you mean " + close + "?");
}

}  // namespace plumb
