// The model on the GPU, through src/model, against the CPU's released profile, layer by layer. A whole pass is not
// compared number by number: sums that differ in the last bit make FP8 and FP4 roundings fall differently, and three
// layers later log-probabilities differ by a tenth (docs/numerics.md). So each layer starts from the same streams on
// both sides.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "base/error.h"
#include "base/philox.h"
#include "model/device_adapters.h"
#include "model_gpu_testing.h"
#include "ops/head.h"
#include "ops/head_divergence.h"
#include "ops/indexer.h"
#include "support/same_bits.h"
#include "train/step.h"

namespace plumb {
namespace {

using namespace testing;  // NOLINT: the vocabulary of these tests

// Both sides compute the same function. What differs is the order of sums, and from then on roundings that fall to the
// other side of a step. Bounds follow from that: numbers that differ by d (of their size, as a root mean square) before
// they are rounded to steps of s differ by a whole s in a share d / s of the places afterwards, sqrt(d s) altogether.
double rounded(double d, double step) { return std::hypot(d, std::sqrt(d * step)); }
// A step as a part of the smallest number that has it.
constexpr double kBf16 = 1.0 / 128, kFp8 = 1.0 / 8, kFp4 = 1.0 / 2;
// FP32 sums in another order, through the 20 rounds of Sinkhorn.
constexpr double kSums = 1e-5;
// Of gradients: the same forward differences, and twice as many links of the chain, each rounded to bf16; the
// attention's dS is a difference of two terms of its own size.
constexpr double kGradient = 1.5e-1;

struct LayerRun {
  LayerSaved saved;
  Tensor next;
};

// Both chose the same experts wherever the margin between what the CPU took and what it left is more than twice the
// largest difference of their scores in that row.
void expect_same_experts(const ops::Routing& cpu, const ops::Routing& gpu, const Tensor& bias) {
  const Tensor expert = to_host(gpu.expert), score = to_host(gpu.score);
  const int64_t rows = cpu.expert.size(0), k = cpu.expert.size(1), all = cpu.score.size(1);
  int compared = 0;
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<float> value(all);
    float bound = 0;
    for (int64_t e = 0; e < all; ++e) {
      value[e] = cpu.score.f32()[r * all + e] + (bias.defined() ? bias.f32()[e] : 0);
      bound = std::max(bound, std::fabs(score.f32()[r * all + e] - cpu.score.f32()[r * all + e]));
    }
    std::sort(value.begin(), value.end(), std::greater<>());
    if (bias.defined() && value[k - 1] - value[k] <= 2 * bound) continue;  // without: the table chooses
    ++compared;
    std::vector<int> a(cpu.expert.ptr<int32_t>() + r * k, cpu.expert.ptr<int32_t>() + (r + 1) * k);
    std::vector<int> b(expert.ptr<int32_t>() + r * k, expert.ptr<int32_t>() + (r + 1) * k);
    std::sort(a.begin(), a.end()), std::sort(b.begin(), b.end());
    EXPECT_EQ(a, b) << "row " << r;
  }
  EXPECT_GT(compared, rows / 3);
}

// The index scores of a row from what a side fed to its selection, for `entries`.
struct IndexInputs {
  Tensor q, w, keys;
  explicit IndexInputs(const AttentionSaved& s)
      : q(to_host(ops::index_values(s.iq))), w(to_host(s.iw)), keys(to_host(ops::index_values(s.ik))) {}
  std::vector<double> scores(int64_t row, const std::vector<int>& entries) const {
    const int64_t heads = q.size(1), width = q.size(2);
    const float *queries = q.f32() + row * heads * width, *weights = w.f32() + row * heads;
    std::vector<double> result;
    for (int e : entries) {
      const float* key = keys.f32() + e * width;
      double sum = 0;
      for (int64_t h = 0; h < heads; ++h) {
        double product = 0;
        for (int64_t i = 0; i < width; ++i) product += double{queries[h * width + i]} * key[i];
        sum += weights[h] * std::max(0.0, product);
      }
      result.push_back(sum);
    }
    return result;
  }
};

// Every entry whose score on the CPU is further than twice the row's largest difference of scores from the limit
// between taken and left is taken, or left, on the GPU as well.
void expect_same_entries(const AttentionSaved& cpu, const AttentionSaved& gpu, const EntryRanges& visible) {
  const IndexInputs cpu_inputs(cpu), gpu_inputs(gpu);
  const KeyLists taken = cpu.selected, other = gpu.selected;
  int64_t compared = 0, all = 0;
  for (int r = 0; r < taken.size(); ++r) {
    std::vector<int> entries;
    for (int i = visible.begin[r]; i < visible.begin[r + 1]; ++i)
      for (int e = visible.range[i].first; e < visible.range[i].last; ++e) entries.push_back(e);
    const std::vector<double> a = cpu_inputs.scores(r, entries), b = gpu_inputs.scores(r, entries);
    const auto has = [r](const KeyLists& lists, int e) {
      return std::binary_search(lists.row.begin() + lists.begin[r], lists.row.begin() + lists.begin[r + 1], e);
    };
    double bound = 0, least_taken = 1e30, most_left = -1e30;
    for (size_t i = 0; i < entries.size(); ++i) {
      bound = std::max(bound, std::fabs(a[i] - b[i]) + 1e-5 * std::fabs(a[i]));  // and the kernel's own FP32 sums
      if (has(taken, entries[i]))
        least_taken = std::min(least_taken, a[i]);
      else
        most_left = std::max(most_left, a[i]);
    }
    for (size_t i = 0; i < entries.size(); ++i) {
      const bool here = has(taken, entries[i]);
      ++all;
      if ((here ? a[i] - most_left : least_taken - a[i]) <= 2 * bound) continue;
      ++compared;
      EXPECT_EQ(has(other, entries[i]), here) << "row " << r << ", entry " << entries[i];
    }
  }
  std::printf("%lld of %lld entries beyond the bound\n", static_cast<long long>(compared), static_cast<long long>(all));
  EXPECT_GT(compared, all / 2);
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
  keep.keep = Keep::streams;
  const Tensor streams = forward(*models().gpu, two.plan, keep).streams[layer], host_streams = to_host(streams);

  const AdapterBatch batch = with_adapter ? one_adapter(flash_adapter(c, 4, 3)) : AdapterBatch{};
  const AdapterBatch there = device_batch(batch);
  PassContext cpu_ctx = make_context(c, two.plan, Numerics::released);
  PassContext gpu_ctx = make_context(c, two.plan, Numerics::released, Space::device);
  if (with_adapter) cpu_ctx.adapters = &batch, gpu_ctx.adapters = &there;

  LayerRun cpu, gpu;
  const LayerLease cpu_weights = models().cpu->acquire(layer), gpu_weights = models().gpu->acquire(layer);
  cpu.next = layer_forward(cpu_ctx, *cpu_weights, layer, host_streams, cpu.saved, true);
  gpu_ctx.replay[layer] = to_device(cpu.saved.routing.expert);  // later stages are compared for the same experts
  gpu.next = layer_forward(gpu_ctx, *gpu_weights, layer, streams, gpu.saved, true);
  gpu_ctx.replay.clear();
  LayerSaved free_choice;
  layer_forward(gpu_ctx, *gpu_weights, layer, streams, free_choice);

  const auto stage = [&](const char* name, const Tensor& a, const Tensor& b, double bound) {
    const double error = relative_error(a, b);
    std::printf("layer %d %-8s %.2e of %.2e\n", layer, name, error, bound);
    EXPECT_LT(error, bound) << name << " of layer " << layer;
    return error;
  };
  const AttentionSaved &g = gpu.saved.attn, &h = cpu.saved.attn;
  const double x = stage("x", g.x, h.x, rounded(kSums, kBf16));
  const double qr = stage("qr", g.qr, h.qr, rounded(x, kFp8));
  const double q = stage("q", g.q, h.q, rounded(qr, kFp8));
  const double keys = stage("keys", g.keys, h.keys, rounded(rounded(x, kFp8), kFp8));  // x, then the keys themselves
  double swapped = 0;
  if (c.kind(layer) == LayerKind::csa) {
    stage("iq", ops::index_values(g.iq), h.iq, rounded(rounded(qr, kFp8), kFp4));
    stage("ik", ops::index_values(g.ik), h.ik,
          rounded(kBf16, kFp4));  // pooled, normed, rotated, transformed: each rounds to bf16
    stage("iw", g.iw, h.iw, rounded(x, kBf16));
    const double common = common_entries(h.selected, g.selected);
    std::printf("layer %d selected %.4f in common\n", layer, common);
    expect_same_entries(h, g, two.plan.csa.visible);
    // Another entry instead of the right one: twice the size of what it adds, squared.
    const auto items = [](const ops::RowLists& lists) { return static_cast<double>(lists.row.numel()); };
    swapped = std::sqrt(2 * (1 - common) * items(h.selected) / items(h.lists));
  }
  // A key enters twice, in the score and as the value; scores are about 1, so their differences are as large. Weights
  // of keys and outputs are rounded to bf16.
  const double turned =
      stage("turned", g.core.turned, h.core.turned, std::hypot(rounded(2 * std::hypot(q, keys, keys), kBf16), swapped));
  const double a = stage("a", gpu.saved.a, cpu.saved.a, rounded(turned, kFp8));
  const double mid = stage("mid", gpu.saved.mid, cpu.saved.mid, a);  // the streams' own part is the same
  // A weighted sum of the streams, whose weights depend on them.
  const double x_ffn = stage("x_ffn", gpu.saved.in_ffn.x, cpu.saved.in_ffn.x, 2 * mid);
  stage("score", free_choice.routing.score, cpu.saved.routing.score, x_ffn);  // logits are about 1
  expect_same_experts(cpu.saved.routing, free_choice.routing, cpu_weights->router.bias);
  stage("weights", gpu.saved.routing.weight, cpu.saved.routing.weight, x_ffn);
  // Both factors of SwiGLU have the rounding of x, then their product is rounded.
  const double f = stage("f", gpu.saved.f, cpu.saved.f, rounded(std::sqrt(2.0) * rounded(x_ffn, kFp8), kFp8));
  stage("next", gpu.next, cpu.next, f + mid);
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
  EXPECT_LT(relative_error(ops::head_logits(hidden, gpu_head).value, ops::head_logits(host, cpu_head).value), 1e-4);
  const Tensor d = Tensor::full({33}, -1.0f / 33);
  Tensor logprob;
  const Tensor d_gpu = ops::head_logprobs_backward(d, hidden, gpu_head, target, {}, &logprob);
  EXPECT_TRUE(same_bits(logprob, gpu));
  // Gradients of logits are rounded to bf16 in between.
  EXPECT_LT(relative_error(d_gpu, ops::head_logprobs_backward(d, host, cpu_head, target, {})), 1e-2);
}

// Logits as above; divergences are sums of their differences.
TEST(ModelGpu, DivergencesAndTheirGradientsAgreeWithTheCpu) {
  const Case one = documents({tokens(33, 4)});
  const AdapterBatch batch = one_adapter(flash_adapter(flash_config(), 4, 29));
  const Tensor student = one.hidden_of(*models().gpu, &batch), teacher = one.hidden_of(*models().gpu);
  const Tensor host_student = to_host(student), host_teacher = to_host(teacher);
  const Linear &gpu_head = models().gpu->outer().head, &cpu_head = models().cpu->outer().head;
  for (const ops::Divergence kind : {ops::Divergence::reverse_kl, ops::Divergence::forward_kl}) {
    const ops::HeadRows mine{student, gpu_head}, taught{teacher, gpu_head};
    const ops::HeadRows host_mine{host_student, cpu_head}, host_taught{host_teacher, cpu_head};
    const Tensor gpu = ops::head_divergence(kind, mine, taught),
                 cpu = ops::head_divergence(kind, host_mine, host_taught);
    for (int64_t r = 0; r < cpu.numel(); ++r) EXPECT_NEAR(gpu.f32()[r], cpu.f32()[r], 2e-4);
    const Tensor d = Tensor::full({33}, 1.0f / 33);
    Tensor value;
    const Tensor d_gpu = ops::head_divergence_backward(kind, d, mine, taught, {}, &value);
    EXPECT_TRUE(same_bits(value, gpu));
    // Gradients of logits are rounded to bf16 in between.
    EXPECT_LT(relative_error(d_gpu, ops::head_divergence_backward(kind, d, host_mine, host_taught, {})), 1e-2);
    EXPECT_THROW(ops::head_divergence(kind, mine, host_taught), Error);
  }
}

// The losses of router and indexer from what the GPU's own forward pass saved: the same numbers on both sides. Operands
// of the gradients' products are rounded to bf16.
TEST(ModelGpu, LossesOfRouterAndIndexerAgreeWithTheCpu) {
  const int layer = 3;  // CSA, routed by scores
  const Case two = documents({tokens(150, 30), tokens(41, 31)});
  const ModelConfig c = flash_config();
  ForwardOptions keep = options();
  keep.keep = Keep::streams;
  const Tensor streams = forward(*models().gpu, two.plan, keep).streams[layer];
  const LayerLease gpu_weights = models().gpu->acquire(layer), cpu_weights = models().cpu->acquire(layer);
  LayerSaved saved;
  layer_forward(make_context(c, two.plan, Numerics::released, Space::device), *gpu_weights, layer, streams, saved,
                true);

  const ops::Routing& r = saved.routing;
  const ops::Routing host{to_host(r.expert), to_host(r.weight), to_host(r.score), to_host(r.logits)};
  const Tensor d_score = zeros_like(r.score), host_d_score = zeros_like(host.score);
  EXPECT_EQ(ops::balance_loss(r, two.plan.document, 0.3f, d_score),
            ops::balance_loss(host, two.plan.document, 0.3f, host_d_score));
  EXPECT_TRUE(same_bits(d_score, host_d_score));
  const Tensor d_weight = Tensor::empty(host.weight.shape());
  Random random(32, 1);
  for (int64_t i = 0; i < d_weight.numel(); ++i) d_weight.f32()[i] = 1e-4f * static_cast<float>(random.normal());
  const ops::RouterOptions router{c.num_experts_per_tok, static_cast<float>(c.routed_scaling_factor)};
  EXPECT_LT(
      relative_error(
          ops::route_backward(to_device(d_weight), d_score, saved.in_ffn.x, gpu_weights->router, r, router, {}),
          ops::route_backward(d_weight, host_d_score, to_host(saved.in_ffn.x), cpu_weights->router, host, router, {})),
      1e-2);

  const AttentionSaved& a = saved.attn;
  const Tensor entries = a.keys.rows(two.plan.key_rows, a.keys.size(0));
  const ops::IndexerLoss loss{0.7f, true, 191};
  const ops::IndexerLossGrad gpu = ops::indexer_loss(loss, a.iq, a.iw, a.ik, a.selected, a.q, entries, a.core.core.lse);
  const ops::IndexerLossGrad cpu =
      ops::indexer_loss(loss, to_host(ops::index_values(a.iq)), to_host(a.iw), to_host(ops::index_values(a.ik)),
                        KeyLists(a.selected), to_host(a.q), to_host(entries), to_host(a.core.core.lse));
  EXPECT_NEAR(gpu.loss, cpu.loss, 1e-3 * cpu.loss);
  EXPECT_LT(relative_error(gpu.d_q, cpu.d_q), 1e-2);
  EXPECT_LT(relative_error(gpu.d_w, cpu.d_w), 1e-2);
  EXPECT_LT(relative_error(gpu.d_keys, cpu.d_keys), 1e-2);
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
  keep.keep = Keep::streams;
  const std::vector<Tensor> streams = forward(*models().gpu, one.plan, keep).streams;
  const auto adapter = flash_adapter(c, 4, 10);
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    AdapterGrads cpu_grads = zero_grads(*adapter), gpu_grads = zero_grads(*adapter);
    DeviceAdapter training = train_on_device(*adapter);
    const AdapterBatch cpu_batch = one_adapter(adapter, &cpu_grads),
                       gpu_batch = one_adapter(training.adapter, &training.grads);
    PassContext cpu_ctx = make_context(c, one.plan, Numerics::released);
    PassContext gpu_ctx = make_context(c, one.plan, Numerics::released, Space::device);
    cpu_ctx.adapters = &cpu_batch, gpu_ctx.adapters = &gpu_batch;
    const LayerLease cpu_weights = models().cpu->acquire(layer), gpu_weights = models().gpu->acquire(layer);
    const Tensor host_streams = to_host(streams[layer]);
    LayerSaved saved;
    layer_forward(cpu_ctx, *cpu_weights, layer, host_streams, saved, true);
    gpu_ctx.replay[layer] = to_device(saved.routing.expert);

    const Tensor random_next = Tensor::empty(host_streams.shape());
    Random random(layer, 5);
    for (int64_t i = 0; i < random_next.numel(); ++i) random_next.f32()[i] = random.normal();
    const Tensor d_gpu_next = to_device_bf16(random_next), d_cpu_next = to_host(d_gpu_next);
    LayerGrads frozen;
    AuxiliaryResults results;
    const Tensor d_cpu =
        layer_backward(cpu_ctx, *cpu_weights, layer, host_streams, d_cpu_next, frozen, {}, results, saved);
    const LayerSaved again = recompute_layer(gpu_ctx, *gpu_weights, layer, streams[layer], {}, {});
    const Tensor d_gpu =
        layer_backward(gpu_ctx, *gpu_weights, layer, streams[layer], d_gpu_next, frozen, {}, results, again);
    bring_home(training.grads, gpu_grads);
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

// The same with the losses of router and indexer, over the selected entries and over all.
TEST(ModelGpu, AuxiliaryLossesOfALayerFollowTheCpu) {
  const int layer = 3;
  const ModelConfig c = flash_config();
  const Case two = documents({tokens(150, 30), tokens(41, 31)});
  ForwardOptions keep = options();
  keep.keep = Keep::streams;
  const Tensor streams = forward(*models().gpu, two.plan, keep).streams[layer], host_streams = to_host(streams);
  const LayerLease cpu_weights = models().cpu->acquire(layer), gpu_weights = models().gpu->acquire(layer);
  for (const bool sparse : {true, false}) {
    PassContext cpu_ctx = make_context(c, two.plan, Numerics::released);
    PassContext gpu_ctx = make_context(c, two.plan, Numerics::released, Space::device);
    LayerSaved saved;
    layer_forward(cpu_ctx, *cpu_weights, layer, host_streams, saved, true);
    gpu_ctx.replay[layer] = to_device(saved.routing.expert);
    const Tensor d_next = Tensor::zeros(host_streams.shape());
    LayerGrads frozen;
    const AuxiliaryLosses aux{{1, sparse, 191}, 10};
    AuxiliaryResults cpu, gpu;
    const Tensor d_cpu = layer_backward(cpu_ctx, *cpu_weights, layer, host_streams, d_next, frozen, aux, cpu, saved);
    const LayerSaved again = recompute_layer(gpu_ctx, *gpu_weights, layer, streams, {}, aux);
    const Tensor d_gpu =
        layer_backward(gpu_ctx, *gpu_weights, layer, streams, to_device_bf16(d_next), frozen, aux, gpu, again);
    std::printf("indexer %.4f of %.4f, balance %.4f of %.4f\n", gpu.indexer, cpu.indexer, gpu.balance, cpu.balance);
    // A row's loss changes with the few entries and experts that roundings exchange.
    EXPECT_NEAR(gpu.indexer, cpu.indexer, 0.05 * cpu.indexer);
    EXPECT_NEAR(gpu.balance, cpu.balance, 0.02 * cpu.balance);
    EXPECT_LT(relative_error(d_gpu, d_cpu), kGradient);  // all of it from the balance loss
  }
}

}  // namespace
}  // namespace plumb
