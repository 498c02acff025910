// Mixture of experts, spec 3.8: router (hash or score), clamped SwiGLU experts, the sum over a token's experts in slot
// order.
#pragma once
#include <vector>

#include "base/tensor.h"
#include "ops/linear.h"

namespace plumb {

struct RouterWeights {
  Linear gate;     // [E, d]
  Tensor bias;     // f32 [E]; undefined on hash layers
  Tensor tid2eid;  // i32 [V, K]; defined on hash layers
};
struct ExpertWeights {
  Linear w1, w3, w2;  // gate [f,d], up [f,d], down [d,f]
};

namespace ops {

struct Routing {
  Tensor expert;  // i32 [rows, K] in slot order
  Tensor weight;  // f32 [rows, K]
  Tensor score;   // f32 [rows, E] sqrt(softplus(logits)), unbiased
  Tensor logits;  // f32 [rows, E]
};
struct RouterOptions {
  int experts_per_token = 6;
  float scale = 1.5f;  // routed_scaling_factor
};

// x [rows,d], token i32 [rows] (hash layers). Score layers: top K of score + bias, by descending score, equal scores:
// lower expert first. Hash layers: tid2eid[token]. weight = score / (sum over chosen + 1e-20) * scale. forced (i32
// [rows,K], may be undefined) replaces the choice (replay).
Routing route(const Tensor& x, const Tensor& token, const RouterWeights& w, const RouterOptions& o,
              const Tensor& forced = {});
// d_weight [rows,K] -> dx [rows,d]; d_gate f32 [E,d] += if defined. Balance loss (spec 4.6) adds its own score
// gradient: d_score_extra [rows,E] or undefined.
Tensor route_backward(const Tensor& d_weight, const Tensor& d_score_extra, const Tensor& x, const RouterWeights& w,
                      const Routing& r, const RouterOptions& o, const Tensor& d_gate);

// Sequence-wise balance loss, spec 4.6: mean over documents of E * sum_e f_e P_e. d_score [rows,E] += coefficient *
// gradient if defined. -> the loss without coefficient.
double balance_loss(const Routing& r, const std::vector<int>& document, float coefficient, const Tensor& d_score);

// Adapters of the routed experts of one layer. gate and up share one A (ART layout).
struct ExpertLora {
  std::vector<LoraPair> gate_up;  // [E]: a [r,d], b [2f,r], rows 0..f gate, f..2f up; empty = none
  std::vector<LoraPair> down;     // [E]: a [r,f], b [d,r]; empty = none
};
struct ExpertLoraGrad {
  std::vector<LoraGrad> gate_up, down;
};
struct ExpertLoraRows {
  const ExpertLora* lora = nullptr;
  const std::vector<int>* rows = nullptr;  // token rows, ascending; nullptr = all
};

struct ExpertGrads {  // per expert: f32 [out,in] += ; undefined = frozen
  Tensor w1, w3, w2;
};

// What the backward pass of one expert needs besides its input, [rows of the expert, f] each.
struct ExpertHidden {
  Tensor gate, up;  // rounded, not clamped
  Tensor hid;       // rounded: what w2 gets
};

// The routed experts. x [rows,d] (rounded at norm_block) -> [rows,d] FP32 sum over a row's experts in slot order, each
// expert's output rounded at out_w2. Rows of an expert are processed in ascending row order. keep: becomes [E], or
// nullptr.
Tensor routed_experts(const Tensor& x, const Routing& r, const std::vector<ExpertWeights>& experts, float limit,
                      const std::vector<ExpertLoraRows>& lora, Numerics numerics,
                      std::vector<ExpertHidden>* keep = nullptr);

struct RoutedBackward {
  Tensor dx;        // [rows,d]
  Tensor d_weight;  // [rows,K]
};
// grads: [E] or empty (all frozen); lora_grads: one for each element of `lora` or empty. kept: what routed_experts
// kept, or nullptr: the hidden rows are recomputed.
RoutedBackward routed_experts_backward(const Tensor& d_sum, const Tensor& x, const Routing& r,
                                       const std::vector<ExpertWeights>& experts, float limit,
                                       const std::vector<ExpertLoraRows>& lora, Numerics numerics,
                                       const std::vector<ExpertGrads>& grads,
                                       const std::vector<ExpertLoraGrad>& lora_grads,
                                       const std::vector<ExpertHidden>* kept = nullptr);

// The shared expert: the same formula without routing weight; rounded at act_s13 ... out_s2. LoRA on gate (w1), up
// (w3), down (w2).
struct SharedLora {
  LoraList gate, up, down;
};
struct SharedLoraGrad {
  std::vector<LoraGrad> gate, up, down;
};
Tensor shared_expert(const Tensor& x, const ExpertWeights& w, float limit, const SharedLora& lora, Numerics numerics,
                     ExpertHidden* keep = nullptr);
Tensor shared_expert_backward(const Tensor& dy, const Tensor& x, const ExpertWeights& w, float limit,
                              const SharedLora& lora, Numerics numerics, const ExpertGrads& grads,
                              const SharedLoraGrad& lora_grads, const ExpertHidden* kept = nullptr);

}  // namespace ops
}  // namespace plumb
