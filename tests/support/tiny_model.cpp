#include "support/tiny_model.h"

#include <cmath>

#include "base/philox.h"
#include "checkpoint/inventory.h"

namespace plumb::testing {
namespace {

Tensor randn(Random& g, Shape shape, float scale, float mean = 0) {
  Tensor t = Tensor::empty(std::move(shape));
  for (int64_t i = 0; i < t.numel(); ++i) t.f32()[i] = mean + scale * g.normal();
  return t;
}

// Fills parameters from the inventory's shapes, one random stream a tensor so that the order does not matter.
struct Filler {
  const ModelConfig& config;
  std::map<std::string, InventoryEntry> entries;
  uint64_t seed;
  WeightFormat format;

  Random stream(const std::string& name) const { return Random(seed, std::hash<std::string>()(name)); }
  void operator()(const std::string& name, Linear& w, Tensor&) const {
    const InventoryEntry& e = entries.at(name);
    Random g = stream(name);
    Tensor values = randn(g, e.shape, name == "embed.weight" ? 1.0f : 1.5f / std::sqrt(static_cast<float>(e.shape[1])));
    w.out = static_cast<int>(e.shape[0]), w.in = static_cast<int>(e.shape[1]);
    w.format = format == WeightFormat::f32 ? WeightFormat::f32 : WeightFormat::bf16;
    if (e.role == Role::expert) w.format = format;
    if (e.role == Role::linear) w.format = format == WeightFormat::fp4 ? WeightFormat::fp8 : format;
    const Codec codec = w.format == WeightFormat::f32    ? Codec::f32
                        : w.format == WeightFormat::bf16 ? Codec::bf16
                        : w.format == WeightFormat::fp8  ? Codec::fp8
                                                         : Codec::fp4;
    const Weight packed = encode(values, codec, name);
    w.data = packed.data, w.scale = packed.scale;
  }
  void operator()(const std::string& name, Tensor& t, Tensor&) const {
    Random g = stream(name);
    const bool norm = name.ends_with("norm.weight"), scale = name.ends_with("_scale"), fn = name.ends_with("_fn");
    t = randn(g, entries.at(name).shape, norm ? 0.3f : scale ? 0.2f : fn ? 0.1f : 0.7f, norm || scale ? 1.0f : 0.0f);
  }
  void buffer(const std::string& name, Tensor& t) const {
    const Shape shape = entries.at(name).shape;
    Random g = stream(name);
    if (!name.ends_with("tid2eid")) {
      t = randn(g, shape, 0.3f);
      return;
    }
    t = Tensor::empty(shape, DType::i32);
    for (int64_t r = 0; r < shape[0]; ++r) {
      std::vector<int> left(config.n_routed_experts);
      for (int e = 0; e < config.n_routed_experts; ++e) left[e] = e;
      for (int64_t k = 0; k < shape[1]; ++k) {
        const uint32_t at = g.below(static_cast<uint32_t>(left.size()));
        t.ptr<int32_t>()[r * shape[1] + k] = left[at];
        left.erase(left.begin() + at);
      }
    }
  }
};

}  // namespace

ModelConfig tiny_config() {
  ModelConfig c;
  c.vocab_size = 61;
  c.hidden_size = 32;
  c.num_hidden_layers = 6;
  c.num_nextn_predict_layers = 1;
  c.max_position_embeddings = 4096;
  c.num_attention_heads = 4;
  c.head_dim = 16;
  c.qk_rope_head_dim = 8;
  c.q_lora_rank = 24;
  c.o_groups = 2;
  c.o_lora_rank = 12;
  c.sliding_window = 8;
  c.compress_rope_theta = 160000;
  c.yarn = Yarn{16, 64, 32, 1};
  using K = LayerKind;
  c.layer_kinds = {K::window, K::csa, K::hca, K::csa, K::hca, K::window, K::window};
  c.hca_ratio = 16;
  c.index_n_heads = 8;
  c.index_head_dim = 16;
  c.index_topk = 3;
  c.moe_intermediate_size = 32;
  c.n_routed_experts = 6;
  c.num_experts_per_tok = 2;
  c.num_hash_layers = 2;
  c.routed_scaling_factor = 1.5;
  c.swiglu_limit = 1.5;
  c.expert_dtype = ExpertDtype::fp4;
  return c;
}

ModelConfig released_ratios_config() {
  ModelConfig c = tiny_config();
  c.hca_ratio = 128;
  c.sliding_window = 128;
  c.num_hidden_layers = 3;
  using K = LayerKind;
  c.layer_kinds = {K::csa, K::hca, K::window, K::window};
  return c;
}

std::shared_ptr<ResidentWeights> random_model(const ModelConfig& config, uint64_t seed, WeightFormat format) {
  Filler fill{config, {}, seed, format};
  for (const InventoryEntry& e : inventory(config)) fill.entries[e.name] = e;
  auto store = std::make_shared<ResidentWeights>();
  store->model = config;
  OuterGrads no_outer;
  visit_outer(store->outer_weights, no_outer, fill);
  auto empty = [&](int layer) {
    LayerWeights w;
    w.kind = config.kind(layer);
    w.experts.resize(config.n_routed_experts);
    return w;
  };
  for (int layer = 0; layer < config.num_hidden_layers; ++layer) {
    store->layers.push_back(empty(layer));
    LayerGrads none;
    visit_layer("layers." + std::to_string(layer) + ".", config.is_hash_layer(layer), store->layers.back(), none, fill);
    cut_groups(store->layers.back(), config.o_groups);
  }
  for (int j = 0; j < config.num_nextn_predict_layers; ++j) {
    store->mtps.emplace_back().block = empty(config.num_hidden_layers + j);
    MtpGrads none;
    visit_mtp("mtp." + std::to_string(j) + ".", store->mtps.back(), none, fill);
    cut_groups(store->mtps.back().block, config.o_groups);
  }
  return store;
}

std::shared_ptr<Adapter> random_adapter(const ModelConfig& c, int rank, uint64_t seed) {
  auto adapter = std::make_shared<Adapter>();
  adapter->rank = rank;
  adapter->alpha = 2.0f * rank;
  adapter->targets = lora_targets();
  Random g(seed);
  auto pair = [&](int out, int in) {
    return LoraPair{randn(g, {rank, in}, 1 / std::sqrt(static_cast<float>(in))),
                    randn(g, {out, rank}, 0.3f / std::sqrt(static_cast<float>(rank))), 2.0f};
  };
  const int d = c.hidden_size, f = c.moe_intermediate_size, width = c.num_attention_heads * c.head_dim;
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    LayerLora& l = adapter->layers.emplace_back();
    l.wq_a = pair(c.q_lora_rank, d), l.wq_b = pair(width, c.q_lora_rank), l.wkv = pair(c.head_dim, d);
    l.wo_a = pair(c.o_groups * c.o_lora_rank, width / c.o_groups), l.wo_b = pair(d, c.o_groups * c.o_lora_rank);
    if (c.kind(layer) != LayerKind::window) {
      const int co = c.kind(layer) == LayerKind::csa ? 2 : 1;
      l.compressor_wkv = pair(co * c.head_dim, d), l.compressor_wgate = pair(co * c.head_dim, d);
    }
    l.shared_w1 = pair(f, d), l.shared_w3 = pair(f, d), l.shared_w2 = pair(d, f);
    for (int e = 0; e < c.n_routed_experts; ++e) {
      l.experts.gate_up.push_back(pair(2 * f, d));
      l.experts.down.push_back(pair(d, f));
    }
  }
  return adapter;
}

std::vector<int> random_tokens(const ModelConfig& c, int n, uint64_t seed) {
  Random g(seed, 77);
  std::vector<int> ids(n);
  for (int& id : ids) id = static_cast<int>(g.below(c.vocab_size));
  return ids;
}

}  // namespace plumb::testing
