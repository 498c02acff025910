// The sampler against distributions computed from their definitions, token by token in FP64.
#include "rollout/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/philox.h"

namespace plumb {
namespace {

constexpr int kVocab = 12;

std::vector<float> random_logits(uint64_t seed) {
  Random g(seed);
  std::vector<float> logits(kVocab);
  for (float& l : logits) l = 2 * g.normal();
  return logits;
}

std::vector<double> softmax(const std::vector<float>& logits, double temperature) {
  std::vector<double> p;
  double total = 0;
  for (float l : logits) total += p.emplace_back(std::exp(l / temperature));
  for (double& x : p) x /= total;
  return p;
}

GeneratedToken sample(const std::vector<float>& logits, const SamplingParams& s, uint64_t sequence,
                      const std::vector<int>& tokens) {
  return sample_token(logits, ops::normaliser_of(logits), s, sequence, tokens, 1);
}

// A token's rank, and the mass in front of it, by counting the tokens that come before it.
std::vector<double> truncated(const std::vector<float>& logits, const SamplingParams& s) {
  std::vector<double> p = softmax(logits, s.temperature);
  const auto renormalise = [&] {
    double total = 0;
    for (double x : p) total += x;
    for (double& x : p) x /= total;
  };
  const auto before = [&](int a, int b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
  std::vector<double> kept = p;
  for (int v = 0; v < kVocab; ++v) {
    int rank = 0;
    for (int u = 0; u < kVocab; ++u) rank += before(u, v);
    if (s.top_k > 0 && rank >= s.top_k) kept[v] = 0;
    if (p[v] < s.min_p * *std::max_element(p.begin(), p.end())) kept[v] = 0;
  }
  p = kept;
  renormalise();
  kept = p;
  for (int v = 0; v < kVocab; ++v) {
    double mass = 0;
    for (int u = 0; u < kVocab; ++u) mass += before(u, v) ? p[u] : 0;
    if (mass >= s.top_p) kept[v] = 0;  // the tokens in front of it are enough
  }
  p = kept;
  renormalise();
  return p;
}

TEST(Sampler, DrawsFromTheTruncatedDistribution) {
  const int draws = 4000;
  std::vector<int> tokens = {1};
  for (uint64_t seed = 0; seed < 24; ++seed) {
    const std::vector<float> logits = random_logits(seed);
    SamplingParams s;
    s.seed = seed;
    s.temperature = seed % 2 ? 0.6f : 1.5f;
    if (seed % 3 == 1) s.top_k = 4;
    if (seed % 4 >= 2) s.top_p = 0.8f;
    if (seed % 5 == 4) s.min_p = 0.1f;
    const std::vector<double> expected = truncated(logits, s);
    std::vector<int> count(kVocab);
    for (int i = 0; i < draws; ++i) ++count[sample(logits, s, i, tokens).id];
    for (int v = 0; v < kVocab; ++v) {
      EXPECT_TRUE(expected[v] > 0 || count[v] == 0) << seed << " token " << v;
      // Six standard deviations of a binomial: fixed seeds, so it passes always or never.
      const double tolerance = 6 * std::sqrt(draws * expected[v] * (1 - expected[v])) + 1;
      EXPECT_NEAR(count[v], draws * expected[v], tolerance) << seed << " token " << v;
    }
  }
}

// Blocks of 256 weights are added up on their own: one of them without any weight, the last one cut.
TEST(Sampler, DrawsFromEverywhereInALargeVocabulary) {
  const int vocab = 1000, draws = 20000, group = 50;
  Random g(77);
  std::vector<float> logits(vocab);
  for (float& l : logits) l = 2 * g.normal();
  std::fill(logits.begin() + 200, logits.begin() + 550, -1e4f);
  for (const float temperature : {1.0f, 0.5f}) {
    SamplingParams s;
    s.temperature = temperature;
    const std::vector<double> p = softmax(logits, temperature);
    std::vector<int> count(vocab / group);
    for (int i = 0; i < draws; ++i) ++count[sample(logits, s, i, {1}).id / group];
    for (int k = 0; k < vocab / group; ++k) {
      double expected = 0;
      for (int v = k * group; v < (k + 1) * group; ++v) expected += p[v];
      const double tolerance = 6 * std::sqrt(draws * expected * (1 - expected));  // as above
      EXPECT_NEAR(count[k], draws * expected, tolerance) << "tokens from " << k * group;
    }
  }
}

TEST(Sampler, NoTokenIsMadeOfNaN) {
  EXPECT_THROW(sample(std::vector<float>(kVocab, std::nanf("")), {}, 0, {1}), Error);
}

TEST(Sampler, RandomNumbersDependOnSeedSequenceAndPosition) {
  const std::vector<float> flat(kVocab, 0.0f);
  const auto ids = [&](uint64_t seed, uint64_t sequence, size_t length) {
    SamplingParams s;
    s.seed = seed;
    std::vector<int> drawn, tokens(length, 1);
    for (int i = 0; i < 20; ++i, tokens.push_back(1)) drawn.push_back(sample(flat, s, sequence, tokens).id);
    return drawn;
  };
  EXPECT_EQ(ids(1, 2, 3), ids(1, 2, 3));
  EXPECT_NE(ids(1, 2, 3), ids(2, 2, 3));
  EXPECT_NE(ids(1, 2, 3), ids(1, 3, 3));
  EXPECT_NE(ids(1, 2, 3), ids(1, 2, 4));
}

TEST(Sampler, RecordsTheModelsOwnLogProbabilities) {
  const std::vector<float> logits = random_logits(9);
  const std::vector<double> p = softmax(logits, 1);
  SamplingParams s;
  s.temperature = 0.3f, s.top_k = 2, s.logit_bias = {{5, 100.0f}}, s.top_logprobs = 4, s.presence_penalty = 2;
  const GeneratedToken t = sample(logits, s, 0, std::vector<int>{1, 2});
  EXPECT_EQ(t.id, 5);
  EXPECT_NEAR(t.logprob, std::log(p[5]), 1e-5);  // FP32 result
  ASSERT_EQ(t.top.size(), 4u);
  std::vector<double> sorted = p;
  std::sort(sorted.rbegin(), sorted.rend());
  for (int i = 0; i < 4; ++i) {
    EXPECT_NEAR(t.top[i].logprob, std::log(p[t.top[i].id]), 1e-5);
    EXPECT_EQ(p[t.top[i].id], sorted[i]);
  }
}

// By their definition: log of the truncated distribution that DrawsFromTheTruncatedDistribution has checked draws from.
TEST(Sampler, RecordsWhatIsDrawnFromWhereAsked) {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    const std::vector<float> logits = random_logits(seed);
    SamplingParams s;
    s.seed = seed, s.processed_logprobs = true, s.top_logprobs = kVocab;
    s.temperature = seed % 2 ? 0.6f : 1.5f;
    if (seed % 3 == 1) s.top_k = 4;
    if (seed % 4 >= 2) s.top_p = 0.8f;
    if (seed % 5 == 4) s.min_p = 0.1f;
    const std::vector<double> expected = truncated(logits, s);
    const GeneratedToken t = sample(logits, s, 0, std::vector<int>{1});
    EXPECT_NEAR(t.logprob, std::log(expected[t.id]), 1e-5);  // FP32 result
    EXPECT_EQ(t.top.size(),
              static_cast<size_t>(std::count_if(expected.begin(), expected.end(), [](double p) { return p > 0; })));
    for (const TokenLogprob& top : t.top) EXPECT_NEAR(top.logprob, std::log(expected[top.id]), 1e-5);
    s.temperature = 0;
    EXPECT_EQ(sample(logits, s, 0, std::vector<int>{1}).logprob, 0);
  }
}

// Against sorting everything, on a vocabulary that is larger than the first guess of top-p.
TEST(Sampler, TheMostLikelyAreThoseOfASort) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Random g(seed);
    std::vector<float> logits(3000);
    for (float& l : logits) l = static_cast<float>(g.below(500)) * 0.01f;  // ties
    std::vector<int> order(logits.size());
    for (size_t v = 0; v < order.size(); ++v) order[v] = static_cast<int>(v);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    const auto top = top_logprobs(logits, ops::normaliser_of(logits), 100);
    for (int i = 0; i < 100; ++i) EXPECT_EQ(top[i].id, order[i]);
    SamplingParams s;
    s.top_p = 0.9f, s.processed_logprobs = true, s.top_logprobs = 100;
    double total = 0, sum = 0;
    for (float l : logits) total += std::exp(static_cast<double>(l));
    size_t kept = 0;
    while (sum < static_cast<double>(s.top_p) * total) sum += std::exp(static_cast<double>(logits[order[kept++]]));
    const GeneratedToken t = sample(logits, s, 0, std::vector<int>{1});
    EXPECT_GT(kept, 256u);
    EXPECT_NEAR(t.top[0].logprob, logits[order[0]] - std::log(sum), 1e-5);  // FP32 result
    EXPECT_LE(std::find(order.begin(), order.end(), t.id) - order.begin(), static_cast<ptrdiff_t>(kept));
  }
}

