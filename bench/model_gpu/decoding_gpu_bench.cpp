// Decoding steps of four layers of Flash's shape (256 experts, adapters of rank 8 on all targets) on one GPU, plain and
// replayed as CUDA graphs.
//
// usage: decoding_gpu_bench [RESULT.json]
//        decoding_gpu_bench --step BATCH [ADAPTERS]   one plain step of so many sequences, with so many adapters in
//        turns
//                                                     (none), between cudaProfilerStart and Stop, for
//                                                     ncu --profile-from-start off
#include <cuda_profiler_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "base/float_formats.h"
#include "base/parallel.h"
#include "base/philox.h"
#include "flash_model.h"
#include "gpu_bench.h"
#include "model/decode_graphs.h"
#include "rollout/sampler.h"

namespace plumb {
namespace {

using namespace bench;

constexpr int kLength = 8000;  // tokens of each sequence
constexpr int kSteps = 8;      // of a round: two of them make entries of ratio 4

// `batch` sequences over a cache, plain or through graphs; the same positions again and again.
class Decoding {
 public:
  Decoding(WeightStore& weights, const AdapterBatch* adapters, int batch)
      : weights_(weights), shape_(plan_shape(weights.config())), batch_(batch) {
    const int keys = shape_.window + kSteps;
    const int csa = kLength / shape_.csa_ratio + kSteps, hca = kLength / shape_.hca_ratio + kSteps;
    for (int i = 0; i < batch; ++i) {
      slots_.push_back({i * keys, keys, i * csa, i * hca, i * 2 * shape_.csa_ratio, i * shape_.hca_ratio});
      next_.push_back({token(weights.config(), i)});
    }
    totals_ = {batch * keys, batch * csa, batch * hca};
    cache_ =
        make_cache(weights.config(), totals_, batch * 2 * shape_.csa_ratio, batch * shape_.hca_ratio, weights.space());
    options_.cache = &cache_;
    options_.adapters = adapters;
    graphs_ = decode_graphs(weights, cache_);
  }
  Decoding(const Decoding&) = delete;

  void step(int number, bool replayed) {
    const SequencePlan plan =
        plan_cached_step(shape_, totals_, slots_, std::vector<int>(batch_, kLength + number % kSteps), next_, true);
    if (replayed)
      graphs_->forward(plan, options_);
    else
      forward(weights_, plan, options_);
  }

  // Mean over the steps of a round, of the fastest of some rounds. host: until all is launched.
  struct Times {
    double host = 1e30, whole = 1e30;
  };
  Times measure(bool replayed) {
    constexpr int kRounds = 4;  // the first two are not counted: by then each shape has its graph
    Times best;
    for (int round = 0; round < kRounds; ++round) {
      double host = 0, whole = 0;
      for (int s = 0; s < kSteps; ++s) {
        const int64_t recordings = graphs_->stats().recordings;
        const auto start = Clock::now();
        step(s, replayed);
        host += milliseconds_since(start) / kSteps;
        wait_for_device();
        whole += milliseconds_since(start) / kSteps;
        if (graphs_->stats().recordings > recordings) recording_ = milliseconds_since(start);
      }
      if (round >= 2) best = {std::min(best.host, host), std::min(best.whole, whole)};
    }
    return best;
  }
  double recording() const { return recording_; }  // ms of the latest step that was run and recorded
  DecodeGraphStats stats() const { return graphs_->stats(); }

