#include "train/rl_step.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "base/error.h"
#include "base/philox.h"
#include "rollout/generate.h"
#include "support/tiny_model.h"
#include "train/step.h"

namespace plumb {
namespace {

using testing::random_adapter;
using testing::random_model;
using testing::random_tokens;
using testing::tiny_config;

constexpr float kUnknown = std::numeric_limits<float>::quiet_NaN();

// Groups of rollouts that the engine samples with the trainee's adapter.
std::vector<RlSample> sample_groups(ResidentWeights& m, const std::shared_ptr<const Adapter>& adapter, Numerics n,
                                    int groups, int group_size, int prompt, int answer) {
  std::vector<GenerationRequest> requests;
  for (int g = 0; g < groups; ++g)
    for (int i = 0; i < group_size; ++i) {
      GenerationRequest r;
      r.prompt = random_tokens(m.model, prompt + g, 50 + g);
      r.sampling.max_tokens = answer + i % 3;
      r.id = static_cast<uint64_t>(g * group_size + i);
      requests.push_back(r);
    }
  GenerateOptions o;
  o.numerics = n;
  o.adapter = adapter;
  const std::vector<Generation> answers = generate(m, requests, o);
  std::vector<RlSample> samples;
  for (size_t i = 0; i < requests.size(); ++i) {
    RlSample s;
    s.tokens = requests[i].prompt;
    s.prompt = static_cast<int>(s.tokens.size());
    s.mask.assign(s.tokens.size(), 0);
    s.logprob.assign(s.tokens.size(), kUnknown);
    s.group = static_cast<int>(i) / group_size;
    for (const GeneratedToken& t : answers[i].tokens) {
      s.tokens.push_back(t.id);
      s.mask.push_back(1);
      s.logprob.push_back(t.logprob);
    }
    samples.push_back(std::move(s));
  }
  return samples;
}

std::vector<SampleWeight> alternating_weights(size_t n) {
  std::vector<SampleWeight> w;
  for (size_t i = 0; i < n; ++i) w.push_back({i % 2 ? -0.7f : 1.1f, 0.5f + 0.1f * static_cast<float>(i % 4), true});
  return w;
}

struct Fixture {
  std::shared_ptr<ResidentWeights> model = random_model(tiny_config(), 1, WeightFormat::fp8);
  std::shared_ptr<Adapter> adapter = random_adapter(model->model, 3, 2);
  std::unique_ptr<Trainee> trainee = lora_trainee(model, adapter);
  PlanShape shape = plan_shape(model->model);
};

std::vector<double> gradients(Trainee& t, const RlRows& rows, Numerics n, const RlLossOptions& o,
                              RlStepResult* result) {
  zero_gradients(t);
  *result = accumulate_rl_gradients(t, rows.rows, n, o);
  std::vector<double> all;
  for (const Parameter& p : t.parameters) all.insert(all.end(), p.grad.f32(), p.grad.f32() + p.grad.numel());
  return all;
}

constexpr TreeOptions kTree{400, 4, 1}, kFlat{400, 1 << 20, 1};

TEST(RlStep, RecordedLogProbabilitiesAreThoseOfTheTrainingForward) {
  for (Numerics n : {Numerics::fp32, Numerics::released}) {
    Fixture s;
    const std::vector<RlSample> samples = sample_groups(*s.model, s.adapter, n, 3, 5, 30, 17);
    for (const TreeOptions& options : {kTree, kFlat}) {
      const RlRows rows = make_rl_rows(s.shape, samples, alternating_weights(samples.size()), options);
      RlStepResult r;
      gradients(*s.trainee, rows, n, {}, &r);
      EXPECT_EQ(r.stats.tokens, rows.trained);
      EXPECT_EQ(r.stats.unequal, 0) << numerics_name(n);
      EXPECT_EQ(r.stats.largest_difference, 0);
    }
  }
}

TEST(RlStep, ADifferentAdapterIsNoticed) {  // the mismatch metric can be other than 0
  Fixture s;
  const std::vector<RlSample> samples = sample_groups(*s.model, nullptr, Numerics::fp32, 1, 4, 30, 17);
  RlStepResult r;
  gradients(*s.trainee, make_rl_rows(s.shape, samples, alternating_weights(4), kTree), Numerics::fp32, {}, &r);
  EXPECT_GT(r.stats.unequal, r.stats.tokens / 2);
  EXPECT_GT(r.stats.largest_difference, 0);
}

TEST(RlStep, TreesGiveTheBitsAndGradientsOfFlatRows) {
  Fixture s;
  const Numerics n = Numerics::fp32;
  const std::vector<RlSample> samples = sample_groups(*s.model, s.adapter, n, 3, 5, 30, 17);
  const std::vector<SampleWeight> weights = alternating_weights(samples.size());
  const RlRows tree = make_rl_rows(s.shape, samples, weights, kTree);
  const RlRows flat = make_rl_rows(s.shape, samples, weights, kFlat);
  EXPECT_EQ(tree.trained, flat.trained);
  EXPECT_EQ(flat.physical_tokens, flat.logical_tokens);
  EXPECT_LT(tree.physical_tokens, flat.physical_tokens * 2 / 3);

  std::map<std::pair<int, int>, float> logprob;
  for (const RlRow& row : flat.rows) {
    const Tensor lp = row_logprobs(*s.model, &s.trainee->adapters, row, n);
    for (size_t i = 0; i < row.origin.size(); ++i)
      logprob[{row.origin[i].sample, row.origin[i].position}] = lp.f32()[i];
  }
  for (const RlRow& row : tree.rows) {
    const Tensor lp = row_logprobs(*s.model, &s.trainee->adapters, row, n);
    for (size_t i = 0; i < row.origin.size(); ++i) {
      const float alone = logprob.at({row.origin[i].sample, row.origin[i].position});
      ASSERT_EQ(std::memcmp(&alone, lp.f32() + i, sizeof alone), 0);
      ASSERT_EQ(row.target[i], samples[row.origin[i].sample].tokens[row.origin[i].position]);
    }
  }

  RlLossOptions o;
  o.loss = PolicyLoss::ppo;
  RlStepResult of_tree, of_flat, repeated;
  const std::vector<double> a = gradients(*s.trainee, tree, n, o, &of_tree);
  const std::vector<double> b = gradients(*s.trainee, flat, n, o, &of_flat);
  EXPECT_EQ(a, gradients(*s.trainee, tree, n, o, &repeated));
  EXPECT_NEAR(of_tree.loss, of_flat.loss, 1e-12);  // sums in double over equal values
  double error = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) error += (a[i] - b[i]) * (a[i] - b[i]), norm += b[i] * b[i];
  EXPECT_GT(norm, 0);
  EXPECT_LT(std::sqrt(error / norm), 1e-5);  // FP32 sums in another order
}

TEST(RlStep, KlShapingUsesTheMeanOfTheWholeStep) {  // rows of 60 tokens or of 400: the same loss
  Fixture s;
  std::vector<RlSample> samples = sample_groups(*s.model, s.adapter, Numerics::fp32, 4, 2, 30, 17);
  const std::vector<SampleWeight> weights = alternating_weights(samples.size());
  RlLossOptions o;
  o.kl_coefficient = 0.5;
  double loss[2];
  for (int i = 0; i < 2; ++i) {
    RlRows rows = make_rl_rows(s.shape, samples, weights, {i == 0 ? 60 : 400, 4, 1});
    EXPECT_EQ(rows.rows.size() == 1, i == 1);
    for (RlRow& row : rows.rows) {
      const Tensor reference = row_logprobs(*s.model, nullptr, row, Numerics::fp32);
      for (size_t t = 0; t < row.tokens.size(); ++t) row.tokens[t].reference = reference.f32()[t];
    }
    RlStepResult r;
    gradients(*s.trainee, rows, Numerics::fp32, o, &r);
    loss[i] = r.loss;
    EXPECT_EQ(r.stats.kl_tokens, rows.trained);
  }
  EXPECT_NEAR(loss[0], loss[1], 1e-9);
}

// Another model as the teacher: wider, with a window and ratios of its own.
Teacher other_teacher(double coefficient, ops::Divergence kind) {
  ModelConfig c = tiny_config();
  c.sliding_window = 16;
  Teacher t;
  t.weights = random_model(c, 8);
  t.coefficient = coefficient;
  t.divergence = kind;
  return t;
}

double loss_of(Fixture& s, const RlRows& rows, const RlLossOptions& o, const Teacher& teacher) {
  RlStepResult r;
  zero_gradients(*s.trainee);
  r = accumulate_rl_gradients(*s.trainee, rows.rows, Numerics::fp32, o, &teacher);
  EXPECT_NEAR(r.loss, r.policy_loss + teacher.coefficient * r.divergence, 1e-12);
  return r.loss;
}

// Half of the samples without a weight, as those of a group without variance: the policy loss does not see them, the
// teacher does.
std::vector<SampleWeight> some_weights(size_t n) {
  std::vector<SampleWeight> w = alternating_weights(n);
  for (size_t i = 0; i < n / 2; ++i) w[i] = {0, 0, true};
  return w;
}

TEST(RlStep, GradientWithATeacherMatchesDifferences) {
  for (ops::Divergence kind : {ops::Divergence::reverse_kl, ops::Divergence::forward_kl})
    for (bool rewarded : {false, true}) {
      Fixture s;
      const std::vector<RlSample> samples = sample_groups(*s.model, s.adapter, Numerics::fp32, 2, 3, 30, 9);
      const RlRows rows = make_rl_rows(
          s.shape, samples,
          rewarded ? some_weights(samples.size()) : std::vector<SampleWeight>(samples.size(), {0, 0, true}), kTree);
      const Teacher teacher = other_teacher(0.5, kind);
      RlLossOptions o;
      o.loss = PolicyLoss::ppo;  // cispo's gradient is not that of its value
      loss_of(s, rows, o, teacher);
      for (size_t at : {size_t{0}, s.trainee->parameters.size() / 2, s.trainee->parameters.size() - 1}) {
        Parameter& p = s.trainee->parameters[at];
        // Along the gradient: one difference tells its length. Steps of 5e-4 and more change which experts and entries
        // are chosen; at 2e-4 the loss changes by 1e-5 and more and is good to about 1e-7.
        const std::vector<float> gradient(p.grad.f32(), p.grad.f32() + p.grad.numel());
        double square = 0;
        for (float g : gradient) square += double(g) * g;
        ASSERT_GT(square, 0) << p.name;
        const double step = 2e-4 / std::sqrt(square);
        const std::vector<float> before(p.master.f32(), p.master.f32() + p.master.numel());
        double side[2];
        for (int up : {0, 1}) {
          for (size_t i = 0; i < before.size(); ++i)
            p.master.f32()[i] = before[i] + static_cast<float>((up ? step : -step) * gradient[i]);
          publish(*s.trainee);
          side[up] = loss_of(s, rows, o, teacher);
        }
        std::copy(before.begin(), before.end(), p.master.f32());
        publish(*s.trainee);
        EXPECT_NEAR((side[1] - side[0]) / (2 * step), square, 0.02 * square)
            << p.name << (rewarded ? " with" : " without") << " a policy loss";
      }
    }
}

TEST(RlStep, ATeacherDoesNotChangeThePolicyLoss) {
  Fixture s;
  const std::vector<RlSample> samples = sample_groups(*s.model, s.adapter, Numerics::fp32, 2, 4, 30, 9);
  const Teacher teacher = other_teacher(2, ops::Divergence::reverse_kl);
  RlLossOptions o;
  o.kl_coefficient = 0.5;
  std::vector<SampleWeight> weights = some_weights(samples.size());
  double loss[2];
  for (bool distilled : {false, true}) {
    for (SampleWeight& w : weights) w.kept = distilled || w.weight > 0;
    RlRows rows = make_rl_rows(s.shape, samples, weights, kTree);
    for (RlRow& row : rows.rows) {
      const Tensor reference = row_logprobs(*s.model, nullptr, row, Numerics::fp32);
      for (size_t t = 0; t < row.tokens.size(); ++t) row.tokens[t].reference = reference.f32()[t];
    }
    zero_gradients(*s.trainee);
    const RlStepResult r =
        accumulate_rl_gradients(*s.trainee, rows.rows, Numerics::fp32, o, distilled ? &teacher : nullptr);
    loss[distilled] = r.policy_loss;
    EXPECT_EQ(r.divergence > 0, distilled);
    if (!distilled) continue;
    EXPECT_EQ(r.divergence, mean_divergence(*s.model, &s.trainee->adapters, rows.rows, Numerics::fp32, teacher));
  }
  EXPECT_NEAR(loss[0], loss[1], 1e-12);
}

TEST(RlStep, AStudentThatIsItsTeacherLearnsNothing) {
  Fixture s;
  const std::vector<RlSample> samples = sample_groups(*s.model, s.adapter, Numerics::released, 1, 2, 30, 5);
  const RlRows rows = make_rl_rows(s.shape, samples, {{0, 0, true}, {0, 0, true}}, kTree);
  Teacher self;
  self.weights = s.model;
  self.adapters.parts.push_back({s.adapter, {}, true, nullptr});
  zero_gradients(*s.trainee);
  const RlStepResult r = accumulate_rl_gradients(*s.trainee, rows.rows, Numerics::released, {}, &self);
  EXPECT_EQ(r.loss, 0);
  EXPECT_EQ(gradient_norm(*s.trainee), 0);
}

TEST(RlStep, ToolResultsBetweenAnswersAreNotTrained) {
  Fixture s;
  RlSample sample;
  sample.tokens = random_tokens(s.model->model, 40, 9);
  sample.mask.assign(40, 0);
  sample.logprob.assign(40, kUnknown);
  for (int p : {12, 13, 14, 25, 26, 39}) sample.mask[p] = 1, sample.logprob[p] = -1;
  sample.prompt = 12;
  const RlRows rows = make_rl_rows(s.shape, {sample}, {{1, 1, true}}, kTree);
  EXPECT_EQ(rows.rows[0].plan.wanted, (std::vector<int>{11, 12, 13, 24, 25, 38}));
  EXPECT_EQ(rows.trained, 6);
}

}  // namespace
}  // namespace plumb
