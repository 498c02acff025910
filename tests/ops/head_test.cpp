#include "ops/head.h"

#include "base/error.h"
#include "linear_testing.h"

namespace plumb {
namespace {

double logprob_fp64(const double* logits, int64_t vocab, int target) {
  const double top = *std::max_element(logits, logits + vocab);
  double sum = 0;
  for (int64_t v = 0; v < vocab; ++v) sum += std::exp(logits[v] - top);
  return logits[target] - top - std::log(sum);
}

struct Case {
  int rows, vocab, d;
  Linear head;
  Tensor hidden;
  std::vector<int> target;
};
Case make_case(int rows, int vocab, int d, uint64_t seed) {
  Random random(seed);
  Case c{rows, vocab, d, random_linear(WeightFormat::bf16, vocab, d, random), random_tensor({rows, d}, random), {}};
  for (int r = 0; r < rows; ++r) c.target.push_back(static_cast<int>(random.below(vocab)));
  return c;
}

// Logits of size 10 are FP32 sums, good to 1e-6; the exponential to 1e-7: 3e-6 in all.
TEST(Head, LogProbabilitiesMatchFp64) {
  for (int vocab : {1, 7, 8, 100, 1003}) {
    const Case c = make_case(9, vocab, 24, 1);
    const Doubles logits = product(doubles(c.hidden), doubles(ops::dequantise(c.head)), c.rows, vocab, c.d);
    const Tensor got = ops::head_logprobs(c.hidden, c.head, c.target);
    for (int r = 0; r < c.rows; ++r)
      EXPECT_NEAR(got.f32()[r], logprob_fp64(logits.data() + r * vocab, vocab, c.target[r]), 3e-6);
  }
}

TEST(Head, ExtremeLogits) {
  std::vector<float> logits(20, -1e4f);
  logits[3] = 1e4f;
  const ops::Normaliser n = ops::normaliser_of(logits);
  EXPECT_EQ(ops::log_probability(logits[3], n), 0);
  EXPECT_EQ(ops::log_probability(logits[4], n), -2e4f);
  std::fill(logits.begin(), logits.end(), 88.0f);
  EXPECT_NEAR(ops::log_probability(88, ops::normaliser_of(logits)), -std::log(20.0), 1e-6);
}

TEST(Head, ChunkedPathHasTheBitsOfWholeRows) {
  const Case c = make_case(300, 203, 32, 2);  // more rows than a chunk
  const Tensor chunked = ops::head_logprobs(c.hidden, c.head, c.target);
  const ops::Logits logits = ops::head_logits(c.hidden, c.head);
  for (int r = 0; r < c.rows; ++r) {
    const float whole =
        ops::log_probability(logits.value.f32()[int64_t{r} * c.vocab + c.target[r]], logits.normaliser[r]);
    ASSERT_EQ(chunked.f32()[r], whole);
    if (r % 37 == 0) {
      const Tensor alone = ops::head_logprobs(c.hidden.rows(r, r + 1), c.head, {c.target[r]});
      ASSERT_EQ(alone.f32()[0], whole);
    }
  }
}

TEST(Head, BackwardMatchesDifferences) {
  const Case c = make_case(5, 43, 16, 3);
  Random random(4);
  const Tensor d = random_tensor({c.rows}, random);
  Doubles hidden = doubles(c.hidden), head = doubles(ops::dequantise(c.head));
  const auto loss = [&] {
    const Doubles logits = product(hidden, head, c.rows, c.vocab, c.d);
    double sum = 0;
    for (int r = 0; r < c.rows; ++r)
      sum += d.f32()[r] * logprob_fp64(logits.data() + r * c.vocab, c.vocab, c.target[r]);
    return sum;
  };
  Tensor d_head = Tensor::zeros({c.vocab, c.d});
  const Tensor d_hidden = ops::head_logprobs_backward(d, c.hidden, c.head, c.target, d_head);
  for (size_t i = 0; i < hidden.size(); ++i) EXPECT_NEAR(d_hidden.f32()[i], slope(hidden, i, loss), 3e-6);
  for (size_t i = 0; i < head.size(); i += 5) EXPECT_NEAR(d_head.f32()[i], slope(head, i, loss), 3e-6);
  Tensor logprobs;
  EXPECT_TRUE(same_bits(d_hidden, ops::head_logprobs_backward(d, c.hidden, c.head, c.target, {}, &logprobs)));
  EXPECT_TRUE(same_bits(logprobs, ops::head_logprobs(c.hidden, c.head, c.target)));
}

// The gradient of the head is one chain over all rows, through the chunks; a row's own gradient knows nothing of the
// others.
TEST(Head, ChunksAndThreadsDoNotChangeGradients) {
  RestoreThreads restore;
  const Case c = make_case(300, 40, 16, 5);
  Random random(6);
  const Tensor d = random_tensor({c.rows}, random);
  Tensor whole = Tensor::zeros({c.vocab, c.d}), parts = Tensor::zeros({c.vocab, c.d});
  const Tensor d_hidden = ops::head_logprobs_backward(d, c.hidden, c.head, c.target, whole);
  set_thread_count(3);
  for (int first = 0; first < c.rows; first += 50) {
    const std::vector<int> target(c.target.begin() + first, c.target.begin() + first + 50);
    const Tensor part =
        ops::head_logprobs_backward(d.rows(first, first + 50), c.hidden.rows(first, first + 50), c.head, target, parts);
    EXPECT_TRUE(same_bits(part, d_hidden.rows(first, first + 50)));
  }
  EXPECT_TRUE(same_bits(whole, parts));
}

TEST(Head, EmptyAndWrongInputs) {
  const Case c = make_case(2, 11, 8, 7);
  EXPECT_EQ(ops::head_logprobs(Tensor::empty({0, 8}), c.head, {}).shape(), (Shape{0}));
  EXPECT_EQ(ops::head_logprobs_backward(Tensor::empty({0}), Tensor::empty({0, 8}), c.head, {}, {}).shape(),
            (Shape{0, 8}));
  EXPECT_THROW(ops::head_logprobs(c.hidden, c.head, {1, 11}), Error);
  EXPECT_THROW(ops::head_logprobs(c.hidden, c.head, {1}), Error);
}

}  // namespace
}  // namespace plumb
