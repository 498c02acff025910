#include "ops/hyper_connections.h"

#include <cmath>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/linear.h"

namespace plumb::ops {
namespace {

float sigmoid(float x) { return static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(x)))); }

// Sixteen running sums, then a tree: the same bits at any vector width.
template <class Term>
float lane_sum(int64_t n, Term term) {
  float lane[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; ++j) lane[j] += term(i + j);
  for (int j = 0; i < n; ++i, ++j) lane[j] += term(i);
  for (int width = 8; width; width /= 2)
    for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
  return lane[0];
}
float dot(const float* a, const float* b, int64_t n) {
  return lane_sum(n, [=](int64_t i) { return a[i] * b[i]; });
}

// The mapping matrix as a weight: it is applied like every other one.
Linear mapping(const HyperWeights& w) {
  return {w.fn, {}, WeightFormat::f32, static_cast<int>(w.fn.size(0)), static_cast<int>(w.fn.size(1))};
}

// mix = rho * (fn v), rho = (mean(v^2) + eps)^(-1/2), v = the token's streams side by side.
void compute_mix(const Tensor& streams, const HyperWeights& w, float norm_eps, Tensor& mix, Tensor& rho) {
  const int64_t rows = streams.size(0), width = streams.size(1) * streams.size(2), outs = w.fn.size(0);
  PLUMB_CHECK(w.fn.size(1) == width, to_string(w.fn.shape()) + " for streams " + to_string(streams.shape()));
  mix = Tensor::empty({rows, outs});
  rho = Tensor::empty({rows});
  linear_into(streams.f32(), width, rows, mapping(w), mix.f32(), outs);
  parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* v = streams.f32() + r * width;
      const double mean = static_cast<double>(dot(v, v, width) / static_cast<float>(width)) + norm_eps;
      rho.f32()[r] = static_cast<float>(1.0 / std::sqrt(mean));
      for (int64_t j = 0; j < outs; ++j) mix.f32()[r * outs + j] *= rho.f32()[r];
    }
  });
}

// Adds the gradient that arrives at mix [rows, outs] to the streams and to fn, spec 4.2 ("rho path").
void mix_backward(const Tensor& d_mix, const Tensor& mix, const Tensor& rho, const Tensor& streams,
                  const HyperWeights& w, const Tensor& d_streams, const Tensor& d_fn) {
  const int64_t rows = streams.size(0), width = streams.size(1) * streams.size(2), outs = w.fn.size(0);
  Tensor scaled = Tensor::empty({rows, outs});
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < outs; ++j) scaled.f32()[r * outs + j] = rho.f32()[r] * d_mix.f32()[r * outs + j];
  linear_backward_input(scaled.f32(), outs, rows, mapping(w), d_streams.f32(), width, true);
  if (d_fn.defined()) linear_backward_weight(scaled.f32(), outs, streams.f32(), width, rows, d_fn);
  parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float along = 0;
      for (int64_t j = 0; j < outs; ++j) along += d_mix.f32()[r * outs + j] * mix.f32()[r * outs + j];
      const float factor = -along * rho.f32()[r] * rho.f32()[r] / static_cast<float>(width);
      const float* v = streams.f32() + r * width;
      float* dv = d_streams.f32() + r * width;
      for (int64_t i = 0; i < width; ++i) dv[i] += factor * v[i];
    }
  });
}

// y = sum_j weight_j h_j for one token.
void contract(const float* h, const float* weight, int64_t n, int64_t d, float* y) {
  for (int64_t i = 0; i < d; ++i) y[i] = weight[0] * h[i];
  for (int64_t j = 1; j < n; ++j)
    for (int64_t i = 0; i < d; ++i) y[i] += weight[j] * h[j * d + i];
}

