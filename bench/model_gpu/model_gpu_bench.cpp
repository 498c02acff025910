// Four layers of Flash's shape with 256 experts on one GPU: a step of LoRA training on long rows, and decoding steps.
// usage: model_gpu_bench [RESULT.json]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"
#include "flash_model.h"
#include "memory/device_weights.h"
#include "model/forward.h"
#include "ops/device.h"
#include "ops/head.h"

namespace plumb {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

double milliseconds_since(Clock::time_point start) {
  to_host(to_device(Tensor::full({1}, 0)));  // waits for the device
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

std::vector<int> tokens(const ModelConfig& c, int n) {
  std::vector<int> ids(n);
  for (int i = 0; i < n; ++i) ids[i] = static_cast<int>((int64_t{i} * 131 + int64_t{i} * i * 7) % c.vocab_size);
  return ids;
}

AdapterGrads zero_grads(const Adapter& adapter) {
  AdapterGrads grads;
  for (LayerLora layer : adapter.layers)
    visit_lora(layer, grads.layers.emplace_back(), [](const std::string&, LoraPair& p, LoraGrad& g) {
      if (p.defined()) g = {Tensor::zeros(p.a.shape()), Tensor::zeros(p.b.shape())};
    });
  return grads;
}

// Without the routed experts, whose adapters travel from the host each step.
std::shared_ptr<Adapter> dense_adapter(const ModelConfig& c) {
  auto adapter = testing::flash_adapter(c, 8, 2);
  for (LayerLora& layer : adapter->layers) layer.experts = {};
  return adapter;
}

// The fastest of some rounds, after one that is not counted.
struct Step {
  double forward = 1e30, backward = 1e30;
};
Step training_step(WeightStore& weights, int rows, bool lora) {
  const ModelConfig& c = weights.config();
  const SequencePlan plan = plan_documents(plan_shape(c), {tokens(c, rows)});
  const std::vector<int> target = tokens(c, rows);
  const auto adapter = dense_adapter(c);
  AdapterGrads grads = zero_grads(*adapter);
  AdapterBatch batch;
  batch.parts.push_back({adapter, {}, true, &grads});
  ForwardOptions o;
  o.adapters = lora ? &batch : nullptr;
  o.keep_streams = lora;
  Step best;
  for (int round = 0; round < 4; ++round) {
    auto start = Clock::now();
    const ForwardResult result = forward(weights, plan, o);
    const double forward_time = milliseconds_since(start);
    double backward_time = 0;
    if (lora) {
      const Tensor d = Tensor::full({rows}, -1.0f / static_cast<float>(rows));
      const Tensor d_hidden = ops::head_logprobs_backward(d, result.hidden, weights.outer().head, target, {});
      Gradients frozen;
      start = Clock::now();
      backward(weights, plan, o, result, d_hidden, {}, frozen, {});
      backward_time = milliseconds_since(start);
    }
    if (round == 0) continue;
    best.forward = std::min(best.forward, forward_time);
    best.backward = std::min(best.backward, backward_time);
  }
  return best;
}

// One step of `batch` sequences that have `length` tokens each.
double decoding_step(WeightStore& weights, int batch, int length) {
  const ModelConfig& c = weights.config();
  const PlanShape shape = plan_shape(c);
  std::vector<CacheSlots> slots;
  const int keys = shape.window + 1, csa = length / shape.csa_ratio + 4, hca = length / shape.hca_ratio + 2;
  for (int i = 0; i < batch; ++i)
    slots.push_back({i * keys, keys, i * csa, i * hca, i * 2 * shape.csa_ratio, i * shape.hca_ratio});
  const CacheShape totals{batch * keys, batch * csa, batch * hca};
  KvCache cache = make_cache(c, totals, batch * 2 * shape.csa_ratio, batch * shape.hca_ratio, weights.space());
  ForwardOptions o;
  o.cache = &cache;
  const std::vector<int> ids = tokens(c, batch);
  std::vector<std::vector<int>> next;
  for (int id : ids) next.push_back({id});
  double best = 1e30;
  for (int round = 0; round < 6; ++round) {
    const auto start = Clock::now();
    const SequencePlan plan =
        plan_cached_step(shape, totals, slots, std::vector<int>(batch, length + round), next, true);
    forward(weights, plan, o);
    const double time = milliseconds_since(start);
    if (round > 0) best = std::min(best, time);
  }
  return best;
}

Json measure() {
  ModelConfig c = testing::flash_config(256);
  c.index_topk = 512;
  auto start = Clock::now();
  const auto host = testing::flash_model(1, c);
  std::printf("random weights: %.0f ms\n", milliseconds_since(start));
  DeviceWeights weights(host);
  start = Clock::now();
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) weights.acquire(layer);
  std::printf("packed and copied: %.0f ms\n", milliseconds_since(start));
  Json figures = Json::array();
  for (int rows : {4096, 16384})
    for (bool lora : {false, true}) {
      const Step s = training_step(weights, rows, lora);
      std::printf("%6d rows, %-7s forward %8.2f ms, backward %8.2f ms\n", rows, lora ? "LoRA" : "base", s.forward,
                  lora ? s.backward : 0);
      figures.push_back({{"rows", rows}, {"lora", lora}, {"forward_ms", s.forward}});
      if (lora) figures.back()["backward_ms"] = s.backward;
    }
  for (int batch : {1, 16, 64, 256}) {
    const double ms = decoding_step(weights, batch, 8000);
    std::printf("decoding, %3d sequences of 8000 tokens: %.3f ms\n", batch, ms);
    figures.push_back({{"decode_batch", batch}, {"length", 8000}, {"step_ms", ms}});
  }
  return figures;
}

}  // namespace
}  // namespace plumb

int main(int argc, char** argv) {
  try {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    const plumb::ops::DeviceStatus device = plumb::ops::open_device();
    if (!device.usable) {
      std::printf("skipped: %s\n", device.what.c_str());
      return 77;
    }
    char date[16];
    const std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof date, "%F", std::gmtime(&now));
    const plumb::Json all = {
        {"name", "model_gpu"},
        {"date", date},
        {"device", device.what},
        {"command", "model_gpu_bench: 4 layers of Flash's shape (window, csa, hca, csa), 256 experts"},
        {"figures", plumb::measure()}};
    if (argc > 1) plumb::write_text(argv[1], all.dump(2) + "\n");
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
