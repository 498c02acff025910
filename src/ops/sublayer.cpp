#include "ops/sublayer.h"

#include "ops/gpu/dispatch.h"
#include "ops/norm.h"

namespace plumb::ops {
namespace {

Tensor contracted_for_head(const Tensor& streams, const SublayerWeights& w, const HyperOptions& o, Numerics numerics) {
  Tensor z = hyper_head(streams, w.hyper, o);
  round_point(numerics, Point::hc_head, z);
  return z;
}

}  // namespace

SublayerInput enter_sublayer(const Tensor& streams, const SublayerWeights& w, const HyperOptions& o,
                             Numerics numerics) {
  PLUMB_ON_GPU(streams, enter_sublayer(streams, w, o, numerics));
  SublayerInput in;
  in.y = hyper_pre(streams, w.hyper, o, in.mix);
  round_point(numerics, Point::hc_pre, in.y);
  in.x = rms_norm(in.y, w.norm, o.norm_eps, {numerics, Point::norm_block});
  return in;
}

Tensor leave_sublayer(const Tensor& out, const Tensor& streams, const HyperMix& mix, Numerics numerics) {
  PLUMB_ON_GPU(streams, leave_sublayer(out, streams, mix, numerics));
  Tensor next = hyper_post(out, streams, mix);
  round_point(numerics, Point::hc_post, next);
  return next;
}

Tensor pass_boundary(const Tensor& out, const Tensor& streams, const HyperMix& mix, const SublayerWeights& next,
                     const HyperOptions& o, Numerics numerics, SublayerInput& next_input) {
  PLUMB_ON_GPU(streams, pass_boundary(out, streams, mix, next, o, numerics, next_input));
  Tensor between = leave_sublayer(out, streams, mix, numerics);
  next_input = enter_sublayer(between, next, o, numerics);
  return between;
}

LeaveGrad leave_sublayer_backward(const Tensor& d_next, const Tensor& out, const Tensor& streams, const HyperMix& mix) {
  PLUMB_ON_GPU(streams, leave_sublayer_backward(d_next, out, streams, mix));
  const HyperPostGrad g = hyper_post_backward(d_next, out, streams, mix);
  return {g.d_out, g.d_streams, g.d_post, g.d_comb, {}, {}};
}

Tensor enter_sublayer_backward(const Tensor& d_x, const LeaveGrad& leave, const Tensor& streams,
                               const SublayerWeights& w, const HyperOptions& o, const SublayerInput& input,
                               const HyperGrads& grads, const Tensor& d_norm) {
  PLUMB_ON_GPU(streams, enter_sublayer_backward(d_x, leave, streams, w, o, input, grads, d_norm));
  const Tensor d_y = rms_norm_backward(d_x, input.y, w.norm, o.norm_eps, d_norm);
  hyper_pre_backward(d_y, leave.d_post, leave.d_comb, streams, w.hyper, o, input.mix, leave.d_streams, grads);
  return leave.d_streams;
}

Tensor head_input(const Tensor& streams, const SublayerWeights& w, const HyperOptions& o, Numerics numerics) {
  PLUMB_ON_GPU(streams, head_input(streams, w, o, numerics));
  return rms_norm(contracted_for_head(streams, w, o, numerics), w.norm, o.norm_eps, {numerics, Point::norm_final});
}

Tensor head_input_backward(const Tensor& d_hidden, const Tensor& streams, const SublayerWeights& w,
                           const HyperOptions& o, Numerics numerics, const HyperGrads& grads, const Tensor& d_norm) {
  PLUMB_ON_GPU(streams, head_input_backward(d_hidden, streams, w, o, numerics, grads, d_norm));
  const Tensor z = contracted_for_head(streams, w, o, numerics);
  const Tensor d_z = rms_norm_backward(d_hidden, z, w.norm, o.norm_eps, d_norm);
  return hyper_head_backward(d_z, streams, w.hyper, o, grads);
}

}  // namespace plumb::ops
