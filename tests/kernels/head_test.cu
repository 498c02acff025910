// The LM head against FP64. Tests named Small* also run under compute-sanitizer.
#include "kernels/head/draw.h"

#include <gtest/gtest.h>

#include <array>
#include <numeric>

#include "device_data.cuh"

namespace plumb::kernels::head {
namespace {

struct Data {
  int rows, vocabulary, width;
  Buffer<uint16_t> hidden, matrix;
  std::vector<int> targets;
  Buffer<int> target;
  Weight weight;
  Data(int rows_, int vocabulary_, int width_, int seed = 1)
      : rows(rows_),
        vocabulary(vocabulary_),
        width(width_),
        hidden(random_bf16(static_cast<size_t>(rows) * width, 1, seed)),
        matrix(
            random_bf16(static_cast<size_t>(vocabulary) * width, 3 / std::sqrt(static_cast<float>(width)), seed + 1)),
        targets(make_targets()),
        target(targets),
        weight{matrix.get(), vocabulary, width} {}
  std::vector<int> make_targets() const {
    std::vector<int> t(rows);
    for (int r = 0; r < rows; ++r) t[r] = static_cast<int>((r * 7919LL + 3) % vocabulary);
    t[0] = vocabulary - 1;
    return t;
  }
  Reference reference() const {
    return reference_product<uint16_t, uint16_t>({hidden.get(), width, 1}, {matrix.get(), width, 1}, rows, vocabulary,
                                                 width);
  }
};

struct Scores {
  std::vector<float> log_probability;
  std::vector<Normaliser> normaliser;
};
Scores score(const Data& d, int first, int rows) {
  Buffer<float> log_probability(rows), workspace(workspace_bytes(rows, d.vocabulary) / 4);
  Buffer<Normaliser> normaliser(rows);
  log_probabilities(d.hidden.get() + static_cast<size_t>(first) * d.width, rows, d.weight, d.target.get() + first,
                    log_probability.get(), normaliser.get(), workspace.get(), nullptr);
  return {log_probability.host(), normaliser.host()};
}
double log_of_sum(const double* logits, int vocabulary) {
  const double top = *std::max_element(logits, logits + vocabulary);
  double sum = 0;
  for (int v = 0; v < vocabulary; ++v) sum += std::exp(logits[v] - top);
  return top + std::log(sum);
}

// Error of a log-probability: that of logits of size up to 20, whose accumulator is truncated to 24 bits width / 16
// times (2^-24 of it on average), and a few FP32 roundings of numbers of that size.
double score_bound(const Data& d) { return 20 * (d.width / 16 + 10) * std::ldexp(1.0, -24); }

// What the sampler, on the host, makes of a logit.
float on_host(float logit, const Normaliser& n) { return static_cast<float>(double{logit} - n.maximum - n.logarithm); }

void check_scores(const Data& d) {
  const Reference expected = d.reference();
  const Scores s = score(d, 0, d.rows);
  for (int r = 0; r < d.rows; ++r) {
    const double* row = expected.sum.data() + static_cast<size_t>(r) * d.vocabulary;
    ASSERT_NEAR(s.log_probability[r], row[d.targets[r]] - log_of_sum(row, d.vocabulary), score_bound(d)) << "row " << r;
  }
  // Sampling's way: the same normalisers, logits that give the same log-probabilities, the best ones in order.
  Buffer<float> logits_device(static_cast<size_t>(d.rows) * d.vocabulary),
      workspace(workspace_bytes(d.rows, d.vocabulary) / 4);
  Buffer<Normaliser> normaliser(d.rows);
  logits(d.hidden.get(), d.rows, d.weight, logits_device.get(), normaliser.get(), workspace.get(), nullptr);
  const auto l = logits_device.host();
  const auto n = normaliser.host();
  EXPECT_LE(worst_error(l, expected), (d.width / 16 + 10) * std::ldexp(1.0, -23));
  for (int r = 0; r < d.rows; ++r) {
    ASSERT_EQ(n[r].maximum, s.normaliser[r].maximum);
    ASSERT_EQ(n[r].logarithm, s.normaliser[r].logarithm);
    const float logit = l[static_cast<size_t>(r) * d.vocabulary + d.targets[r]];
    ASSERT_EQ(on_host(logit, n[r]), s.log_probability[r]) << "row " << r;
  }
  for (const int count : {1, 5, std::min(kMostBest, d.vocabulary)}) {
    Buffer<TokenLogit> found(d.rows * count);
    best(logits_device.get(), d.rows, d.vocabulary, count, found.get(), workspace.get(), nullptr);
    const auto t = found.host();
    for (int r = 0; r < d.rows; ++r) {
      const float* row = l.data() + static_cast<size_t>(r) * d.vocabulary;
      std::vector<int> order(d.vocabulary);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return row[a] > row[b]; });
      for (int j = 0; j < count; ++j) {
        ASSERT_EQ(t[r * count + j].token, order[j]) << "row " << r << " place " << j;
        ASSERT_EQ(t[r * count + j].logit, row[order[j]]);
      }
    }
  }
}
TEST(Head, SmallScoresAgainstDoublePrecision) {
  check_scores(Data(1, 64, 64));
  check_scores(Data(70, 1000, 136));
}
TEST(Head, ScoresAgainstDoublePrecision) {
  check_scores(Data(300, 12928, 1024));
  check_scores(Data(3, 129280, 4096));
}

