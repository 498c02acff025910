// The model on the GPU, through src/model: against the CPU's released profile, layer by layer, and on bits against
// itself. A whole pass is not compared with the CPU's number by number: sums that differ in the last bit make FP8 and
// FP4 roundings fall differently, and three layers later log-probabilities differ by a tenth (docs/numerics.md). So
// each layer starts from the same streams on both sides.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "base/error.h"
#include "base/float_formats.h"
#include "base/philox.h"
#include "flash_model.h"
#include "memory/device_weights.h"
#include "model/device_adapters.h"
#include "model/forward.h"
#include "ops/device.h"
#include "ops/head.h"

namespace plumb {
namespace {

using testing::flash_adapter;
using testing::flash_config;
using testing::flash_model;

// Made once: packing four layers takes seconds.
struct Models {
  std::shared_ptr<ResidentWeights> cpu = flash_model(1);
  std::shared_ptr<DeviceWeights> gpu = std::make_shared<DeviceWeights>(cpu);
};
Models& models() {
  static Models& m = *new Models;
  return m;
}

std::vector<int> tokens(int n, int seed) {
  std::vector<int> ids(n);
  for (int i = 0; i < n; ++i) ids[i] = (i * 131 + seed * 977 + i * i * 7) % flash_config().vocab_size;
  return ids;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = to_host(a), y = to_host(b);
  return x.shape() == y.shape() && std::memcmp(x.raw(), y.raw(), x.bytes()) == 0;
}

// ||gpu - cpu|| / ||cpu||
double relative_error(const Tensor& gpu, const Tensor& cpu) {
  const Tensor x = to_host(gpu);
  EXPECT_EQ(x.numel(), cpu.numel());
  double error = 0, size = 0;
  for (int64_t i = 0; i < cpu.numel(); ++i) {
    const double d = double{x.f32()[i]} - cpu.f32()[i];
    error += d * d, size += double{cpu.f32()[i]} * cpu.f32()[i];
  }
  return std::sqrt(error / (size + 1e-300));
}

// As a bf16 tensor of the device holds it.
Tensor to_device_bf16(const Tensor& x) {
  const Tensor packed = Tensor::empty(x.shape(), DType::bf16);
  for (int64_t i = 0; i < x.numel(); ++i) packed.ptr<uint16_t>()[i] = float_to_bf16(x.f32()[i]);
  return to_device(packed);
}

ForwardOptions options(const AdapterBatch* adapters = nullptr) {
  ForwardOptions o;
  o.adapters = adapters;
  return o;
}

struct Case {
  SequencePlan plan;
  Tensor hidden_of(WeightStore& w, const AdapterBatch* adapters = nullptr) const {
    return forward(w, plan, options(adapters)).hidden;
  }
};
Case documents(const std::vector<std::vector<int>>& ids) { return {plan_documents(plan_shape(flash_config()), ids)}; }

AdapterBatch one_adapter(std::shared_ptr<const Adapter> adapter, AdapterGrads* grads = nullptr) {
  AdapterBatch batch;
  batch.parts.push_back({std::move(adapter), {}, true, grads});
  return batch;
}

// ---- Against the CPU

// Of what a layer computes from the same streams. bf16 rounding of a result is 2^-9 of it, 1.7e-3 as a root mean
// square. Where such a value is then stored in FP8, some in a hundred fall to the other side of a step of 2^-4: 1e-2. A
// wrong term shows as 1e-1 and more.
constexpr double kStage = 3e-2;
// Of gradients: the same forward differences, and twice as many links of the chain, each rounded to bf16; the
// attention's dS is a difference of two terms of its own size.
constexpr double kGradient = 1.5e-1;

struct LayerRun {
  LayerSaved saved;
  Tensor next;
};

// Rows where both chose the same, among those where the CPU's own margin between what it took and what it left is
// beyond `bound`.
void expect_same_experts(const ops::Routing& cpu, const Tensor& bias, const Tensor& gpu_expert, double bound) {
  const Tensor expert = to_host(gpu_expert);
  const int64_t rows = cpu.expert.size(0), k = cpu.expert.size(1), all = cpu.score.size(1);
  int compared = 0;
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<float> value(all);
    for (int64_t e = 0; e < all; ++e) value[e] = cpu.score.f32()[r * all + e] + (bias.defined() ? bias.f32()[e] : 0);
    std::sort(value.begin(), value.end(), std::greater<>());
    if (bias.defined() && value[k - 1] - value[k] < bound) continue;
    ++compared;
    std::vector<int> a(cpu.expert.ptr<int32_t>() + r * k, cpu.expert.ptr<int32_t>() + (r + 1) * k);
    std::vector<int> b(expert.ptr<int32_t>() + r * k, expert.ptr<int32_t>() + (r + 1) * k);
    std::sort(a.begin(), a.end()), std::sort(b.begin(), b.end());
    EXPECT_EQ(a, b) << "row " << r;
  }
  EXPECT_GT(compared, rows / 3);
}

// Share of the entries that both selected.
double common_entries(const KeyLists& cpu, const KeyLists& gpu) {
  EXPECT_EQ(cpu.begin, gpu.begin);
  int64_t same = 0;
  for (int r = 0; r < cpu.size(); ++r)
    for (int i = cpu.begin[r]; i < cpu.begin[r + 1]; ++i)
      same += std::binary_search(gpu.row.begin() + gpu.begin[r], gpu.row.begin() + gpu.begin[r + 1], cpu.row[i]);
  return cpu.row.empty() ? 1 : static_cast<double>(same) / static_cast<double>(cpu.row.size());
}

void expect_layer_agrees(int layer, bool with_adapter) {
  const ModelConfig c = flash_config();
  const Case two = documents({tokens(270, 1), tokens(21, 2)});
  ForwardOptions keep = options();
  keep.keep_streams = true;
  const Tensor streams = forward(*models().gpu, two.plan, keep).streams[layer], host_streams = to_host(streams);

  const AdapterBatch batch = with_adapter ? one_adapter(flash_adapter(c, 4, 3)) : AdapterBatch{};
  const DeviceAdapters device_batch(batch);
  PassContext cpu_ctx = make_context(c, two.plan, Numerics::released);
  PassContext gpu_ctx = make_context(c, two.plan, Numerics::released, Space::device);
  if (with_adapter) cpu_ctx.adapters = &batch, gpu_ctx.adapters = &device_batch.batch();

  LayerRun cpu, gpu;
  const LayerLease cpu_weights = models().cpu->acquire(layer), gpu_weights = models().gpu->acquire(layer);
  cpu.next = layer_forward(cpu_ctx, *cpu_weights, layer, host_streams, &cpu.saved);
  gpu_ctx.replay[layer] = to_device(cpu.saved.routing.expert);  // later stages are compared for the same experts
  gpu.next = layer_forward(gpu_ctx, *gpu_weights, layer, streams, &gpu.saved);
  gpu_ctx.replay.clear();
  LayerSaved free_choice;
  layer_forward(gpu_ctx, *gpu_weights, layer, streams, &free_choice);

  const auto stage = [&](const char* name, const Tensor& a, const Tensor& b) {
    const double error = relative_error(a, b);
    std::printf("layer %d %-8s %.2e\n", layer, name, error);
    EXPECT_LT(error, kStage) << name << " of layer " << layer;
  };
  const AttentionSaved &g = gpu.saved.attn, &h = cpu.saved.attn;
  stage("x", g.x, h.x);
  stage("qr", g.qr, h.qr);
  stage("q", g.q, h.q);
  stage("keys", g.keys, h.keys);
  if (c.kind(layer) == LayerKind::csa) {
    stage("iw", g.iw, h.iw);
    const double common = common_entries(h.selected, g.selected);
    std::printf("layer %d selected %.4f in common\n", layer, common);
    // Index vectors are FP4: values that fall to the other side of a step move scores by some percent of their spread,
    // so entries near the limit change places.
    EXPECT_GT(common, 0.9);
  }
  stage("turned", g.core.turned, h.core.turned);
  stage("a", gpu.saved.a, cpu.saved.a);
  stage("mid", gpu.saved.mid, cpu.saved.mid);
  stage("x_ffn", gpu.saved.in_ffn.x, cpu.saved.in_ffn.x);
  // Scores are sqrt(softplus) of logits of size 1 whose input differs by kStage at most: 0.03 is far beyond.
  expect_same_experts(cpu.saved.routing, cpu_weights->router.bias, free_choice.routing.expert, 0.03);
  stage("weights", gpu.saved.routing.weight, cpu.saved.routing.weight);
  stage("f", gpu.saved.f, cpu.saved.f);
  stage("next", gpu.next, cpu.next);
}

TEST(ModelGpu, EachLayerAgreesWithTheCpu) {
  for (int layer = 0; layer < flash_config().num_hidden_layers; ++layer) expect_layer_agrees(layer, false);
}
TEST(ModelGpu, EachLayerAgreesWithTheCpuWithAnAdapter) {
  for (int layer = 0; layer < flash_config().num_hidden_layers; ++layer) expect_layer_agrees(layer, true);
}

// The head alone: FP32 sums in another order, 1 to 3e-5 for logits near 15 (docs/kernels/head.md), here near 5.
TEST(ModelGpu, LogProbabilitiesAndTheirGradientAgreeWithTheCpu) {
  const Case one = documents({tokens(33, 4)});
  const Tensor hidden = one.hidden_of(*models().gpu), host = to_host(hidden);
  const std::vector<int> target = tokens(33, 5);
  const Linear &gpu_head = models().gpu->outer().head, &cpu_head = models().cpu->outer().head;
  const Tensor gpu = ops::head_logprobs(hidden, gpu_head, target), cpu = ops::head_logprobs(host, cpu_head, target);
  for (int64_t r = 0; r < cpu.numel(); ++r) EXPECT_NEAR(gpu.f32()[r], cpu.f32()[r], 1e-4);
  EXPECT_LT(relative_error(ops::head_logits(hidden, gpu_head), ops::head_logits(host, cpu_head)), 1e-4);
  const Tensor d = Tensor::full({33}, -1.0f / 33);
  Tensor logprob;
  const Tensor d_gpu = ops::head_logprobs_backward(d, hidden, gpu_head, target, {}, &logprob);
  EXPECT_TRUE(same_bits(logprob, gpu));
  // Gradients of logits are rounded to bf16 in between.
  EXPECT_LT(relative_error(d_gpu, ops::head_logprobs_backward(d, host, cpu_head, target, {})), 1e-2);
}

// The whole pass: the same function, so log-probabilities agree on the average as closely as roundings let them (see
// above); a wrong layer would make them independent, with a mean difference above 1.
TEST(ModelGpu, WholePassFollowsTheCpu) {
  const Case two = documents({tokens(270, 6), tokens(21, 7)});
  std::vector<int> target = tokens(291, 8);
  const Tensor gpu = ops::head_logprobs(two.hidden_of(*models().gpu), models().gpu->outer().head, target);
  const Tensor cpu = ops::head_logprobs(two.hidden_of(*models().cpu), models().cpu->outer().head, target);
  double mean = 0;
  for (int64_t r = 0; r < cpu.numel(); ++r) mean += std::fabs(gpu.f32()[r] - cpu.f32()[r]) / 291;
  std::printf("mean difference of log-probabilities: %.3f\n", mean);
  EXPECT_LT(mean, 0.3);
}

// Gradients of one layer's adapters and of its input, from the same streams, the same gradient and the same experts.
TEST(ModelGpu, GradientsOfEachLayerAgreeWithTheCpu) {
  const ModelConfig c = flash_config();
  const Case one = documents({tokens(150, 9)});
  ForwardOptions keep = options();
  keep.keep_streams = true;
  const std::vector<Tensor> streams = forward(*models().gpu, one.plan, keep).streams;
  const auto adapter = flash_adapter(c, 4, 10);
  const auto zero_grads = [&] {
    AdapterGrads grads;
    for (LayerLora layer : adapter->layers) {
      LayerLoraGrad& g = grads.layers.emplace_back();
      visit_lora(layer, g, [](const std::string&, LoraPair& p, LoraGrad& grad) {
        if (p.defined()) grad = {Tensor::zeros(p.a.shape()), Tensor::zeros(p.b.shape())};
      });
    }
    return grads;
  };
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    AdapterGrads cpu_grads = zero_grads(), gpu_grads = zero_grads();
    const AdapterBatch cpu_batch = one_adapter(adapter, &cpu_grads), gpu_batch = one_adapter(adapter, &gpu_grads);
    const DeviceAdapters device_batch(gpu_batch);
    PassContext cpu_ctx = make_context(c, one.plan, Numerics::released);
    PassContext gpu_ctx = make_context(c, one.plan, Numerics::released, Space::device);
    cpu_ctx.adapters = &cpu_batch, gpu_ctx.adapters = &device_batch.batch();
    const LayerLease cpu_weights = models().cpu->acquire(layer), gpu_weights = models().gpu->acquire(layer);
    const Tensor host_streams = to_host(streams[layer]);
    LayerSaved saved;
    layer_forward(cpu_ctx, *cpu_weights, layer, host_streams, &saved);
    gpu_ctx.replay[layer] = to_device(saved.routing.expert);

    const Tensor random_next = Tensor::empty(host_streams.shape());
    Random random(layer, 5);
    for (int64_t i = 0; i < random_next.numel(); ++i) random_next.f32()[i] = random.normal();
    const Tensor d_gpu_next = to_device_bf16(random_next), d_cpu_next = to_host(d_gpu_next);
    LayerGrads frozen;
    AuxiliaryResults results;
    const Tensor d_cpu =
        layer_backward(cpu_ctx, *cpu_weights, layer, host_streams, d_cpu_next, frozen, {}, results, &saved);
    const Tensor d_gpu = layer_backward(gpu_ctx, *gpu_weights, layer, streams[layer], d_gpu_next, frozen, {}, results);
    device_batch.add_gradients();
    const double error = relative_error(d_gpu, d_cpu);
    std::printf("layer %d d_streams %.2e\n", layer, error);
    EXPECT_LT(error, kGradient) << "streams of layer " << layer;
    LayerLoraGrad& g = gpu_grads.layers[layer];
    LayerLoraGrad& h = cpu_grads.layers[layer];
    std::map<std::string, LoraGrad> gpu_of;
    LayerLora pairs = adapter->layers[layer];
    visit_lora(pairs, g, [&](const std::string& name, LoraPair&, LoraGrad& grad) { gpu_of[name] = grad; });
    visit_lora(pairs, h, [&](const std::string& name, LoraPair& p, LoraGrad& grad) {
      if (!p.defined()) return;
      for (const auto& [matrix, mine, other] :
           {std::tuple{".a", gpu_of[name].a, grad.a}, {".b", gpu_of[name].b, grad.b}}) {
        const double e = relative_error(mine, other);
        if (!name.starts_with("ffn.experts.") || name.starts_with("ffn.experts.5."))
          std::printf("layer %d %s%s %.2e\n", layer, name.c_str(), matrix, e);
        EXPECT_LT(e, kGradient) << name << matrix << " of layer " << layer;
      }
    });
  }
}

