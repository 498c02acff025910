// The attention half of a layer, spec 3.3 to 3.7, in the order in which a row meets it; then the same backwards.
#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "model/layer.h"
#include "ops/elementwise.h"
#include "ops/grouped_output.h"
#include "ops/norm.h"
#include "ops/rows.h"
#include "ops/vectors.h"

namespace plumb {
namespace {

// The five rounding points of a compressor, main or indexer's.
struct CompressorPoints {
  Point pool, norm, rope, hadamard, sim;
};
constexpr CompressorPoints kMain{Point::pool_ckv, Point::norm_ckv, Point::rope_ckv, Point::none, Point::sim_ckv};
constexpr CompressorPoints kIndex{Point::pool_ik, Point::norm_ik, Point::rope_ik, Point::had_ik, Point::sim_ik};

const ops::RotaryTable& rotary(const PassContext& ctx, LayerKind kind) {
  return kind == LayerKind::window ? ctx.tensors.window_rotary : ctx.tensors.compressed_rotary;
}
const ops::Compression& compression(const PassContext& ctx, LayerKind kind) {
  return kind == LayerKind::csa ? ctx.tensors.csa : ctx.tensors.hca;
}

// From a product to what the core meets: queries, window keys, entries (main or indexer's), index queries.
float eps(const PassContext& ctx) { return static_cast<float>(ctx.config.rms_norm_eps); }
ops::VectorSteps query_steps(const PassContext& ctx) {
  return {true, eps(ctx), ctx.numerics, Point::norm_qhead, Point::rope_q, Point::none, Point::none};
}
ops::VectorSteps key_steps(const PassContext& ctx) {
  return {true, eps(ctx), ctx.numerics, Point::norm_kv, Point::rope_kv, Point::none, Point::sim_kv};
}
ops::VectorSteps entry_steps(const PassContext& ctx, const CompressorPoints& p) {
  return {true, eps(ctx), ctx.numerics, p.norm, p.rope, p.hadamard, p.sim};
}
ops::VectorSteps index_query_steps(const PassContext& ctx) {
  return {false, 0, ctx.numerics, Point::none, Point::rope_iq, Point::had_iq, Point::sim_iq};
}

void put(const PassContext& ctx, const char* name, int layer, const Tensor& value) {
  if (ctx.taps && !ctx.taps->choices_only && value.defined())
    ctx.taps->values[name + ("." + std::to_string(layer))] = to_host(value);
}

// One vector a row.
Tensor single(const Tensor& x) { return x.view({x.size(0), 1, x.size(1)}); }
Tensor rows_of(const Tensor& x) { return x.view({x.size(0), x.size(1) * x.size(2)}); }

// x [T,d] -> finished entries [new entries, 1, c], spec 3.6. Keeps the rows of open windows in the cache.
Tensor compress(const PassContext& ctx, const CompressorPart<Linear>& w, const ops::Compression& plan, const Tensor& x,
                const LoraList& kv_lora, const LoraList& gate_lora, const CompressorPoints& points,
                const Tensor* pending_kv, const Tensor* pending_gate, CompressorSaved& s) {
  s.rows.kv = ops::linear(x, w.wkv, kv_lora, {}, &s.low_rank_kv);  // FP32 results, no rounding point
  s.rows.gate = ops::linear(x, w.wgate, gate_lora, {}, &s.low_rank_gate);
  if (pending_kv) s.rows.pending_kv = *pending_kv, s.rows.pending_gate = *pending_gate;
  s.pooled = ops::pool_entries(plan, s.rows, w.ape, {ctx.numerics, points.pool});
  if (pending_kv) {  // only now: entries above read the old rows
    ops::copy_rows(s.rows.kv, {plan.pending_row, plan.pending_slot}, *pending_kv);
    ops::copy_rows(s.rows.gate, {plan.pending_row, plan.pending_slot}, *pending_gate);
  }
  return ops::finish_vectors(single(s.pooled), w.norm, plan.rotary, entry_steps(ctx, points));
}

// Gradient of finished entries (used up) -> the compressor's parameters; the two gradients of x [T,d] that it returns.
std::vector<Tensor> compress_backward(const PassContext& ctx, const CompressorPart<Linear>& w,
                                      const ops::Compression& plan, const Tensor& x, const LoraList& kv_lora,
                                      const LoraList& gate_lora, const CompressorPoints& points,
                                      const CompressorSaved& s, const Tensor& d_entries,
                                      const std::vector<LoraGrad>& kv_grads, const std::vector<LoraGrad>& gate_grads,
                                      CompressorPart<Tensor>& grads) {
  const Tensor d_pooled = ops::finish_vectors_backward(single(d_entries), single(s.pooled), w.norm, plan.rotary,
                                                       entry_steps(ctx, points), grads.norm);
  const auto gradient_of = [](const Tensor& rows) {  // on a device it is written as a whole
    return rows.on_device() ? empty_like(rows, rows.shape()) : zeros_like(rows);
  };
  Tensor d_kv = gradient_of(s.rows.kv), d_gate = gradient_of(s.rows.gate);
  ops::pool_entries_backward(plan, s.rows, w.ape, rows_of(d_pooled), d_kv, d_gate, grads.ape);
  return {ops::linear_backward(d_kv, x, w.wkv, kv_lora, {}, kv_grads, grads.wkv, s.low_rank_kv),
          ops::linear_backward(d_gate, x, w.wgate, gate_lora, {}, gate_grads, grads.wgate, s.low_rank_gate)};
}

float index_scale(const ModelConfig& c) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.index_head_dim)) /
                            std::sqrt(static_cast<double>(c.index_n_heads)));
}

