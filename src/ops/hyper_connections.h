// Manifold-constrained hyper-connections (mHC), spec 3.9, 4.2: n residual streams a token, mixed before and after each
// sublayer.
#pragma once
#include "base/tensor.h"

namespace plumb {

struct HyperWeights {  // of one sublayer; the head uses rows [0,n) only: fn [n, n*d], base [n], scale [1]
  Tensor fn;           // f32 [(2+n)*n, n*d]
  Tensor base;         // f32 [(2+n)*n]
  Tensor scale;        // f32 [3]: pre, post, comb
};
struct HyperGrads {  // += ; undefined = frozen
  Tensor fn, base, scale;
};
struct HyperOptions {
  int sinkhorn_iters = 20;
  float hc_eps = 1e-6f, norm_eps = 1e-6f;
};

namespace ops {

struct HyperMix {       // what hc_post and the backward pass need
  Tensor mix;           // [rows, (2+n)*n] = rho * (fn v), before scale and base
  Tensor rho;           // [rows]
  Tensor pre, post;     // [rows, n]
  Tensor comb;          // [rows, n, n], axes (source, destination)
  Tensor coefficients;  // on a GPU instead of pre, post and comb: all three, [rows, (2+n)*n]
};

// streams [rows, n, d] -> y [rows, d] = sum_j pre_j streams_j (not rounded), and the mix.
Tensor hyper_pre(const Tensor& streams, const HyperWeights& w, const HyperOptions& o, HyperMix& mix);
// h'_k = post_k * out + sum_j comb[j,k] * streams_j. -> [rows, n, d] (not rounded)
Tensor hyper_post(const Tensor& out, const Tensor& streams, const HyperMix& mix);
// Contraction before the final norm: weights fn [n, n*d], base [n], scale [1]. -> [rows, d] (not rounded)
Tensor hyper_head(const Tensor& streams, const HyperWeights& w, const HyperOptions& o);

// Backward of hyper_post: d_out [rows,d]; d_streams [rows,n,d] (assigned); d_post [rows,n], d_comb [rows,n,n]
// (assigned).
struct HyperPostGrad {
  Tensor d_out, d_streams, d_post, d_comb;
};
HyperPostGrad hyper_post_backward(const Tensor& d_next, const Tensor& out, const Tensor& streams, const HyperMix& mix);
// Backward of hyper_pre, given also the gradients of post and comb: d_streams [rows,n,d] +=.
void hyper_pre_backward(const Tensor& d_y, const Tensor& d_post, const Tensor& d_comb, const Tensor& streams,
                        const HyperWeights& w, const HyperOptions& o, const HyperMix& mix, const Tensor& d_streams,
                        const HyperGrads& grads);
// -> d_streams [rows,n,d]
Tensor hyper_head_backward(const Tensor& d_z, const Tensor& streams, const HyperWeights& w, const HyperOptions& o,
                           const HyperGrads& grads);

// [n,n] logits (source, destination) -> doubly stochastic up to eps; exposed for tests.
void sinkhorn(const float* logits, float* c, int n, int iters, float eps);
void sinkhorn_backward(const float* logits, const float* d_c, float* d_logits, int n, int iters, float eps);

}  // namespace ops
}  // namespace plumb
