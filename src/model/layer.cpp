#include "model/layer.h"

#include "base/error.h"
#include "ops/elementwise.h"

namespace plumb {
namespace {

ops::RouterOptions router_options(const ModelConfig& c) {
  return {c.num_experts_per_tok, static_cast<float>(c.routed_scaling_factor)};
}

// The adapters of the routed experts, and their gradients in the same order.
std::vector<ops::ExpertLoraRows> expert_lora(const PassContext& ctx, int layer) {
  std::vector<ops::ExpertLoraRows> list;
  if (ctx.adapters)
    for (const auto& part : ctx.adapters->parts) {
      if (layer >= static_cast<int>(part.adapter->layers.size())) continue;
      const ops::ExpertLora& e = part.adapter->layers[layer].experts;
      if (!e.gate_up.empty() || !e.down.empty()) list.push_back({&e, part.all ? nullptr : &part.rows});
    }
  return list;
}
std::vector<ops::ExpertLoraGrad> expert_lora_grads(const PassContext& ctx, int layer) {
  std::vector<ops::ExpertLoraGrad> list;
  if (ctx.adapters)
    for (const auto& part : ctx.adapters->parts) {
      if (layer >= static_cast<int>(part.adapter->layers.size())) continue;
      const ops::ExpertLora& e = part.adapter->layers[layer].experts;
      if (!e.gate_up.empty() || !e.down.empty())
        list.push_back(part.grads ? part.grads->layers[layer].experts : ops::ExpertLoraGrad{});
    }
  return list;
}

ops::SharedLora shared_lora(const PassContext& ctx, int layer) {
  return {lora_of(ctx, layer, &LayerLora::shared_w1), lora_of(ctx, layer, &LayerLora::shared_w3),
          lora_of(ctx, layer, &LayerLora::shared_w2)};
}

ops::MixtureWeights mixture_weights(const PassContext& ctx, const LayerWeights& w) {
  return {w.experts, w.shared, static_cast<float>(ctx.config.swiglu_limit)};
}
ops::MixtureLora mixture_lora(const PassContext& ctx, int layer) {
  return {expert_lora(ctx, layer), shared_lora(ctx, layer)};
}

// s.in_ffn.x [T,d] -> [T,d], spec 3.8: routed experts and the shared one. known: the result, or undefined.
Tensor moe_forward(const PassContext& ctx, const LayerWeights& w, int layer, LayerSaved& s, bool keep_hidden,
                   const Tensor& known) {
  const Tensor& x = s.in_ffn.x;
  const auto forced = ctx.replay.find(layer);
  s.routing = ops::route(x, ctx.tensors.token, w.router, router_options(ctx.config),
                         forced == ctx.replay.end() ? Tensor() : forced->second);
  if (known.defined()) return known;
  return ops::mixture(x, s.routing, mixture_weights(ctx, w), mixture_lora(ctx, layer), ctx.numerics,
                      keep_hidden ? &s.experts : nullptr);
}

Tensor moe_backward(const PassContext& ctx, const LayerWeights& w, int layer, const LayerSaved& s, const Tensor& d_f,
                    LayerGrads& grads, const AuxiliaryLosses& aux, AuxiliaryResults& results) {
  const Tensor& x = s.in_ffn.x;
  const bool trained = !grads.experts.empty() && grads.experts[0].w1.defined();
  const ops::MixtureGrads mixture_grads{trained ? grads.experts : std::vector<ops::ExpertGrads>{},
                                        grads.shared,
                                        expert_lora_grads(ctx, layer),
                                        {lora_grads_of(ctx, layer, &LayerLora::shared_w1, &LayerLoraGrad::shared_w1),
                                         lora_grads_of(ctx, layer, &LayerLora::shared_w3, &LayerLoraGrad::shared_w3),
                                         lora_grads_of(ctx, layer, &LayerLora::shared_w2, &LayerLoraGrad::shared_w2)}};
  const ops::RoutedBackward from_experts = ops::mixture_backward(
      d_f, x, s.routing, mixture_weights(ctx, w), mixture_lora(ctx, layer), ctx.numerics, mixture_grads, s.experts);
  Tensor d_score;
  if (aux.balance != 0 && !w.router.tid2eid.defined()) {  // counts of hash layers do not depend on parameters
    d_score = zeros_like(s.routing.score);
    results.balance += ops::balance_loss(s.routing, ctx.plan.document, aux.balance, d_score);
  }
  ops::add(ops::route_backward(from_experts.d_weight, d_score, x, w.router, s.routing, router_options(ctx.config),
                               grads.gate),
           from_experts.dx);
  if (results.expert_rows.size() <= static_cast<size_t>(layer)) results.expert_rows.resize(layer + 1);
  auto& counts = results.expert_rows[layer];
  const std::vector<int64_t> rows = ops::count_rows(s.routing, static_cast<int64_t>(w.experts.size()));
  counts.resize(rows.size());
  for (size_t e = 0; e < rows.size(); ++e) counts[e] += rows[e];
  return from_experts.dx;
}

// One layer, spec 3.0, up to the mixing at its end: two halves, each between a contraction of the streams and their
// mixing.
void run_layer(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& streams, LayerSaved& s,
               bool keep_hidden, const LayerOutputs& known = {}) {
  const HyperOptions hc = hyper_options(ctx.config);
  s.in_attn = ops::enter_sublayer(streams, {w.hc_attn, w.attn_norm}, hc, ctx.numerics);
  s.a = attention_forward(ctx, w, layer, s.in_attn.x, s.attn, known);
  s.mid = ops::pass_boundary(s.a, streams, s.in_attn.mix, {w.hc_ffn, w.ffn_norm}, hc, ctx.numerics, s.in_ffn);
  s.f = moe_forward(ctx, w, layer, s, keep_hidden, known.f);
}

void tap_layer(const PassContext& ctx, int layer, const LayerSaved& s, const Tensor& next) {
  if (!ctx.taps) return;
  const std::string suffix = "." + std::to_string(layer);
  const Tensor expert = to_host(s.routing.expert);
  const int32_t* chosen = expert.ptr<int32_t>();
  ctx.taps->values["routed" + suffix] =
      Tensor::of(std::vector<int64_t>(chosen, chosen + expert.numel()), expert.shape());
  if (ctx.taps->choices_only) return;
  ctx.taps->values["route_weights" + suffix] = to_host(s.routing.weight);
  ctx.taps->values["mid" + suffix] = to_host(s.mid);
  ctx.taps->values["streams" + suffix] = to_host(next);
}

}  // namespace

HyperOptions hyper_options(const ModelConfig& c) {
  return {c.hc_sinkhorn_iters, static_cast<float>(c.hc_eps), static_cast<float>(c.rms_norm_eps)};
}

ops::RotaryFrequencies rotary_frequencies(const ModelConfig& c) {
  const int dim = c.qk_rope_head_dim;
  ops::RotaryFrequencies f{ops::rotary_frequencies(dim, c.rope_theta, nullptr), {}};
  if (c.has(LayerKind::csa) || c.has(LayerKind::hca))
    f.compressed = ops::rotary_frequencies(dim, c.compress_rope_theta, c.yarn ? &*c.yarn : nullptr);
  return f;
}

PassContext make_context(const ModelConfig& c, const SequencePlan& plan, Numerics numerics, Space space) {
  return {c,       plan,    numerics, ops::plan_tensors(plan, rotary_frequencies(c), c.index_topk, space),
          nullptr, nullptr, nullptr,  {}};
}

LoraList lora_of(const PassContext& ctx, int layer, LoraPair LayerLora::*pair) {
  LoraList list;
  if (ctx.adapters)
    for (const auto& part : ctx.adapters->parts) {
      if (layer >= static_cast<int>(part.adapter->layers.size())) continue;
      const LoraPair& p = part.adapter->layers[layer].*pair;
      if (p.defined()) list.push_back({&p, part.all ? nullptr : &part.rows});
    }
  return list;
}

std::vector<LoraGrad> lora_grads_of(const PassContext& ctx, int layer, LoraPair LayerLora::*pair,
                                    LoraGrad LayerLoraGrad::*grad) {
  std::vector<LoraGrad> list;
  if (ctx.adapters)
    for (const auto& part : ctx.adapters->parts) {
      if (layer >= static_cast<int>(part.adapter->layers.size())) continue;
      if ((part.adapter->layers[layer].*pair).defined())
        list.push_back(part.grads ? part.grads->layers[layer].*grad : LoraGrad{});
    }
  return list;
}

Tensor layer_forward(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& streams, LayerSaved& s,
                     bool keep_hidden) {
  run_layer(ctx, w, layer, streams, s, keep_hidden);
  Tensor next = ops::leave_sublayer(s.f, s.mid, s.in_ffn.mix, ctx.numerics);
  tap_layer(ctx, layer, s, next);
  return next;
}

LayerOutputs outputs_of(const LayerSaved& s) {
  return {s.attn.selected, s.attn.u, s.a, s.f, s.attn.low_rank_wo_a, s.attn.low_rank_wo_b};
}

LayerSaved recompute_layer(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& streams,
                           LayerOutputs known, const AuxiliaryLosses& aux) {
  if (aux.indexer.coefficient != 0) known.selected = {};  // its loss needs the indexer's queries and keys
  LayerSaved s;
  run_layer(ctx, w, layer, streams, s, true, known);
  return s;
}

Tensor layer_backward(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& streams,
                      const Tensor& d_next, LayerGrads& grads, const AuxiliaryLosses& aux, AuxiliaryResults& results,
                      const LayerSaved& s) {
  const HyperOptions hc = hyper_options(ctx.config);
  ops::LeaveGrad leave = ops::leave_sublayer_backward(d_next, s.f, s.mid, s.in_ffn.mix);
  Tensor d_x = moe_backward(ctx, w, layer, s, leave.d_out, grads, aux, results);
  const Tensor d_mid = ops::enter_sublayer_backward(d_x, leave, s.mid, {w.hc_ffn, w.ffn_norm}, hc, s.in_ffn,
                                                    grads.hc_ffn, grads.ffn_norm);

  leave = ops::leave_sublayer_backward(d_mid, s.a, streams, s.in_attn.mix);
  d_x = attention_backward(ctx, w, layer, s.attn, leave.d_out, grads, aux, results);
  return ops::enter_sublayer_backward(d_x, leave, streams, {w.hc_attn, w.attn_norm}, hc, s.in_attn, grads.hc_attn,
                                      grads.attn_norm);
}

}  // namespace plumb
