#include "ops/linear.h"

#include "base/error.h"
#include "base/float_formats.h"
#include "linear_testing.h"
#include "ops/matmul.h"

namespace plumb {
namespace {

class EachUnit : public ::testing::TestWithParam<ops::VectorUnit> {
 protected:
  void SetUp() override {
    if (!ops::vector_unit_available(GetParam())) GTEST_SKIP() << "this machine has no AVX-512";
    ops::use_vector_unit(GetParam());
  }
  void TearDown() override { ops::use_vector_unit(before_); }
  ops::VectorUnit before_ = ops::vector_unit();
};
INSTANTIATE_TEST_SUITE_P(Linear, EachUnit, ::testing::Values(ops::VectorUnit::avx2, ops::VectorUnit::avx512),
                         [](const auto& info) { return info.param == ops::VectorUnit::avx2 ? "avx2" : "avx512"; });

// One chain of fused multiply-adds, as the header promises. Strides: of the outer index and of k.
float chain(float start, const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t k) {
  for (int64_t i = 0; i < k; ++i) start = std::fma(a[i * a_stride], b[i * b_stride], start);
  return start;
}

// Both units against the same scalar chain: so they equal each other, bit for bit.
TEST_P(EachUnit, ProductsAreTheScalarChainBitForBit) {
  Random random(11);
  for (WeightFormat format : kFormats)
    for (auto [out, in] : {std::pair{1, 32}, {5, 96}, {40, 160}, {130, 320}, {67, 544}, {33, 7}, {18, 261}}) {
      if (format == WeightFormat::fp4 && in % 32 != 0) continue;
      const Linear w = random_linear(format, out, in, random);
      const Tensor full = ops::dequantise(w);
      for (int rows : {1, 2, 3, 4, 5, 6, 9, 17}) {
        SCOPED_TRACE(std::string(format_name(format)) + " " + to_string({rows, out, in}));
        const Tensor x = random_tensor({rows, in}, random), dy = random_tensor({rows, out}, random);
        const Tensor y = ops::linear(x, w);
        Tensor dw = random_tensor({out, in}, random);
        const Tensor start = dw.clone();
        const Tensor dx = ops::linear_backward(dy, x, w, {}, {}, {}, dw);
        int wrong = 0;
        const auto differ = [](float a, float b) { return std::memcmp(&a, &b, 4) != 0; };
        for (int r = 0; r < rows; ++r) {
          for (int o = 0; o < out; ++o)
            wrong += differ(y.f32()[r * out + o], chain(0, x.f32() + r * in, 1, full.f32() + o * in, 1, in));
          for (int i = 0; i < in; ++i)
            wrong += differ(dx.f32()[r * in + i], chain(0, dy.f32() + r * out, 1, full.f32() + i, in, out));
        }
        for (int j = 0; j < out * in; ++j)
          wrong += differ(dw.f32()[j], chain(start.f32()[j], dy.f32() + j / in, out, x.f32() + j % in, in, rows));
        ASSERT_EQ(wrong, 0);
      }
    }
}

// Row `code` of the weight holds that code everywhere; x and dy pick single weights out.
TEST_P(EachUnit, EveryCodeOfFp8AndFp4IsWidenedExactly) {
  for (int scale_code : {0, 1, 100, 127, 133, 245}) {
    Linear w8, w4;
    w8.format = WeightFormat::fp8, w8.out = 256, w8.in = 40;
    w8.data = Tensor::empty({256, 40}, DType::f8_e4m3), w8.scale = Tensor::empty({2, 1}, DType::f8_e8m0);
    w4.format = WeightFormat::fp4, w4.out = 16, w4.in = 64;
    w4.data = Tensor::empty({16, 32}, DType::i8), w4.scale = Tensor::empty({16, 2}, DType::f8_e8m0);
    for (int i = 0; i < 256 * 40; ++i) w8.data.ptr<uint8_t>()[i] = static_cast<uint8_t>(i / 40);
    for (int i = 0; i < 16 * 32; ++i) w4.data.ptr<uint8_t>()[i] = static_cast<uint8_t>(i / 32 * 17);
    for (Linear* w : {&w8, &w4}) {
      std::fill_n(w->scale.ptr<uint8_t>(), w->scale.numel(), static_cast<uint8_t>(scale_code));
      const auto expect_weight = [&](float got, int code) {
        const auto c = static_cast<uint8_t>(code);
        const float want =
            (w == &w8 ? e4m3_to_float(c) : e2m1_to_float(c)) * e8m0_to_float(static_cast<uint8_t>(scale_code));
        EXPECT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << code << ": " << got << " for " << want;
      };
      for (int rows : {1, 9}) {  // with and without a panel
        Tensor x = Tensor::zeros({rows, w->in});
        for (int r = 0; r < rows; ++r) x.f32()[r * w->in + 3 * r] = 1;
        const Tensor y = ops::linear(x, *w);
        for (int i = 0; i < rows * w->out; ++i) expect_weight(y.f32()[i], i % w->out);
      }
      for (int code = 0; code < w->out; ++code) {  // columns are outputs
        Linear row = *w;
        row.out = 1, row.data = w->data.rows(code, code + 1), row.scale = w->scale.rows(0, 1);
        const float one = 1;
        Tensor dx = Tensor::empty({1, w->in});
        ops::linear_backward_input(&one, 1, 1, row, dx.f32(), w->in, false);
        for (int i = 0; i < w->in; ++i) expect_weight(dx.f32()[i], code);
      }
    }
  }
}

// FP32 chains of K random terms: error about sqrt(K) 2^-24 of the largest result.
TEST_P(EachUnit, AgreesWithFp64) {
  Random random(5);
  const Linear w = random_linear(WeightFormat::fp4, 96, 1024, random);
  const Tensor x = random_tensor({20, 1024}, random);
  EXPECT_LT(relative_error(ops::linear(x, w), product(doubles(x), doubles(ops::dequantise(w)), 20, 96, 1024)), 3e-6);
}

struct Adapters {
  LoraPair p, q;
  std::vector<int> rows_p, rows_q;
  LoraList list() const { return {{&p, &rows_p}, {&q, &rows_q}}; }
};

LoraPair random_pair(int r, int out, int in, Random& random) {
  return {random_tensor({r, in}, random, 0.1f), random_tensor({out, r}, random, 0.1f), 0.75f};
}

TEST_P(EachUnit, ARowHasTheSameBitsInAnyBatch) {
  Random random(7);
  const LinearPoints points{Numerics::released, Point::act_w13, Point::out_w13};
  for (WeightFormat format : kFormats) {
    const int out = 100, in = 288, all = 70;
    const Linear w = random_linear(format, out, in, random);
    const Tensor x = random_tensor({all, in}, random);
    const LoraPair p = random_pair(4, out, in, random), q = random_pair(9, out, in, random);
    const auto adapter = [](int row) { return row % 3; };  // 0 none, 1 p, 2 q
    std::vector<Tensor> alone(all);
    for (int r = 0; r < all; ++r) {
      LoraList lora;
      if (adapter(r)) lora.push_back({adapter(r) == 1 ? &p : &q, nullptr});
      alone[r] = ops::linear(take_rows(x, {r}), w, lora, points);
    }
    for (int trial = 0; trial < 12; ++trial) {
      std::vector<int> rows(1 + random.below(all)), of_p, of_q;
      for (size_t i = 0; i < rows.size(); ++i) {
        rows[i] = static_cast<int>(random.below(all));
        if (adapter(rows[i])) (adapter(rows[i]) == 1 ? of_p : of_q).push_back(static_cast<int>(i));
      }
      const Tensor y = ops::linear(take_rows(x, rows), w, {{&p, &of_p}, {&q, &of_q}}, points);
      for (size_t i = 0; i < rows.size(); ++i)
        ASSERT_TRUE(same_bits(y.f32() + i * out, alone[rows[i]].f32(), out))
            << format_name(format) << ", row " << i << " of " << rows.size();
    }
  }
}

TEST_P(EachUnit, ThreadsDoNotChangeBits) {
  RestoreThreads restore;
  Random random(8);
  const int rows = 210, out = 330, in = 600;  // several blocks each way
  const Linear w = random_linear(WeightFormat::bf16, out, in, random);
  const Tensor x = random_tensor({rows, in}, random), dy = random_tensor({rows, out}, random);
  Tensor y, dx, dw;
  for (int threads : {1, 2, 5}) {
    set_thread_count(threads);
    Tensor now_dw = Tensor::zeros({out, in});
    const Tensor now_y = ops::linear(x, w), now_dx = ops::linear_backward(dy, x, w, {}, {}, {}, now_dw);
    if (!y.defined()) y = now_y, dx = now_dx, dw = now_dw;
    EXPECT_TRUE(same_bits(y, now_y) && same_bits(dx, now_dx) && same_bits(dw, now_dw)) << threads;
    EXPECT_TRUE(same_bits(y.rows(7, 8), ops::linear(x.rows(7, 8), w)));
  }
}

// Loss = sum(dy * y) in FP64 from the definition; its differences are exact but for FP64 rounding, as y is linear in
// each parameter. FP32 sums of a few hundred terms: 1e-5 of the largest.
TEST_P(EachUnit, BackwardWithAdaptersMatchesDifferences) {
  Random random(9);
  const int rows = 11, out = 37, in = 64;
  const Linear w = random_linear(WeightFormat::bf16, out, in, random);
  const Tensor x = random_tensor({rows, in}, random), dy = random_tensor({rows, out}, random);
  Adapters ad{random_pair(3, out, in, random), random_pair(5, out, in, random), {0, 3, 4}, {1, 2, 10}};
  Doubles vx = doubles(x), vw = doubles(ops::dequantise(w)), vdy = doubles(dy);
  struct {
    Doubles a, b;
  } v[2] = {{doubles(ad.p.a), doubles(ad.p.b)}, {doubles(ad.q.a), doubles(ad.q.b)}};
  const auto loss = [&] {
    Doubles y = product(vx, vw, rows, out, in);
    for (int which = 0; which < 2; ++which) {
      const LoraPair& p = which ? ad.q : ad.p;
      const int64_t r = p.a.size(0);
      const Doubles delta = product(product(vx, v[which].a, rows, r, in), v[which].b, rows, out, r);
      for (int row : which ? ad.rows_q : ad.rows_p)
        for (int o = 0; o < out; ++o) y[row * out + o] += p.scale * delta[row * out + o];
    }
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += y[i] * vdy[i];
    return sum;
  };
  const std::vector<LoraGrad> grads = {{Tensor::zeros(ad.p.a.shape()), Tensor::zeros(ad.p.b.shape())},
                                       {Tensor::zeros(ad.q.a.shape()), Tensor::zeros(ad.q.b.shape())}};
  Tensor dw = Tensor::zeros({out, in});
  const Tensor dx = ops::linear_backward(dy, x, w, ad.list(), {}, grads, dw);
  const auto check = [&](const char* what, const Tensor& gradient, Doubles& parameter) {
    for (int trial = 0; trial < 25; ++trial) {
      const size_t i = random.below(static_cast<uint32_t>(parameter.size()));
      EXPECT_NEAR(gradient.f32()[i], slope(parameter, i, loss, 1e-2), 2e-5) << what << " " << i;
    }
  };
  check("x", dx, vx);
  check("w", dw, vw);
  for (int which = 0; which < 2; ++which)
    check("a", grads[which].a, v[which].a), check("b", grads[which].b, v[which].b);

  // Gradients accumulate; frozen parts may be left out.
  ops::linear_backward(dy, x, w, ad.list(), {}, {{grads[0].a, {}}, {}}, {});
  EXPECT_NEAR(grads[0].a.f32()[1], 2 * slope(v[0].a, 1, loss, 1e-2), 4e-5);
  EXPECT_TRUE(same_bits(dx, ops::linear_backward(dy, x, w, ad.list(), {}, {}, {})));
}

TEST_P(EachUnit, PointsAreStraightThrough) {
  Random random(10);
  const int rows = 6, out = 20, in = 128;
  const Linear w = random_linear(WeightFormat::fp8, out, in, random);
  const Tensor x = random_tensor({rows, in}, random), dy = random_tensor({rows, out}, random);
  const LinearPoints points{Numerics::released, Point::act_wq_a, Point::out_wq_a};
  Tensor rounded = x.clone();
  ops::round_point(Numerics::released, Point::act_wq_a, rounded);
  ASSERT_FALSE(same_bits(rounded, x));
  Tensor y = ops::linear(rounded, w);
  ops::round_point(Numerics::released, Point::out_wq_a, y);
  EXPECT_TRUE(same_bits(ops::linear(x, w, {}, points), y));
  Tensor dw = Tensor::zeros({out, in}), dw_rounded = Tensor::zeros({out, in});
  EXPECT_TRUE(same_bits(ops::linear_backward(dy, x, w, {}, points, {}, dw),
                        ops::linear_backward(dy, rounded, w, {}, {}, {}, dw_rounded)));
  EXPECT_TRUE(same_bits(dw, dw_rounded));
  // The delta of an adapter sees the unrounded input.
  const LoraPair p = random_pair(2, out, in, random);
  const LinearPoints only_act{Numerics::released, Point::act_wq_a, Point::none};
  Linear zero;
  zero.data = Tensor::zeros({out, in}), zero.out = out, zero.in = in;
  EXPECT_TRUE(same_bits(ops::linear(x, zero, {{&p, nullptr}}, only_act), ops::linear(x, zero, {{&p, nullptr}})));
}

TEST_P(EachUnit, StridedViewsAndAccumulation) {
  Random random(12);
  const int rows = 9, out = 21, in = 50, ldx = 70, ldy = 33;
  const Linear w = random_linear(WeightFormat::f32, out, in, random);
  const Tensor wide = random_tensor({rows, ldx}, random);
  Tensor x = Tensor::empty({rows, in}), y = Tensor::full({rows, ldy}, 7), dx = Tensor::full({rows, ldx}, 1);
  for (int r = 0; r < rows; ++r) std::copy_n(wide.f32() + r * ldx, in, x.f32() + r * in);
  ops::linear_into(wide.f32(), ldx, rows, w, y.f32(), ldy);
  const Tensor want = ops::linear(x, w);
  ops::linear_backward_input(want.f32(), out, rows, w, dx.f32(), ldx, true);
  for (int r = 0; r < rows; ++r) {
    EXPECT_TRUE(same_bits(y.f32() + r * ldy, want.f32() + r * out, out));
    for (int i = out; i < ldy; ++i) ASSERT_EQ(y.f32()[r * ldy + i], 7);  // nothing is written past the outputs
    for (int i = 0; i < ldx; ++i)
      ASSERT_EQ(dx.f32()[r * ldx + i], i < in ? chain(1, want.f32() + r * out, 1, w.data.f32() + i, in, out) : 1);
  }
}

TEST(LinearEdge, NoRowsAndNoInputs) {
  Random random(1);
  const Linear w = random_linear(WeightFormat::bf16, 20, 32, random);
  EXPECT_EQ(ops::linear(Tensor::empty({0, 32}), w).shape(), (Shape{0, 20}));
  const LoraPair p = random_pair(2, 20, 32, random);
  const std::vector<int> nobody;
  const Tensor x = random_tensor({3, 32}, random);
  EXPECT_TRUE(same_bits(ops::linear(x, w, {{&p, &nobody}}), ops::linear(x, w)));
  Tensor dw = Tensor::zeros({20, 32});
  EXPECT_EQ(
      ops::linear_backward(Tensor::empty({0, 20}), Tensor::empty({0, 32}), w, {{&p, nullptr}}, {}, {}, dw).shape(),
      (Shape{0, 32}));
  EXPECT_TRUE(same_bits(dw, Tensor::zeros({20, 32})));
}

TEST(LinearEdge, WrongShapesAreNamed) {
  Random random(1);
  Linear w = random_linear(WeightFormat::fp8, 20, 40, random);
  EXPECT_THROW(ops::linear(Tensor::zeros({2, 41}), w), Error);
  w.scale = Tensor();
  EXPECT_THROW(ops::linear(Tensor::zeros({2, 40}), w), Error);
  w = random_linear(WeightFormat::f32, 20, 40, random);
  w.in = 39;
  EXPECT_THROW(ops::linear(Tensor::zeros({2, 39}), w), Error);
  w = random_linear(WeightFormat::f32, 20, 40, random);
  const LoraPair p = random_pair(2, 21, 40, random);
  EXPECT_THROW(ops::linear(Tensor::zeros({2, 40}), w, {{&p, nullptr}}), Error);
}

}  // namespace
}  // namespace plumb
