// The page to read: tokens -> streams -> layers -> hidden rows. T rows, n streams, d hidden size.
#include "model/forward.h"

#include <cstring>

#include "base/error.h"
#include "base/float_formats.h"
#include "ops/elementwise.h"
#include "ops/norm.h"

namespace plumb {
namespace {

float eps(const ModelConfig& c) { return static_cast<float>(c.rms_norm_eps); }
HyperOptions hyper_options(const ModelConfig& c) {
  return {c.hc_sinkhorn_iters, static_cast<float>(c.hc_eps), static_cast<float>(c.rms_norm_eps)};
}

PassContext context(WeightStore& weights, const SequencePlan& plan, const ForwardOptions& o) {
  PassContext ctx = make_context(weights.config(), plan, o.numerics);
  ctx.adapters = o.adapters;
  ctx.cache = o.cache ? &o.cache->layers : nullptr;
  ctx.taps = o.taps;
  ctx.replay = o.replay;
  return ctx;
}

// Rows of the embedding table, [tokens, d].
Tensor embed(const Linear& table, const std::vector<int>& token) {
  Tensor x = Tensor::empty({static_cast<int64_t>(token.size()), table.in});
  for (size_t r = 0; r < token.size(); ++r) {
    PLUMB_CHECK(0 <= token[r] && token[r] < table.out, "token " + std::to_string(token[r]));
    float* to = x.f32() + r * table.in;
    if (table.format == WeightFormat::f32) {
      std::memcpy(to, table.data.f32() + static_cast<int64_t>(token[r]) * table.in, table.in * sizeof(float));
    } else {
      PLUMB_CHECK(table.format == WeightFormat::bf16);
      const uint16_t* from = table.data.ptr<uint16_t>() + static_cast<int64_t>(token[r]) * table.in;
      for (int i = 0; i < table.in; ++i) to[i] = bf16_to_float(from[i]);
    }
  }
  return x;
}
void embed_backward(const Tensor& dx, const std::vector<int>& token, const Tensor& d_table) {
  for (size_t r = 0; r < token.size(); ++r)  // in order of rows
    ops::add(dx.f32() + r * dx.size(1), dx.size(1), d_table.f32() + token[r] * dx.size(1));
}

Tensor gather_rows(const Tensor& x, const std::vector<int>& rows) {
  Shape shape = x.shape();
  shape[0] = static_cast<int64_t>(rows.size());
  Tensor y = Tensor::empty(shape);
  for (size_t i = 0; i < rows.size(); ++i)
    std::memcpy(y.f32() + i * x.row_size(), x.f32() + rows[i] * x.row_size(), x.row_size() * sizeof(float));
  return y;
}
void scatter_add_rows(const Tensor& dy, const std::vector<int>& rows, const Tensor& dx) {
  for (size_t i = 0; i < rows.size(); ++i)
    ops::add(dy.f32() + i * dx.row_size(), dx.row_size(), dx.f32() + rows[i] * dx.row_size());
}

// Streams of the rows that are wanted -> normed rows in front of the LM head.
Tensor contract_and_norm(const Tensor& streams, const HyperWeights& hc, const Tensor& norm, const ModelConfig& c,
                         Numerics n, Tensor& z) {
  z = ops::hyper_head(streams, hc, hyper_options(c));
  ops::round_point(n, Point::hc_head, z);
  Tensor hidden = ops::rms_norm(z, norm, eps(c));
  ops::round_point(n, Point::norm_final, hidden);
  return hidden;
}
// -> gradient of the streams handed to contract_and_norm (recomputed from them).
Tensor contract_and_norm_backward(const Tensor& d_hidden, const Tensor& streams, const HyperWeights& hc,
                                  const Tensor& norm, const ModelConfig& c, Numerics n, HyperGrads& hc_grads,
                                  const Tensor& d_norm) {
  Tensor z;
  contract_and_norm(streams, hc, norm, c, n, z);
  Tensor d_z = ops::rms_norm_backward(d_hidden, z, norm, eps(c), d_norm);
  return ops::hyper_head_backward(d_z, streams, hc, hyper_options(c), hc_grads);
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

ForwardResult forward(WeightStore& weights, const SequencePlan& plan, const ForwardOptions& o) {
  const ModelConfig& c = weights.config();
  PassContext ctx = context(weights, plan, o);
  ForwardResult result;

  Tensor x = embed(weights.outer().embed, plan.token);                      // [T, d]
  Tensor streams = Tensor::empty({plan.rows(), c.hc_mult, c.hidden_size});  // [T, n, d]: n copies of the embedding
  for (int64_t i = 0; i < streams.numel() / c.hidden_size; ++i)
    std::memcpy(streams.f32() + i * c.hidden_size, x.f32() + i / c.hc_mult * c.hidden_size,
                c.hidden_size * sizeof(float));

  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    LayerLease lease = weights.acquire(layer);
    if (o.keep_streams) result.streams.push_back(streams);
    LayerSaved* keep = o.keep_layers ? &result.layers.emplace_back() : nullptr;
    streams = layer_forward(ctx, *lease, layer, streams, keep);  // [T, n, d]
  }
  if (o.keep_streams) result.streams.push_back(streams);

  Tensor z;  // [wanted, d]
  result.hidden = contract_and_norm(gather_rows(streams, plan.wanted), weights.outer().hc_head, weights.outer().norm, c,
                                    o.numerics, z);
  return result;
}

AuxiliaryResults backward(WeightStore& weights, const SequencePlan& plan, const ForwardOptions& o,
                          const ForwardResult& result, const Tensor& d_hidden, const Tensor& d_last, Gradients& g,
                          const AuxiliaryLosses& aux) {
  const ModelConfig& c = weights.config();
  PLUMB_CHECK(static_cast<int>(result.streams.size()) == c.num_hidden_layers + 1, "forward must keep the streams");
  PassContext ctx = context(weights, plan, o);
  ctx.taps = nullptr;
  AuxiliaryResults results;

  Tensor d_streams = d_last.defined() ? d_last.clone() : Tensor::zeros(result.streams.back().shape());
  Tensor d_wanted =
      contract_and_norm_backward(d_hidden, gather_rows(result.streams.back(), plan.wanted), weights.outer().hc_head,
                                 weights.outer().norm, c, o.numerics, g.outer.hc_head, g.outer.norm);
  scatter_add_rows(d_wanted, plan.wanted, d_streams);

  LayerGrads frozen;
  const int first = first_trained_layer(o, g, c.num_hidden_layers);
  for (int layer = c.num_hidden_layers - 1; layer >= first; --layer) {
    LayerLease lease = weights.acquire(layer);
    d_streams = layer_backward(ctx, *lease, layer, result.streams[layer], d_streams,
                               g.layers.empty() ? frozen : g.layers[layer], aux, results,
                               result.layers.empty() ? nullptr : &result.layers[layer]);
  }

  if (g.outer.embed.defined()) {
    Tensor dx = Tensor::zeros({plan.rows(), c.hidden_size});
    for (int64_t i = 0; i < d_streams.numel() / c.hidden_size; ++i)
      ops::add(d_streams.f32() + i * c.hidden_size, c.hidden_size, dx.f32() + i / c.hc_mult * c.hidden_size);
    embed_backward(dx, plan.token, g.outer.embed);
  }
  return results;
}

PlanShape plan_shape(const ModelConfig& c) {
  return {c.sliding_window, c.has(LayerKind::csa) ? c.csa_ratio : 0, c.has(LayerKind::hca) ? c.hca_ratio : 0};
}

KvCache make_cache(const ModelConfig& c, const CacheShape& shape, int csa_pending, int hca_pending) {
  KvCache cache;
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    const LayerKind kind = c.kind(layer);
    const bool csa = kind == LayerKind::csa, hca = kind == LayerKind::hca;
    const int entries = csa ? shape.csa_entries : hca ? shape.hca_entries : 0;
    const int64_t pending = csa ? csa_pending : hca_pending, co = csa ? 2 : 1;
    LayerCache& l = cache.layers.emplace_back();
    l.keys = Tensor::zeros({shape.key_rows + entries, c.head_dim});
    if (csa || hca) {
      l.pending_kv = Tensor::zeros({pending, co * c.head_dim});
      l.pending_gate = Tensor::zeros({pending, co * c.head_dim});
    }
    if (csa) {
      l.index_keys = Tensor::zeros({entries, c.index_head_dim});
      l.index_pending_kv = Tensor::zeros({pending, co * c.index_head_dim});
      l.index_pending_gate = Tensor::zeros({pending, co * c.index_head_dim});
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

void mtp_input(WeightStore& weights, const MtpWeights& w, const MtpInput& input, const Tensor& last, Numerics n,
               MtpSaved& s) {
  const ModelConfig& c = weights.config();
  const int64_t rows = input.plan.rows(), streams = c.hc_mult, d = c.hidden_size;
  const LinearPoints points{n, Point::act_mtp, Point::out_mtp};
  s.e_raw = embed(weights.outer().embed, input.plan.token);
  s.e = ops::rms_norm(s.e_raw, w.enorm, eps(c));
  ops::round_point(n, Point::norm_mtp, s.e);
  s.g_raw = gather_rows(last, input.source_row).view({rows * streams, d});
  s.g = ops::rms_norm(s.g_raw, w.hnorm, eps(c));
  ops::round_point(n, Point::norm_mtp, s.g);
  Tensor e = ops::linear(s.e, w.e_proj, {}, points), g = ops::linear(s.g, w.h_proj, {}, points);
  s.x = Tensor::empty({rows, streams, d});
  for (int64_t i = 0; i < rows * streams; ++i)
    for (int64_t j = 0; j < d; ++j) s.x.f32()[i * d + j] = e.f32()[i / streams * d + j] + g.f32()[i * d + j];
  ops::round_point(n, Point::mtp_sum, s.x);
}

}  // namespace

Tensor mtp_forward(WeightStore& weights, int j, const MtpInput& input, const Tensor& last, const ForwardOptions& o) {
  const ModelConfig& c = weights.config();
  const MtpWeights& w = weights.mtp(j);
  PassContext ctx = context(weights, input.plan, o);
  MtpSaved s;
  mtp_input(weights, w, input, last, o.numerics, s);
  LayerLease lease = weights.acquire(c.num_hidden_layers + j);
  Tensor z, streams = layer_forward(ctx, *lease, c.num_hidden_layers + j, s.x);
  return contract_and_norm(streams, w.hc_head, w.norm, c, o.numerics, z);
}

void mtp_backward(WeightStore& weights, int j, const MtpInput& input, const Tensor& last, const ForwardOptions& o,
                  const Tensor& d_hidden, const Tensor& d_last, Gradients& gradients, const AuxiliaryLosses& aux,
                  AuxiliaryResults& results) {
  const ModelConfig& c = weights.config();
  const MtpWeights& w = weights.mtp(j);
  const int64_t rows = input.plan.rows(), n = c.hc_mult, d = c.hidden_size;
  const int layer = c.num_hidden_layers + j;
  const LinearPoints points{o.numerics, Point::act_mtp, Point::out_mtp};
  PassContext ctx = context(weights, input.plan, o);
  ctx.taps = nullptr;
  MtpGrads frozen;
  MtpGrads& g = gradients.mtp.empty() ? frozen : gradients.mtp[j];
  MtpSaved s;
  mtp_input(weights, w, input, last, o.numerics, s);
  LayerLease lease = weights.acquire(layer);
  Tensor streams = layer_forward(ctx, *lease, layer, s.x);
  Tensor d_streams = contract_and_norm_backward(d_hidden, streams, w.hc_head, w.norm, c, o.numerics, g.hc_head, g.norm);
  Tensor d_x = layer_backward(ctx, *lease, layer, s.x, d_streams, g.block, aux, results);

  Tensor d_e = Tensor::zeros({rows, d});
  for (int64_t i = 0; i < rows * n; ++i) ops::add(d_x.f32() + i * d, d, d_e.f32() + i / n * d);
  d_e = ops::linear_backward(d_e, s.e, w.e_proj, {}, points, {}, g.e_proj);
  d_e = ops::rms_norm_backward(d_e, s.e_raw, w.enorm, eps(c), g.enorm);
  if (gradients.outer.embed.defined()) embed_backward(d_e, input.plan.token, gradients.outer.embed);
  Tensor d_g = ops::linear_backward(d_x.view({rows * n, d}), s.g, w.h_proj, {}, points, {}, g.h_proj);
  d_g = ops::rms_norm_backward(d_g, s.g_raw, w.hnorm, eps(c), g.hnorm);
  scatter_add_rows(d_g.view({rows, n, d}), input.source_row, d_last);
}

}  // namespace plumb
