// Adapters on a device (a stand-in): what a pass gets, and how its gradients come back.
#include "model/device_adapters.h"

#include <gtest/gtest.h>

#include "support/stand_in_device.h"
#include "support/tiny_model.h"

namespace plumb {
namespace {

using testing::random_adapter;
using testing::StandInDevice;
using testing::tiny_config;

// a [r, in], b [out, r] against the same with more ranks, all zero.
void expect_padded(const LoraPair& device, const LoraPair& host, int rank) {
  const Tensor a = to_host(device.a), b = to_host(device.b);
  const int64_t r = host.a.size(0), in = host.a.size(1), out = host.b.size(0);
  ASSERT_EQ(a.shape(), (Shape{rank, in}));
  ASSERT_EQ(b.shape(), (Shape{out, rank}));
  EXPECT_EQ(device.scale, host.scale);
  for (int64_t j = 0; j < rank; ++j) {
    for (int64_t i = 0; i < in; ++i) ASSERT_EQ(a.f32()[j * in + i], j < r ? host.a.f32()[j * in + i] : 0);
    for (int64_t o = 0; o < out; ++o) ASSERT_EQ(b.f32()[o * rank + j], j < r ? host.b.f32()[o * r + j] : 0);
  }
}

TEST(DeviceAdapters, PairsHaveOneRankAndExpertsLieBehindEachOther) {
  const StandInDevice device;
  const ModelConfig c = tiny_config();
  const auto first = random_adapter(c, 3, 1), second = random_adapter(c, 6, 2);
  AdapterBatch batch;
  batch.parts.push_back({first, {0, 2}, false, nullptr});
  batch.parts.push_back({second, {1}, false, nullptr});
  const AdapterBatch there_batch = device_batch(batch);
  ASSERT_EQ(there_batch.parts.size(), 2u);
  EXPECT_EQ(there_batch.parts[0].rows, batch.parts[0].rows);
  for (int part : {0, 1})
    for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
      LayerLora host = batch.parts[part].adapter->layers[layer];
      LayerLora there = there_batch.parts[part].adapter->layers[layer];
      LayerLoraGrad unused;
      std::map<std::string, LoraPair> pairs;
      visit_lora(there, unused, [&](const std::string& name, LoraPair& p, LoraGrad&) { pairs[name] = p; });
      visit_lora(host, unused, [&](const std::string& name, LoraPair& p, LoraGrad&) {
        ASSERT_EQ(pairs[name].defined(), p.defined()) << name;
        if (p.defined()) expect_padded(pairs[name], p, 8);  // the largest rank, as a multiple of four
      });
      for (const auto& experts : {there.experts.gate_up, there.experts.down})
        for (size_t e = 1; e < experts.size(); ++e) {
          EXPECT_EQ(experts[e].a.raw(), experts[0].a.raw() + e * experts[0].a.bytes());
          EXPECT_EQ(experts[e].b.raw(), experts[0].b.raw() + e * experts[0].b.bytes());
        }
    }
}

TEST(DeviceAdapters, SnapshotsAreCopiedOnceAndAdaptersInTrainingNotAtAll) {
  const StandInDevice device;
  const ModelConfig c = tiny_config();
  const auto adapter = random_adapter(c, 4, 3);
  AdapterBatch snapshot, trained, wrong;
  snapshot.parts.push_back({adapter, {}, true, nullptr});
  const AdapterBatch first = device_batch(snapshot);
  DeviceAdapter training = train_on_device(*adapter);
  trained.parts.push_back({training.adapter, {}, true, &training.grads});
  const size_t before = device.copied();
  EXPECT_EQ(device_batch(snapshot).parts[0].adapter, first.parts[0].adapter);
  EXPECT_EQ(device_batch(trained).parts[0].adapter, training.adapter);
  EXPECT_EQ(device_batch(trained).parts[0].grads, &training.grads);
  EXPECT_EQ(device.copied(), before);
  AdapterGrads grads = zero_grads(*adapter);
  wrong.parts.push_back({adapter, {}, true, &grads});
  EXPECT_THROW(device_batch(wrong), std::exception);
}

TEST(DeviceAdapters, ValuesAndGradientsOfAnAdapterInTrainingComeHome) {
  const StandInDevice device;
  const ModelConfig c = tiny_config();
  const auto adapter = random_adapter(c, 3, 4);
  const DeviceAdapter training = train_on_device(*adapter);
  AdapterGrads grads = zero_grads(*adapter);
  grads.layers[1].wq_a.a.fill(7);
  bring_home(training.grads, grads);
  for (int64_t i = 0; i < grads.layers[1].wq_a.a.numel(); ++i) ASSERT_EQ(grads.layers[1].wq_a.a.f32()[i], 0);

  const LayerLoraGrad& there = training.grads.layers[1];
  const LoraPair& weight = training.adapter->layers[1].experts.down[2];
  for (const Tensor& t : {there.wq_a.a, there.wq_a.b, there.experts.down[2].b, weight.b})
    for (int64_t i = 0; i < t.numel(); ++i) t.device<float>()[i] = static_cast<float>(i);  // a stand-in may be written
  bring_home(training.grads, grads), bring_home(*training.adapter, *adapter);
  const int64_t in = c.hidden_size;
  for (int64_t i = 0; i < 3 * in; ++i) ASSERT_EQ(grads.layers[1].wq_a.a.f32()[i], static_cast<float>(i));
  for (int64_t o = 0; o < c.q_lora_rank; ++o)
    for (int64_t j = 0; j < 3; ++j)
      ASSERT_EQ(grads.layers[1].wq_a.b.f32()[o * 3 + j], static_cast<float>(o * 4 + j));  // rank 4 there
  for (int64_t o = 0; o < in; ++o) {
    ASSERT_EQ(grads.layers[1].experts.down[2].b.f32()[o * 3 + 1], static_cast<float>(o * 4 + 1));
    ASSERT_EQ(adapter->layers[1].experts.down[2].b.f32()[o * 3 + 1], static_cast<float>(o * 4 + 1));
  }
  EXPECT_EQ(grads.layers[1].experts.down[1].b.f32()[1], 0);
}

}  // namespace
}  // namespace plumb