TEST(Head, EqualLogitsGoToTheLowerToken) {
  Data d(2, 600, 64);
  d.matrix.set(std::vector<uint16_t>(600 * 64, float_to_bf16(0.5f)));
  Buffer<float> l(2 * 600), workspace(workspace_bytes(2, 600) / 4);
  Buffer<Normaliser> normaliser(2);
  Buffer<TokenLogit> found(2 * 64);
  logits(d.hidden.get(), 2, d.weight, l.get(), normaliser.get(), workspace.get(), nullptr);
  best(l.get(), 2, 600, 64, found.get(), workspace.get(), nullptr);
  const auto t = found.host();
  for (int i = 0; i < 128; ++i) ASSERT_EQ(t[i].token, i % 64);
}

// A token is drawn where the sum of exp((logit - highest) / temperature), in double, passes u times the total. Weights
// are good to 2^-23 and (logit - highest) / temperature, at most 60, to 2^-24 of itself: 5e-6 of a weight.
void check_draws(int rows, int vocabulary) {
  std::vector<float> logits(static_cast<size_t>(rows) * vocabulary);
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 3);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (float& l : logits) l = normal(random);
  std::vector<Draw> draws;
  for (int i = 0; i < 400; ++i) {
    const int row = static_cast<int>(random() % rows);
    const float* l = logits.data() + static_cast<size_t>(row) * vocabulary;
    const float temperature = std::array{0.0f, 0.5f, 1.0f, 2.5f}[i % 4], min_p = i % 3 == 2 ? 0.01f : 0.0f;
    const double u = i < 8 ? (i < 4 ? 1e-18 : 1 - 1e-16) : uniform(random);
    draws.push_back({u, row, temperature, min_p, *std::max_element(l, l + vocabulary)});
  }
  Buffer<float> device_logits(logits);
  Buffer<Draw> device_draws(draws);
  Buffer<Drawn> found(draws.size());
  draw(device_logits.get(), vocabulary, device_draws.get(), static_cast<int>(draws.size()), found.get(), nullptr);
  const auto result = found.host();
  for (size_t i = 0; i < draws.size(); ++i) {
    const Draw& d = draws[i];
    const float* l = logits.data() + static_cast<size_t>(d.row) * vocabulary;
    const int token = result[i].found.token;
    ASSERT_TRUE(token >= 0 && token < vocabulary);
    ASSERT_EQ(result[i].found.logit, l[token]);
    if (d.temperature == 0) {
      ASSERT_EQ(token, std::max_element(l, l + vocabulary) - l);
      continue;
    }
    double total = 0, before = 0, through = 0;
    for (int v = 0; v < vocabulary; ++v) {
      const double w = std::exp((double{l[v]} - d.highest) / d.temperature);
      ASSERT_TRUE(v != token || w > 0.999 * d.min_p);
      if (v == token) before = total;
      total += w < d.min_p ? 0 : w;
      if (v == token) through = total;
    }
    ASSERT_NEAR(result[i].total, total, 5e-6 * total + (d.min_p > 0 ? 0.02 : 0));  // a weight of 0.01 may go either way
    ASSERT_LE(before, (d.u + 5e-6) * total) << "draw " << i;
    ASSERT_GE(through, (d.u - 5e-6) * total) << "draw " << i;
  }
}
TEST(Head, SmallDrawsFollowTheDistribution) {
  check_draws(3, 8);
  check_draws(5, 1000);
}
TEST(Head, DrawsFollowTheDistribution) { check_draws(9, 129280); }

