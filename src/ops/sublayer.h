// The ends of a sublayer (attention, experts) at the residual streams: what it reads of them and how its output goes
// back. Compositions of hyper_connections.h and norm.h with their rounding points, in the pieces in which a GPU does
// them in one pass.
#pragma once
#include "base/tensor.h"
#include "ops/hyper_connections.h"
#include "ops/numerics.h"

namespace plumb::ops {

struct SublayerWeights {
  const HyperWeights& hyper;
  const Tensor& norm;  // f32 [d]
};

struct SublayerInput {
  HyperMix mix;
  Tensor y;  // [rows, d] contraction of the streams, rounded at hc_pre
  Tensor x;  // [rows, d] normed, rounded at norm_block: what the sublayer reads
};

// streams [rows, n, d].
SublayerInput enter_sublayer(const Tensor& streams, const SublayerWeights& w, const HyperOptions& o, Numerics numerics);
// out [rows, d]: what the sublayer gave. -> the next streams, rounded at hc_post
Tensor leave_sublayer(const Tensor& out, const Tensor& streams, const HyperMix& mix, Numerics numerics);
// leave_sublayer, then enter_sublayer of the one after it. -> the streams between them
Tensor pass_boundary(const Tensor& out, const Tensor& streams, const HyperMix& mix, const SublayerWeights& next,
                     const HyperOptions& o, Numerics numerics, SublayerInput& next_input);

// Backward in two halves, with the sublayer's own backward in between (d_out -> d_x).
struct LeaveGrad {
  Tensor d_out;                      // [rows, d]
  Tensor d_streams, d_post, d_comb;  // see HyperPostGrad; d_streams: the part that went around the sublayer
  Tensor d_next, d_coefficients;     // on a GPU instead of these three
};
LeaveGrad leave_sublayer_backward(const Tensor& d_next, const Tensor& out, const Tensor& streams, const HyperMix& mix);
// -> gradient of the streams that entered; `leave` is used up. grads and d_norm += ; undefined = frozen
Tensor enter_sublayer_backward(const Tensor& d_x, const LeaveGrad& leave, const Tensor& streams,
                               const SublayerWeights& w, const HyperOptions& o, const SublayerInput& input,
                               const HyperGrads& grads, const Tensor& d_norm);

// In front of the LM head: contraction, rounded at hc_head, and norm, rounded at norm_final. streams [rows, n, d] ->
// [rows, d].
Tensor head_input(const Tensor& streams, const SublayerWeights& w, const HyperOptions& o, Numerics numerics);
// -> d_streams; recomputes what it needs from the streams.
Tensor head_input_backward(const Tensor& d_hidden, const Tensor& streams, const SublayerWeights& w,
                           const HyperOptions& o, Numerics numerics, const HyperGrads& grads, const Tensor& d_norm);

}  // namespace plumb::ops