void row_normalise(float* c, int n, float eps) {
  for (int i = 0; i < n; ++i) {
    float sum = 0;
    for (int j = 0; j < n; ++j) sum += c[i * n + j];
    for (int j = 0; j < n; ++j) c[i * n + j] /= sum + eps;
  }
}
void column_normalise(float* c, int n, float eps) {
  for (int j = 0; j < n; ++j) {
    float sum = 0;
    for (int i = 0; i < n; ++i) sum += c[i * n + j];
    for (int i = 0; i < n; ++i) c[i * n + j] /= sum + eps;
  }
}
void row_softmax(const float* logits, float* c, int n) {
  for (int i = 0; i < n; ++i) {
    float top = logits[i * n], sum = 0;
    for (int j = 1; j < n; ++j) top = std::max(top, logits[i * n + j]);
    for (int j = 0; j < n; ++j) {
      c[i * n + j] = static_cast<float>(std::exp(static_cast<double>(logits[i * n + j] - top)));
      sum += c[i * n + j];
    }
    for (int j = 0; j < n; ++j) c[i * n + j] /= sum;
  }
}

// Backward of a row (stride_in = 1) or column normalisation Y = X / (sum X + eps), in place on d: dX = (dY - sum dY Y)
// / (sum + eps).
void normalise_backward(const float* x, float* d, int n, int stride_out, int stride_in, float eps) {
  for (int i = 0; i < n; ++i) {
    float sum = eps, along = 0;
    for (int j = 0; j < n; ++j) sum += x[i * stride_out + j * stride_in];
    for (int j = 0; j < n; ++j) along += d[i * stride_out + j * stride_in] * x[i * stride_out + j * stride_in] / sum;
    for (int j = 0; j < n; ++j) d[i * stride_out + j * stride_in] = (d[i * stride_out + j * stride_in] - along) / sum;
  }
}

}  // namespace

void sinkhorn(const float* logits, float* c, int n, int iters, float eps) {
  row_softmax(logits, c, n);
  for (int i = 0; i < n * n; ++i) c[i] += eps;
  column_normalise(c, n, eps);
  for (int t = 1; t < iters; ++t) row_normalise(c, n, eps), column_normalise(c, n, eps);
}

void sinkhorn_backward(const float* logits, const float* d_c, float* d_logits, int n, int iters, float eps) {
  const int size = n * n;
  std::vector<float> history(static_cast<size_t>(2 * iters) * size);  // input of every normalisation, in order
  float* step = history.data();
  row_softmax(logits, step, n);
  for (int i = 0; i < size; ++i) step[i] += eps;
  for (int t = 0; t < 2 * iters - 2; ++t, step += size) {
    std::copy(step, step + size, step + size);
    t % 2 == 0 ? column_normalise(step + size, n, eps) : row_normalise(step + size, n, eps);
  }
  std::copy(d_c, d_c + size, d_logits);
  for (int t = 2 * iters - 2; t >= 0; --t, step -= size)
    t % 2 == 0 ? normalise_backward(step, d_logits, n, 1, n, eps) : normalise_backward(step, d_logits, n, n, 1, eps);
  const float* softmax = history.data();  // eps was added to it
  for (int i = 0; i < n; ++i) {
    float along = 0;
    for (int j = 0; j < n; ++j) along += d_logits[i * n + j] * (softmax[i * n + j] - eps);
    for (int j = 0; j < n; ++j) d_logits[i * n + j] = (softmax[i * n + j] - eps) * (d_logits[i * n + j] - along);
  }
}