TEST(Head, RowCountDoesNotMatter) {
  const Data d(20000, 776, 128);
  const Scores all = score(d, 0, d.rows);
  for (const int rows : {1, 2, 63, 64, 65, 127, 128, 129, 255, 257, 2047, 2049, 19999}) {
    const int first = d.rows - rows;
    const Scores some = score(d, first, rows);
    ASSERT_TRUE(
        std::equal(some.log_probability.begin(), some.log_probability.end(), all.log_probability.begin() + first))
        << rows << " rows";
  }
  for (int i = 0; i < 20; ++i) ASSERT_EQ(differences(score(d, 0, d.rows).log_probability, all.log_probability), 0u);
}

// Gradients against FP64. Each logit's gradient is rounded to bf16 (relative 2^-9, 1.66e-3 on average for random
// numbers) before the two products, whose own errors are far smaller: 2.5e-3 of the norm.
void check_gradients(const Data& d, int chunk) {
  const Scores s = score(d, 0, d.rows);
  const auto factor = random_floats(d.rows, 1, 9);
  const Buffer<float> factor_device(factor);
  const Buffer<Normaliser> normaliser(s.normaliser);
  Buffer<float> d_hidden(static_cast<size_t>(d.rows) * d.width),
      workspace(backward_workspace_bytes(chunk, d.vocabulary) / 4 + 1);
  Buffer<float> d_weight(std::vector<float>(static_cast<size_t>(d.vocabulary) * d.width, 0.0f));
  log_probabilities_backward(factor_device.get(), d.hidden.get(), d.rows, d.weight, d.target.get(), normaliser.get(),
                             chunk, d_hidden.get(), d_weight.get(), workspace.get(), nullptr);
  const Reference logits = d.reference();
  std::vector<float> gradient(logits.sum.size());  // FP32 is exact enough for the reference
  for (int r = 0; r < d.rows; ++r) {
    const double* row = logits.sum.data() + static_cast<size_t>(r) * d.vocabulary;
    const double log_sum = log_of_sum(row, d.vocabulary);
    for (int v = 0; v < d.vocabulary; ++v)
      gradient[static_cast<size_t>(r) * d.vocabulary + v] =
          static_cast<float>(factor[r] * ((v == d.targets[r]) - std::exp(row[v] - log_sum)));
  }
  const Buffer<float> g(gradient);
  const auto to_hidden = reference_product<float, uint16_t>({g.get(), d.vocabulary, 1}, {d.matrix.get(), 1, d.width},
                                                            d.rows, d.width, d.vocabulary);
  const auto to_weight = reference_product<float, uint16_t>({g.get(), 1, d.vocabulary}, {d.hidden.get(), 1, d.width},
                                                            d.vocabulary, d.width, d.rows);
  EXPECT_LT(relative_error(d_hidden.host(), to_hidden.sum), 2.5e-3);
  EXPECT_LT(relative_error(d_weight.host(), to_weight.sum), 2.5e-3);

  Buffer<float> again(static_cast<size_t>(d.rows) * d.width),
      more(backward_workspace_bytes(d.rows, d.vocabulary) / 4 + 1);
  log_probabilities_backward(factor_device.get(), d.hidden.get(), d.rows, d.weight, d.target.get(), normaliser.get(),
                             d.rows, again.get(), nullptr, more.get(), nullptr);
  EXPECT_EQ(differences(again.host(), d_hidden.host()), 0u) << "the size of a chunk matters";
}
TEST(Head, SmallGradientsAgainstDoublePrecision) { check_gradients(Data(70, 520, 72), 40); }
TEST(Head, GradientsAgainstDoublePrecision) { check_gradients(Data(600, 6000, 512), 256); }

}  // namespace
}  // namespace plumb::kernels::head
