#include "ops/hyper_connections.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/linear.h"
#include "ops/vector_math.h"

namespace plumb::ops {
namespace {

// 1 / (1 + e^-x)
Lanes sigmoid(Lanes x) { return splat(1) / (splat(1) + exp(splat(0) - x)); }
float sigmoid(float x) { return _mm256_cvtss_f32(sigmoid(splat(x))); }

// to += factor * from, n channels.
void add_multiple(float factor, const float* from, int64_t n, float* to) {
  for_lanes(n, [&](int64_t i, int64_t count) {
    store_part(to + i, fma(splat(factor), load_part(from + i, count), load_part(to + i, count)), count);
  });
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
      add_multiple(factor, v, width, dv);
    }
  });
}

// y = sum_j weight_j h_j for one token.
void contract(const float* h, const float* weight, int64_t n, int64_t d, float* y) {
  for_lanes(d, [&](int64_t i, int64_t count) {
    Lanes sum = splat(0);
    for (int64_t j = 0; j < n; ++j) sum = fma(splat(weight[j]), load_part(h + j * d + i, count), sum);
    store_part(y + i, sum, count);
  });
}

// The functions of an n x n matrix below work on eight matrices at once: lane l of every element belongs to matrix l.
// stride: n and 1 normalise rows, 1 and n columns.

// Y = X / (sum X + eps), in place.
void normalise(Lanes* c, int n, int stride_out, int stride_in, float eps) {
  for (int i = 0; i < n; ++i) {
    Lanes sum = splat(eps);
    for (int j = 0; j < n; ++j) sum += c[i * stride_out + j * stride_in];
    const Lanes inverse = splat(1) / sum;
    for (int j = 0; j < n; ++j) c[i * stride_out + j * stride_in] *= inverse;
  }
}
// In place on d: dX = (dY - sum dY Y) / (sum X + eps).
void normalise_backward(const Lanes* x, Lanes* d, int n, int stride_out, int stride_in, float eps) {
  for (int i = 0; i < n; ++i) {
    Lanes sum = splat(eps), along = splat(0);
    for (int j = 0; j < n; ++j) {
      const int at = i * stride_out + j * stride_in;
      sum += x[at];
      along = fma(d[at], x[at], along);
    }
    const Lanes inverse = splat(1) / sum;
    along *= inverse;
    for (int j = 0; j < n; ++j)
      d[i * stride_out + j * stride_in] = (d[i * stride_out + j * stride_in] - along) * inverse;
  }
}
void row_softmax(const Lanes* logits, Lanes* c, int n) {
  for (int i = 0; i < n; ++i) {
    Lanes top = logits[i * n], sum = splat(0);
    for (int j = 1; j < n; ++j) top = _mm256_max_ps(top, logits[i * n + j]);
    for (int j = 0; j < n; ++j) sum += c[i * n + j] = exp(logits[i * n + j] - top);
    for (int j = 0; j < n; ++j) c[i * n + j] /= sum;
  }
}

// Step t of the iteration normalises columns (t even) or rows; there are 2 iters - 1 of them after the softmax.
void sinkhorn_step(Lanes* c, int n, int t, float eps) {
  t % 2 == 0 ? normalise(c, n, 1, n, eps) : normalise(c, n, n, 1, eps);
}

void sinkhorn(const Lanes* logits, Lanes* c, int n, int iters, float eps) {
  row_softmax(logits, c, n);
  for (int i = 0; i < n * n; ++i) c[i] += splat(eps);
  for (int t = 0; t < 2 * iters - 1; ++t) sinkhorn_step(c, n, t, eps);
}

