#include "train/parameters.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/parallel.h"
#include "base/philox.h"
#include "checkpoint/codecs.h"
#include "memory/device_weights.h"
#include "model/adapter_files.h"
#include "model/device_adapters.h"

namespace plumb {
namespace {

// The visitor that makes every weight of a model a parameter.
struct Collector {
  Trainee& t;
  bool train_indexer;
  int o_groups;

  bool frozen(const std::string& name) const { return !train_indexer && name.find(".indexer.") != std::string::npos; }
  void operator()(const std::string& name, Linear& w, Tensor& grad) const {
    if (frozen(name)) return;
    Parameter p;
    p.name = name;
    const Codec codec = codec_of(w.data.dtype());
    if (codec == Codec::f32) {
      p.master = w.data = w.data.clone();
    } else {
      p.master = decode({w.data, w.scale});
      p.write_back = [name, codec, master = p.master, &w] {
        const Weight stored = encode(master, codec, name);
        w.data = stored.data, w.scale = stored.scale;
      };
    }
    p.blocks = name == "embed.weight" || name == "head.weight" ? 0 : name.ends_with("wo_a.weight") ? o_groups : 1;
    add(std::move(p), grad);
  }
  void operator()(const std::string& name, Tensor& w, Tensor& grad) const {
    if (frozen(name)) return;
    w = w.clone();
    add({name, w, {}, name.ends_with("_fn") ? 1 : 0}, grad);  // the mapping of mHC is a matrix
  }
  void buffer(const std::string& name, Tensor& b) const {
    if (!name.ends_with("gate.bias")) return;  // tables of experts never change
    b = b.clone();
    t.buffers.emplace_back(name, b);
  }

 private:
  void add(Parameter p, Tensor& grad) const {
    p.grad = grad = Tensor::zeros(p.master.shape());
    t.gradient_memory.push_back(grad);
    t.parameters.push_back(std::move(p));
  }
};

// Fills one pair of a fresh adapter.
struct PairMaker {
  int rank;
  float scale;
  uint64_t seed;
  LoraPair make(const std::string& name, int64_t out, int64_t in) const {
    Random random(seed, mix_bits(hash_text(name)));
    LoraPair pair{Tensor::empty({rank, in}), Tensor::zeros({out, rank}), scale};
    const float bound = 1 / std::sqrt(static_cast<float>(in));
    for (int64_t i = 0; i < pair.a.numel(); ++i) pair.a.f32()[i] = bound * (2 * random.uniform() - 1);
    return pair;
  }
};

struct LoraMatrix {
  const char* target;
  LoraPair LayerLora::*pair;
  int64_t out, in;
};
// The adapted matrices of one layer but the routed experts.
std::vector<LoraMatrix> lora_matrices(const ModelConfig& c, LayerKind kind) {
  using L = LayerLora;
  const int64_t d = c.hidden_size, f = c.moe_intermediate_size, heads = int64_t{c.num_attention_heads} * c.head_dim;
  const int64_t grouped = int64_t{c.o_groups} * c.o_lora_rank;
  std::vector<LoraMatrix> list = {
      {"q_a_proj", &L::wq_a, c.q_lora_rank, d}, {"q_b_proj", &L::wq_b, heads, c.q_lora_rank},
      {"kv_proj", &L::wkv, c.head_dim, d},      {"o_a_proj", &L::wo_a, grouped, heads / c.o_groups},
      {"o_b_proj", &L::wo_b, d, grouped},       {"gate_proj", &L::shared_w1, f, d},
      {"up_proj", &L::shared_w3, f, d},         {"down_proj", &L::shared_w2, d, f}};
  if (kind != LayerKind::window) {
    const int64_t width = (kind == LayerKind::csa ? 2 : 1) * int64_t{c.head_dim};
    list.push_back({"compressor.kv_proj", &L::compressor_wkv, width, d});
    list.push_back({"compressor.gate_proj", &L::compressor_wgate, width, d});
  }
  return list;
}

// Sum of squares of elements [begin, end), eight interleaved chains that are added up in order.
double sum_of_squares(const float* x, int64_t begin, int64_t end) {
  double lane[8] = {};
  int64_t i = begin;
  for (; i + 8 <= end; i += 8)
    for (int j = 0; j < 8; ++j) lane[j] += double(x[i + j]) * x[i + j];
  for (int j = 0; i < end; ++i, ++j) lane[j] += double(x[i]) * x[i];
  double sum = 0;
  for (double l : lane) sum += l;
  return sum;
}

}  // namespace

std::shared_ptr<WeightStore> open_weights(const ModelKeys& model) {
  const PlacedWeights placed = place_weights(load_weights(Checkpoint::open(model.path)), model.kernels,
                                             numerics_from_name(model.numerics.c_str()));
  if (!placed.warning.empty()) log_warning("{}", placed.warning);
  if (placed.store->space() == Space::device) log_info("{:14} {}", "computes on", placed.device);
  return placed.store;
}

std::shared_ptr<Adapter> fresh_adapter(const ModelConfig& c, const LoraKeys& keys, uint64_t seed) {
  auto adapter = std::make_shared<Adapter>();
  adapter->rank = static_cast<int>(keys.rank);
  adapter->alpha = static_cast<float>(keys.alpha);
  adapter->targets = keys.targets;
  std::vector<std::string> unmet = keys.targets;
  auto wanted = [&](const std::string& target) {
    std::erase(unmet, target);
    return std::ranges::find(keys.targets, target) != keys.targets.end();
  };
  const PairMaker maker{adapter->rank, adapter->alpha / static_cast<float>(adapter->rank), seed};
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    LayerLora& l = adapter->layers.emplace_back();
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    for (const LoraMatrix& m : lora_matrices(c, c.kind(layer)))
      if (wanted(m.target)) l.*m.pair = maker.make(prefix + m.target, m.out, m.in);
    if (!wanted("experts")) continue;
    for (int e = 0; e < c.n_routed_experts; ++e) {
      const std::string expert = prefix + "experts." + std::to_string(e);
      l.experts.gate_up.push_back(maker.make(expert + ".gate_up", 2 * c.moe_intermediate_size, c.hidden_size));
      l.experts.down.push_back(maker.make(expert + ".down", c.hidden_size, c.moe_intermediate_size));
    }
  }
  if (!unmet.empty())
    fail("lora.targets", unmet[0] + " is in no layer of this model", "leave it out: no layer compresses its keys");
  return adapter;
}