// Index queries and weights, spec 3.7.
void index_queries(const PassContext& ctx, const IndexerPart<Linear>& w, const Tensor& x, const Tensor& qr,
                   AttentionSaved& s) {
  const ModelConfig& c = ctx.config;
  s.iq = ops::linear(qr, w.wq_b, {}, {ctx.numerics, Point::act_iwq_b, Point::out_iwq_b})
             .view({x.size(0), c.index_n_heads, c.index_head_dim});
  s.iq = ops::finish_vectors(s.iq, {}, ctx.tensors.compressed_rotary, index_query_steps(ctx));
  s.iw = ops::scaled(ops::linear(x, w.weights_proj, {}, {ctx.numerics, Point::none, Point::out_iw}), index_scale(c));
}

// [rows, longest list] i64, filled up with -1.
Tensor as_table(const KeyLists& lists) {
  int64_t most = 0;
  for (int r = 0; r < lists.size(); ++r) most = std::max<int64_t>(most, lists.begin[r + 1] - lists.begin[r]);
  Tensor table = Tensor::empty({lists.size(), most}, DType::i64);
  std::fill_n(table.ptr<int64_t>(), table.numel(), -1);
  for (int r = 0; r < lists.size(); ++r)
    std::copy(lists.row.begin() + lists.begin[r], lists.row.begin() + lists.begin[r + 1],
              table.ptr<int64_t>() + r * most);
  return table;
}

// Fills the compressed half of the key buffer. -> the entries that each row attends to, which may be known
ops::RowLists compressed_keys(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& x,
                              LayerCache* cache, const ops::RowLists& known, AttentionSaved& s) {
  const ops::Compression& plan = compression(ctx, w.kind);
  const Tensor e = compress(ctx, w.attn.compressor, plan, x, lora_of(ctx, layer, &LayerLora::compressor_wkv),
                            lora_of(ctx, layer, &LayerLora::compressor_wgate), kMain,
                            cache ? &cache->pending_kv : nullptr, cache ? &cache->pending_gate : nullptr, s.main);
  put(ctx, "ckv", layer, rows_of(e));
  ops::copy_rows(e, {{}, plan.slot, ctx.plan.key_rows}, s.keys);
  if (w.kind == LayerKind::hca) return plan.attended;
  if (known.begin.defined()) return s.selected = known;
  index_queries(ctx, w.attn.indexer, x, s.qr, s);
  const Tensor k =
      compress(ctx, w.attn.indexer.compressor, plan, x, {}, {}, kIndex, cache ? &cache->index_pending_kv : nullptr,
               cache ? &cache->index_pending_gate : nullptr, s.index);
  s.ik = cache ? cache->index_keys : empty_like(k, {plan.plan->entries, k.size(2)});
  ops::copy_rows(k, {{}, plan.slot}, s.ik);
  s.selected = ops::select_entries(s.iq, s.iw, s.ik, plan.visible, ctx.config.index_topk);
  if (ctx.taps && !ctx.taps->choices_only) {
    put(ctx, "iq", layer, ops::index_values(s.iq)), put(ctx, "iw", layer, s.iw);
    put(ctx, "ik", layer, rows_of(ops::index_values(k)));
  }
  if (ctx.taps) ctx.taps->values["selected." + std::to_string(layer)] = as_table(s.selected);
  return s.selected;
}

