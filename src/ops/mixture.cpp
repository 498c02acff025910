#include "ops/mixture.h"

#include "ops/elementwise.h"
#include "ops/gpu/dispatch.h"

namespace plumb::ops {

Tensor mixture(const Tensor& x, const Routing& r, const MixtureWeights& w, const MixtureLora& lora, Numerics numerics,
               MixtureSaved* saved) {
  PLUMB_ON_GPU(x, mixture(x, r, w, lora, numerics, saved));
  Tensor sum = routed_experts(x, r, w.experts, w.limit, lora.routed, numerics, saved ? &saved->routed : nullptr);
  const Tensor shared = shared_expert(x, w.shared, w.limit, lora.shared, numerics, saved ? &saved->shared : nullptr);
  add(shared, sum);
  round_point(numerics, Point::moe_sum, sum);
  return sum;
}

RoutedBackward mixture_backward(const Tensor& d_sum, const Tensor& x, const Routing& r, const MixtureWeights& w,
                                const MixtureLora& lora, Numerics numerics, const MixtureGrads& grads,
                                const MixtureSaved& saved) {
  PLUMB_ON_GPU(x, mixture_backward(d_sum, x, r, w, lora, numerics, grads, saved));
  RoutedBackward result = routed_experts_backward(d_sum, x, r, w.experts, w.limit, lora.routed, numerics, grads.experts,
                                                  grads.routed_lora, saved.routed.empty() ? nullptr : &saved.routed);
  add(shared_expert_backward(d_sum, x, w.shared, w.limit, lora.shared, numerics, grads.shared, grads.shared_lora,
                             saved.shared.hid.defined() ? &saved.shared : nullptr),
      result.dx);
  return result;
}

std::vector<int64_t> count_rows(const Routing& r, int64_t experts) {
  std::vector<int64_t> rows(experts);
  const Tensor expert = r.expert.on_device() ? to_host(r.expert) : r.expert;
  for (int64_t i = 0; i < expert.numel(); ++i) ++rows[expert.ptr<int32_t>()[i]];
  return rows;
}

}  // namespace plumb::ops
