// The page to read: tokens -> streams -> layers -> hidden rows. T rows, n streams, d hidden size.
#include "model/forward.h"

#include "base/error.h"
#include "model/device_adapters.h"
#include "ops/indexer.h"
#include "ops/norm.h"
#include "ops/rows.h"
#include "ops/sublayer.h"

namespace plumb {
namespace {

// A pass of the model: its context, and what that points to.
struct Pass {
  Pass(WeightStore& weights, const SequencePlan& plan, const ForwardOptions& o)
      : ctx(make_context(weights.config(), plan, o.numerics, weights.space())) {
    ctx.adapters = o.adapters;
    if (o.adapters && weights.space() == Space::device) adapters = device_batch(*o.adapters), ctx.adapters = &adapters;
    ctx.cache = o.cache ? &o.cache->layers : nullptr;
    ctx.taps = o.taps;
    ctx.replay = o.replay;
  }
  Pass(const Pass&) = delete;

  PassContext ctx;
  AdapterBatch adapters;  // on the device
};

// What stands in front of the LM head, of the backbone or of an MTP layer.
template <class W>
ops::SublayerWeights head_weights(const W& w) {
  return {w.hc_head, w.norm};
}

// The first layer that a gradient must reach; layers in front of it are not visited.
int first_trained_layer(const ForwardOptions& o, const Gradients& g, int layers) {
  if (g.outer.embed.defined() || !g.layers.empty()) return 0;
  int first = layers;
  if (o.adapters)
    for (const auto& part : o.adapters->parts)
      for (int l = 0; part.grads && l < first && l < static_cast<int>(part.grads->layers.size()); ++l) {
        bool any = false;
        LayerLora pairs = part.adapter->layers[l];
        visit_lora(pairs, part.grads->layers[l],
                   [&](const std::string&, LoraPair& p, LoraGrad&) { any = any || p.defined(); });
        if (any) first = l;
      }
  return first;
}

}  // namespace

int64_t kept_layer_bytes(const ModelConfig& c, int64_t rows) {
  const int64_t d = c.hidden_size, q = int64_t{c.num_attention_heads} * c.head_dim;
  const int64_t attention = 4 * q + 2 * c.q_lora_rank + c.o_groups * c.o_lora_rank + 6 * c.head_dim;
  const int64_t index = c.has(LayerKind::csa) ? int64_t{c.index_n_heads} * c.index_head_dim : 0;
  const int64_t experts = 3 * c.moe_intermediate_size * (c.num_experts_per_tok + 1) + 2 * c.n_routed_experts;
  const int64_t keys = c.sliding_window + c.index_topk;  // numbers of the keys in the attention's lists
  const int64_t floats = (2 * c.hc_mult + 6) * d + attention + index + experts + keys;
  return floats * rows * c.num_hidden_layers * static_cast<int64_t>(sizeof(float));
}

ForwardResult forward(WeightStore& weights, const PassContext& ctx, Keep keep) {
  const ModelConfig& c = weights.config();
  ForwardResult result;

  Tensor streams = ops::embed(weights.outer().embed, ctx.tensors.token, c.hc_mult);  // [T, n, d]
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    LayerLease lease = weights.acquire(layer);
    if (keep != Keep::nothing) result.streams.push_back(streams);
    LayerSaved s;
    streams = layer_forward(ctx, *lease, layer, streams, s, keep == Keep::all);  // [T, n, d]
    if (keep == Keep::outputs) result.outputs.push_back(outputs_of(s));
    if (keep == Keep::all) result.layers.push_back(std::move(s));
  }
  if (keep != Keep::nothing) result.streams.push_back(streams);

  result.hidden = ops::head_input(ops::gather_rows(streams, ctx.tensors.wanted), head_weights(weights.outer()),
                                  hyper_options(c), ctx.numerics);  // [wanted, d]
  return result;
}

ForwardResult forward(WeightStore& weights, const SequencePlan& plan, const ForwardOptions& o) {
  const Pass pass(weights, plan, o);
  return forward(weights, pass.ctx, o.keep);
}

