#include "ops/moe.h"

#include <numeric>

#include "base/error.h"
#include "linear_testing.h"

namespace plumb {
namespace {

using ops::ExpertGrads;
using ops::ExpertLora;
using ops::ExpertLoraGrad;
using ops::ExpertLoraRows;
using ops::RouterOptions;
using ops::Routing;
using ops::SharedLora;

// ---- router
// ------------------------------------------------------------------------------------------------------------

Linear dense(Tensor data) {
  Linear w;
  w.out = static_cast<int>(data.size(0)), w.in = static_cast<int>(data.size(1)), w.data = std::move(data);
  return w;
}
Linear diagonal(const std::vector<float>& values) {
  const int n = static_cast<int>(values.size());
  Tensor t = Tensor::zeros({n, n});
  for (int i = 0; i < n; ++i) t.f32()[i * n + i] = values[i];
  return dense(t);
}

TEST(Router, GoldenScores) {
  const RouterWeights w{diagonal({-4, -1, 0, 1, 4}), {}, {}};
  const Routing r = ops::route(Tensor::full({1, 5}, 1), {}, w, {1, 1.0f});
  const float want[] = {0.134722f, 0.559698f, 0.832555f, 1.145976f, 2.004532f};
  const float slope[] = {0.066753f, 0.240256f, 0.300281f, 0.318968f, 0.244948f};
  for (int e = 0; e < 5; ++e) EXPECT_NEAR(r.score.f32()[e], want[e], 6e-7);
  // A score gradient of 1 everywhere gives the derivative of each score; the weight's own gradient is off.
  Tensor d_gate = Tensor::zeros({5, 5});
  ops::route_backward(Tensor::zeros({1, 1}), Tensor::full({1, 5}, 1), Tensor::full({1, 5}, 1), w, r, {1, 1.0f}, d_gate);
  for (int e = 0; e < 5; ++e) EXPECT_NEAR(d_gate.f32()[e * 5], slope[e], 6e-7);
}

TEST(Router, GoldenWeights) {
  std::vector<float> z(6);
  for (int i = 0; i < 6; ++i) z[i] = static_cast<float>(std::sin(1.7 * 160 + 0.9 * i));
  const Routing r = ops::route(Tensor::full({1, 6}, 1), {}, {diagonal(z), Tensor::zeros({6}), {}}, {6, 1.5f});
  const float want[] = {0.353445f, 0.297951f, 0.217411f, 0.175497f, 0.192904f, 0.262793f};
  float last = 1e9f, sum = 0;
  for (int j = 0; j < 6; ++j) {
    const int e = r.expert.ptr<int32_t>()[j];
    EXPECT_NEAR(r.weight.f32()[j], want[e], 6e-7);
    EXPECT_LE(r.weight.f32()[j], last);  // slots by descending score
    last = r.weight.f32()[j], sum += last;
  }
  EXPECT_NEAR(sum, 1.5, 1e-6);
}

TEST(Router, TiesBiasHashAndReplay) {
  const Tensor x = Tensor::full({2, 5}, 1);
  const Linear gate = diagonal({1, 2, 2, 1, 2});
  const auto chosen = [](const Routing& r) {
    return std::vector<int>(r.expert.ptr<int32_t>(), r.expert.ptr<int32_t>() + r.expert.numel());
  };
  const RouterOptions three{3, 1.0f};
  EXPECT_EQ(chosen(ops::route(x, {}, {gate, Tensor::zeros({5}), {}}, three)), (std::vector<int>{1, 2, 4, 1, 2, 4}));
  const Tensor bias = Tensor::of<float>({0, 0, 0, 9, 0.5f});
  const Routing biased = ops::route(x, {}, {gate, bias, {}}, three);
  EXPECT_EQ(chosen(biased), (std::vector<int>{3, 4, 1, 3, 4, 1}));
  EXPECT_LT(biased.weight.f32()[0], biased.weight.f32()[1]);  // the bias chooses but does not weigh
  const Tensor table = Tensor::of<int32_t>({0, 1, 2, 4, 3, 0}, {2, 3});
  const RouterWeights hash{gate, {}, table};
  EXPECT_EQ(chosen(ops::route(x, Tensor::of<int32_t>({1, 0}), hash, three)), (std::vector<int>{4, 3, 0, 0, 1, 2}));
  EXPECT_THROW(ops::route(x, Tensor::of<int32_t>({1, 2}), hash, three), Error);
  const Tensor forced = Tensor::of<int32_t>({0, 3, 1, 4, 2, 3}, {2, 3});
  const Routing replay = ops::route(x, {}, {gate, bias, {}}, three, forced);
  EXPECT_EQ(chosen(replay), (std::vector<int>{0, 3, 1, 4, 2, 3}));
  EXPECT_EQ(replay.weight.f32()[0], replay.weight.f32()[1]);  // equal logits
  EXPECT_THROW(ops::route(x, {}, {gate, bias, {}}, three, Tensor::of<int32_t>({0, 3, 5, 4, 2, 3}, {2, 3})), Error);
  EXPECT_THROW(ops::route(x, {}, {gate, bias, {}}, {6, 1.0f}), Error);
}

TEST(Router, VeryNegativeLogitsAndNans) {
  const RouterWeights w{diagonal({-300, -250, -210}), Tensor::zeros({3}), {}};
  const Tensor x = Tensor::full({1, 3}, 1);
  const Routing r = ops::route(x, {}, w, {2, 1.5f});  // all scores underflow to 0
  Tensor d_gate = Tensor::zeros({3, 3});
  ops::route_backward(Tensor::full({1, 2}, 1), {}, x, w, r, {2, 1.5f}, d_gate);
  for (int i = 0; i < 9; ++i) EXPECT_TRUE(std::isfinite(d_gate.f32()[i]));
  EXPECT_TRUE(std::isfinite(r.weight.f32()[0]) && std::isfinite(r.weight.f32()[1]));
  d_gate.zero();
  const RouterWeights steep{diagonal({-40, -60, 1}), Tensor::zeros({3}), {}};
  const Routing s = ops::route(x, {}, steep, {2, 1.0f});
  ops::route_backward(Tensor::zeros({1, 2}), Tensor::full({1, 3}, 1), x, steep, s, {2, 1.0f}, d_gate);
  EXPECT_NEAR(d_gate.f32()[0] / (std::exp(-20.0) / 2), 1, 1e-6);
  EXPECT_NEAR(d_gate.f32()[3] / (std::exp(-30.0) / 2), 1, 1e-6);

  const Routing nan = ops::route(Tensor::full({1, 3}, NAN), {}, w, {2, 1.5f});
  EXPECT_NE(nan.expert.ptr<int32_t>()[0], nan.expert.ptr<int32_t>()[1]);  // a broken row stays a legal choice
}

Routing scores(const std::vector<float>& a, int experts, int k) {
  const int64_t rows = static_cast<int64_t>(a.size()) / experts;
  return {Tensor::zeros({rows, k}, DType::i32), Tensor::zeros({rows, k}), Tensor::of<float>(a, {rows, experts}), {}};
}

TEST(Balance, GoldenAndDifferences) {
  const std::vector<float> a = {.9f, .4f, .1f, .2f, .3f, .8f, .5f, .1f, .7f, .6f, .2f, .4f};
  EXPECT_NEAR(ops::balance_loss(scores(a, 4, 2), {0, 0, 0}, 1, {}), 1.285733, 1e-6);

  // Two documents, interleaved: the mean of their own losses.
  std::vector<float> two;
  for (int row = 0; row < 3; ++row) {
    two.insert(two.end(), a.begin() + 4 * row, a.begin() + 4 * row + 4);
    if (row < 2) two.insert(two.end(), {.5f, .25f, .3f, .6f});
  }
  const std::vector<int> document = {7, 3, 7, 3, 7};
  const double other = ops::balance_loss(scores({.5f, .25f, .3f, .6f}, 4, 2), {0}, 1, {});
  Tensor d = Tensor::full({5, 4}, 1);
  const double loss = ops::balance_loss(scores(two, 4, 2), document, 0.5f, d);
  EXPECT_NEAR(loss, (1.285733 + other) / 2, 1e-6);
  for (int i = 0; i < 20; ++i) {  // FP32 inputs: a difference of 2e-3 has a relative error of 1e-4
    std::vector<float> up = two, down = two;
    up[i] += 1e-3f, down[i] -= 1e-3f;
    const double slope = (ops::balance_loss(scores(up, 4, 2), document, 1, {}) -
                          ops::balance_loss(scores(down, 4, 2), document, 1, {})) /
                         (double{up[i]} - down[i]);
    EXPECT_NEAR(d.f32()[i], 1 + 0.5 * slope, 2e-5);
  }
}

// ---- experts
// -----------------------------------------------------------------------------------------------------------

TEST(SharedExpert, GoldenClampedSwiglu) {
  ExpertWeights w{dense(Tensor::of<float>({1, 0}, {1, 2})), dense(Tensor::of<float>({0, 1}, {1, 2})),
                  dense(Tensor::full({1, 1}, 1))};
  const float gate_up[][2] = {{1.3f, -2}, {12, 3}, {-14, 3}, {2, 11}, {2, -11}};
  const float value[] = {-2.043171f, 29.998638f, -3.5e-5f, 17.615942f, -17.615942f};
  const float slope[][2] = {{-2.009246f, 1.021585f}, {0, 9.999546f}, {}, {10.907842f, 0}, {-10.907842f, 0}};
  for (int i = 0; i < 5; ++i) {
    const Tensor x = Tensor::of<float>({gate_up[i][0], gate_up[i][1]}, {1, 2});
    EXPECT_NEAR(ops::shared_expert(x, w, 10, {}, Numerics::fp32).f32()[0], value[i], 3e-6);
    if (i == 2) continue;
    const Tensor dx = ops::shared_expert_backward(Tensor::full({1, 1}, 1), x, w, 10, {}, Numerics::fp32, {}, {});
    EXPECT_NEAR(dx.f32()[0], slope[i][0], 3e-6);
    EXPECT_NEAR(dx.f32()[1], slope[i][1], 3e-6);
  }
  // At the limit the gradient passes; a limit of 0 is none.
  const Tensor edge = Tensor::of<float>({10, 10}, {1, 2}), one = Tensor::full({1, 1}, 1);
  const Tensor dx = ops::shared_expert_backward(one, edge, w, 10, {}, Numerics::fp32, {}, {});
  EXPECT_NEAR(dx.f32()[0], 10, 0.01);
  EXPECT_NEAR(dx.f32()[1], 10, 0.01);
  EXPECT_NEAR(ops::shared_expert(Tensor::of<float>({12, 30}, {1, 2}), w, 0, {}, Numerics::fp32).f32()[0], 360, 0.01);
}

// A whole layer of experts and the same in FP64, written from the formulas.
struct Layer {
  static constexpr int rows = 13, d = 32, f = 19, experts = 5, k = 2, r = 3;
  static constexpr float limit = 0.8f;  // cuts a good part of the values
  Tensor x, d_out;
  RouterWeights router;
  RouterOptions options{k, 1.5f};
  std::vector<ExpertWeights> expert;
  ExpertLora lora;
  std::vector<int> lora_rows{0, 2, 3, 7, 8, 12};