Tensor hyper_pre(const Tensor& streams, const HyperWeights& w, const HyperOptions& o, HyperMix& mix) {
  const int64_t rows = streams.size(0), n = streams.size(1), d = streams.size(2), outs = (2 + n) * n;
  compute_mix(streams, w, o.norm_eps, mix.mix, mix.rho);
  mix.pre = Tensor::empty({rows, n});
  mix.post = Tensor::empty({rows, n});
  mix.comb = Tensor::empty({rows, n, n});
  Tensor y = Tensor::empty({rows, d});
  const float *base = w.base.f32(), *scale = w.scale.f32();
  parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    std::vector<float> logits(n * n);
    for (int64_t r = begin; r < end; ++r) {
      const float* m = mix.mix.f32() + r * outs;
      float *pre = mix.pre.f32() + r * n, *post = mix.post.f32() + r * n;
      for (int64_t j = 0; j < n; ++j) {
        pre[j] = sigmoid(m[j] * scale[0] + base[j]) + o.hc_eps;
        post[j] = 2 * sigmoid(m[n + j] * scale[1] + base[n + j]);
      }
      for (int64_t i = 0; i < n * n; ++i) logits[i] = m[2 * n + i] * scale[2] + base[2 * n + i];
      sinkhorn(logits.data(), mix.comb.f32() + r * n * n, static_cast<int>(n), o.sinkhorn_iters, o.hc_eps);
      contract(streams.f32() + r * n * d, pre, n, d, y.f32() + r * d);
    }
  });
  return y;
}

Tensor hyper_post(const Tensor& out, const Tensor& streams, const HyperMix& mix) {
  const int64_t rows = streams.size(0), n = streams.size(1), d = streams.size(2);
  Tensor next = Tensor::empty(streams.shape());
  parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float *f = out.f32() + r * d, *h = streams.f32() + r * n * d, *comb = mix.comb.f32() + r * n * n;
      for (int64_t k = 0; k < n; ++k) {  // k: destination stream, j: source stream
        const float post = mix.post.f32()[r * n + k];
        float* to = next.f32() + (r * n + k) * d;
        for (int64_t i = 0; i < d; ++i) to[i] = post * f[i];
        for (int64_t j = 0; j < n; ++j)
          for (int64_t i = 0; i < d; ++i) to[i] += comb[j * n + k] * h[j * d + i];
      }
    }
  });
  return next;
}

Tensor hyper_head(const Tensor& streams, const HyperWeights& w, const HyperOptions& o) {
  const int64_t rows = streams.size(0), n = streams.size(1), d = streams.size(2);
  Tensor mix, rho, z = Tensor::empty({rows, d});
  compute_mix(streams, w, o.norm_eps, mix, rho);
  parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    std::vector<float> pre(n);
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t j = 0; j < n; ++j)
        pre[j] = sigmoid(mix.f32()[r * n + j] * w.scale.f32()[0] + w.base.f32()[j]) + o.hc_eps;
      contract(streams.f32() + r * n * d, pre.data(), n, d, z.f32() + r * d);
    }
  });
  return z;
}

HyperPostGrad hyper_post_backward(const Tensor& d_next, const Tensor& out, const Tensor& streams, const HyperMix& mix) {
  const int64_t rows = streams.size(0), n = streams.size(1), d = streams.size(2);
  HyperPostGrad g{Tensor::zeros({rows, d}), Tensor::zeros(streams.shape()), Tensor::empty({rows, n}),
                  Tensor::empty({rows, n, n})};
  parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float *f = out.f32() + r * d, *h = streams.f32() + r * n * d, *comb = mix.comb.f32() + r * n * n;
      for (int64_t k = 0; k < n; ++k) {
        const float* dn = d_next.f32() + (r * n + k) * d;
        const float post = mix.post.f32()[r * n + k];
        float* d_out = g.d_out.f32() + r * d;
        for (int64_t i = 0; i < d; ++i) d_out[i] += post * dn[i];
        g.d_post.f32()[r * n + k] = dot(dn, f, d);
        for (int64_t j = 0; j < n; ++j) {
          float* dh = g.d_streams.f32() + (r * n + j) * d;
          for (int64_t i = 0; i < d; ++i) dh[i] += comb[j * n + k] * dn[i];
          g.d_comb.f32()[(r * n + j) * n + k] = dot(dn, h + j * d, d);
        }
      }
    }
  });
  return g;
}

