#include "model/layer.h"

#include "base/error.h"
#include "ops/elementwise.h"
#include "ops/norm.h"
#include "ops/rope.h"

namespace plumb {
namespace {

HyperOptions hyper_options(const ModelConfig& c) {
  return {c.hc_sinkhorn_iters, static_cast<float>(c.hc_eps), static_cast<float>(c.rms_norm_eps)};
}
ops::RouterOptions router_options(const ModelConfig& c) {
  return {c.num_experts_per_tok, static_cast<float>(c.routed_scaling_factor)};
}
float eps(const ModelConfig& c) { return static_cast<float>(c.rms_norm_eps); }

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

// x_ffn [T,d] -> [T,d], spec 3.8: routed experts and the shared one.
Tensor moe_forward(const PassContext& ctx, const LayerWeights& w, int layer, LayerSaved& s, bool keep_hidden) {
  const float limit = static_cast<float>(ctx.config.swiglu_limit);
  const auto forced = ctx.replay.find(layer);
  s.routing = ops::route(s.x_ffn, ctx.plan.token, w.router, router_options(ctx.config),
                         forced == ctx.replay.end() ? Tensor() : forced->second);
  Tensor sum = ops::routed_experts(s.x_ffn, s.routing, w.experts, limit, expert_lora(ctx, layer), ctx.numerics,
                                   keep_hidden ? &s.routed : nullptr);
  Tensor shared = ops::shared_expert(s.x_ffn, w.shared, limit, shared_lora(ctx, layer), ctx.numerics,
                                     keep_hidden ? &s.shared : nullptr);
  ops::add(shared, sum);
  ops::round_point(ctx.numerics, Point::moe_sum, sum);
  return sum;
}

Tensor moe_backward(const PassContext& ctx, const LayerWeights& w, int layer, const LayerSaved& s, const Tensor& d_f,
                    LayerGrads& grads, const AuxiliaryLosses& aux, AuxiliaryResults& results) {
  const float limit = static_cast<float>(ctx.config.swiglu_limit);
  const bool trained = !grads.experts.empty() && grads.experts[0].w1.defined();
  ops::RoutedBackward routed = ops::routed_experts_backward(
      d_f, s.x_ffn, s.routing, w.experts, limit, expert_lora(ctx, layer), ctx.numerics,
      trained ? grads.experts : std::vector<ops::ExpertGrads>{}, expert_lora_grads(ctx, layer), &s.routed);
  ops::SharedLoraGrad lora_grads{lora_grads_of(ctx, layer, &LayerLora::shared_w1, &LayerLoraGrad::shared_w1),
                                 lora_grads_of(ctx, layer, &LayerLora::shared_w3, &LayerLoraGrad::shared_w3),
                                 lora_grads_of(ctx, layer, &LayerLora::shared_w2, &LayerLoraGrad::shared_w2)};
  Tensor from_shared = ops::shared_expert_backward(d_f, s.x_ffn, w.shared, limit, shared_lora(ctx, layer), ctx.numerics,
                                                   grads.shared, lora_grads, &s.shared);
  Tensor d_score;
  if (aux.balance != 0 && !w.router.tid2eid.defined()) {  // counts of hash layers do not depend on parameters
    d_score = Tensor::zeros(s.routing.score.shape());
    results.balance += ops::balance_loss(s.routing, ctx.plan.document, aux.balance, d_score);
  }
  Tensor from_router = ops::route_backward(routed.d_weight, d_score, s.x_ffn, w.router, s.routing,
                                           router_options(ctx.config), grads.gate);
  ops::add(from_shared, routed.dx);
  ops::add(from_router, routed.dx);
  if (results.expert_rows.size() <= static_cast<size_t>(layer)) results.expert_rows.resize(layer + 1);
  auto& counts = results.expert_rows[layer];
  counts.resize(w.experts.size());
  for (int64_t i = 0; i < s.routing.expert.numel(); ++i) ++counts[s.routing.expert.ptr<int32_t>()[i]];
  return routed.dx;
}

// One layer, spec 3.0: two halves, each between a contraction of the streams and their mixing.
Tensor run_layer(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& streams, LayerSaved& s,
                 bool keep_hidden) {
  const HyperOptions hc = hyper_options(ctx.config);
  const Numerics n = ctx.numerics;
  s.y_attn = ops::hyper_pre(streams, w.hc_attn, hc, s.mix_attn);
  ops::round_point(n, Point::hc_pre, s.y_attn);
  Tensor x = ops::rms_norm(s.y_attn, w.attn_norm, eps(ctx.config));
  ops::round_point(n, Point::norm_block, x);
  s.a = attention_forward(ctx, w, layer, x, s.attn);
  s.mid = ops::hyper_post(s.a, streams, s.mix_attn);
  ops::round_point(n, Point::hc_post, s.mid);

  s.y_ffn = ops::hyper_pre(s.mid, w.hc_ffn, hc, s.mix_ffn);
  ops::round_point(n, Point::hc_pre, s.y_ffn);
  s.x_ffn = ops::rms_norm(s.y_ffn, w.ffn_norm, eps(ctx.config));
  ops::round_point(n, Point::norm_block, s.x_ffn);
  s.f = moe_forward(ctx, w, layer, s, keep_hidden);
  Tensor next = ops::hyper_post(s.f, s.mid, s.mix_ffn);
  ops::round_point(n, Point::hc_post, next);
  return next;
}

void tap_layer(const PassContext& ctx, int layer, const LayerSaved& s, const Tensor& next) {
  if (!ctx.taps) return;
  const std::string suffix = "." + std::to_string(layer);
  Tensor chosen = Tensor::empty(s.routing.expert.shape(), DType::i64);
  for (int64_t i = 0; i < chosen.numel(); ++i) chosen.ptr<int64_t>()[i] = s.routing.expert.ptr<int32_t>()[i];
  ctx.taps->values["routed" + suffix] = chosen;
  if (ctx.taps->choices_only) return;
  ctx.taps->values["route_weights" + suffix] = s.routing.weight;
  ctx.taps->values["mid" + suffix] = s.mid;
  ctx.taps->values["streams" + suffix] = next;
}

}  // namespace

PassContext make_context(const ModelConfig& config, const SequencePlan& plan, Numerics numerics) {
  PassContext ctx{config, plan, numerics, nullptr, nullptr, nullptr, {}, {}, {}, {}};
  ctx.window_rotary =
      ops::rotary_table(plan.position, ops::rotary_frequencies(config.qk_rope_head_dim, config.rope_theta, nullptr));
  if (config.has(LayerKind::csa) || config.has(LayerKind::hca)) {
    ctx.compressed_freq = ops::rotary_frequencies(config.qk_rope_head_dim, config.compress_rope_theta,
                                                  config.yarn ? &*config.yarn : nullptr);
    ctx.compressed_rotary = ops::rotary_table(plan.position, ctx.compressed_freq);
  }
  return ctx;
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

Tensor layer_forward(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& streams,
                     LayerSaved* keep) {
  LayerSaved unkept;
  LayerSaved& s = keep ? *keep : unkept;
  Tensor next = run_layer(ctx, w, layer, streams, s, keep != nullptr);
  tap_layer(ctx, layer, s, next);
  return next;
}

Tensor layer_backward(const PassContext& ctx, const LayerWeights& w, int layer, const Tensor& streams,
                      const Tensor& d_next, LayerGrads& grads, const AuxiliaryLosses& aux, AuxiliaryResults& results,
                      const LayerSaved* kept) {
  const HyperOptions hc = hyper_options(ctx.config);
  LayerSaved recomputed;
  if (!kept) run_layer(ctx, w, layer, streams, recomputed, true);
  const LayerSaved& s = kept ? *kept : recomputed;

  ops::HyperPostGrad post = ops::hyper_post_backward(d_next, s.f, s.mid, s.mix_ffn);
  Tensor d_x = moe_backward(ctx, w, layer, s, post.d_out, grads, aux, results);
  Tensor d_y = ops::rms_norm_backward(d_x, s.y_ffn, w.ffn_norm, eps(ctx.config), grads.ffn_norm);
  ops::hyper_pre_backward(d_y, post.d_post, post.d_comb, s.mid, w.hc_ffn, hc, s.mix_ffn, post.d_streams, grads.hc_ffn);

  post = ops::hyper_post_backward(post.d_streams, s.a, streams, s.mix_attn);
  d_x = attention_backward(ctx, w, layer, s.attn, post.d_out, grads, aux, results);
  d_y = ops::rms_norm_backward(d_x, s.y_attn, w.attn_norm, eps(ctx.config), grads.attn_norm);
  ops::hyper_pre_backward(d_y, post.d_post, post.d_comb, streams, w.hc_attn, hc, s.mix_attn, post.d_streams,
                          grads.hc_attn);
  return post.d_streams;
}

}  // namespace plumb