// The indexer is trained by its own loss only; its inputs are detached, spec 4.1.
void indexer_backward(const PassContext& ctx, const LayerWeights& w, const AttentionSaved& s, LayerGrads& grads,
                      const ops::IndexerLoss& options, AuxiliaryResults& results) {
  const IndexerPart<Linear>& iw = w.attn.indexer;
  IndexerPart<Tensor>& ig = grads.attn.indexer;
  const Tensor entries = s.keys.rows(ctx.plan.key_rows, s.keys.size(0));
  ops::RowLists valid = s.selected;
  Tensor joint_lse = s.core.core.lse;
  if (!options.sparse) {
    valid = ops::visible_entries(ctx.plan.csa.visible);
    if (s.x.on_device()) valid = {to_device(valid.begin), to_device(valid.row)};
    joint_lse = ops::rotated_attention(s.q, s.keys, ops::merge_keys(ctx.tensors.window, valid, ctx.plan.key_rows),
                                       w.attn.sink, rotary(ctx, w.kind), ctx.numerics)
                    .core.lse;
  }
  const ops::IndexerLossGrad d = ops::indexer_loss(options, s.iq, s.iw, s.ik, valid, s.q, entries, joint_lse);
  results.indexer += d.loss;
  const Tensor d_q =
      ops::finish_vectors_backward(d.d_q, {}, {}, ctx.tensors.compressed_rotary, index_query_steps(ctx), {});
  ops::linear_backward(rows_of(d_q), s.qr, iw.wq_b, {}, {ctx.numerics, Point::act_iwq_b, Point::out_iwq_b}, {},
                       ig.wq_b);
  ops::linear_backward(ops::scaled(d.d_w, index_scale(ctx.config)), s.x, iw.weights_proj, {},
                       {ctx.numerics, Point::none, Point::out_iw}, {}, ig.weights_proj);
  compress_backward(ctx, iw.compressor, ctx.tensors.csa, s.x, {}, {}, kIndex, s.index, d.d_keys, {}, {}, ig.compressor);
}

}  // namespace

Tensor attention_forward(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& x, AttentionSaved& s,
                         const LayerOutputs& known) {
  const ModelConfig& c = ctx.config;
  const Numerics n = ctx.numerics;
  LayerCache* cache = ctx.cache ? &ctx.cache->at(layer) : nullptr;
  s.x = x;

  const LoraList wq_a_lora = lora_of(ctx, layer, &LayerLora::wq_a), wkv_lora = lora_of(ctx, layer, &LayerLora::wkv);
  ops::low_rank_together(x, {{wq_a_lora, &s.low_rank_wq_a},
                             {wkv_lora, &s.low_rank_wkv},
                             {lora_of(ctx, layer, &LayerLora::compressor_wkv), &s.main.low_rank_kv},
                             {lora_of(ctx, layer, &LayerLora::compressor_wgate), &s.main.low_rank_gate}});

  // Queries: low rank, norm, heads, norm of every head, rotation of the last channels.
  s.qa = ops::linear(x, w.attn.wq_a, wq_a_lora, {n, Point::act_wq_a, Point::out_wq_a}, &s.low_rank_wq_a);
  s.qr = ops::rms_norm(s.qa, w.attn.q_norm, eps(ctx), {n, Point::norm_q});
  s.qb = ops::linear(s.qr, w.attn.wq_b, lora_of(ctx, layer, &LayerLora::wq_b), {n, Point::act_wq_b, Point::out_wq_b},
                     &s.low_rank_wq_b)
             .view({x.size(0), c.num_attention_heads, c.head_dim});
  s.q = ops::finish_vectors(s.qb, {}, rotary(ctx, w.kind), query_steps(ctx));

  // Window keys: one head, the key is the value.
  s.kva = single(ops::linear(x, w.attn.wkv, wkv_lora, {n, Point::act_wkv, Point::out_wkv}, &s.low_rank_wkv));
  const Tensor kv = ops::finish_vectors(s.kva, w.attn.kv_norm, rotary(ctx, w.kind), key_steps(ctx));
  put(ctx, "q", layer, s.q), put(ctx, "kv", layer, rows_of(kv));

  const int64_t entries = w.kind == LayerKind::window ? 0 : compression(ctx, w.kind).plan->entries;
  s.keys = cache ? cache->keys : empty_like(kv, {ctx.plan.key_rows + entries, c.head_dim});
  ops::copy_rows(kv, {{}, ctx.tensors.key_slot}, s.keys);
  s.lists = w.kind == LayerKind::window
                ? ctx.tensors.window
                : ops::merge_keys(ctx.tensors.window, compressed_keys(ctx, w, layer, x, cache, known.selected, s),
                                  ctx.plan.key_rows);

  // One softmax over window, entries and sink; rotation back; grouped projection; output.
  s.core = ops::rotated_attention(s.q, s.keys, s.lists, w.attn.sink, rotary(ctx, w.kind), n);
  put(ctx, "o", layer, s.core.core.o);
  if (known.a.defined()) {
    s.u = known.u, s.low_rank_wo_a = known.low_rank_wo_a, s.low_rank_wo_b = known.low_rank_wo_b;
    return known.a;
  }
  s.u = ops::grouped_output(s.core.turned, {w.attn.wo_a, w.wo_a_group}, lora_of(ctx, layer, &LayerLora::wo_a),
                            {n, Point::out_wo_a}, &s.low_rank_wo_a);
  return ops::linear(s.u, w.attn.wo_b, lora_of(ctx, layer, &LayerLora::wo_b), {n, Point::act_wo_b, Point::out_wo_b},
                     &s.low_rank_wo_b);
}