// ---- On bits

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

TEST(ModelGpu, EachRowUsesItsOwnAdapter) {
  const std::vector<int> a = tokens(30, 16), b = tokens(20, 17), d = tokens(9, 18);
  const auto first = flash_adapter(flash_config(), 4, 19), second = flash_adapter(flash_config(), 8, 20);
  AdapterBatch mixed;
  mixed.parts.push_back({first, {}, false, nullptr});
  mixed.parts.push_back({second, {}, false, nullptr});
  for (int r = 0; r < 30; ++r) mixed.parts[0].rows.push_back(r);
  for (int r = 30; r < 50; ++r) mixed.parts[1].rows.push_back(r);
  const Tensor all = to_host(documents({a, b, d}).hidden_of(*models().gpu, &mixed));
  const AdapterBatch only_second = one_adapter(second);
  EXPECT_TRUE(same_bits(all.rows(30, 50), documents({b}).hidden_of(*models().gpu, &only_second)));
  EXPECT_TRUE(same_bits(all.rows(50, 59), documents({d}).hidden_of(*models().gpu)));
}

TEST(ModelGpu, ForwardAndBackwardRepeatOnBits) {
  const ModelConfig c = flash_config();
  const Case one = documents({tokens(140, 21)});
  const auto adapter = flash_adapter(c, 4, 22);
  std::vector<Tensor> first;
  for (int repeat = 0; repeat < 5; ++repeat) {
    AdapterGrads grads;
    for (LayerLora layer : adapter->layers)
      visit_lora(layer, grads.layers.emplace_back(), [](const std::string&, LoraPair& p, LoraGrad& grad) {
        if (p.defined()) grad = {Tensor::zeros(p.a.shape()), Tensor::zeros(p.b.shape())};
      });
    const AdapterBatch batch = one_adapter(adapter, &grads);
    ForwardOptions o = options(&batch);
    o.keep_streams = true;
    const ForwardResult result = forward(*models().gpu, one.plan, o);
    const Tensor d = Tensor::full({140}, -1.0f / 140);
    Tensor logprob;
    const Tensor d_hidden =
        ops::head_logprobs_backward(d, result.hidden, models().gpu->outer().head, tokens(140, 23), {}, &logprob);
    Gradients frozen;
    backward(*models().gpu, one.plan, o, result, d_hidden, {}, frozen, {});
    std::vector<Tensor> found = {logprob};
    for (size_t l = 0; l < grads.layers.size(); ++l) {
      LayerLora pairs = adapter->layers[l];
      visit_lora(pairs, grads.layers[l], [&](const std::string&, LoraPair& p, LoraGrad& grad) {
        if (p.defined()) found.push_back(grad.a), found.push_back(grad.b);
      });
    }
    if (repeat == 0) first = found;
    ASSERT_EQ(found.size(), first.size());
    for (size_t i = 0; i < found.size(); ++i) ASSERT_TRUE(same_bits(found[i], first[i])) << "repeat " << repeat;
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

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);  // lines appear even if a kernel hangs
  testing::InitGoogleTest(&argc, argv);
  const plumb::ops::DeviceStatus device = plumb::ops::open_device();
  if (!device.usable) {
    std::printf("skipped: %s\n", device.what.c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