// history: space for 2 iters matrices, the input of every step.
void sinkhorn_backward(const Lanes* logits, const Lanes* d_c, Lanes* d_logits, int n, int iters, float eps,
                       Lanes* history) {
  const int size = n * n;
  Lanes* step = history;
  row_softmax(logits, step, n);
  for (int i = 0; i < size; ++i) step[i] += splat(eps);
  for (int t = 0; t < 2 * iters - 2; ++t, step += size) {
    std::copy(step, step + size, step + size);
    sinkhorn_step(step + size, n, t, eps);
  }
  std::copy(d_c, d_c + size, d_logits);
  for (int t = 2 * iters - 2; t >= 0; --t, step -= size)
    t % 2 == 0 ? normalise_backward(step, d_logits, n, 1, n, eps) : normalise_backward(step, d_logits, n, n, 1, eps);
  for (int i = 0; i < n; ++i) {  // the softmax: eps was added to it
    const Lanes* y = history + i * n;
    Lanes *d = d_logits + i * n, along = splat(0);
    for (int j = 0; j < n; ++j) along = fma(d[j], y[j] - splat(eps), along);
    for (int j = 0; j < n; ++j) d[j] = (y[j] - splat(eps)) * (d[j] - along);
  }
}

struct LaneBuffer {  // a vector would drop the alignment attribute of Lanes
  explicit LaneBuffer(int64_t n) : data(new Lanes[n]) {}
  ~LaneBuffer() { delete[] data; }
  LaneBuffer(const LaneBuffer&) = delete;
  Lanes& operator[](int64_t i) { return data[i]; }
  Lanes* const data;
};

// Element i of `count` (1 to 8) matrices that lie `stride` floats apart; lanes beyond them repeat the last one.
Lanes gather_lanes(const float* first, int64_t stride, int64_t count) {
  alignas(32) float v[kLanes];
  for (int64_t l = 0; l < kLanes; ++l) v[l] = first[std::min(l, count - 1) * stride];
  return load(v);
}
void scatter_lanes(Lanes x, float* first, int64_t stride, int64_t count) {
  alignas(32) float v[kLanes];
  store(v, x);
  for (int64_t l = 0; l < count; ++l) first[l * stride] = v[l];
}

// body(first row, rows) for groups of up to eight rows, on all threads.
template <class Body>
void for_row_groups(int64_t rows, Body&& body) {
  parallel_for((rows + kLanes - 1) / kLanes, 1, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) body(g * kLanes, std::min(kLanes, rows - g * kLanes));
  });
}

}  // namespace

void sinkhorn(const float* logits, float* c, int n, int iters, float eps) {
  LaneBuffer in(n * n), out(n * n);
  for (int i = 0; i < n * n; ++i) in[i] = splat(logits[i]);
  sinkhorn(in.data, out.data, n, iters, eps);
  for (int i = 0; i < n * n; ++i) c[i] = _mm256_cvtss_f32(out[i]);
}

void sinkhorn_backward(const float* logits, const float* d_c, float* d_logits, int n, int iters, float eps) {
  const int size = n * n;
  LaneBuffer in(size), d(size), out(size), history(2 * iters * size);
  for (int i = 0; i < size; ++i) in[i] = splat(logits[i]), d[i] = splat(d_c[i]);
  sinkhorn_backward(in.data, d.data, out.data, n, iters, eps, history.data);
  for (int i = 0; i < size; ++i) d_logits[i] = _mm256_cvtss_f32(out[i]);
}

Tensor hyper_pre(const Tensor& streams, const HyperWeights& w, const HyperOptions& o, HyperMix& mix) {
  const int64_t rows = streams.size(0), n = streams.size(1), d = streams.size(2), outs = (2 + n) * n;
  compute_mix(streams, w, o.norm_eps, mix.mix, mix.rho);
  mix.pre = Tensor::empty({rows, n});
  mix.post = Tensor::empty({rows, n});
  mix.comb = Tensor::empty({rows, n, n});
  Tensor y = Tensor::empty({rows, d});
  const float *base = w.base.f32(), *scale = w.scale.f32();
  for_row_groups(rows, [&](int64_t r, int64_t count) {
    LaneBuffer logits(n * n), comb(n * n);
    const float* m = mix.mix.f32() + r * outs;
    const auto logit = [&](int64_t j, int part) {
      return fma(gather_lanes(m + j, outs, count), splat(scale[part]), splat(base[j]));
    };
    for (int64_t j = 0; j < n; ++j) {
      scatter_lanes(sigmoid(logit(j, 0)) + splat(o.hc_eps), mix.pre.f32() + r * n + j, n, count);
      scatter_lanes(splat(2) * sigmoid(logit(n + j, 1)), mix.post.f32() + r * n + j, n, count);
    }
    for (int64_t i = 0; i < n * n; ++i) logits[i] = logit(2 * n + i, 2);
    sinkhorn(logits.data, comb.data, static_cast<int>(n), o.sinkhorn_iters, o.hc_eps);
    for (int64_t i = 0; i < n * n; ++i) scatter_lanes(comb[i], mix.comb.f32() + r * n * n + i, n * n, count);
    for (int64_t t = r; t < r + count; ++t)
      contract(streams.f32() + t * n * d, mix.pre.f32() + t * n, n, d, y.f32() + t * d);
  });
  return y;
}

