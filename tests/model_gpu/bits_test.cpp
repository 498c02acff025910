// The model on the GPU against itself, on bits: packed and alone, prefill, decoding and training, adapters by row,
// repeats, and an adapter in training against the host's optimizer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/philox.h"
#include "model/device_adapters.h"
#include "model_gpu_testing.h"
#include "ops/head.h"
#include "support/same_bits.h"
#include "train/step.h"

namespace plumb {
namespace {

using namespace testing;  // NOLINT: the vocabulary of these tests

TEST(ModelGpu, PackedDocumentsHaveTheBitsOfSeparateOnes) {
  const std::vector<int> a = tokens(150, 11), b = tokens(1, 12), d = tokens(40, 13);
  const Tensor packed = to_host(documents({a, {}, b, d}).hidden_of(*models().gpu));
  EXPECT_TRUE(same_bits(packed.rows(0, 150), documents({a}).hidden_of(*models().gpu)));
  EXPECT_TRUE(same_bits(packed.rows(150, 151), documents({b}).hidden_of(*models().gpu)));
  EXPECT_TRUE(same_bits(packed.rows(151, 191), documents({d}).hidden_of(*models().gpu)));
}

// Feeds one sequence through a cache in chunks of the given sizes, then of the last one; the hidden rows of all tokens.
Tensor cached(const std::vector<int>& ids, const std::vector<int>& chunks, const AdapterBatch* adapters) {
  const ModelConfig c = flash_config();
  const PlanShape shape = plan_shape(c);
  const int length = static_cast<int>(ids.size()), largest = *std::max_element(chunks.begin(), chunks.end());
  const CacheSlots slots{3, shape.window + largest, 1, 2, 5, 1};  // not at the start of the cache
  const CacheShape totals{3 + shape.window + largest, 1 + length, 2 + length};
  KvCache cache = make_cache(c, totals, 5 + 2 * shape.csa_ratio, 1 + shape.hca_ratio, Space::device);
  ForwardOptions o = options(adapters);
  o.cache = &cache;
  Tensor all = Tensor::empty({length, c.hidden_size});
  int done = 0;
  for (size_t i = 0; done < length; ++i) {
    const int take = std::min(chunks[std::min(i, chunks.size() - 1)], length - done);
    const SequencePlan plan =
        plan_cached_step(shape, totals, {slots}, {done}, {{ids.begin() + done, ids.begin() + done + take}}, true);
    copy_bytes(all.rows(done, done + take), to_host(forward(*models().gpu, plan, o).hidden));
    done += take;
  }
  return all;
}

TEST(ModelGpu, PrefillAndDecodingHaveTheBitsOfTraining) {
  const std::vector<int> ids = tokens(266, 14);
  const AdapterBatch batch = one_adapter(flash_adapter(flash_config(), 8, 15));
  for (const AdapterBatch* adapters : {static_cast<const AdapterBatch*>(nullptr), &batch}) {
    const Tensor whole = to_host(documents({ids}).hidden_of(*models().gpu, adapters));
    for (const std::vector<int>& chunks : {std::vector<int>{254, 1}, {100, 7, 64}, {17}}) {
      const Tensor stepped = cached(ids, chunks, adapters);
      for (int r = 0; r < whole.size(0); ++r)
        ASSERT_TRUE(same_bits(stepped.rows(r, r + 1), whole.rows(r, r + 1)))
            << "row " << r << ", chunks of " << chunks[0] << (adapters ? ", with an adapter" : "");
    }
  }
}

// One product alone, with rows that change adapters all the time, of a narrow and of a wide kernel.
TEST(ModelGpu, LinearAddsTheAdapterOfEachRow) {
  const auto first = flash_adapter(flash_config(), 8, 25), second = flash_adapter(flash_config(), 8, 26);
  const LayerLease weights = models().gpu->acquire(0);
  const auto on_device = [](const LoraPair& p) { return LoraPair{to_device(p.a), to_device(p.b), p.scale}; };
  const LoraPair a = on_device(first->layers[0].wq_a), b = on_device(second->layers[0].wq_a);
  for (int rows : {5, 59, 300}) {
    const Tensor host = Tensor::empty({rows, flash_config().hidden_size});
    Random random(rows, 6);
    for (int64_t i = 0; i < host.numel(); ++i) host.f32()[i] = static_cast<float>(random.normal());
    const Tensor x = to_device_bf16(host);
    std::vector<std::vector<int>> of(3);
    for (int r = 0; r < rows; ++r) of[r * 7 % 11 % 3].push_back(r);
    const auto product = [&](const LoraList& lora) {
      return to_host(ops::linear(x, weights->attn.wq_a, lora, {Numerics::released, Point::act_wq_a, Point::out_wq_a}));
    };
    const Tensor mixed = product({{&a, &of[0]}, {&b, &of[1]}});
    const Tensor alone[] = {product({{&a, nullptr}}), product({{&b, nullptr}}), product({})};
    for (int which : {0, 1, 2})
      for (int r : of[which])
        EXPECT_TRUE(same_bits(mixed.rows(r, r + 1), alone[which].rows(r, r + 1))) << "row " << r << " of " << rows;
  }
}

// The smaller rank is filled up to the larger one.
void check_own_adapters(int first_rank, int second_rank) {
  const std::vector<int> a = tokens(30, 16), b = tokens(20, 17), d = tokens(9, 18);
  const auto first = flash_adapter(flash_config(), first_rank, 19),
             second = flash_adapter(flash_config(), second_rank, 20);
  AdapterBatch mixed;
  mixed.parts.push_back({first, {}, false, nullptr});
  mixed.parts.push_back({second, {}, false, nullptr});
  for (int r = 0; r < 30; ++r) mixed.parts[0].rows.push_back(r);
  for (int r = 30; r < 50; ++r) mixed.parts[1].rows.push_back(r);
  const Tensor all = to_host(documents({a, b, d}).hidden_of(*models().gpu, &mixed));
  const AdapterBatch only_first = one_adapter(first), only_second = one_adapter(second);
  EXPECT_TRUE(same_bits(all.rows(0, 30), documents({a}).hidden_of(*models().gpu, &only_first)));
  EXPECT_TRUE(same_bits(all.rows(30, 50), documents({b}).hidden_of(*models().gpu, &only_second)));
  EXPECT_TRUE(same_bits(all.rows(50, 59), documents({d}).hidden_of(*models().gpu)));
}
TEST(ModelGpu, EachRowUsesItsOwnAdapter) {
  check_own_adapters(4, 8);
  check_own_adapters(12, 8);
}

// What is kept of a snapshot has the bits of what is made anew in each pass of an adapter in training.
TEST(ModelGpu, SnapshotsHaveTheBitsOfTheTrainedAdapter) {
  const auto adapter = flash_adapter(flash_config(), 8, 27);
  DeviceAdapter training = train_on_device(*adapter);
  const AdapterBatch trained = one_adapter(training.adapter, &training.grads), snapshot = one_adapter(adapter);
  for (int rows : {3, 80}) {
    const Case one = documents({tokens(rows, 28)});
    const Tensor hidden = one.hidden_of(*models().gpu, &trained);
    for (int repeat = 0; repeat < 2; ++repeat)
      EXPECT_TRUE(same_bits(one.hidden_of(*models().gpu, &snapshot), hidden)) << rows << " rows";
  }
}

TEST(ModelGpu, ForwardAndBackwardRepeatOnBits) {
  const ModelConfig c = flash_config();
  const Case one = documents({tokens(140, 21)});
  const auto adapter = flash_adapter(c, 4, 22);
  std::vector<Tensor> first;
  for (int repeat = 0; repeat < 5; ++repeat) {
    DeviceAdapter training = train_on_device(*adapter);
    const AdapterBatch batch = one_adapter(training.adapter, &training.grads);
    ForwardOptions o = options(&batch);
    o.keep = std::array{Keep::streams, Keep::streams, Keep::outputs, Keep::outputs, Keep::all}[repeat];
    const ForwardResult result = forward(*models().gpu, one.plan, o);
    const Tensor d = Tensor::full({140}, -1.0f / 140);
    Tensor logprob;
    const Tensor d_hidden =
        ops::head_logprobs_backward(d, result.hidden, models().gpu->outer().head, tokens(140, 23), {}, &logprob);
    Gradients frozen;
    backward(*models().gpu, one.plan, o, result, d_hidden, {}, frozen, {});
    std::vector<Tensor> found = {logprob};
    for (const Tensor& g : training.gradient_memory) found.push_back(to_host(g));
    if (repeat == 0) first = found;
    ASSERT_EQ(found.size(), first.size());
    for (size_t i = 0; i < found.size(); ++i) ASSERT_TRUE(same_bits(found[i], first[i])) << "repeat " << repeat;
  }
}

// Two steps of the trainer, whose adapter, gradients and moments stay on the GPU: the host's AdamW of the same
// gradients gives the same bits (both compute in double and round once), and the norm is that of all gradients.
TEST(ModelGpu, AnAdapterInTrainingHasTheBitsOfTheHostsOptimizer) {
  const auto adapter = flash_adapter(flash_config(), 4, 31);
  const std::unique_ptr<Trainee> trainee = lora_trainee(models().gpu, copy_adapter(*adapter));
  OptimizerOptions options;
  options.adamw.weight_decay = 0.01;
  Optimizer optimizer(*trainee, options);
  AdapterGrads grads = zero_grads(*adapter);
  std::vector<std::pair<Tensor, Tensor>> weights;  // host's adapter, its gradient
  for (size_t l = 0; l < adapter->layers.size(); ++l)
    visit_lora(adapter->layers[l], grads.layers[l], [&](const std::string&, LoraPair& p, LoraGrad& g) {
      if (p.defined()) weights.emplace_back(p.a, g.a), weights.emplace_back(p.b, g.b);
    });
  std::vector<std::pair<Tensor, Tensor>> moments;
  for (const auto& [w, g] : weights) moments.emplace_back(zeros_like(w), zeros_like(w));
  const std::vector<int> ids = tokens(60, 32);
  for (int step = 1; step <= 2; ++step) {
    zero_gradients(*trainee);
    TrainRow row;
    row.plan = plan_documents(plan_shape(flash_config()), {ids});
    row.documents = {ids};
    row.target = tokens(60, 33);
    accumulate_gradients(*trainee, {row, row}, Numerics::released, {});
    bring_home(trainee->adapter_grads, grads);
    double squares = 0;
    for (const auto& [w, g] : weights)
      for (int64_t i = 0; i < g.numel(); ++i) squares += double{g.f32()[i]} * g.f32()[i];
    const double norm = apply_gradients(*trainee, optimizer, 1e-3, 0.5, step, "");
    EXPECT_NEAR(norm, std::sqrt(squares), 1e-12 * norm);
    EXPECT_GT(norm, 0);
    for (size_t i = 0; i < weights.size(); ++i)
      adamw_step(weights[i].first, weights[i].second, moments[i].first, moments[i].second, options.adamw, 1e-3,
                 clip_factor(norm, 0.5), step);
    const Adapter& there = *host_adapter(*trainee);
    size_t at = 0;
    for (const LayerLora& layer : there.layers) {
      LayerLora pairs = layer;
      LayerLoraGrad unused;
      visit_lora(pairs, unused, [&](const std::string& name, LoraPair& p, LoraGrad&) {
        if (!p.defined()) return;
        EXPECT_TRUE(same_bits(p.a, weights[at++].first)) << name << " in step " << step;
        EXPECT_TRUE(same_bits(p.b, weights[at++].first)) << name << " in step " << step;
      });
    }
    EXPECT_EQ(at, weights.size());
  }
}

TEST(ModelGpu, OtherProfilesAreRefused) {
  ForwardOptions o = options();
  o.numerics = Numerics::bf16;
  EXPECT_THROW(forward(*models().gpu, documents({tokens(4, 24)}).plan, o), Error);
  EXPECT_THROW(place_weights(models().cpu, "cuda", Numerics::fp32), Error);
  EXPECT_EQ(place_weights(models().cpu, "auto", Numerics::fp32).store->space(), Space::host);
  EXPECT_EQ(place_weights(models().cpu, "auto", Numerics::released).store->space(), Space::device);
}

}  // namespace
}  // namespace plumb
