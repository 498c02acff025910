// The step on the small random model: the loss is a mean over tokens whatever the packing, gradients are those of the
// loss, and everything repeats to the bit.
#include "train/step.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "base/parallel.h"
#include "base/philox.h"
#include "checkpoint/codecs.h"
#include "ops/head.h"
#include "train/testing.h"

namespace plumb {
namespace {

using namespace testing;

constexpr LossWeights kAllLosses{0.3, 0.01, 0.5};

// Largest difference of two gradients, relative to the root mean square of the first.
double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0, worst = 0;
  for (float x : a) sum += double(x) * x;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(double(a[i]) - b[i]));
  return worst / std::sqrt(sum / static_cast<double>(a.size()));
}

TEST(TrainRow, TargetsAreNextTokensInsideADocument) {
  ModelConfig c = tiny_config();
  const std::vector<Sample> samples = {{{5, 6, 7}, {0, 1, 1}, 1}, {{8, 9, 10, 11}, {0, 0, 1, 0}, 2}};
  const TrainRow r = make_row(plan_shape(c), samples, {0, 1});
  EXPECT_EQ(r.plan.token, (std::vector<int>{5, 6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(r.plan.wanted, (std::vector<int>{0, 1, 4}));
  EXPECT_EQ(r.target, (std::vector<int>{6, 7, 10}));
  const MtpRow m = make_mtp_row(plan_shape(c), r);  // rows: next tokens 6 7, 9 10 11
  EXPECT_EQ(m.input.plan.token, (std::vector<int>{6, 7, 9, 10, 11}));
  EXPECT_EQ(m.target, (std::vector<int>{7, 0, 10, 0, 0}));
  EXPECT_EQ(m.weight, (std::vector<float>{1, 0, 1, 0, 0}));
}

TEST(Step, LossIsTheMeanOverTokensAlone) {
  const ModelConfig c = tiny_config();
  auto t = random_lora_trainee(c, 1);
  const std::vector<Sample> samples = random_samples(c, {19, 30, 7});
  double sum = 0;
  int64_t n = 0;
  for (int i = 0; i < 3; ++i) {  // document by document, from whole logits
    const SequencePlan plan = plan_documents(plan_shape(c), {samples[i].tokens});
    ForwardOptions o;
    o.numerics = Numerics::fp32;
    o.adapters = &t->adapters;
    const Tensor logits = ops::head_logits(forward(*t->weights, plan, o).hidden, t->weights->outer().head).value;
    for (size_t k = 1; k < samples[i].tokens.size(); ++k) {
      if (!samples[i].mask[k]) continue;
      const float* row = logits.f32() + (k - 1) * c.vocab_size;
      double total = 0;
      for (int v = 0; v < c.vocab_size; ++v) total += std::exp(double(row[v]));
      sum += std::log(total) - row[samples[i].tokens[k]];
      ++n;
    }
  }
  const StepLosses losses = accumulate_gradients(*t, make_rows(c, samples, {{0, 1}, {2}}), Numerics::fp32, {});
  EXPECT_EQ(losses.trained, n);
  EXPECT_NEAR(losses.loss, sum / static_cast<double>(n), 1e-5);  // log-probabilities are FP32 values of about 5
  EXPECT_NEAR(evaluate(*t, make_rows(c, samples, {{2, 1, 0}}), Numerics::fp32), sum / static_cast<double>(n), 1e-5);
}

TEST(Step, PackingDoesNotMatter) {
  const ModelConfig c = tiny_config();
  const std::vector<Sample> samples = random_samples(c, {19, 30, 7, 21});
  auto lora = random_lora_trainee(c, 1);
  auto full = full_trainee(random_model(c, 1), {});
  for (Trainee* t : {lora.get(), full.get()}) {
    const LossWeights weights = t->trained ? kAllLosses : LossWeights{};
    std::vector<std::vector<float>> grads;
    std::vector<StepLosses> losses;
    for (const std::vector<Row>& rows :
         {std::vector<Row>{{0, 1, 2, 3}}, std::vector<Row>{{3}, {2}, {1}, {0}}, std::vector<Row>{{1, 3}, {0, 2}}}) {
      zero_gradients(*t);
      losses.push_back(accumulate_gradients(*t, make_rows(c, samples, rows), Numerics::fp32, weights));
      grads.push_back(flat(*t, &Parameter::grad));
    }
    for (int i = 1; i < 3; ++i) {
      // Forward passes have the same bits; only the order of the sums over rows differs (FP32, some 80 rows).
      EXPECT_LT(relative_difference(grads[0], grads[i]), 2e-4);
      EXPECT_NEAR(losses[0].loss, losses[i].loss, 1e-12);
      EXPECT_NEAR(losses[0].mtp, losses[i].mtp, 1e-12);
      EXPECT_NEAR(losses[0].balance, losses[i].balance, 1e-6);
      EXPECT_NEAR(losses[0].indexer, losses[i].indexer, 1e-6);
      EXPECT_EQ(losses[0].expert_rows, losses[i].expert_rows);
    }
  }
}

TEST(Step, RepeatsToTheBitWithAnyNumberOfThreads) {
  const ModelConfig c = tiny_config();
  const std::vector<Sample> samples = random_samples(c, {19, 30, 7, 21});
  const std::vector<TrainRow> rows = make_rows(c, samples, {{0, 1}, {2, 3}});
  std::vector<float> first;
  double first_norm = 0;
  const int threads = thread_count();
  for (int n : {1, 2, 3, 1}) {
    set_thread_count(n);
    auto t = full_trainee(random_model(c, 1, WeightFormat::fp8), {});
    Optimizer optimizer(*t, {{}, true, {}});
    accumulate_gradients(*t, rows, Numerics::released, kAllLosses);
    const double norm = gradient_norm(*t);
    optimizer.step(*t, 1e-3, 0.5, 1);
    const std::vector<float> masters = flat(*t, &Parameter::master);
    if (first.empty()) first = masters, first_norm = norm;
    EXPECT_TRUE(same_bits(masters, first)) << n << " threads";
    EXPECT_EQ(norm, first_norm);
  }
  set_thread_count(threads);
}

// The whole step against finite differences: the gradient times a random direction is the slope of the loss along it.
// The model has no discrete choices (all experts from tables, all entries selected), since a flip has no slope.
TEST(Step, GradientsAreThoseOfTheLosses) {
  ModelConfig c = tiny_config();
  c.num_hash_layers = c.num_hidden_layers;
  c.num_experts_per_tok = c.n_routed_experts;  // of the MTP layer, which always has a router
  c.index_topk = 100;
  c.swiglu_limit = 3;
  const LossWeights weights{0.3, 0, 0};
  auto t = full_trainee(random_model(c, 3), {});
  const std::vector<TrainRow> rows = make_rows(c, random_samples(c, {23, 18, 9}), {{0, 1}, {2}});
  accumulate_gradients(*t, rows, Numerics::fp32, weights);
  const std::vector<float> grad = flat(*t, &Parameter::grad);
  auto objective = [&] {
    const StepLosses l = accumulate_gradients(*t, rows, Numerics::fp32, weights);
    return l.loss + weights.mtp * l.mtp;
  };
  // One direction for each kind of parameter, so that a wrong gradient cannot hide behind the others.
  const char* kinds[] = {"embed", "head.weight", "wq_a",        "wq_b",  "wkv",     "wo_a", "wo_b",  "attn_sink",
                         "ape",   "wgate",       "norm.weight", "gate.", "experts", "hc_",  "e_proj"};
  for (const char* kind : kinds) {
    std::vector<Tensor> before;
    for (const Parameter& p : t->parameters) before.push_back(p.master.clone());
    auto move = [&](float h) {  // along the gradient, scaled to its norm: the slope is the norm of that part
      double expected = 0;
      size_t at = 0;
      double norm = 0;
      for (size_t pass = 0; pass < 2; ++pass, at = 0)
        for (size_t i = 0; i < t->parameters.size(); ++i) {
          const Parameter& p = t->parameters[i];
          const bool moves = p.name.find(kind) != std::string::npos && p.name.find("indexer") == std::string::npos;
          for (int64_t k = 0; k < p.master.numel(); ++k, ++at) {
            if (!moves) continue;
            if (pass == 0) norm += double(grad[at]) * grad[at];
            if (pass == 1) p.master.f32()[k] = before[i].f32()[k] + h * grad[at] / static_cast<float>(std::sqrt(norm));
          }
        }
      expected = std::sqrt(norm);
      publish(*t);
      return expected;
    };
    const float h = 4e-3f;
    const double slope = move(h);
    const double up = objective();
    move(-h);
    const double down = objective();
    for (size_t i = 0; i < before.size(); ++i)
      std::memcpy(t->parameters[i].master.raw(), before[i].raw(), before[i].bytes());
    publish(*t);
    ASSERT_GT(slope, 0) << kind;
    // The loss is an FP32 computation (1e-6 / 2h = 1e-4) and has a third derivative.
    EXPECT_NEAR((up - down) / (2 * h), slope, 2e-3 + 0.02 * slope) << kind;
  }
}

TEST(Step, LoraOverfitsTwoSamples) {
  const ModelConfig c = tiny_config();
  auto t = lora_trainee(random_model(c, 1, WeightFormat::fp8), fresh_adapter(c, lora_keys(4, 16), 7));
  const std::vector<TrainRow> rows = make_rows(c, random_samples(c, {16, 20}), {{0, 1}});
  Optimizer optimizer(*t, {{0.9, 0.99, 1e-13, 0}, false, {}});
  std::vector<double> losses;
  for (int step = 1; step <= 30; ++step) {
    zero_gradients(*t);
    losses.push_back(accumulate_gradients(*t, rows, Numerics::released, {}).loss);
    optimizer.step(*t, 5e-3, clip_factor(gradient_norm(*t), 1), step);
  }
  EXPECT_LT(losses.back(), 0.25 * losses[0]) << losses[0] << " " << losses[10] << " " << losses[20];
}

TEST(Step, EveryWeightGetsAGradientAndPackedOnesStayInTheirFormat) {
  const ModelConfig c = tiny_config();
  auto t = full_trainee(random_model(c, 1, WeightFormat::fp8), {});
  const std::vector<TrainRow> rows = make_rows(c, random_samples(c, {40, 40, 40}), {{0, 1, 2}});
  accumulate_gradients(*t, rows, Numerics::released, kAllLosses);
  for (const Parameter& p : t->parameters) {
    double sum = 0;
    for (int64_t i = 0; i < p.grad.numel(); ++i) sum += std::abs(p.grad.f32()[i]);
    EXPECT_GT(sum, 0) << p.name;
  }
  Optimizer optimizer(*t, {{}, false, {}});
  optimizer.step(*t, 1e-2, 1, 1);
  const Linear& w = t->trained->layers[1].attn.wq_b;
  ASSERT_EQ(w.format, WeightFormat::fp8);
  for (const Parameter& p : t->parameters) {
    if (p.name != "layers.1.attn.wq_b.weight") continue;
    const Tensor seen = decode({w.data, w.scale}), expected = decode(encode(p.master, Codec::fp8, p.name));
    EXPECT_EQ(std::memcmp(seen.raw(), expected.raw(), seen.bytes()), 0);
    EXPECT_NE(std::memcmp(seen.raw(), p.master.raw(), seen.bytes()), 0);  // the master keeps what the format loses
  }
  EXPECT_EQ(t->trained->layers[1].wo_a_group.size(), static_cast<size_t>(c.o_groups));
}

TEST(Step, WithoutItsLossThePartIsFrozen) {
  const ModelConfig c = tiny_config();
  auto t = full_trainee(random_model(c, 1), {false, false});
  for (const Parameter& p : t->parameters) {
    EXPECT_EQ(p.name.find(".indexer."), std::string::npos);
    EXPECT_FALSE(p.name.starts_with("mtp."));
  }
  accumulate_gradients(*t, make_rows(c, random_samples(c, {20}), {{0}}), Numerics::fp32, {});
}

TEST(RouterBias, MovesTowardsEqualLoad) {
  const ModelConfig c = tiny_config();  // layers 0 and 1 have tables, 6 is the MTP layer
  auto t = full_trainee(random_model(c, 1), {});
  const Tensor before = t->trained->layers[2].router.bias.clone(),
               mtp_before = t->trained->mtps[0].block.router.bias.clone();
  std::vector<std::vector<int64_t>> rows(7, std::vector<int64_t>{4, 0, 2, 2, 3, 1});
  update_router_bias(*t, rows, 0.25);
  const float moved[] = {-0.25f, 0.25f, 0, 0, -0.25f, 0.25f};
  for (int e = 0; e < 6; ++e) {
    EXPECT_FLOAT_EQ(t->trained->layers[2].router.bias.f32()[e], before.f32()[e] + moved[e]);
    EXPECT_FLOAT_EQ(t->trained->mtps[0].block.router.bias.f32()[e], mtp_before.f32()[e] + moved[e]);
  }
}

// ---- Parameters -----------------------------------------------------------------------------------------------------

TEST(FreshAdapter, StartsAsTheIdentityAndFollowsTheSeed) {
  const ModelConfig c = tiny_config();
  const auto a = fresh_adapter(c, lora_keys(), 1), b = fresh_adapter(c, lora_keys(), 1),
             other = fresh_adapter(c, lora_keys(), 2);
  auto ta = lora_trainee(random_model(c, 1), a), tb = lora_trainee(random_model(c, 1), b),
       to = lora_trainee(random_model(c, 1), other);
  EXPECT_TRUE(same_bits(flat(*ta, &Parameter::master), flat(*tb, &Parameter::master)));
  EXPECT_FALSE(same_bits(flat(*ta, &Parameter::master), flat(*to, &Parameter::master)));
  for (const Parameter& p : ta->parameters) {
    double sum = 0, worst = 0;
    for (int64_t i = 0; i < p.master.numel(); ++i) {
      sum += double(p.master.f32()[i]) * p.master.f32()[i];
      worst = std::max(worst, std::abs(double(p.master.f32()[i])));
    }
    if (p.name.ends_with("lora_b")) {
      EXPECT_EQ(sum, 0) << p.name;
      continue;
    }
    const double bound = 1 / std::sqrt(static_cast<double>(p.master.size(1)));
    EXPECT_LE(worst, bound) << p.name;
    // A uniform variable in +-bound has mean square bound^2 / 3; 24 values and more, three standard deviations.
    EXPECT_NEAR(sum / static_cast<double>(p.master.numel()) / (bound * bound), 1.0 / 3, 0.25) << p.name;
  }
}

TEST(FreshAdapter, TargetsChooseTheMatrices) {
  const ModelConfig c = tiny_config();
  LoraKeys keys = lora_keys();
  keys.targets = {"kv_proj", "compressor.gate_proj"};
  auto t = lora_trainee(random_model(c, 1), fresh_adapter(c, keys, 1));
  std::set<std::string> names;
  for (const Parameter& p : t->parameters) names.insert(p.name);
  std::set<std::string> expected;
  for (int layer = 0; layer < 6; ++layer)
    for (const char* part : {".lora_a", ".lora_b"}) {
      expected.insert("layers." + std::to_string(layer) + ".attn.wkv" + part);
      if (c.kind(layer) != LayerKind::window)
        expected.insert("layers." + std::to_string(layer) + ".attn.compressor.wgate" + part);
    }
  EXPECT_EQ(names, expected);
  // The values of a target do not depend on which others there are.
  auto all = fresh_adapter(c, lora_keys(), 1);
  EXPECT_EQ(std::memcmp(all->layers[3].wkv.a.raw(), t->adapter->layers[3].wkv.a.raw(), all->layers[3].wkv.a.bytes()),
            0);
}

TEST(Parameters, FullTrainingCoversTheInventory) {
  const ModelConfig c = tiny_config();
  auto t = full_trainee(random_model(c, 1), {});
  std::set<std::string> names, expected;
  for (const Parameter& p : t->parameters) names.insert(p.name);
  for (const InventoryEntry& e : inventory(c))
    if (!e.name.ends_with("gate.bias") && !e.name.ends_with("tid2eid")) expected.insert(e.name);
  EXPECT_EQ(names, expected);
}

TEST(GradientNorm, IsTheRootOfAllSquares) {
  const ModelConfig c = tiny_config();
  auto t = random_lora_trainee(c, 1);
  double sum = 0;
  Random g(4);
  for (const Parameter& p : t->parameters)
    for (int64_t i = 0; i < p.grad.numel(); ++i) {
      p.grad.f32()[i] = g.normal();
      sum += double(p.grad.f32()[i]) * p.grad.f32()[i];
    }
  EXPECT_NEAR(gradient_norm(*t), std::sqrt(sum), 1e-9);
  EXPECT_EQ(find_bad_gradient(*t), "");
  t->parameters[5].grad.f32()[1] = std::nanf("");
  EXPECT_EQ(find_bad_gradient(*t), t->parameters[5].name);
  EXPECT_FALSE(std::isfinite(gradient_norm(*t)));
}

}  // namespace
}  // namespace plumb
