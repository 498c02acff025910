#include "ops/head_divergence.h"

#include "base/error.h"
#include "linear_testing.h"
#include "ops/head.h"

namespace plumb {
namespace {

using ops::Divergence;
constexpr Divergence kKinds[] = {Divergence::reverse_kl, Divergence::forward_kl};

Doubles log_softmax(const double* logits, int64_t vocab) {
  const double top = *std::max_element(logits, logits + vocab);
  double sum = 0;
  for (int64_t v = 0; v < vocab; ++v) sum += std::exp(logits[v] - top);
  Doubles log_p(logits, logits + vocab);
  for (double& x : log_p) x -= top + std::log(sum);
  return log_p;
}

double divergence_fp64(Divergence kind, const double* student, const double* teacher, int64_t vocab) {
  const Doubles p = log_softmax(student, vocab), q = log_softmax(teacher, vocab);
  double sum = 0;
  for (int64_t v = 0; v < vocab; ++v)
    sum += kind == Divergence::reverse_kl ? std::exp(p[v]) * (p[v] - q[v]) : std::exp(q[v]) * (q[v] - p[v]);
  return sum;
}

// A student and a teacher whose hidden size is another one.
struct Case {
  int rows, vocab, d;
  Linear head, teacher_head;
  Tensor hidden, teacher_hidden;
  ops::HeadRows student() const { return {hidden, head}; }
  ops::HeadRows teacher() const { return {teacher_hidden, teacher_head}; }
};
Case make_case(int rows, int vocab, int d, uint64_t seed) {
  Random random(seed);
  Case c{rows,
         vocab,
         d,
         random_linear(WeightFormat::bf16, vocab, d, random),
         random_linear(WeightFormat::f32, vocab, d + 4, random),
         random_tensor({rows, d}, random),
         random_tensor({rows, d + 4}, random)};
  return c;
}
Doubles logits_of(const Tensor& hidden, const Linear& head) {
  return product(doubles(hidden), doubles(ops::dequantise(head)), hidden.size(0), head.out, head.in);
}

// Logits of size 10 are FP32 sums, good to 1e-6; differences of two of them and the exponential add as much: 5e-6.
TEST(HeadDivergence, MatchesFp64) {
  for (Divergence kind : kKinds)
    for (int vocab : {1, 7, 8, 100, 1003}) {
      const Case c = make_case(9, vocab, 24, 1);
      const Doubles s = logits_of(c.hidden, c.head), t = logits_of(c.teacher_hidden, c.teacher_head);
      const Tensor got = ops::head_divergence(kind, c.student(), c.teacher());
      for (int r = 0; r < c.rows; ++r) {
        const double wanted = divergence_fp64(kind, s.data() + r * vocab, t.data() + r * vocab, vocab);
        EXPECT_NEAR(got.f32()[r], wanted, 5e-6 * (1 + wanted));
      }
    }
}

TEST(HeadDivergence, EqualModelsHaveNoneAndNoGradient) {
  const Case c = make_case(20, 57, 16, 2);
  for (Divergence kind : kKinds) {
    Tensor value, ones = Tensor::full({c.rows}, 1.0f);
    const Tensor d = ops::head_divergence_backward(kind, ones, c.student(), c.student(), {}, &value);
    for (int r = 0; r < c.rows; ++r) EXPECT_EQ(value.f32()[r], 0);
    for (int64_t i = 0; i < d.numel(); ++i) EXPECT_EQ(d.f32()[i], 0);
  }
}

// The teacher's favourite has a logit of -1e4 for the student, and the other way round: no NaN, no infinity.
TEST(HeadDivergence, ExtremeLogits) {
  Linear student, teacher;
  student.format = teacher.format = WeightFormat::f32, student.in = teacher.in = 1, student.out = teacher.out = 3;
  student.data = Tensor::of<float>({-1e4f, 0.0f, 1e4f}).view({3, 1});
  teacher.data = Tensor::of<float>({1e4f, 0.0f, -1e4f}).view({3, 1});
  const Tensor one = Tensor::full({1, 1}, 1.0f), d = Tensor::full({1}, 1.0f);
  for (Divergence kind : kKinds) {
    Tensor value;
    const Tensor gradient = ops::head_divergence_backward(kind, d, {one, student}, {one, teacher}, {}, &value);
    EXPECT_EQ(value.f32()[0], 2e4f);
    EXPECT_EQ(gradient.f32()[0], kind == Divergence::reverse_kl ? 0 : 2e4f);  // p = 1 where it is: no way down for p
  }
}

TEST(HeadDivergence, BackwardMatchesDifferences) {
  for (Divergence kind : kKinds) {
    const Case c = make_case(5, 43, 16, 3);
    Random random(4);
    const Tensor d = random_tensor({c.rows}, random);
    const Doubles t = logits_of(c.teacher_hidden, c.teacher_head);
    Doubles hidden = doubles(c.hidden), head = doubles(ops::dequantise(c.head));
    const auto loss = [&] {
      const Doubles s = product(hidden, head, c.rows, c.vocab, c.d);
      double sum = 0;
      for (int r = 0; r < c.rows; ++r)
        sum += d.f32()[r] * divergence_fp64(kind, s.data() + r * c.vocab, t.data() + r * c.vocab, c.vocab);
      return sum;
    };
    Tensor d_head = Tensor::zeros({c.vocab, c.d}), value;
    const Tensor d_hidden = ops::head_divergence_backward(kind, d, c.student(), c.teacher(), d_head, &value);
    for (size_t i = 0; i < hidden.size(); ++i) EXPECT_NEAR(d_hidden.f32()[i], slope(hidden, i, loss), 5e-6);
    for (size_t i = 0; i < head.size(); i += 5) EXPECT_NEAR(d_head.f32()[i], slope(head, i, loss), 5e-6);
    EXPECT_TRUE(same_bits(value, ops::head_divergence(kind, c.student(), c.teacher())));
  }
}

// A row knows nothing of the others; the gradient of the head is one chain over all rows, through the chunks.
TEST(HeadDivergence, ChunksAndThreadsDoNotChangeBits) {
  RestoreThreads restore;
  const Case c = make_case(300, 40, 16, 5);  // more rows than a chunk
  Random random(6);
  const Tensor d = random_tensor({c.rows}, random);
  for (Divergence kind : kKinds) {
    Tensor whole = Tensor::zeros({c.vocab, c.d}), parts = Tensor::zeros({c.vocab, c.d}), values;
    set_thread_count(1);
    const Tensor d_hidden = ops::head_divergence_backward(kind, d, c.student(), c.teacher(), whole, &values);
    set_thread_count(3);
    for (int first = 0; first < c.rows; first += 50) {
      const Tensor hidden = c.hidden.rows(first, first + 50), taught = c.teacher_hidden.rows(first, first + 50);
      Tensor value;
      const Tensor part = ops::head_divergence_backward(kind, d.rows(first, first + 50), {hidden, c.head},
                                                        {taught, c.teacher_head}, parts, &value);
      EXPECT_TRUE(same_bits(part, d_hidden.rows(first, first + 50)));
      EXPECT_TRUE(same_bits(value, values.rows(first, first + 50)));
    }
    EXPECT_TRUE(same_bits(whole, parts));
  }
}

TEST(HeadDivergence, EmptyAndWrongInputs) {
  const Case c = make_case(2, 11, 8, 7), other = make_case(2, 12, 8, 7), longer = make_case(3, 11, 8, 7);
  const Tensor none = Tensor::empty({0, 8}), none_taught = Tensor::empty({0, 12});
  EXPECT_EQ(ops::head_divergence(kKinds[0], {none, c.head}, {none_taught, c.teacher_head}).shape(), (Shape{0}));
  EXPECT_EQ(
      ops::head_divergence_backward(kKinds[0], Tensor::empty({0}), {none, c.head}, {none_taught, c.teacher_head}, {})
          .shape(),
      (Shape{0, 8}));
  EXPECT_THROW(ops::head_divergence(kKinds[0], c.student(), other.teacher()), Error);   // another vocabulary
  EXPECT_THROW(ops::head_divergence(kKinds[0], c.student(), longer.teacher()), Error);  // other rows
  EXPECT_THROW(ops::head_divergence(kKinds[0], {c.teacher_hidden, c.head}, c.teacher()), Error);
}

}  // namespace
}  // namespace plumb