Tensor attention_backward(const PassContext& ctx, const LayerWeights& w, int layer, const AttentionSaved& s,
                          const Tensor& d_out, LayerGrads& grads, const AuxiliaryLosses& aux,
                          AuxiliaryResults& results) {
  const Numerics n = ctx.numerics;
  PLUMB_CHECK(!ctx.cache && ctx.plan.key_slot.empty(), "a backward pass needs a plan without a cache");

  Tensor d_u = ops::linear_backward(
      d_out, s.u, w.attn.wo_b, lora_of(ctx, layer, &LayerLora::wo_b), {n, Point::act_wo_b, Point::out_wo_b},
      lora_grads_of(ctx, layer, &LayerLora::wo_b, &LayerLoraGrad::wo_b), grads.attn.wo_b, s.low_rank_wo_b);
  Tensor d_turned = ops::grouped_output_backward(
      d_u, s.core.turned, {w.attn.wo_a, w.wo_a_group}, lora_of(ctx, layer, &LayerLora::wo_a),
      lora_grads_of(ctx, layer, &LayerLora::wo_a, &LayerLoraGrad::wo_a), grads.attn.wo_a, s.low_rank_wo_a);
  const ops::AttentionGrad core = ops::rotated_attention_backward(d_turned, s.q, s.keys, s.lists, w.attn.sink,
                                                                  rotary(ctx, w.kind), s.core, grads.attn.sink);

  // Queries.
  Tensor d_qb = ops::finish_vectors_backward(core.dq, s.qb, {}, rotary(ctx, w.kind), query_steps(ctx), {});
  Tensor d_qr = ops::linear_backward(
      rows_of(d_qb), s.qr, w.attn.wq_b, lora_of(ctx, layer, &LayerLora::wq_b), {n, Point::act_wq_b, Point::out_wq_b},
      lora_grads_of(ctx, layer, &LayerLora::wq_b, &LayerLoraGrad::wq_b), grads.attn.wq_b, s.low_rank_wq_b);
  Tensor d_qa = ops::rms_norm_backward(d_qr, s.qa, w.attn.q_norm, eps(ctx), grads.attn.q_norm);
  Tensor dx = ops::linear_backward(
      d_qa, s.x, w.attn.wq_a, lora_of(ctx, layer, &LayerLora::wq_a), {n, Point::act_wq_a, Point::out_wq_a},
      lora_grads_of(ctx, layer, &LayerLora::wq_a, &LayerLoraGrad::wq_a), grads.attn.wq_a, s.low_rank_wq_a);

  // Window keys.
  const Tensor d_kva = ops::finish_vectors_backward(single(core.d_keys.rows(0, s.x.size(0))), s.kva, w.attn.kv_norm,
                                                    rotary(ctx, w.kind), key_steps(ctx), grads.attn.kv_norm);
  std::vector<Tensor> more;  // gradients of x besides dx
  more.push_back(ops::linear_backward(
      rows_of(d_kva), s.x, w.attn.wkv, lora_of(ctx, layer, &LayerLora::wkv), {n, Point::act_wkv, Point::out_wkv},
      lora_grads_of(ctx, layer, &LayerLora::wkv, &LayerLoraGrad::wkv), grads.attn.wkv, s.low_rank_wkv));

  // Compressed entries.
  if (w.kind != LayerKind::window)
    for (Tensor& d : compress_backward(
             ctx, w.attn.compressor, compression(ctx, w.kind), s.x, lora_of(ctx, layer, &LayerLora::compressor_wkv),
             lora_of(ctx, layer, &LayerLora::compressor_wgate), kMain, s.main,
             core.d_keys.rows(ctx.plan.key_rows, core.d_keys.size(0)),
             lora_grads_of(ctx, layer, &LayerLora::compressor_wkv, &LayerLoraGrad::compressor_wkv),
             lora_grads_of(ctx, layer, &LayerLora::compressor_wgate, &LayerLoraGrad::compressor_wgate),
             grads.attn.compressor))
      more.push_back(std::move(d));
  ops::add(more, dx);
  if (w.kind == LayerKind::csa && aux.indexer.coefficient != 0)
    indexer_backward(ctx, w, s, grads, aux.indexer, results);
  return dx;
}

}  // namespace plumb