  explicit Layer(uint64_t seed, WeightFormat format = WeightFormat::f32) {
    Random random(seed);
    x = random_tensor({rows, d}, random), d_out = random_tensor({rows, d}, random);
    router = {random_linear(WeightFormat::f32, experts, d, random), random_tensor({experts}, random, 0.1f), {}};
    for (int e = 0; e < experts; ++e) {
      expert.push_back({random_linear(format, f, d, random), random_linear(format, f, d, random),
                        random_linear(WeightFormat::f32, d, f, random)});
      lora.gate_up.push_back({random_tensor({r, d}, random, 0.3f), random_tensor({2 * f, r}, random, 0.3f), 0.5f});
      lora.down.push_back({random_tensor({r, f}, random, 0.3f), random_tensor({d, r}, random, 0.3f), 0.25f});
    }
  }
  std::vector<ExpertLoraRows> adapters() const { return {{&lora, &lora_rows}}; }
  Tensor forward(const Routing& routing, Numerics numerics = Numerics::fp32) const {
    return ops::routed_experts(x, routing, expert, limit, adapters(), numerics);
  }
};

struct LayerFp64 {
  struct Weights {
    Doubles w1, w3, w2, gu_a, gu_b, dn_a, dn_b;
  };
  const Layer& l;
  std::vector<int> chosen;
  Doubles x, gate;
  std::vector<Weights> e;

