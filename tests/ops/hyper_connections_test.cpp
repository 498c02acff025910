#include "ops/hyper_connections.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "base/philox.h"

namespace plumb::ops {
namespace {

constexpr int kStreams = 4, kWidth = 8;
const HyperOptions kOptions{20, 1e-6f, 1e-6f};

Tensor randn(Shape shape, uint64_t seed, float scale = 1) {
  Tensor t = Tensor::empty(std::move(shape));
  Random g(seed);
  for (int64_t i = 0; i < t.numel(); ++i) t.f32()[i] = scale * g.normal();
  return t;
}

HyperWeights random_weights(int outs, int scales, uint64_t seed) {
  return {randn({outs, kStreams * kWidth}, seed, 0.3f), randn({outs}, seed + 1, 0.5f), randn({scales}, seed + 2)};
}

// Golden of spec 3.9: row logits -> matrix, six digits printed there.
const float kLogits[16] = {1, 0, 0, 0, 0, 2, 0, 0, 0, 0, 3, 1, .5f, -1, 0, 4};

TEST(Sinkhorn, Golden) {
  const float want[16] = {.661039f, .169846f, .110271f, .058854f, .145858f, .752727f, .066139f, .035300f,
                          .087233f, .060926f, .794472f, .057387f, .105869f, .016501f, .029118f, .848458f};
  float c[16];
  sinkhorn(kLogits, c, 4, 20, 1e-6f);
  for (int i = 0; i < 16; ++i) EXPECT_NEAR(c[i], want[i], 1e-6f);
  for (int j = 0; j < 4; ++j)
    EXPECT_NEAR(c[j] + c[4 + j] + c[8 + j] + c[12 + j], .999999f, 1e-6f);  // columns come last
}

TEST(Sinkhorn, BackwardGolden) {  // spec 4.2: dM_k = sin(9*1.7 + .9k)
  float d_c[16], d_logits[16];
  for (int k = 0; k < 16; ++k) d_c[k] = static_cast<float>(std::sin(9 * 1.7 + .9 * k));
  sinkhorn_backward(kLogits, d_c, d_logits, 4, 20, 1e-6f);
  const float want[4] = {.130264f, -.064951f, -.061287f, -.004026f};
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(d_logits[i], want[i], 2e-6f);
}

TEST(HyperConnections, ZeroLogits) {  // spec A16
  HyperWeights w{Tensor::zeros({24, kStreams * kWidth}), Tensor::zeros({24}), Tensor::full({3}, 1)};
  HyperMix mix;
  hyper_pre(randn({3, kStreams, kWidth}, 1), w, kOptions, mix);
  for (int i = 0; i < 12; ++i) {
    EXPECT_NEAR(mix.pre.f32()[i], .500001f, 1e-7f);
    EXPECT_EQ(mix.post.f32()[i], 1);
  }
  for (int i = 0; i < 48; ++i) EXPECT_NEAR(mix.comb.f32()[i], .25f, 1e-6f);
}

// Defects T11, T12: comb must be applied with j as source and k as destination. A permutation shows a transposition at
// once.
TEST(HyperConnections, PermutationMovesStreamsFromSourceToDestination) {
  HyperMix mix{{}, {}, {}, Tensor::zeros({1, 4}), Tensor::zeros({1, 4, 4}), {}};
  const int to[4] = {1, 2, 3, 0};
  for (int j = 0; j < 4; ++j) mix.comb.f32()[j * 4 + to[j]] = 1;
  Tensor h = randn({1, kStreams, kWidth}, 5), next = hyper_post(Tensor::zeros({1, kWidth}), h, mix);
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < kWidth; ++i) EXPECT_EQ(next.f32()[to[j] * kWidth + i], h.f32()[j * kWidth + i]);
}

// B9: comb = I, pre = post = e_0 is a plain residual network on stream 0.
TEST(HyperConnections, PlainResidual) {
  HyperMix mix{{}, {}, {}, Tensor::of<float>({1, 0, 0, 0}, {1, 4}), Tensor::zeros({1, 4, 4}), {}};
  for (int j = 0; j < 4; ++j) mix.comb.f32()[j * 5] = 1;
  Tensor h = randn({1, kStreams, kWidth}, 5), f = randn({1, kWidth}, 6), next = hyper_post(f, h, mix);
  for (int i = 0; i < kWidth; ++i) EXPECT_EQ(next.f32()[i], f.f32()[i] + h.f32()[i]);
  for (int i = kWidth; i < 4 * kWidth; ++i) EXPECT_EQ(next.f32()[i], h.f32()[i]);
}

// Central differences of sum(probe * f) against the written-out gradient. FP32 function values of order 10 with step
// 4e-3 leave an error of about 1e-6 * 10 / 4e-3 = 3e-3 in a difference; gradients here are of order 1.
void check_gradient(const Tensor& x, const Tensor& grad, const std::function<double()>& f, const char* name) {
  const float step = 4e-3f;
  for (int64_t i = 0; i < x.numel(); i += std::max<int64_t>(1, x.numel() / 37)) {
    const float keep = x.f32()[i];
    x.f32()[i] = keep + step;
    const double up = f();
    x.f32()[i] = keep - step;
    const double down = f();
    x.f32()[i] = keep;
    EXPECT_NEAR(grad.f32()[i], (up - down) / (2 * step), 6e-3 + 4e-3 * std::fabs(grad.f32()[i])) << name << " " << i;
  }
}
double probe_sum(const Tensor& y, const Tensor& probe) {
  double s = 0;
  for (int64_t i = 0; i < y.numel(); ++i) s += double(y.f32()[i]) * probe.f32()[i];
  return s;
}

TEST(HyperConnections, PreAndPostGradients) {
  const int rows = 3;
  Tensor h = randn({rows, kStreams, kWidth}, 11), probe_y = randn({rows, kWidth}, 12), probe_n = randn(h.shape(), 13);
  HyperWeights w = random_weights(24, 3, 20);
  HyperMix mix;
  // The sublayer is y -> sin(y): its output depends on the streams, as in the model.
  auto sublayer = [](const Tensor& y) {
    Tensor f = Tensor::empty(y.shape());
    for (int64_t i = 0; i < y.numel(); ++i) f.f32()[i] = std::sin(y.f32()[i]);
    return f;
  };
  auto run = [&] {
    HyperMix m;
    Tensor y = hyper_pre(h, w, kOptions, m);
    return probe_sum(hyper_post(sublayer(y), h, m), probe_n);
  };
  Tensor y = hyper_pre(h, w, kOptions, mix), f = sublayer(y);
  HyperPostGrad g = hyper_post_backward(probe_n, f, h, mix);
  Tensor d_y = Tensor::empty(y.shape());
  for (int64_t i = 0; i < y.numel(); ++i) d_y.f32()[i] = g.d_out.f32()[i] * std::cos(y.f32()[i]);
  HyperGrads grads{Tensor::zeros(w.fn.shape()), Tensor::zeros({24}), Tensor::zeros({3})};
  hyper_pre_backward(d_y, g.d_post, g.d_comb, h, w, kOptions, mix, g.d_streams, grads);
  check_gradient(h, g.d_streams, run, "streams");
  check_gradient(w.fn, grads.fn, run, "fn");
  check_gradient(w.base, grads.base, run, "base");
  check_gradient(w.scale, grads.scale, run, "scale");
}

TEST(HyperConnections, HeadGradients) {
  Tensor h = randn({3, kStreams, kWidth}, 31), probe = randn({3, kWidth}, 32);
  HyperWeights w = random_weights(4, 1, 40);
  auto run = [&] { return probe_sum(hyper_head(h, w, kOptions), probe); };
  HyperGrads grads{Tensor::zeros(w.fn.shape()), Tensor::zeros({4}), Tensor::zeros({1})};
  Tensor d_h = hyper_head_backward(probe, h, w, kOptions, grads);
  check_gradient(h, d_h, run, "streams");
  check_gradient(w.fn, grads.fn, run, "fn");
  check_gradient(w.base, grads.base, run, "base");
  check_gradient(w.scale, grads.scale, run, "scale");
}

}  // namespace
}  // namespace plumb::ops
