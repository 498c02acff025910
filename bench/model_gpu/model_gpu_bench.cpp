// Layers of Flash's shape with 256 experts on one GPU: a training step of one layer of each kind, with adapters of rank
// 8 on all targets; a step of the trainer with four layers.
//
// usage: model_gpu_bench [RESULT.json]
//        model_gpu_bench --step window|CSA|HCA ROWS   one training step of a layer between cudaProfilerStart and Stop,
//                                                     for ncu --profile-from-start off (tools/step_profile.py)
#include <cuda_profiler_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "config/presets.h"
#include "flash_model.h"
#include "gpu_bench.h"
#include "model/device_adapters.h"
#include "model/forward.h"
#include "train/step.h"

namespace plumb {
namespace {

using namespace bench;

// Of some work that began at `start`, the device's part included.
double whole_time(Clock::time_point start) {
  wait_for_device();
  return milliseconds_since(start);
}

std::vector<int> tokens(const ModelConfig& c, int n) {
  std::vector<int> ids(n);
  for (int i = 0; i < n; ++i) ids[i] = token(c, i);
  return ids;
}

// A figure of the result, also said at once.
void report(Figures& figures, const std::string& name, double value, const char* unit) {
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
    const double time = whole_time(start);
    if (round > 0) best = std::min(best, time);
  }
  return best;
}

void measure_kinds(WeightStore& weights, const AdapterBatch& adapters, int rows, Keep keep, Figures& figures) {
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

void measure_layers(WeightStore& weights, const AdapterBatch& adapters, Figures& figures) {
  for (int rows : {4096, 8192, 16384})
    for (Keep keep : {Keep::streams, Keep::outputs}) measure_kinds(weights, adapters, rows, keep, figures);
}

// ---- Four layers

// The fastest of some rounds, after one that is not counted.
template <class F>
double fastest(F&& f) {
  double best = 1e30;
  for (int round = 0; round < 4; ++round) {
    const auto start = Clock::now();
    f();
    const double time = whole_time(start);
    if (round > 0) best = std::min(best, time);
  }
  return best;
}

void measure_passes(WeightStore& weights, Figures& figures) {
  for (int rows : {4096, 16384}) {
    const SequencePlan plan = plan_documents(plan_shape(weights.config()), {tokens(weights.config(), rows)});
    const double time = fastest([&] { forward(weights, plan, {}); });
    report(figures, "forward pass of four layers, " + std::to_string(rows) + " rows", time, "ms");
  }
}

// A step of the trainer: forward pass, head with loss and its gradient, backward pass, norm, clipping, AdamW.
void measure_training(const std::shared_ptr<WeightStore>& weights, const std::shared_ptr<Adapter>& adapter,
                      Figures& figures) {
  const std::unique_ptr<Trainee> trainee = lora_trainee(weights, adapter);
  Optimizer optimizer(*trainee, {});
  int64_t step = 0;
  for (int rows : {4096, 16384}) {
    TrainRow row;
    row.documents = {tokens(weights->config(), rows)};
    row.plan = plan_documents(plan_shape(weights->config()), row.documents);
    row.target = row.documents[0];
    const std::string of = " of four layers and the head, " + std::to_string(rows) + " rows, LoRA";
    report(figures, "training step" + of, fastest([&] {
             zero_gradients(*trainee);
             accumulate_gradients(*trainee, {row}, Numerics::released, {});
             apply_gradients(*trainee, optimizer, 1e-5, 1, ++step, "");
           }),
           "ms");
    report(figures, "norm, clipping and AdamW" + of,
           fastest([&] { apply_gradients(*trainee, optimizer, 1e-5, 1, ++step, ""); }), "ms");
  }
  report(figures, "the adapter of four layers to the host", fastest([&] { host_adapter(*trainee); }), "ms");
}

Figures measure() {
  const auto weights = four_layers();
  const ModelConfig& c = weights->config();
  Figures figures = Figures::array();
  const auto start = Clock::now();
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) weights->acquire(layer);
  report(figures, "a layer packed and copied", whole_time(start) / c.num_hidden_layers, "ms");
  const auto adapter = testing::flash_adapter(c, 8, 2);
  {
    DeviceAdapter training = train_on_device(*adapter);
    measure_layers(*weights, {{{training.adapter, {}, true, &training.grads}}}, figures);
  }
  measure_passes(*weights, figures);
  measure_training(weights, adapter, figures);
  return figures;
}

int profile_step(int argc, char** argv) {
  const std::string name = argc == 4 ? argv[2] : "";
  const int rows = argc == 4 ? std::atoi(argv[3]) : 0;
  const auto* kind = std::find_if(std::begin(kKinds), std::end(kKinds), [&](const Kind& k) { return name == k.name; });
  if (kind == std::end(kKinds) || rows < 1) {
    std::fprintf(stderr, "usage: model_gpu_bench --step window|CSA|HCA ROWS\n");
    return 2;
  }
  const auto weights = four_layers();
  DeviceAdapter training = train_on_device(*testing::flash_adapter(weights->config(), 8, 2));
  const AdapterBatch adapters{{{training.adapter, {}, true, &training.grads}}};
  const LayerStep step(*weights, adapters, kind->layer, rows, Keep::outputs);
  step.run();
  wait_for_device();
  cudaProfilerStart();
  step.run();
  wait_for_device();
  cudaProfilerStop();
  return 0;
}

}  // namespace
}  // namespace plumb

int main(int argc, char** argv) {
  return plumb::bench::run_on_gpu(
      argc, argv,
      {{"name", "model_gpu"},
       {"command", "model_gpu_bench: layers of Flash's shape, 256 experts, adapters of rank 8 on all targets"}},
      plumb::measure, plumb::profile_step);
}
