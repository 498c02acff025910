#include "model/weights.h"

#include "base/error.h"
#include "base/float_formats.h"

namespace plumb {
namespace {

Linear to_linear(const Weight& stored, const std::string& name) {
  Linear w;
  w.data = stored.data;
  w.scale = stored.scale;
  w.out = static_cast<int>(stored.data.size(0));
  w.in = static_cast<int>(stored.data.size(1));
  switch (codec_of(stored.data.dtype())) {
    case Codec::f32:
      w.format = WeightFormat::f32;
      break;
    case Codec::bf16:
      w.format = WeightFormat::bf16;
      break;
    case Codec::fp8:
      w.format = WeightFormat::fp8;
      break;
    case Codec::fp4:
      w.format = WeightFormat::fp4;
      w.in *= 2;
      break;
  }
  PLUMB_CHECK(stored.data.dim() == 2, name);
  return w;
}

// The visitor that fills weights from a checkpoint.
struct Loader {
  const Checkpoint& from;
  void operator()(const std::string& name, Linear& w, Tensor&) const { w = to_linear(from.weight(name), name); }
  void operator()(const std::string& name, Tensor& w, Tensor&) const { w = from.floats(name); }
  void buffer(const std::string& name, Tensor& t) const {
    t = name.ends_with("tid2eid") ? from.table(name) : from.floats(name);
  }
};

LayerWeights empty_layer(const ModelConfig& c, int layer) {
  LayerWeights w;
  w.kind = c.kind(layer);
  w.experts.resize(c.n_routed_experts);
  return w;
}

}  // namespace

void cut_groups(LayerWeights& w, int groups) {
  const Linear& whole = w.attn.wo_a;
  const int rows = whole.out / groups;
  const bool slices = whole.format == WeightFormat::f32 || whole.format == WeightFormat::bf16 ||
                      (whole.format == WeightFormat::fp8 && rows % 128 == 0) || whole.format == WeightFormat::fp4;
  Linear from = whole;
  if (!slices) {
    Tensor values = ops::dequantise(whole), packed = Tensor::empty({whole.out, whole.in}, DType::bf16);
    for (int64_t i = 0; i < values.numel(); ++i) packed.ptr<uint16_t>()[i] = float_to_bf16(values.f32()[i]);
    from = {packed, {}, WeightFormat::bf16, whole.out, whole.in};
  }
  w.wo_a_group.clear();
  for (int g = 0; g < groups; ++g) {
    Linear part = from;
    part.out = rows;
    part.data = from.data.rows(g * rows, (g + 1) * rows);
    if (from.format == WeightFormat::fp8) part.scale = from.scale.rows(g * rows / 128, (g + 1) * rows / 128);
    if (from.format == WeightFormat::fp4) part.scale = from.scale.rows(g * rows, (g + 1) * rows);
    w.wo_a_group.push_back(part);
  }
}

LayerLease ResidentWeights::acquire(int layer) {
  LayerWeights& w = layer < model.num_hidden_layers ? layers.at(layer) : mtps.at(layer - model.num_hidden_layers).block;
  return LayerLease(LayerLease(), &w);  // no owner: the store outlives its leases
}

std::shared_ptr<ResidentWeights> load_weights(const Checkpoint& checkpoint) {
  auto store = std::make_shared<ResidentWeights>();
  const ModelConfig& c = store->model = checkpoint.config();
  const Loader load{checkpoint};
  OuterGrads no_outer;
  visit_outer(store->outer_weights, no_outer, load);
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    LayerWeights& w = store->layers.emplace_back(empty_layer(c, layer));
    LayerGrads none;
    visit_layer("layers." + std::to_string(layer) + ".", c.is_hash_layer(layer), w, none, load);
    cut_groups(w, c.o_groups);
  }
  for (int j = 0; j < c.num_nextn_predict_layers && checkpoint.has_mtp(j); ++j) {
    MtpWeights& m = store->mtps.emplace_back();
    m.block = empty_layer(c, c.num_hidden_layers + j);
    MtpGrads none;
    visit_mtp("mtp." + std::to_string(j) + ".", m, none, load);
    cut_groups(m.block, c.o_groups);
  }
  return store;
}

}  // namespace plumb