AuxiliaryResults backward(WeightStore& weights, const SequencePlan& plan, const ForwardOptions& o,
                          const ForwardResult& result, const Tensor& d_hidden, const Tensor& d_last, Gradients& g,
                          const AuxiliaryLosses& aux) {
  const ModelConfig& c = weights.config();
  PLUMB_CHECK(static_cast<int>(result.streams.size()) == c.num_hidden_layers + 1, "forward must keep the streams");
  Pass pass(weights, plan, o);
  PassContext& ctx = pass.ctx;
  ctx.taps = nullptr;
  AuxiliaryResults results;

  Tensor d_streams = d_last.defined() ? d_last.clone() : zeros_like(result.streams.back());
  const Tensor d_wanted = ops::head_input_backward(
      d_hidden, ops::gather_rows(result.streams.back(), ctx.tensors.wanted), head_weights(weights.outer()),
      hyper_options(c), o.numerics, g.outer.hc_head, g.outer.norm);
  ops::scatter_add_rows(d_wanted, ctx.tensors.wanted, d_streams);

  LayerGrads frozen;
  const int first = first_trained_layer(o, g, c.num_hidden_layers);
  for (int layer = c.num_hidden_layers - 1; layer >= first; --layer) {
    LayerLease lease = weights.acquire(layer);
    const Tensor& input = result.streams[layer];
    LayerSaved recomputed;
    if (result.layers.empty())
      recomputed = recompute_layer(ctx, *lease, layer, input,
                                   result.outputs.empty() ? LayerOutputs{} : result.outputs[layer], aux);
    d_streams = layer_backward(ctx, *lease, layer, input, d_streams, g.layers.empty() ? frozen : g.layers[layer], aux,
                               results, result.layers.empty() ? recomputed : result.layers[layer]);
  }

  if (g.outer.embed.defined()) ops::embed_backward(d_streams, ctx.tensors.token, g.outer.embed);
  return results;
}

PlanShape plan_shape(const ModelConfig& c) {
  return {c.sliding_window, c.has(LayerKind::csa) ? c.csa_ratio : 0, c.has(LayerKind::hca) ? c.hca_ratio : 0};
}

KvCache make_cache(const ModelConfig& c, const CacheShape& shape, int csa_pending, int hca_pending, Space space) {
  // On a device keys have the type in which the ops write them.
  const DType keys = space == Space::device ? DType::bf16 : DType::f32;
  const auto zeros = [space](int64_t rows, int64_t width, DType type) {
    return Tensor::zeros({rows, width}, type, space);
  };
  KvCache cache;
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    const LayerKind kind = c.kind(layer);
    const bool csa = kind == LayerKind::csa, hca = kind == LayerKind::hca;
    const int entries = csa ? shape.csa_entries : hca ? shape.hca_entries : 0;
    const int64_t pending = csa ? csa_pending : hca_pending, co = csa ? 2 : 1;
    LayerCache& l = cache.layers.emplace_back();
    l.keys = zeros(shape.key_rows + entries, c.head_dim, keys);
    if (csa || hca) {
      l.pending_kv = zeros(pending, co * c.head_dim, DType::f32);
      l.pending_gate = zeros(pending, co * c.head_dim, DType::f32);
    }
    if (csa) {
      l.index_keys = ops::empty_index_keys(entries, c.index_head_dim, space);
      l.index_pending_kv = zeros(pending, co * c.index_head_dim, DType::f32);
      l.index_pending_gate = zeros(pending, co * c.index_head_dim, DType::f32);
    }
  }
  return cache;
}

// ---- Multi-token prediction
// ----------------------------------------------------------------------------------------------------

MtpInput plan_mtp(const PlanShape& shape, const std::vector<std::vector<int>>& documents) {
  MtpInput input;
  std::vector<std::vector<int>> next;
  int row = 0;
  for (const auto& d : documents) {
    next.emplace_back(d.begin() + (d.empty() ? 0 : 1), d.end());
    for (size_t i = 0; i < next.back().size(); ++i) input.source_row.push_back(row + static_cast<int>(i));
    row += static_cast<int>(d.size());
  }
  input.plan = plan_documents(shape, next);
  return input;
}

