#include "train/dpo_step.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "train/testing.h"

namespace plumb {
namespace {

using namespace testing;

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// Pairs with a common prompt, answers of one token and more.
std::vector<PreferencePair> random_pairs(const ModelConfig& c) {
  std::vector<PreferencePair> pairs;
  for (int i = 0; i < 4; ++i) {
    const std::vector<int> prompt = random_tokens(c, 14 + 5 * i, 40 + i);
    const auto answer = [&](int n, uint64_t seed) {
      Sample s;
      s.tokens = prompt;
      const std::vector<int> tokens = random_tokens(c, n, seed);
      s.tokens.insert(s.tokens.end(), tokens.begin(), tokens.end());
      s.mask.assign(prompt.size(), 0);
      s.mask.resize(s.tokens.size(), 1);
      return s;
    };
    pairs.push_back({answer(1 + 3 * i, 70 + i), answer(9 - 2 * i, 80 + i), i + 1});
  }
  return pairs;
}

struct DpoStep : ::testing::Test {
  ModelConfig config = tiny_config();
  std::unique_ptr<Trainee> trainee = random_lora_trainee(config, 4);
  std::vector<PreferencePair> data = random_pairs(config);
  DpoOptions options{0.4, 0.1};

  RlRows rows(const TreeOptions& o) const {
    std::vector<const PreferencePair*> pairs;
    for (const PreferencePair& p : data) pairs.push_back(&p);
    return make_pair_rows(plan_shape(config), pairs, o);
  }
  std::vector<double> logprobs(const RlRows& r, const AdapterBatch* adapters) const {
    std::vector<double> values(2 * data.size(), kUnknown);
    fill_answer_logprobs(*trainee->weights, adapters, r, Numerics::fp32, values);
    return values;
  }
  double loss(const RlRows& r, const std::vector<double>& reference) const {
    return dpo_figures(options, logprobs(r, &trainee->adapters), reference).loss;
  }
};

TEST_F(DpoStep, PackingChangesNoBitOfALogProbability) {
  const RlRows shared = rows({200, 4, 1}), flat = rows({200, 1000, 1}), split = rows({40, 4, 1});
  EXPECT_LT(shared.physical_tokens, flat.physical_tokens);
  EXPECT_GT(split.rows.size(), data.size() - 1);
  const std::vector<double> a = logprobs(shared, &trainee->adapters);
  EXPECT_EQ(a, logprobs(flat, &trainee->adapters));
  EXPECT_EQ(a, logprobs(split, &trainee->adapters));
  EXPECT_NE(a, logprobs(shared, nullptr));
}

TEST_F(DpoStep, KnownLogProbabilitiesAreKept) {
  const RlRows r = rows({200, 4, 1});
  std::vector<double> values(2 * data.size(), -1);
  fill_answer_logprobs(*trainee->weights, nullptr, r, Numerics::fp32, values);
  EXPECT_EQ(values, std::vector<double>(2 * data.size(), -1));
}

TEST_F(DpoStep, GradientMatchesDifferences) {
  const RlRows r = rows({200, 4, 1});
  const std::vector<double> reference = logprobs(r, nullptr);
  zero_gradients(*trainee);
  const std::vector<double> policy = accumulate_dpo_gradients(*trainee, r, Numerics::fp32, options, reference);
  EXPECT_EQ(policy, logprobs(r, &trainee->adapters));
  for (size_t at : {size_t{0}, trainee->parameters.size() / 2, trainee->parameters.size() - 1}) {
    Parameter& p = trainee->parameters[at];
    // Along the gradient. A log-probability is FP32, good to 1e-7 of about 10; a step of 4e-3 is rounding of 1e-3 of
    // the difference and curvature of as much.
    const std::vector<float> gradient(p.grad.f32(), p.grad.f32() + p.grad.numel());
    double square = 0;
    for (float g : gradient) square += double(g) * g;
    ASSERT_GT(square, 0) << p.name;
    const double step = 4e-3 / std::sqrt(square);
    const std::vector<float> before(p.master.f32(), p.master.f32() + p.master.numel());
    double side[2];
    for (int up : {0, 1}) {
      for (size_t i = 0; i < before.size(); ++i)
        p.master.f32()[i] = before[i] + static_cast<float>((up ? step : -step) * gradient[i]);
      publish(*trainee);
      side[up] = loss(r, reference);
    }
    std::copy(before.begin(), before.end(), p.master.f32());
    publish(*trainee);
    EXPECT_NEAR((side[1] - side[0]) / (2 * step), square, 0.02 * square) << p.name;
  }
}

TEST_F(DpoStep, APairInTwoRowsHasTheGradientOfOneInOne) {
  const std::vector<double> reference = logprobs(rows({200, 4, 1}), nullptr);
  std::vector<float> gradients[2];
  for (bool split : {false, true}) {
    const RlRows r = rows({split ? 40 : 200, 4, 1});
    zero_gradients(*trainee);
    accumulate_dpo_gradients(*trainee, r, Numerics::fp32, options, reference);
    gradients[split] = flat(*trainee, &Parameter::grad);
  }
  double error = 0, norm = 0;
  for (size_t i = 0; i < gradients[0].size(); ++i) {
    error += std::pow(double(gradients[0][i]) - gradients[1][i], 2);
    norm += std::pow(double(gradients[0][i]), 2);
  }
  EXPECT_GT(norm, 0);
  EXPECT_LT(std::sqrt(error / norm), 1e-5);  // FP32 sums in another order
}

TEST_F(DpoStep, EqualAnswersPullInNoDirection) {
  data = {data[1]};
  data[0].rejected = data[0].chosen;
  const RlRows r = rows({200, 4, 1});
  const std::vector<double> reference = logprobs(r, nullptr);
  zero_gradients(*trainee);
  const std::vector<double> policy = accumulate_dpo_gradients(*trainee, r, Numerics::fp32, options, reference);
  EXPECT_EQ(policy[0], policy[1]);
  EXPECT_NEAR(dpo_figures(options, policy, reference).loss, std::log(2.0), 1e-12);
  EXPECT_LT(gradient_norm(*trainee), 1e-6);  // opposite numbers, in sums over all rows
}

}  // namespace
}  // namespace plumb
