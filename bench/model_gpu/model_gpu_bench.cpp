// Layers of Flash's shape with 256 experts on one GPU: a training step of one layer of each kind, with adapters of rank
// 8 on all targets; a pass of four layers with what travels between host and GPU.
//
// usage: model_gpu_bench [RESULT.json]
//        model_gpu_bench --step window|CSA|HCA ROWS   one training step of a layer between cudaProfilerStart and Stop,
//                                                     for ncu --profile-from-start off (tools/step_profile.py)
#include <cuda_profiler_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "base/error.h"
#include "base/files.h"
#include "config/presets.h"
#include "flash_model.h"
#include "memory/device_weights.h"
#include "model/device_adapters.h"
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

// An adapter in training.
struct Trained {
  explicit Trained(const ModelConfig& c) : adapter(testing::flash_adapter(c, 8, 2)), grads(zero_grads(*adapter)) {
    batch.parts.push_back({adapter, {}, true, &grads});
  }
  std::shared_ptr<Adapter> adapter;
  AdapterGrads grads;
  AdapterBatch batch;
};

// A figure of the result, also said at once.
void report(Json& figures, const std::string& name, double value, const char* unit) {
  std::printf("%-66s %10.3f %s\n", name.c_str(), value, unit);
  figures.push_back({{"name", name}, {"value", value}, {"unit", unit}});
}

// ---- One layer: forward, then recomputed and backward, weights and adapters on the GPU.

struct Kind {
  const char* name;
  int layer;  // of the four
};
constexpr Kind kKinds[] = {{"window", 0}, {"CSA", 3}, {"HCA", 2}};

class LayerStep {
 public:
  LayerStep(WeightStore& weights, const AdapterBatch& adapters, int layer, int rows, Keep keep)
      : plan_(plan_documents(plan_shape(weights.config()), {tokens(weights.config(), rows)})),
        ctx_(make_context(weights.config(), plan_, Numerics::released, Space::device)),
        lease_(weights.acquire(layer)),
        layer_(layer),
        keep_(keep) {
    ForwardOptions o;
    o.keep = Keep::streams;
    streams_ = forward(weights, plan_, o).streams[layer];
    ctx_.adapters = &adapters;
  }
  LayerStep(const LayerStep&) = delete;
  void run() const {
    LayerOutputs outputs;
    {
      LayerSaved s;
      layer_forward(ctx_, *lease_, layer_, streams_, s);
      if (keep_ == Keep::outputs) outputs = outputs_of(s);
    }
    const LayerSaved s = recompute_layer(ctx_, *lease_, layer_, streams_, outputs, {});
    LayerGrads frozen;
    AuxiliaryResults results;
    layer_backward(ctx_, *lease_, layer_, streams_, streams_, frozen, {}, results, s);  // any gradient will do
  }

 private:
  SequencePlan plan_;
  PassContext ctx_;
  LayerLease lease_;
  int layer_;
  Keep keep_;
  Tensor streams_;
};

double layer_time(const LayerStep& step) {
  double best = 1e30;
  for (int round = 0; round < 4; ++round) {
    const auto start = Clock::now();
    step.run();
    const double time = milliseconds_since(start);
    if (round > 0) best = std::min(best, time);
  }
  return best;
}

void measure_kinds(WeightStore& weights, const AdapterBatch& adapters, int rows, Keep keep, Json& figures) {
  const std::string with_rows =
      ", forward and backward, " + std::to_string(rows) + " rows" + (keep == Keep::outputs ? ", outputs kept" : "");
  std::map<std::string, double> time;
  for (const Kind& kind : kKinds) {
    time[kind.name] = layer_time({weights, adapters, kind.layer, rows, keep});
    report(figures, std::string("one ") + kind.name + " layer" + with_rows, time[kind.name], "ms");
  }
  const ModelConfig whole = preset("flash");
  double sum = 0;
  for (int layer = 0; layer < whole.num_hidden_layers; ++layer)
    sum += time[whole.kind(layer) == LayerKind::window ? "window"
                : whole.kind(layer) == LayerKind::csa  ? "CSA"
                                                       : "HCA"];
  report(figures, "mean over the layers of Flash" + with_rows, sum / whole.num_hidden_layers, "ms");
  report(figures, "all layers of Flash" + with_rows, rows / sum * 1e3, "tokens/s");
}