TEST(Sampler, TiesGoToTheLowerId) {
  SamplingParams s;
  s.temperature = 0, s.top_logprobs = 3;
  const GeneratedToken t = sample(std::vector<float>{0, 2, 1, 2, 2, 0}, s, 0, std::vector<int>{1});
  EXPECT_EQ(t.id, 1);
  EXPECT_EQ(t.top[1].id, 3);
  EXPECT_EQ(t.top[2].id, 4);
}

TEST(Sampler, PenaltiesByDefinition) {
  const std::vector<float> raw = {1.0f, -1.0f, 2.0f, -2.0f, 0.5f, 3.0f};
  const std::vector<int> tokens = {0, 1, 1, 2, 3, 2};  // the answer is 2 3 2
  SamplingParams s;
  s.repetition_penalty = 2, s.frequency_penalty = 0.25f, s.presence_penalty = 1, s.logit_bias = {{4, -3.0f}, {3, 1.0f}};
  std::vector<float> logits = raw;
  adjust_logits(logits, s, tokens, 3);
  // token 0: prompt, 1/2; 1: prompt, -1*2; 2: 2/2 - 2*0.25 - 1; 3: (-2+1)*2 - 0.25 - 1; 4: bias alone; 5: untouched
  EXPECT_EQ(logits, (std::vector<float>{0.5f, -2.0f, -0.5f, -3.25f, -2.5f, 3.0f}));
}

TEST(Sampler, NoStopTokenBeforeMinTokens) {
  SamplingParams s;
  s.temperature = 0, s.min_tokens = 2, s.stop_tokens = {1};
  const std::vector<float> logits = {0, 5, 1};
  EXPECT_EQ(sample(logits, s, 0, std::vector<int>{0}).id, 2);
  EXPECT_EQ(sample(logits, s, 0, std::vector<int>{0, 2}).id, 2);
  EXPECT_EQ(sample(logits, s, 0, std::vector<int>{0, 2, 2}).id, 1);
}

}  // namespace
}  // namespace plumb
