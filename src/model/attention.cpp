// The attention half of a layer, spec 3.3 to 3.7, in the order in which a row meets it; then the same backwards.
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "model/layer.h"
#include "ops/elementwise.h"
#include "ops/linear_parts.h"
#include "ops/norm.h"
#include "ops/rope.h"

namespace plumb {
namespace {

// The five rounding points of a compressor, main or indexer's.
struct CompressorPoints {
  Point pool, norm, rope, hadamard, sim;
};
constexpr CompressorPoints kMain{Point::pool_ckv, Point::norm_ckv, Point::rope_ckv, Point::none, Point::sim_ckv};
constexpr CompressorPoints kIndex{Point::pool_ik, Point::norm_ik, Point::rope_ik, Point::had_ik, Point::sim_ik};

float eps(const PassContext& ctx) { return static_cast<float>(ctx.config.rms_norm_eps); }
const ops::RotaryTable& rotary(const PassContext& ctx, LayerKind kind) {
  return kind == LayerKind::window ? ctx.window_rotary : ctx.compressed_rotary;
}
const CompressionPlan& compression(const PassContext& ctx, LayerKind kind) {
  return kind == LayerKind::csa ? ctx.plan.csa : ctx.plan.hca;
}
bool transforms(const PassContext& ctx, Point p) { return point_kind(ctx.numerics, p) != PointKind::keep; }

// FP8 storage of a key: the channels in front of the rotary ones.
void simulate_storage(const PassContext& ctx, Point p, const Tensor& x) {
  const int64_t width = x.size(-1);
  ops::round_point(ctx.numerics, p, x.f32(), x.numel() / width, width - ctx.config.qk_rope_head_dim, width);
}

void put(const PassContext& ctx, const char* name, int layer, const Tensor& value) {
  if (ctx.taps && !ctx.taps->choices_only) ctx.taps->values[name + ("." + std::to_string(layer))] = value.clone();
}

// Copies rows of `from` to rows slot[i] (identity if empty) + offset of `to`.
void store_rows(const Tensor& from, const std::vector<int>& slot, int offset, const Tensor& to) {
  const size_t bytes = from.row_size() * sizeof(float);
  for (int64_t i = 0; i < from.size(0); ++i) {
    const int64_t at = offset + (slot.empty() ? i : slot[i]);
    PLUMB_CHECK(0 <= at && at < to.size(0));
    std::memcpy(to.f32() + at * to.row_size(), from.f32() + i * from.row_size(), bytes);
  }
}

// x [T,d] -> finished entries [new entries, c], spec 3.6. Keeps the rows of open windows in the cache.
Tensor compress(const PassContext& ctx, const CompressorPart<Linear>& w, const CompressionPlan& plan, const Tensor& x,
                const LoraList& kv_lora, const LoraList& gate_lora, const CompressorPoints& points, Tensor* pending_kv,
                Tensor* pending_gate, CompressorSaved& s) {
  const int64_t width = w.norm.numel();
  s.rows.kv = ops::linear(x, w.wkv, kv_lora);  // FP32 results, no rounding point
  s.rows.gate = ops::linear(x, w.wgate, gate_lora);
  if (pending_kv) s.rows.pending_kv = *pending_kv, s.rows.pending_gate = *pending_gate;
  s.pooled = ops::pool_entries(plan, s.rows, w.ape);
  ops::round_point(ctx.numerics, points.pool, s.pooled);
  Tensor e = ops::rms_norm(s.pooled, w.norm, eps(ctx));
  ops::round_point(ctx.numerics, points.norm, e);
  ops::rotate(e.f32(), plan.new_entries(), 1, width, plan.position, ctx.compressed_freq, false);
  ops::round_point(ctx.numerics, points.rope, e);
  if (points.hadamard == Point::none) {
    simulate_storage(ctx, points.sim, e);
  } else {
    if (transforms(ctx, points.hadamard)) ops::hadamard(e.f32(), e.size(0), width);
    ops::round_point(ctx.numerics, points.hadamard, e);
    ops::round_point(ctx.numerics, points.sim, e);
  }
  for (size_t i = 0; pending_kv && i < plan.pending_row.size(); ++i) {  // only now: entries above read the old rows
    const size_t row = plan.pending_row[i], slot = plan.pending_slot[i], bytes = s.rows.kv.row_size() * sizeof(float);
    std::memcpy(pending_kv->f32() + slot * pending_kv->row_size(), s.rows.kv.f32() + row * s.rows.kv.row_size(), bytes);
    std::memcpy(pending_gate->f32() + slot * pending_gate->row_size(), s.rows.gate.f32() + row * s.rows.gate.row_size(),
                bytes);
  }
  return e;
}

// Gradient of finished entries -> the compressor's parameters, and dx [T,d] +=.
void compress_backward(const PassContext& ctx, const CompressorPart<Linear>& w, const CompressionPlan& plan,
                       const Tensor& x, const LoraList& kv_lora, const LoraList& gate_lora, const CompressorSaved& s,
                       Tensor d_entries, const std::vector<LoraGrad>& kv_grads, const std::vector<LoraGrad>& gate_grads,
                       CompressorPart<Tensor>& grads, Tensor* dx) {
  ops::rotate(d_entries.f32(), plan.new_entries(), 1, w.norm.numel(), plan.position, ctx.compressed_freq, true);
  Tensor d_pooled = ops::rms_norm_backward(d_entries, s.pooled, w.norm, eps(ctx), grads.norm);
  Tensor d_kv = Tensor::zeros(s.rows.kv.shape()), d_gate = Tensor::zeros(s.rows.gate.shape());
  ops::pool_entries_backward(plan, s.rows, w.ape, d_pooled, d_kv, d_gate, grads.ape);
  Tensor from_kv = ops::linear_backward(d_kv, x, w.wkv, kv_lora, {}, kv_grads, grads.wkv);
  Tensor from_gate = ops::linear_backward(d_gate, x, w.wgate, gate_lora, {}, gate_grads, grads.wgate);
  if (!dx) return;
  ops::add(from_kv, *dx);
  ops::add(from_gate, *dx);
}

// Index queries and weights, spec 3.7.
void index_queries(const PassContext& ctx, const IndexerPart<Linear>& w, const Tensor& x, const Tensor& qr,
                   AttentionSaved& s) {
  const ModelConfig& c = ctx.config;
  const int64_t rows = x.size(0), heads = c.index_n_heads, width = c.index_head_dim;
  s.iq = ops::linear(qr, w.wq_b, {}, {ctx.numerics, Point::act_iwq_b, Point::out_iwq_b}).view({rows, heads, width});
  ops::rotate(s.iq.f32(), heads, width, ctx.compressed_rotary, false);
  ops::round_point(ctx.numerics, Point::rope_iq, s.iq);
  if (transforms(ctx, Point::had_iq)) ops::hadamard(s.iq.f32(), rows * heads, width);
  ops::round_point(ctx.numerics, Point::had_iq, s.iq);
  ops::round_point(ctx.numerics, Point::sim_iq, s.iq);
  s.iw = ops::linear(x, w.weights_proj, {}, {ctx.numerics, Point::none, Point::out_iw});
  const float scale =
      static_cast<float>(1.0 / std::sqrt(static_cast<double>(width)) / std::sqrt(static_cast<double>(heads)));
  for (int64_t i = 0; i < s.iw.numel(); ++i) s.iw.f32()[i] *= scale;
}

// Fills the compressed half of the key buffer and decides which entries each row attends to.
void compressed_keys(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& x, LayerCache* cache,
                     AttentionSaved& s) {
  const CompressionPlan& plan = compression(ctx, w.kind);
  Tensor e = compress(ctx, w.attn.compressor, plan, x, lora_of(ctx, layer, &LayerLora::compressor_wkv),
                      lora_of(ctx, layer, &LayerLora::compressor_wgate), kMain, cache ? &cache->pending_kv : nullptr,
                      cache ? &cache->pending_gate : nullptr, s.main);
  put(ctx, "ckv", layer, e);
  store_rows(e, plan.slot, ctx.plan.key_rows, s.keys);
  if (w.kind == LayerKind::hca) {
    s.selected = ops::visible_entries(plan.visible);
    return;
  }
  index_queries(ctx, w.attn.indexer, x, s.qr, s);
  Tensor k =
      compress(ctx, w.attn.indexer.compressor, plan, x, {}, {}, kIndex, cache ? &cache->index_pending_kv : nullptr,
               cache ? &cache->index_pending_gate : nullptr, s.index);
  s.ik = cache ? cache->index_keys : Tensor::empty({plan.entries, k.size(1)});
  store_rows(k, plan.slot, 0, s.ik);
  s.selected = ops::select_entries(s.iq, s.iw, s.ik, plan.visible, ctx.config.index_topk);
  put(ctx, "iq", layer, s.iq), put(ctx, "iw", layer, s.iw), put(ctx, "ik", layer, k);
  if (ctx.taps) {
    int64_t most = 0;
    for (int r = 0; r < s.selected.size(); ++r)
      most = std::max<int64_t>(most, s.selected.begin[r + 1] - s.selected.begin[r]);
    Tensor chosen = Tensor::empty({s.selected.size(), most}, DType::i64);
    std::fill_n(chosen.ptr<int64_t>(), chosen.numel(), -1);
    for (int r = 0; r < s.selected.size(); ++r)
      for (int i = s.selected.begin[r]; i < s.selected.begin[r + 1]; ++i)
        chosen.ptr<int64_t>()[r * most + i - s.selected.begin[r]] = s.selected.row[i];
    ctx.taps->values["selected." + std::to_string(layer)] = chosen;
  }
}

// The slice of a pair that group g of wo_a uses: the shared A, and B's rows of the group.
LoraPair group_pair(const LoraPair& pair, int g, int64_t rows) {
  return {pair.a, pair.b.rows(g * rows, (g + 1) * rows), pair.scale};
}

// Grouped projection: group g of heads meets rows [g*d_g, (g+1)*d_g) of wo_a only. Calls each(g, lora_g) for every
// group.
template <class Each>
void for_groups(const PassContext& ctx, const LayerWeights& w, int layer, Each&& each) {
  const LoraList whole = lora_of(ctx, layer, &LayerLora::wo_a);
  for (int g = 0; g < ctx.config.o_groups; ++g) {
    std::vector<LoraPair> pairs;
    for (const LoraRows& part : whole) pairs.push_back(group_pair(*part.pair, g, w.wo_a_group[g].out));
    LoraList lora = whole;
    for (size_t i = 0; i < lora.size(); ++i) lora[i].pair = &pairs[i];
    each(g, lora);
  }
}

// turned [T,H,c] -> [T, g*d_g], rounded.
Tensor grouped_output(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& turned) {
  const int64_t rows = turned.size(0), outs = w.attn.wo_a.out, groups = ctx.config.o_groups, rank = outs / groups;
  const int64_t ld = turned.row_size(), width = ld / groups;
  Tensor u = Tensor::empty({rows, outs});
  for_groups(ctx, w, layer, [&](int g, const LoraList& lora) {
    const float* x = turned.f32() + g * width;
    float* y = u.f32() + g * rank;
    ops::linear_into(x, ld, rows, w.wo_a_group[g], y, outs);
    ops::add_lora(rows, {x, ld, width}, lora, {{y, outs, rank}});
    ops::round_point(ctx.numerics, Point::out_wo_a, y, rows, rank, outs);
  });
  return u;
}

Tensor grouped_output_backward(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& turned,
                               const Tensor& d_u, LayerGrads& grads) {
  const int64_t rows = turned.size(0), outs = w.attn.wo_a.out, groups = ctx.config.o_groups, rank = outs / groups;
  const int64_t ld = turned.row_size(), width = ld / groups;
  const std::vector<LoraGrad> whole = lora_grads_of(ctx, layer, &LayerLora::wo_a, &LayerLoraGrad::wo_a);
  Tensor d_turned = Tensor::empty(turned.shape());
  for_groups(ctx, w, layer, [&](int g, const LoraList& lora) {
    const float *x = turned.f32() + g * width, *dy = d_u.f32() + g * rank;
    float* dx = d_turned.f32() + g * width;
    std::vector<LoraGrad> lora_grads = whole;
    for (LoraGrad& lg : lora_grads)
      if (lg.b.defined()) lg.b = lg.b.rows(g * rank, (g + 1) * rank);
    ops::linear_backward_input(dy, outs, rows, w.wo_a_group[g], dx, ld, false);
    ops::lora_backward(rows, {{dy, outs, rank}}, {x, ld, width}, lora, lora_grads, {dx, ld, width});
    if (grads.attn.wo_a.defined())
      ops::linear_backward_weight(dy, outs, x, ld, rows, grads.attn.wo_a.rows(g * rank, (g + 1) * rank));
  });
  return d_turned;
}

// The indexer is trained by its own loss only; its inputs are detached, spec 4.1.
void indexer_backward(const PassContext& ctx, const LayerWeights& w, const AttentionSaved& s, LayerGrads& grads,
                      const ops::IndexerLoss& options, AuxiliaryResults& results) {
  const IndexerPart<Linear>& iw = w.attn.indexer;
  IndexerPart<Tensor>& ig = grads.attn.indexer;
  const int64_t rows = s.x.size(0), heads = ctx.config.index_n_heads, width = ctx.config.index_head_dim;
  const Tensor other_lse = ops::sparse_attention(s.q, s.keys, ctx.plan.window, w.attn.sink, ctx.numerics).lse;
  Tensor d_q = Tensor::zeros(s.iq.shape()), d_w = Tensor::zeros(s.iw.shape()), d_k = Tensor::zeros(s.ik.shape());
  results.indexer += ops::indexer_loss(options, s.iq, s.iw, s.ik,
                                       options.sparse ? s.selected : ops::visible_entries(ctx.plan.csa.visible), s.q,
                                       s.keys.rows(ctx.plan.key_rows, s.keys.size(0)), other_lse, d_q, d_w, d_k);
  if (transforms(ctx, Point::had_iq)) ops::hadamard(d_q.f32(), rows * heads, width);
  ops::rotate(d_q.f32(), heads, width, ctx.compressed_rotary, true);
  ops::linear_backward(d_q.view({rows, heads * width}), s.qr, iw.wq_b, {},
                       {ctx.numerics, Point::act_iwq_b, Point::out_iwq_b}, {}, ig.wq_b);
  const float scale =
      static_cast<float>(1.0 / std::sqrt(static_cast<double>(width)) / std::sqrt(static_cast<double>(heads)));
  for (int64_t i = 0; i < d_w.numel(); ++i) d_w.f32()[i] *= scale;
  ops::linear_backward(d_w, s.x, iw.weights_proj, {}, {ctx.numerics, Point::none, Point::out_iw}, {}, ig.weights_proj);
  if (transforms(ctx, Point::had_ik)) ops::hadamard(d_k.f32(), d_k.size(0), width);
  compress_backward(ctx, iw.compressor, ctx.plan.csa, s.x, {}, {}, s.index, d_k, {}, {}, ig.compressor, nullptr);
}

}  // namespace

Tensor attention_forward(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& x, AttentionSaved& s) {
  const ModelConfig& c = ctx.config;
  const Numerics n = ctx.numerics;
  const int64_t rows = x.size(0), heads = c.num_attention_heads, width = c.head_dim;
  LayerCache* cache = ctx.cache ? &ctx.cache->at(layer) : nullptr;
  s.x = x;

  // Queries: low rank, norm, heads, norm of every head, rotation of the last channels.
  s.qa = ops::linear(x, w.attn.wq_a, lora_of(ctx, layer, &LayerLora::wq_a), {n, Point::act_wq_a, Point::out_wq_a});
  s.qr = ops::rms_norm(s.qa, w.attn.q_norm, eps(ctx));
  ops::round_point(n, Point::norm_q, s.qr);
  s.qb = ops::linear(s.qr, w.attn.wq_b, lora_of(ctx, layer, &LayerLora::wq_b), {n, Point::act_wq_b, Point::out_wq_b});
  s.q = ops::rms_norm(s.qb.view({rows * heads, width}), {}, eps(ctx)).view({rows, heads, width});
  ops::round_point(n, Point::norm_qhead, s.q);
  ops::rotate(s.q.f32(), heads, width, rotary(ctx, w.kind), false);
  ops::round_point(n, Point::rope_q, s.q);

  // Window keys: one head, the key is the value.
  s.kva = ops::linear(x, w.attn.wkv, lora_of(ctx, layer, &LayerLora::wkv), {n, Point::act_wkv, Point::out_wkv});
  Tensor kv = ops::rms_norm(s.kva, w.attn.kv_norm, eps(ctx));
  ops::round_point(n, Point::norm_kv, kv);
  ops::rotate(kv.f32(), 1, width, rotary(ctx, w.kind), false);
  ops::round_point(n, Point::rope_kv, kv);
  simulate_storage(ctx, Point::sim_kv, kv);
  put(ctx, "q", layer, s.q), put(ctx, "kv", layer, kv);

  const int64_t entries = w.kind == LayerKind::window ? 0 : compression(ctx, w.kind).entries;
  s.keys = cache ? cache->keys : Tensor::empty({ctx.plan.key_rows + entries, width});
  store_rows(kv, ctx.plan.key_slot, 0, s.keys);
  if (w.kind == LayerKind::window)
    s.selected.begin.assign(rows + 1, 0);
  else
    compressed_keys(ctx, w, layer, x, cache, s);

  // One softmax over window, entries and sink; rotation back; grouped projection; output.
  s.lists = ops::merge_keys(ctx.plan.window, s.selected, ctx.plan.key_rows);
  s.core = ops::sparse_attention(s.q, s.keys, s.lists, w.attn.sink, n);
  put(ctx, "o", layer, s.core.o);
  s.turned = s.core.o.clone();
  ops::rotate(s.turned.f32(), heads, width, rotary(ctx, w.kind), true);
  ops::round_point(n, Point::rope_o, s.turned);
  s.u = grouped_output(ctx, w, layer, s.turned);
  return ops::linear(s.u, w.attn.wo_b, lora_of(ctx, layer, &LayerLora::wo_b), {n, Point::act_wo_b, Point::out_wo_b});
}

Tensor attention_backward(const PassContext& ctx, const LayerWeights& w, int layer, const AttentionSaved& s,
                          const Tensor& d_out, LayerGrads& grads, const AuxiliaryLosses& aux,
                          AuxiliaryResults& results) {
  const ModelConfig& c = ctx.config;
  const Numerics n = ctx.numerics;
  const int64_t rows = s.x.size(0), heads = c.num_attention_heads, width = c.head_dim;
  PLUMB_CHECK(!ctx.cache && ctx.plan.key_slot.empty(), "a backward pass needs a plan without a cache");

  Tensor d_u = ops::linear_backward(d_out, s.u, w.attn.wo_b, lora_of(ctx, layer, &LayerLora::wo_b),
                                    {n, Point::act_wo_b, Point::out_wo_b},
                                    lora_grads_of(ctx, layer, &LayerLora::wo_b, &LayerLoraGrad::wo_b), grads.attn.wo_b);
  Tensor d_o = grouped_output_backward(ctx, w, layer, s.turned, d_u, grads);
  ops::rotate(d_o.f32(), heads, width, rotary(ctx, w.kind), false);
  Tensor d_keys = Tensor::zeros(s.keys.shape());
  Tensor d_q = ops::sparse_attention_backward(d_o, s.q, s.keys, s.lists, w.attn.sink, s.core, d_keys, grads.attn.sink);

  // Queries.
  ops::rotate(d_q.f32(), heads, width, rotary(ctx, w.kind), true);
  Tensor d_qb =
      ops::rms_norm_backward(d_q.view({rows * heads, width}), s.qb.view({rows * heads, width}), {}, eps(ctx), {});
  Tensor d_qr =
      ops::linear_backward(d_qb.view({rows, heads * width}), s.qr, w.attn.wq_b, lora_of(ctx, layer, &LayerLora::wq_b),
                           {n, Point::act_wq_b, Point::out_wq_b},
                           lora_grads_of(ctx, layer, &LayerLora::wq_b, &LayerLoraGrad::wq_b), grads.attn.wq_b);
  Tensor d_qa = ops::rms_norm_backward(d_qr, s.qa, w.attn.q_norm, eps(ctx), grads.attn.q_norm);
  Tensor dx = ops::linear_backward(d_qa, s.x, w.attn.wq_a, lora_of(ctx, layer, &LayerLora::wq_a),
                                   {n, Point::act_wq_a, Point::out_wq_a},
                                   lora_grads_of(ctx, layer, &LayerLora::wq_a, &LayerLoraGrad::wq_a), grads.attn.wq_a);

  // Window keys.
  Tensor d_kv = d_keys.rows(0, rows);
  ops::rotate(d_kv.f32(), 1, width, rotary(ctx, w.kind), true);
  Tensor d_kva = ops::rms_norm_backward(d_kv, s.kva, w.attn.kv_norm, eps(ctx), grads.attn.kv_norm);
  Tensor from_kv = ops::linear_backward(
      d_kva, s.x, w.attn.wkv, lora_of(ctx, layer, &LayerLora::wkv), {n, Point::act_wkv, Point::out_wkv},
      lora_grads_of(ctx, layer, &LayerLora::wkv, &LayerLoraGrad::wkv), grads.attn.wkv);
  ops::add(from_kv, dx);

  // Compressed entries.
  if (w.kind != LayerKind::window)
    compress_backward(
        ctx, w.attn.compressor, compression(ctx, w.kind), s.x, lora_of(ctx, layer, &LayerLora::compressor_wkv),
        lora_of(ctx, layer, &LayerLora::compressor_wgate), s.main, d_keys.rows(ctx.plan.key_rows, d_keys.size(0)),
        lora_grads_of(ctx, layer, &LayerLora::compressor_wkv, &LayerLoraGrad::compressor_wkv),
        lora_grads_of(ctx, layer, &LayerLora::compressor_wgate, &LayerLoraGrad::compressor_wgate),
        grads.attn.compressor, &dx);
  if (w.kind == LayerKind::csa && aux.indexer.coefficient != 0)
    indexer_backward(ctx, w, s, grads, aux.indexer, results);
  return dx;
}

}  // namespace plumb
