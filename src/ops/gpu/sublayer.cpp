#include "ops/sublayer.h"

#include "kernels/glue/glue.h"
#include "kernels/hyper_connections/hyper_connections.h"
#include "ops/gpu/gpu_ops.h"
#include "ops/gpu/support.h"

namespace plumb::ops::gpu {
namespace {

kernels::HyperMapping mapping_of(const HyperWeights& w, const HyperOptions& o) {
  return {f32(w.fn),        f32(w.base), f32(w.scale), static_cast<int>(w.base.numel()),
          o.sinkhorn_iters, o.hc_eps,    o.norm_eps};
}

// A boundary: takes up `out` if it is defined, and computes the next sublayer's input.
Tensor boundary(const Tensor& out, const Tensor& streams, const HyperMix& finished, const SublayerWeights& w,
                const HyperOptions& o, SublayerInput& in) {
  const int rows = static_cast<int>(streams.size(0)), width = static_cast<int>(streams.size(2));
  if (streams.size(1) != kernels::kHyperStreams)
    fail("hyper-connections", std::to_string(streams.size(1)) + " streams", "the GPU kernels take four");
  const Tensor next = out.defined() ? empty(streams.shape(), DType::bf16) : Tensor();
  in.mix.coefficients = empty({rows, kernels::kHyperOutputs}, DType::f32);
  in.mix.mix = empty({rows, kernels::kHyperOutputs}, DType::f32);
  in.mix.rho = empty({rows}, DType::f32);
  in.x = empty({rows, width}, DType::bf16);
  const Tensor memory = workspace(kernels::hyper_boundary_workspace(rows, width));
  kernels::HyperBoundary p{};
  p.streams = bf16(streams), p.out = bf16(out), p.finished = out.defined() ? f32(finished.coefficients) : nullptr;
  p.next = bf16(next), p.mapping = mapping_of(w.hyper, o);
  p.coefficients = f32(in.mix.coefficients), p.mix = f32(in.mix.mix), p.rho = f32(in.mix.rho);
  p.norm_weight = f32(w.norm), p.rms_eps = o.norm_eps, p.x = bf16(in.x);
  p.workspace = memory.raw(), p.rows = rows, p.width = width;
  check(kernels::hyper_boundary(p, kStream), "hyper-connections");
  return next;
}

// Backward of what reads the streams. d_next undefined: the head.
Tensor pre_backward(const Tensor& d_next, const Tensor& d_x, const Tensor& d_coefficients, const Tensor& streams,
                    const SublayerWeights& w, const HyperOptions& o, const HyperMix& mix) {
  const int rows = static_cast<int>(streams.size(0)), width = static_cast<int>(streams.size(2));
  const Tensor d_streams = empty(streams.shape(), DType::bf16);
  const Tensor memory = workspace(kernels::hyper_pre_backward_workspace(rows, width, false));
  const Tensor d_input = converted(d_x, DType::bf16);
  kernels::HyperPreBackward p{};
  p.d_next = bf16(d_next), p.streams = bf16(streams), p.d_x = bf16(d_input);
  p.coefficients = f32(mix.coefficients), p.mix = f32(mix.mix), p.rho = f32(mix.rho);
  p.mapping = mapping_of(w.hyper, o), p.norm_weight = f32(w.norm), p.rms_eps = o.norm_eps;
  p.d_coefficients = f32(d_coefficients), p.d_streams = bf16(d_streams);
  p.workspace = memory.raw(), p.rows = rows, p.width = width;
  check(kernels::hyper_pre_backward(p, kStream), "hyper-connections backward");
  return d_streams;
}

void require_frozen(const HyperGrads& grads, const Tensor& d_norm) {
  if (grads.fn.defined() || d_norm.defined()) not_on_gpu("training of hyper-connections and norms");
}

void require_released(Numerics n) { require_kind({n, Point::hc_post}, PointKind::bf16, "hyper-connections"); }

}  // namespace

SublayerInput enter_sublayer(const Tensor& streams, const SublayerWeights& w, const HyperOptions& o,
                             Numerics numerics) {
  require_released(numerics);
  SublayerInput in;
  boundary({}, streams, {}, w, o, in);
  return in;
}

Tensor leave_sublayer(const Tensor& out, const Tensor& streams, const HyperMix& mix, Numerics numerics) {
  require_released(numerics);
  Tensor next = empty(streams.shape(), DType::bf16);
  kernels::glue::take_up(bf16(out), bf16(streams), f32(mix.coefficients), static_cast<int>(streams.size(0)),
                         static_cast<int>(streams.size(2)), bf16(next), kStream);
  return next;
}

Tensor pass_boundary(const Tensor& out, const Tensor& streams, const HyperMix& mix, const SublayerWeights& next,
                     const HyperOptions& o, Numerics numerics, SublayerInput& next_input) {
  require_released(numerics);
  return boundary(out, streams, mix, next, o, next_input);
}

LeaveGrad leave_sublayer_backward(const Tensor& d_next, const Tensor& out, const Tensor& streams, const HyperMix& mix) {
  const int rows = static_cast<int>(streams.size(0)), width = static_cast<int>(streams.size(2));
  LeaveGrad g;
  g.d_out = empty(out.shape(), DType::bf16);
  g.d_next = d_next;
  g.d_coefficients = empty({rows, kernels::kHyperOutputs}, DType::f32);
  check(kernels::hyper_post_backward({bf16(d_next), bf16(streams), bf16(out), f32(mix.coefficients), bf16(g.d_out),
                                      f32(g.d_coefficients), rows, width},
                                     kStream),
        "hyper-connections backward");
  return g;
}

Tensor enter_sublayer_backward(const Tensor& d_x, const LeaveGrad& leave, const Tensor& streams,
                               const SublayerWeights& w, const HyperOptions& o, const SublayerInput& input,
                               const HyperGrads& grads, const Tensor& d_norm) {
  require_frozen(grads, d_norm);
  return pre_backward(leave.d_next, d_x, leave.d_coefficients, streams, w, o, input.mix);
}

Tensor head_input(const Tensor& streams, const SublayerWeights& w, const HyperOptions& o, Numerics numerics) {
  return gpu::enter_sublayer(streams, w, o, numerics).x;
}

Tensor head_input_backward(const Tensor& d_hidden, const Tensor& streams, const SublayerWeights& w,
                           const HyperOptions& o, Numerics numerics, const HyperGrads& grads, const Tensor& d_norm) {
  require_frozen(grads, d_norm);
  const SublayerInput in = gpu::enter_sublayer(streams, w, o, numerics);
  return pre_backward({}, d_hidden, zeros({streams.size(0), kernels::kHyperOutputs}, DType::f32), streams, w, o,
                      in.mix);
}

}  // namespace plumb::ops::gpu