Tensor hyper_post(const Tensor& out, const Tensor& streams, const HyperMix& mix) {
  const int64_t rows = streams.size(0), n = streams.size(1), d = streams.size(2);
  Tensor next = Tensor::empty(streams.shape());
  parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float *f = out.f32() + r * d, *h = streams.f32() + r * n * d, *comb = mix.comb.f32() + r * n * n;
      const float* post = mix.post.f32() + r * n;
      float* to = next.f32() + r * n * d;
      for_lanes(d, [&](int64_t i, int64_t count) {
        const Lanes out_part = load_part(f + i, count);
        for (int64_t k = 0; k < n; ++k) {  // k: destination stream, j: source stream
          Lanes sum = splat(post[k]) * out_part;
          for (int64_t j = 0; j < n; ++j) sum = fma(splat(comb[j * n + k]), load_part(h + j * d + i, count), sum);
          store_part(to + k * d + i, sum, count);
        }
      });
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
  HyperPostGrad g{Tensor::empty({rows, d}), Tensor::empty(streams.shape()), Tensor::empty({rows, n}),
                  Tensor::empty({rows, n, n})};
  parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float *f = out.f32() + r * d, *h = streams.f32() + r * n * d, *dn = d_next.f32() + r * n * d;
      const float *comb = mix.comb.f32() + r * n * n, *post = mix.post.f32() + r * n;
      float* dh = g.d_streams.f32() + r * n * d;
      contract(dn, post, n, d, g.d_out.f32() + r * d);
      for (int64_t j = 0; j < n; ++j) contract(dn, comb + j * n, n, d, dh + j * d);
      for (int64_t k = 0; k < n; ++k) {
        g.d_post.f32()[r * n + k] = dot(dn + k * d, f, d);
        for (int64_t j = 0; j < n; ++j) g.d_comb.f32()[(r * n + j) * n + k] = dot(dn + k * d, h + j * d, d);
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
  for_row_groups(rows, [&](int64_t first, int64_t count) {
    const int64_t size = n * n;
    LaneBuffer logits(size), d_out(size), d_in(size), history(2 * o.sinkhorn_iters * size);
    for (int64_t i = 0; i < size; ++i) {
      logits[i] = fma(gather_lanes(mix.mix.f32() + first * outs + 2 * n + i, outs, count), splat(scale[2]),
                      splat(base[2 * n + i]));
      d_out[i] = gather_lanes(d_comb.f32() + first * size + i, size, count);
    }
    sinkhorn_backward(logits.data, d_out.data, d_in.data, static_cast<int>(n), o.sinkhorn_iters, o.hc_eps,
                      history.data);
    for (int64_t i = 0; i < size; ++i) scatter_lanes(d_in[i], d_logit.f32() + first * outs + 2 * n + i, outs, count);
    for (int64_t r = first; r < first + count; ++r) {
      const float* dy = d_y.f32() + r * d;
      float* dl = d_logit.f32() + r * outs;
      for (int64_t j = 0; j < n; ++j) {
        const float pre = mix.pre.f32()[r * n + j], post = mix.post.f32()[r * n + j], s = pre - o.hc_eps;
        add_multiple(pre, dy, d, d_streams.f32() + (r * n + j) * d);
        dl[j] = dot(dy, streams.f32() + (r * n + j) * d, d) * s * (1 - s);
        dl[n + j] = d_post.f32()[r * n + j] * post * (1 - post / 2);
      }
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
