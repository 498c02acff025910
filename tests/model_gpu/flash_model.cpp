#include "flash_model.h"

#include <cmath>
#include <cstring>
#include <map>

#include "base/parallel.h"
#include "base/philox.h"
#include "checkpoint/inventory.h"
#include "config/presets.h"

namespace plumb::testing {
namespace {

// A tensor filled in pieces on all threads, each from a random stream of its own.
template <class Fill>
void fill_pieces(uint64_t seed, int64_t count, Fill&& fill) {
  constexpr int64_t kPiece = 1 << 14;
  parallel_for((count + kPiece - 1) / kPiece, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      Random g(seed, static_cast<uint64_t>(p));
      for (int64_t i = p * kPiece; i < std::min(count, (p + 1) * kPiece); ++i) fill(g, i);
    }
  });
}

Tensor normal(uint64_t seed, Shape shape, float scale, float mean = 0) {
  Tensor t = Tensor::empty(std::move(shape));
  fill_pieces(seed, t.numel(),
              [&](Random& g, int64_t i) { t.f32()[i] = mean + scale * static_cast<float>(g.normal()); });
  return t;
}

// Weights are seldom looked at closely: bytes of one long random run serve all matrices, each from another place on.
Tensor random_bytes(uint64_t seed, int64_t count) {
  Tensor t = Tensor::empty({count}, DType::u8);
  fill_pieces(seed, count, [&](Random& g, int64_t i) {
    uint8_t byte = static_cast<uint8_t>(g.below(256));
    if ((byte & 0x7f) == 0x7f) byte ^= 1;  // no e4m3 NaN
    t.ptr<uint8_t>()[i] = byte;
  });
  return t;
}

struct Filler {
  const ModelConfig& config;
  std::map<std::string, InventoryEntry> entries;
  uint64_t seed;
  Tensor bytes;
  mutable int64_t next = 0;

  uint64_t stream(const std::string& name) const { return seed ^ std::hash<std::string>()(name); }

  Tensor some_bytes(Shape shape, DType type) const {
    const int64_t count = numel_of(shape);
    next = (next + 4096 * 37) % (bytes.numel() - count);
    next -= next % 64;
    return Tensor::over(bytes.raw() + next, std::move(shape), type, std::make_shared<Tensor>(bytes));
  }
  // Scale bytes around `middle`, no two blocks alike.
  Tensor scales(const std::string& name, Shape shape, int middle, int spread) const {
    Tensor t = Tensor::empty(std::move(shape), DType::f8_e8m0);
    fill_pieces(stream(name + "s"), t.numel(), [&](Random& g, int64_t i) {
      t.ptr<uint8_t>()[i] = static_cast<uint8_t>(middle - spread + static_cast<int>(g.below(2 * spread + 1)));
    });
    return t;
  }

  void operator()(const std::string& name, Linear& w, Tensor&) const {
    const InventoryEntry& e = entries.at(name);
    w.out = static_cast<int>(e.shape[0]), w.in = static_cast<int>(e.shape[1]);
    const int64_t out = w.out, in = w.in;
    // Random codes have a root mean square of 2.9 (e2m1) and 150 (e4m3); weights should have about 1 / sqrt(in).
    const double bits = -std::log2(std::sqrt(static_cast<double>(in)));
    if (e.role == Role::expert) {
      w.format = WeightFormat::fp4;
      w.data = some_bytes({out, in / 2}, DType::i8);
      w.scale = scales(name, {out, in / 32}, 127 + static_cast<int>(std::lround(bits - 1.5)), 2);
    } else if (e.role == Role::linear) {
      w.format = WeightFormat::fp8;
      w.data = some_bytes({out, in}, DType::f8_e4m3);
      w.scale = scales(name, {out / 128, in / 128}, 127 + static_cast<int>(std::lround(bits - 7.2)), 1);
    } else {
      w.format = WeightFormat::bf16;
      const float size = name == "embed.weight" ? 1.0f : 1 / std::sqrt(static_cast<float>(in));
      w.data = encode(normal(stream(name), e.shape, size), Codec::bf16, name).data;
    }
  }
  void operator()(const std::string& name, Tensor& t, Tensor&) const {
    const Shape shape = entries.at(name).shape;
    const bool norm = name.ends_with("norm.weight"), scale = name.ends_with("_scale"), fn = name.ends_with("_fn");
    const float size = fn ? 1 / std::sqrt(static_cast<float>(shape[1])) : norm ? 0.3f : scale ? 0.2f : 0.7f;
    t = normal(stream(name), shape, size, norm || scale ? 1.0f : 0.0f);
  }
  void buffer(const std::string& name, Tensor& t) const {
    const Shape shape = entries.at(name).shape;
    if (!name.ends_with("tid2eid")) {
      t = normal(stream(name), shape, 0.1f);
      return;
    }
    t = Tensor::empty(shape, DType::i32);
    Random g(stream(name));
    for (int64_t r = 0; r < shape[0]; ++r) {  // neighbours from a random expert on
      const uint32_t first = g.below(config.n_routed_experts);
      for (int64_t k = 0; k < shape[1]; ++k)
        t.ptr<int32_t>()[r * shape[1] + k] = static_cast<int32_t>((first + k * 5) % config.n_routed_experts);
    }
  }
};

}  // namespace

ModelConfig flash_config(int experts) {
  ModelConfig c = preset("flash-4layer");
  c.n_routed_experts = experts;
  c.vocab_size = 4096;
  c.index_topk = 32;  // so that rows of some hundred tokens choose
  c.num_nextn_predict_layers = 0;
  c.layer_kinds.resize(c.num_hidden_layers);
  return c;
}

std::shared_ptr<ResidentWeights> flash_model(uint64_t seed, const ModelConfig& c) {
  auto store = std::make_shared<ResidentWeights>();
  store->model = c;
  Filler fill{c, {}, seed, random_bytes(seed, int64_t{1} << 26)};
  for (const InventoryEntry& e : inventory(c)) fill.entries[e.name] = e;
  OuterGrads no_outer;
  visit_outer(store->outer_weights, no_outer, fill);
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    LayerWeights& w = store->layers.emplace_back();
    w.kind = c.kind(layer);
    w.experts.resize(c.n_routed_experts);
    LayerGrads none;
    visit_layer("layers." + std::to_string(layer) + ".", c.is_hash_layer(layer), w, none, fill);
    cut_groups(w, c.o_groups);
  }
  return store;
}

std::shared_ptr<Adapter> flash_adapter(const ModelConfig& c, int rank, uint64_t seed) {
  auto adapter = std::make_shared<Adapter>();
  adapter->rank = rank, adapter->alpha = 2.0f * static_cast<float>(rank), adapter->targets = lora_targets();
  uint64_t number = seed << 20;
  const auto pair = [&](int out, int in) {
    return LoraPair{normal(++number, {rank, in}, 1 / std::sqrt(static_cast<float>(in))),
                    normal(++number, {out, rank}, 0.1f), 2.0f};
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

}  // namespace plumb::testing