void measure_layers(WeightStore& weights, Trained& trained, Json& figures) {
  DeviceAdapters adapters(trained.batch);
  adapters.begin_gradients();
  for (int rows : {4096, 8192, 16384})
    for (Keep keep : {Keep::streams, Keep::outputs}) measure_kinds(weights, adapters.batch(), rows, keep, figures);
}

// What a pass adds to that: the adapters on their way to the GPU, and their gradients on the way back.
void measure_travel(const ModelConfig& c, Trained& trained, Json& figures) {
  double up = 1e30, back = 1e30;
  for (int round = 0; round < 3; ++round) {
    auto start = Clock::now();
    DeviceAdapters adapters(trained.batch);
    up = std::min(up, milliseconds_since(start));
    adapters.begin_gradients();
    start = Clock::now();
    adapters.finish_gradients();
    back = std::min(back, milliseconds_since(start));
  }
  report(figures, "adapters of a layer to the GPU", up / c.num_hidden_layers, "ms");
  report(figures, "gradients of a layer's adapters to the host", back / c.num_hidden_layers, "ms");
}

// ---- Four layers

// The fastest of some rounds, after one that is not counted.
struct Step {
  double forward = 1e30, backward = 1e30;
};
Step training_step(WeightStore& weights, const AdapterBatch* adapters, int rows) {
  const ModelConfig& c = weights.config();
  const SequencePlan plan = plan_documents(plan_shape(c), {tokens(c, rows)});
  const std::vector<int> target = tokens(c, rows);
  ForwardOptions o;
  o.adapters = adapters;
  if (adapters) o.keep = Keep::streams;
  Step best;
  for (int round = 0; round < 4; ++round) {
    auto start = Clock::now();
    const ForwardResult result = forward(weights, plan, o);
    const double forward_time = milliseconds_since(start);
    double backward_time = 0;
    if (adapters) {
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

std::shared_ptr<DeviceWeights> four_layers() {
  ModelConfig c = testing::flash_config(256);
  c.index_topk = 512;
  return std::make_shared<DeviceWeights>(testing::flash_model(1, c));
}

Json measure() {
  const auto weights = four_layers();
  const ModelConfig& c = weights->config();
  Json figures = Json::array();
  const auto start = Clock::now();
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) weights->acquire(layer);
  report(figures, "a layer packed and copied", milliseconds_since(start) / c.num_hidden_layers, "ms");
  Trained trained(c);
  measure_layers(*weights, trained, figures);
  measure_travel(c, trained, figures);
  for (int rows : {4096, 16384})
    for (bool lora : {false, true}) {
      const Step s = training_step(*weights, lora ? &trained.batch : nullptr, rows);
      const std::string of = " of four layers, " + std::to_string(rows) + " rows" + (lora ? ", LoRA" : "");
      report(figures, "forward pass" + of, s.forward, "ms");
      if (lora) report(figures, "backward pass" + of, s.backward, "ms");
    }
  return figures;
}

int profile_step(const std::string& name, int rows) {
  const auto* kind = std::find_if(std::begin(kKinds), std::end(kKinds), [&](const Kind& k) { return name == k.name; });
  if (kind == std::end(kKinds) || rows < 1) {
    std::fprintf(stderr, "usage: model_gpu_bench --step window|CSA|HCA ROWS\n");
    return 2;
  }
  const auto weights = four_layers();
  Trained trained(weights->config());
  DeviceAdapters adapters(trained.batch);
  adapters.begin_gradients();
  const LayerStep step(*weights, adapters.batch(), kind->layer, rows, Keep::outputs);
  step.run();
  milliseconds_since(Clock::now());
  cudaProfilerStart();
  step.run();
  milliseconds_since(Clock::now());
  cudaProfilerStop();
  return 0;
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
    if (argc == 4 && std::string(argv[1]) == "--step") return plumb::profile_step(argv[2], std::atoi(argv[3]));
    char date[16];
    const std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof date, "%F", std::gmtime(&now));
    const plumb::Json all = {
        {"name", "model_gpu"},
        {"date", date},
        {"device", device.what},
        {"command", "model_gpu_bench: layers of Flash's shape, 256 experts, adapters of rank 8 on all targets"},
        {"figures", plumb::measure()}};
    if (argc > 1) plumb::write_text(argv[1], all.dump(2) + "\n");
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