  LayerFp64(const Layer& layer, const Routing& r)
      : l(layer),
        chosen(r.expert.ptr<int32_t>(), r.expert.ptr<int32_t>() + r.expert.numel()),
        x(doubles(layer.x)),
        gate(doubles(layer.router.gate.data)) {
    for (int i = 0; i < Layer::experts; ++i)
      e.push_back({doubles(l.expert[i].w1.data), doubles(l.expert[i].w3.data), doubles(l.expert[i].w2.data),
                   doubles(l.lora.gate_up[i].a), doubles(l.lora.gate_up[i].b), doubles(l.lora.down[i].a),
                   doubles(l.lora.down[i].b)});
  }
  static Doubles apply(const Doubles& w, const Doubles& in) {
    return product(in, w, 1, static_cast<int64_t>(w.size() / in.size()), static_cast<int64_t>(in.size()));
  }
  Doubles row(int t) const {
    constexpr int f = Layer::f;
    const Doubles in(x.begin() + t * Layer::d, x.begin() + (t + 1) * Layer::d);
    const bool adapted = std::find(l.lora_rows.begin(), l.lora_rows.end(), t) != l.lora_rows.end();
    Doubles score = apply(gate, in), out(Layer::d);
    double total = 0;
    for (double& z : score) z = std::sqrt(std::log1p(std::exp(z)));
    for (int j = 0; j < Layer::k; ++j) total += score[chosen[t * Layer::k + j]];
    for (int j = 0; j < Layer::k; ++j) {
      const int id = chosen[t * Layer::k + j];
      const Weights& w = e[id];
      Doubles g = apply(w.w1, in), u = apply(w.w3, in), hid(f);
      if (adapted) {
        const Doubles delta = apply(w.gu_b, apply(w.gu_a, in));
        for (int i = 0; i < f; ++i) g[i] += 0.5 * delta[i], u[i] += 0.5 * delta[f + i];
      }
      for (int i = 0; i < f; ++i) {
        const double cut = std::min(g[i], double{Layer::limit});
        const double up = std::clamp(u[i], -double{Layer::limit}, double{Layer::limit});
        hid[i] = cut / (1 + std::exp(-cut)) * up * score[id] / total * 1.5;
      }
      Doubles y = apply(w.w2, hid);
      if (adapted) {
        const Doubles delta = apply(w.dn_b, apply(w.dn_a, hid));
        for (int i = 0; i < Layer::d; ++i) y[i] += 0.25 * delta[i];
      }
      for (int i = 0; i < Layer::d; ++i) out[i] += y[i];
    }
    return out;
  }
  double loss() const {
    double sum = 0;
    for (int t = 0; t < Layer::rows; ++t) {
      const Doubles out = row(t);
      for (int i = 0; i < Layer::d; ++i) sum += out[i] * l.d_out.f32()[t * Layer::d + i];
    }
    return sum;
  }
};

TEST(Experts, ForwardMatchesFp64) {
  const Layer l(21);
  const Routing r = ops::route(l.x, {}, l.router, l.options);
  const LayerFp64 want(l, r);
  const Tensor y = l.forward(r);
  for (int t = 0; t < Layer::rows; ++t) {
    const Doubles row = want.row(t);  // FP32 sums of up to 32 terms of size 1
    for (int i = 0; i < Layer::d; ++i) ASSERT_NEAR(y.f32()[t * Layer::d + i], row[i], 3e-6);
  }
}

// Router and experts together: the loss as a function of every kind of parameter, choices held.
TEST(Experts, BackwardMatchesDifferences) {
  const Layer l(22);
  const Routing r = ops::route(l.x, {}, l.router, l.options);
  LayerFp64 v(l, r);
  std::vector<ExpertGrads> grads;
  ExpertLoraGrad lora;
  for (int e = 0; e < Layer::experts; ++e) {
    grads.push_back({Tensor::zeros({Layer::f, Layer::d}), Tensor::zeros({Layer::f, Layer::d}),
                     Tensor::zeros({Layer::d, Layer::f})});
    lora.gate_up.push_back({Tensor::zeros({Layer::r, Layer::d}), Tensor::zeros({2 * Layer::f, Layer::r})});
    lora.down.push_back({Tensor::zeros({Layer::r, Layer::f}), Tensor::zeros({Layer::d, Layer::r})});
  }
  const ops::RoutedBackward b = ops::routed_experts_backward(l.d_out, l.x, r, l.expert, Layer::limit, l.adapters(),
                                                             Numerics::fp32, grads, {lora});
  Tensor d_gate = Tensor::zeros({Layer::experts, Layer::d});
  const Tensor from_router = ops::route_backward(b.d_weight, {}, l.x, l.router, r, l.options, d_gate);
  Tensor dx = b.dx.clone();
  for (int64_t i = 0; i < dx.numel(); ++i) dx.f32()[i] += from_router.f32()[i];

  Random random(23);
  // FP32 sums with terms up to 10; a clamp edge within h of a value has probability 1e-6 and these seeds meet none.
  const auto check = [&](const char* what, const Tensor& gradient, Doubles& parameter, int samples) {
    for (int s = 0; s < samples; ++s) {
      const size_t i = random.below(static_cast<uint32_t>(parameter.size()));
      EXPECT_NEAR(gradient.f32()[i],
                  slope(
                      parameter, i, [&] { return v.loss(); }, 1e-6),
                  3e-5)
          << what << " " << i;
    }
  };
  check("x", dx, v.x, 60);
  check("gate", d_gate, v.gate, 40);
  for (int e = 0; e < Layer::experts; ++e) {
    check("w1", grads[e].w1, v.e[e].w1, 8), check("w3", grads[e].w3, v.e[e].w3, 8),
        check("w2", grads[e].w2, v.e[e].w2, 8);
    check("gate_up.a", lora.gate_up[e].a, v.e[e].gu_a, 8), check("gate_up.b", lora.gate_up[e].b, v.e[e].gu_b, 12);
    check("down.a", lora.down[e].a, v.e[e].dn_a, 8), check("down.b", lora.down[e].b, v.e[e].dn_b, 8);
  }
}

TEST(Experts, SharedExpertIsARoutedOneOfWeightOne) {
  const Layer l(24);
  Routing r{Tensor::zeros({Layer::rows, 1}, DType::i32), Tensor::full({Layer::rows, 1}, 1), {}, {}};
  const LoraPair &gu = l.lora.gate_up[0], &dn = l.lora.down[0];
  const LoraPair gate{gu.a, gu.b.rows(0, Layer::f), gu.scale}, up{gu.a, gu.b.rows(Layer::f, 2 * Layer::f), gu.scale};
  const SharedLora lora{{{&gate, &l.lora_rows}}, {{&up, &l.lora_rows}}, {{&dn, &l.lora_rows}}};
  for (Numerics n : {Numerics::fp32, Numerics::released}) {  // the points of both are of the same kinds
    EXPECT_TRUE(same_bits(l.forward(r, n), ops::shared_expert(l.x, l.expert[0], Layer::limit, lora, n)));
    ExpertGrads a{Tensor::zeros({Layer::f, Layer::d}), {}, Tensor::zeros({Layer::d, Layer::f})},
        b{Tensor::zeros({Layer::f, Layer::d}), {}, Tensor::zeros({Layer::d, Layer::f})};
    std::vector<ExpertGrads> all(Layer::experts);
    all[0] = a;
    const Tensor dx =
        ops::routed_experts_backward(l.d_out, l.x, r, l.expert, Layer::limit, l.adapters(), n, all, {}).dx;
    // One pair for gate and up adds both gradients before it meets A, two pairs afterwards: equal up to rounding.
    const Tensor shared_dx = ops::shared_expert_backward(l.d_out, l.x, l.expert[0], Layer::limit, lora, n, b, {});
    EXPECT_LT(relative_error(dx, doubles(shared_dx)), 1e-6);
    EXPECT_TRUE(same_bits(a.w1, b.w1) && same_bits(a.w2, b.w2));
  }
}

Routing take(const Routing& r, const std::vector<int>& rows) {
  Tensor expert = Tensor::empty({static_cast<int64_t>(rows.size()), r.expert.size(1)}, DType::i32);
  for (size_t i = 0; i < rows.size(); ++i)
    std::copy_n(r.expert.ptr<int32_t>() + rows[i] * r.expert.size(1), r.expert.size(1),
                expert.ptr<int32_t>() + static_cast<int64_t>(i) * r.expert.size(1));
  return {expert, take_rows(r.weight, rows), take_rows(r.score, rows), take_rows(r.logits, rows)};
}

TEST(Experts, ARowHasTheSameBitsInAnyBatchOnAnyThreads) {
  RestoreThreads restore;
  for (WeightFormat format : {WeightFormat::fp4, WeightFormat::bf16})
    for (Numerics n : {Numerics::fp32, Numerics::released}) {
      const Layer l(25, format);
      const Routing r = ops::route(l.x, {}, l.router, l.options);
      const Tensor y = l.forward(r, n);
      const auto back = ops::routed_experts_backward(l.d_out, l.x, r, l.expert, Layer::limit, l.adapters(), n, {}, {});
      Random random(26);
      for (int trial = 0; trial < 12; ++trial) {
        set_thread_count(1 + trial % 4);
        std::vector<int> rows(1 + random.below(trial < 4 ? 2 : 40)), adapted;
        for (size_t i = 0; i < rows.size(); ++i) {
          rows[i] = static_cast<int>(random.below(Layer::rows));
          if (std::find(l.lora_rows.begin(), l.lora_rows.end(), rows[i]) != l.lora_rows.end())
            adapted.push_back(static_cast<int>(i));
        }
        const Tensor x = take_rows(l.x, rows), d_out = take_rows(l.d_out, rows);
        const Routing again = ops::route(x, {}, l.router, l.options), part = take(r, rows);
        EXPECT_TRUE(same_bits(again.weight, part.weight) && same_bits(again.expert, part.expert));
        const Tensor some = ops::routed_experts(x, part, l.expert, Layer::limit, {{&l.lora, &adapted}}, n);
        const auto some_back =
            ops::routed_experts_backward(d_out, x, part, l.expert, Layer::limit, {{&l.lora, &adapted}}, n, {}, {});
        EXPECT_TRUE(same_bits(some, take_rows(y, rows)));
        EXPECT_TRUE(same_bits(some_back.dx, take_rows(back.dx, rows)));
        EXPECT_TRUE(same_bits(some_back.d_weight, take_rows(back.d_weight, rows)));
      }
    }
}

TEST(Experts, IdleExpertsGetNoGradientAndNoRowsAreLegal) {
  const Layer l(27);
  Routing r = ops::route(l.x, {}, l.router, l.options);
  for (int64_t i = 0; i < r.expert.numel(); ++i) r.expert.ptr<int32_t>()[i] = static_cast<int>(1 + i % 2);
  std::vector<ExpertGrads> grads(Layer::experts);
  for (ExpertGrads& g : grads) g.w1 = Tensor::zeros({Layer::f, Layer::d});
  ops::routed_experts_backward(l.d_out, l.x, r, l.expert, Layer::limit, l.adapters(), Numerics::fp32, grads, {});
  const Tensor none = Tensor::zeros({Layer::f, Layer::d});
  for (int e = 0; e < Layer::experts; ++e) EXPECT_EQ(same_bits(grads[e].w1, none), e != 1 && e != 2) << e;

  const Tensor x = Tensor::empty({0, Layer::d});
  const Routing empty = ops::route(x, {}, l.router, l.options);
  EXPECT_EQ(ops::routed_experts(x, empty, l.expert, 10, {}, Numerics::released).shape(), (Shape{0, Layer::d}));
  const auto back = ops::routed_experts_backward(x, x, empty, l.expert, 10, {}, Numerics::released, {}, {});
  EXPECT_EQ(back.dx.shape(), (Shape{0, Layer::d}));
  EXPECT_EQ(back.d_weight.shape(), (Shape{0, Layer::k}));
  EXPECT_EQ(ops::shared_expert(x, l.expert[0], 10, {}, Numerics::bf16).shape(), (Shape{0, Layer::d}));
}

}  // namespace
}  // namespace plumb