void hyper_pre_backward(const Tensor& d_y, const Tensor& d_post, const Tensor& d_comb, const Tensor& streams,
                        const HyperWeights& w, const HyperOptions& o, const HyperMix& mix, const Tensor& d_streams,
                        const HyperGrads& grads) {
  const int64_t rows = streams.size(0), n = streams.size(1), d = streams.size(2), outs = (2 + n) * n;
  const float *base = w.base.f32(), *scale = w.scale.f32();
  Tensor d_logit = Tensor::empty({rows, outs}), d_mix = Tensor::empty({rows, outs});
  parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    std::vector<float> logits(n * n);
    for (int64_t r = begin; r < end; ++r) {
      const float *m = mix.mix.f32() + r * outs, *dy = d_y.f32() + r * d;
      float* dl = d_logit.f32() + r * outs;
      for (int64_t j = 0; j < n; ++j) {
        const float *h = streams.f32() + (r * n + j) * d, pre = mix.pre.f32()[r * n + j],
                    post = mix.post.f32()[r * n + j];
        float* dh = d_streams.f32() + (r * n + j) * d;
        for (int64_t i = 0; i < d; ++i) dh[i] += pre * dy[i];
        const float s = pre - o.hc_eps;
        dl[j] = dot(dy, h, d) * s * (1 - s);
        dl[n + j] = d_post.f32()[r * n + j] * post * (1 - post / 2);
      }
      for (int64_t i = 0; i < n * n; ++i) logits[i] = m[2 * n + i] * scale[2] + base[2 * n + i];
      sinkhorn_backward(logits.data(), d_comb.f32() + r * n * n, dl + 2 * n, static_cast<int>(n), o.sinkhorn_iters,
                        o.hc_eps);
      for (int64_t j = 0; j < outs; ++j) d_mix.f32()[r * outs + j] = dl[j] * scale[j < n ? 0 : j < 2 * n ? 1 : 2];
    }
  });
  for (int64_t r = 0; r < rows; ++r)  // in order of rows
    for (int64_t j = 0; j < outs; ++j) {
      const float dl = d_logit.f32()[r * outs + j];
      if (grads.base.defined()) grads.base.f32()[j] += dl;
      if (grads.scale.defined()) grads.scale.f32()[j < n ? 0 : j < 2 * n ? 1 : 2] += dl * mix.mix.f32()[r * outs + j];
    }
  mix_backward(d_mix, mix.mix, mix.rho, streams, w, d_streams, grads.fn);
}

Tensor hyper_head_backward(const Tensor& d_z, const Tensor& streams, const HyperWeights& w, const HyperOptions& o,
                           const HyperGrads& grads) {
  const int64_t rows = streams.size(0), n = streams.size(1), d = streams.size(2);
  Tensor mix, rho, d_streams = Tensor::empty(streams.shape()), d_logit = Tensor::empty({rows, n}),
                   d_mix = Tensor::empty({rows, n});
  compute_mix(streams, w, o.norm_eps, mix, rho);
  parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t j = 0; j < n; ++j) {
        const float s = sigmoid(mix.f32()[r * n + j] * w.scale.f32()[0] + w.base.f32()[j]);
        const float *dz = d_z.f32() + r * d, *h = streams.f32() + (r * n + j) * d;
        float* dh = d_streams.f32() + (r * n + j) * d;
        for (int64_t i = 0; i < d; ++i) dh[i] = (s + o.hc_eps) * dz[i];
        d_logit.f32()[r * n + j] = dot(dz, h, d) * s * (1 - s);
        d_mix.f32()[r * n + j] = d_logit.f32()[r * n + j] * w.scale.f32()[0];
      }
  });
  for (int64_t i = 0; i < rows * n; ++i) {
    if (grads.base.defined()) grads.base.f32()[i % n] += d_logit.f32()[i];
    if (grads.scale.defined()) grads.scale.f32()[0] += d_logit.f32()[i] * mix.f32()[i];
  }
  mix_backward(d_mix, mix, rho, streams, w, d_streams, grads.fn);
  return d_streams;
}

}  // namespace plumb::ops