std::shared_ptr<Adapter> copy_adapter(const Adapter& from) {
  auto adapter = std::make_shared<Adapter>(from);
  for (LayerLora& layer : adapter->layers) {
    LayerLoraGrad none;
    visit_lora(layer, none, [](const std::string&, LoraPair& pair, LoraGrad&) {
      if (pair.defined()) pair.a = pair.a.clone(), pair.b = pair.b.clone();
    });
  }
  return adapter;
}

std::shared_ptr<Adapter> first_adapter(const RunConfig& config, const ModelConfig& model) {
  if (config.lora.init.empty()) return fresh_adapter(model, config.lora, static_cast<uint64_t>(config.train.seed));
  std::shared_ptr<Adapter> adapter = copy_adapter(*load_adapter(config.lora.init, model));
  if (adapter->rank != config.lora.rank || adapter->alpha != static_cast<float>(config.lora.alpha))
    log_info("{}: rank {} and alpha {} of this adapter are used", config.lora.init, adapter->rank, adapter->alpha);
  return adapter;
}

std::unique_ptr<Trainee> lora_trainee(std::shared_ptr<WeightStore> weights, std::shared_ptr<Adapter> adapter) {
  auto t = std::make_unique<Trainee>();
  t->weights = std::move(weights);
  t->adapter = std::move(adapter);
  std::shared_ptr<Adapter> trained = t->adapter;
  const bool on_device = t->weights->space() == Space::device;
  if (on_device) {
    DeviceAdapter d = train_on_device(*t->adapter);
    trained = d.adapter, t->adapter_grads = std::move(d.grads), t->gradient_memory = std::move(d.gradient_memory);
  } else {
    t->adapter_grads = zero_grads(*t->adapter);
  }
  for (size_t layer = 0; layer < trained->layers.size(); ++layer)
    visit_lora(trained->layers[layer], t->adapter_grads.layers[layer],
               [&](const std::string& suffix, LoraPair& pair, LoraGrad& grad) {
                 if (!pair.defined()) return;
                 const std::string name = "layers." + std::to_string(layer) + "." + suffix;
                 t->parameters.push_back({name + ".lora_a", pair.a, grad.a, 1});
                 t->parameters.push_back({name + ".lora_b", pair.b, grad.b, 1});
               });
  if (on_device) {
    std::vector<ops::ParameterTensors> there;
    for (const Parameter& p : t->parameters) there.push_back({p.master, p.grad, {}, {}});
    t->on_device = ops::parameter_table(there);
  } else {
    for (const Parameter& p : t->parameters) t->gradient_memory.push_back(p.grad);
  }
  t->adapters.parts.push_back({trained, {}, true, &t->adapter_grads});
  return t;
}