namespace {

struct MtpSaved {
  Tensor e_raw, e;  // [T,d] embedding of the next token, normed
  Tensor g_raw, g;  // [T*n, d] streams, normed
  Tensor x;         // [T,n,d] input streams of the block
};

void mtp_input(const PassContext& ctx, const Linear& table, const MtpWeights& w, const Tensor& source_row,
               const Tensor& last, MtpSaved& s) {
  const Numerics n = ctx.numerics;
  const float eps = hyper_options(ctx.config).norm_eps;
  const int64_t rows = ctx.plan.rows(), streams = ctx.config.hc_mult, d = ctx.config.hidden_size;
  const LinearPoints points{n, Point::act_mtp, Point::out_mtp};
  s.e_raw = ops::embed(table, ctx.tensors.token, 1).view({rows, d});
  s.e = ops::rms_norm(s.e_raw, w.enorm, eps, {n, Point::norm_mtp});
  s.g_raw = ops::gather_rows(last, source_row).view({rows * streams, d});
  s.g = ops::rms_norm(s.g_raw, w.hnorm, eps, {n, Point::norm_mtp});
  const Tensor e = ops::linear(s.e, w.e_proj, {}, points), g = ops::linear(s.g, w.h_proj, {}, points);
  s.x = ops::add_to_copies(e, g.view({rows, streams, d}), {n, Point::mtp_sum});
}

}  // namespace

Tensor mtp_forward(WeightStore& weights, int j, const MtpInput& input, const Tensor& last, const ForwardOptions& o) {
  const ModelConfig& c = weights.config();
  const MtpWeights& w = weights.mtp(j);
  const Pass pass(weights, input.plan, o);
  const PassContext& ctx = pass.ctx;
  MtpSaved s;
  mtp_input(ctx, weights.outer().embed, w, Tensor::of(input.source_row), last, s);
  LayerLease lease = weights.acquire(c.num_hidden_layers + j);
  LayerSaved unkept;
  const Tensor streams = layer_forward(ctx, *lease, c.num_hidden_layers + j, s.x, unkept);
  return ops::head_input(streams, head_weights(w), hyper_options(c), o.numerics);
}

void mtp_backward(WeightStore& weights, int j, const MtpInput& input, const Tensor& last, const ForwardOptions& o,
                  const Tensor& d_hidden, const Tensor& d_last, Gradients& gradients, const AuxiliaryLosses& aux,
                  AuxiliaryResults& results) {
  const ModelConfig& c = weights.config();
  const MtpWeights& w = weights.mtp(j);
  const int64_t rows = input.plan.rows(), n = c.hc_mult, d = c.hidden_size;
  const int layer = c.num_hidden_layers + j;
  const float eps = hyper_options(c).norm_eps;
  const LinearPoints points{o.numerics, Point::act_mtp, Point::out_mtp};
  Pass pass(weights, input.plan, o);
  PassContext& ctx = pass.ctx;
  ctx.taps = nullptr;
  MtpGrads frozen;
  MtpGrads& g = gradients.mtp.empty() ? frozen : gradients.mtp[j];
  const Tensor source_row = Tensor::of(input.source_row);
  MtpSaved s;
  mtp_input(ctx, weights.outer().embed, w, source_row, last, s);
  LayerLease lease = weights.acquire(layer);
  LayerSaved block;
  const Tensor streams = layer_forward(ctx, *lease, layer, s.x, block, true);
  const Tensor d_streams =
      ops::head_input_backward(d_hidden, streams, head_weights(w), hyper_options(c), o.numerics, g.hc_head, g.norm);
  const Tensor d_x = layer_backward(ctx, *lease, layer, s.x, d_streams, g.block, aux, results, block);

  Tensor d_e = ops::linear_backward(ops::sum_copies(d_x), s.e, w.e_proj, {}, points, {}, g.e_proj);
  d_e = ops::rms_norm_backward(d_e, s.e_raw, w.enorm, eps, g.enorm);
  if (gradients.outer.embed.defined())
    ops::embed_backward(d_e.view({rows, 1, d}), ctx.tensors.token, gradients.outer.embed);
  Tensor d_g = ops::linear_backward(d_x.view({rows * n, d}), s.g, w.h_proj, {}, points, {}, g.h_proj);
  d_g = ops::rms_norm_backward(d_g, s.g_raw, w.hnorm, eps, g.hnorm);
  ops::scatter_add_rows(d_g.view({rows, n, d}), source_row, d_last);
}

}  // namespace plumb