 private:
  WeightStore& weights_;
  PlanShape shape_;
  int batch_;
  std::vector<CacheSlots> slots_;
  std::vector<std::vector<int>> next_;
  CacheShape totals_;
  KvCache cache_;
  ForwardOptions options_;
  std::unique_ptr<DecodeGraphs> graphs_;
  double recording_ = 0;
};

std::vector<std::shared_ptr<Adapter>> make_adapters(const WeightStore& weights, int count) {
  std::vector<std::shared_ptr<Adapter>> adapters;
  for (int a = 0; a < count; ++a) adapters.push_back(testing::flash_adapter(weights.config(), 8, 2 + a));
  return adapters;
}

// Of `count` adapters, in turns.
AdapterBatch in_turns(const std::vector<std::shared_ptr<Adapter>>& adapters, int count, int batch) {
  AdapterBatch rows;
  for (int a = 0; a < std::min(count, batch); ++a) {
    rows.parts.push_back({adapters[a], {}, false, nullptr});
    for (int r = a; r < batch; r += count) rows.parts.back().rows.push_back(r);
  }
  return rows;
}

// What follows a step in serving, at Flash's vocabulary: the logits of `batch` rows, brought to the host, and a token
// drawn from each at temperature 1.
class Sampling {
 public:
  static constexpr int kVocab = 129280, kWidth = 4096;
  Sampling() {
    const Tensor piece = random_bf16(kWidth, 1);  // the same logits every 4,096 tokens
    const Tensor weight = Tensor::empty({kVocab, kWidth}, DType::bf16, Space::device);
    for (int row = 0; row < kVocab; row += kWidth) {
      const int rows = std::min(kWidth, kVocab - row);
      copy_bytes(weight.rows(row, row + rows), piece.rows(0, rows));
    }
    head_ = {weight, {}, WeightFormat::bf16, kVocab, kWidth};
  }
  double measure(int batch, const SamplingParams& params = {}) const {
    const Tensor hidden = to_device(random_bf16(batch, 2));
    std::vector<SampledRow> rows;
    for (int i = 0; i < batch; ++i) rows.push_back({&params, static_cast<uint64_t>(i), {}, 0});
    double best = 1e30;
    for (int round = 0; round < 6; ++round) {
      const auto start = Clock::now();
      sample_tokens(ops::head_logits(hidden, head_), rows);
      best = std::min(best, milliseconds_since(start));
    }
    return best;
  }

 private:
  static Tensor random_bf16(int64_t rows, uint64_t seed) {
    Tensor t = Tensor::empty({rows, kWidth}, DType::bf16);
    Random g(seed);
    for (int64_t i = 0; i < t.numel(); ++i) t.ptr<uint16_t>()[i] = float_to_bf16(0.2f * static_cast<float>(g.normal()));
    return t;
  }
  Linear head_;
};

Figures measure() {
  std::map<int, double> sampling;
  {
    const Sampling head;
    for (int batch : {1, 16, 64, 256}) sampling[batch] = head.measure(batch);
  }
  const auto weights = four_layers();
  const auto adapters = make_adapters(*weights, 2);
  Figures figures = Figures::array();
  std::printf(
      "sequences adapters  plain ms (launching)  replayed ms (launching)  recording ms  graphs MB  sampling ms\n");
  for (int count : {0, 1, 2})
    for (int batch : {1, 16, 64, 256}) {
      if (count > batch) continue;
      const AdapterBatch rows = in_turns(adapters, count, batch);
      Decoding decoding(*weights, count > 0 ? &rows : nullptr, batch);
      const Decoding::Times plain = decoding.measure(false), replayed = decoding.measure(true);
      const double megabytes = 1e-6 * static_cast<double>(decoding.stats().bytes);
      std::printf("%9d %8d %9.3f (%.3f) %15.3f (%.3f) %17.1f %10.1f %12.3f\n", batch, count, plain.whole, plain.host,
                  replayed.whole, replayed.host, decoding.recording(), megabytes, sampling[batch]);
      figures.push_back({{"sequences", batch},
                         {"adapters", count},
                         {"plain, ms", plain.whole},
                         {"of it launching", plain.host},
                         {"replayed, ms", replayed.whole},
                         {"of it launching, replayed", replayed.host},
                         {"a step with its recording, ms", decoding.recording()},
                         {"memory of two graphs, MB", megabytes},
                         {"logits and drawing behind it, ms", sampling[batch]}});
    }
  return figures;
}

int profile_step(int argc, char** argv) {
  const int batch = argc == 3 || argc == 4 ? std::atoi(argv[2]) : 0, count = argc == 4 ? std::atoi(argv[3]) : 0;
  if (batch < 1 || count < 0) {
    std::fprintf(stderr, "usage: decoding_gpu_bench --step BATCH [ADAPTERS]\n");
    return 2;
  }
  const auto weights = four_layers();
  const AdapterBatch rows = in_turns(make_adapters(*weights, count), count, batch);
  Decoding decoding(*weights, count > 0 ? &rows : nullptr, batch);
  decoding.measure(false);
  cudaProfilerStart();
  decoding.step(0, false);
  wait_for_device();
  cudaProfilerStop();
  return 0;
}

}  // namespace
}  // namespace plumb

int main(int argc, char** argv) {
  return plumb::bench::run_on_gpu(
      argc, argv,
      {{"name", "decoding_gpu"},
       {"title", "Decoding steps on a GPU"},
       {"command",
        "decoding_gpu_bench: four layers of Flash's shape, 256 experts, sequences of 8,000 tokens, adapters of rank 8 "
        "on all targets; mean of eight steps. Logits and drawing: 129,280 tokens, temperature 1"}},
      plumb::measure, plumb::profile_step);
}