std::unique_ptr<Trainee> full_trainee(std::shared_ptr<ResidentWeights> weights, const FullTraining& what) {
  auto t = std::make_unique<Trainee>();
  const ModelConfig& c = weights->model;
  const Collector collect{*t, what.indexer, c.o_groups};
  visit_outer(weights->outer_weights, t->gradients.outer, collect);
  t->gradients.layers.resize(weights->layers.size());
  for (size_t layer = 0; layer < weights->layers.size(); ++layer)
    visit_layer("layers." + std::to_string(layer) + ".", c.is_hash_layer(static_cast<int>(layer)),
                weights->layers[layer], t->gradients.layers[layer], collect);
  if (what.mtp) t->gradients.mtp.resize(weights->mtps.size());
  for (size_t j = 0; j < t->gradients.mtp.size(); ++j)
    visit_mtp("mtp." + std::to_string(j) + ".", weights->mtps[j], t->gradients.mtp[j], collect);
  t->weights = t->trained = std::move(weights);
  publish(*t);  // groups of wo_a must refer to the copies
  return t;
}

const std::shared_ptr<Adapter>& host_adapter(const Trainee& t) {
  if (t.on_device.count > 0) bring_home(*t.adapters.parts[0].adapter, *t.adapter);
  return t.adapter;
}

void zero_gradients(Trainee& t) {
  parallel_for(static_cast<int64_t>(t.gradient_memory.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) t.gradient_memory[i].zero();
  });
}

void publish(Trainee& t) {
  for (Parameter& p : t.parameters)
    if (p.write_back) p.write_back();
  if (!t.trained) return;
  for (LayerWeights& w : t.trained->layers) cut_groups(w, t.trained->model.o_groups);
  for (MtpWeights& w : t.trained->mtps) cut_groups(w.block, t.trained->model.o_groups);
}

int64_t parameter_count(const Trainee& t) {
  int64_t n = 0;
  for (const Parameter& p : t.parameters) n += p.master.numel();
  return n;
}

double gradient_norm(const Trainee& t) {
  if (t.on_device.count > 0) return ops::gradient_norm(t.on_device);
  constexpr int64_t kChunk = 1 << 14;
  struct Piece {
    const float* x;
    int64_t begin, end;
  };
  std::vector<Piece> pieces;
  for (const Parameter& p : t.parameters)
    for (int64_t begin = 0; begin < p.grad.numel(); begin += kChunk)
      pieces.push_back({p.grad.f32(), begin, std::min(p.grad.numel(), begin + kChunk)});
  std::vector<double> sums(pieces.size());
  parallel_for(static_cast<int64_t>(pieces.size()), 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sums[i] = sum_of_squares(pieces[i].x, pieces[i].begin, pieces[i].end);
  });
  double total = 0;
  for (double s : sums) total += s;
  return std::sqrt(total);
}

std::string find_bad_gradient(const Trainee& t) {
  for (const Parameter& p : t.parameters) {
    const Tensor g = p.grad.on_device() ? to_host(p.grad) : p.grad;
    if (!std::all_of(g.f32(), g.f32() + g.numel(), [](float v) { return std::isfinite(v); })) return p.name;
  }
  return "";
}

}  // namespace plumb
