// Speed of the grouped linear kernels at the shapes of DeepSeek-V4-Flash's experts: 256 experts, fc1 [4096, 4096] (gate
// and up), fc2 [4096, 2048], 98,304 rows (16,384 tokens x top 6).
//
// usage: grouped_linear_bench [result.json]. Takes about 20 s and 12 GB of GPU memory.
//
// fresh: median of 5 launches after 0.3 s of rest. sustained: median of 60 launches in a row, when the power limit has
// pulled the clock down. Data is random (on zeros the clock stays higher): the kernels' results are checked by the
// tests, not here.
#include <cmath>
#include <memory>
#include <random>

#include "bench_support.cuh"
#include "kernels/grouped_linear/activation.cuh"
#include "kernels/grouped_linear/grouped_linear.h"
#include "kernels/grouped_linear/route.h"
#include "kernels/launch.cuh"
#include "kernels/router/router.h"

namespace {

using namespace plumb::bench;
using namespace plumb::kernels;
using namespace plumb::kernels::grouped_linear;

constexpr int kExperts = 256, kRows = 98304, kWideWidth = 256;
constexpr double kPeakTflops = 1979;  // FP8 dense, datasheet

// ---- Random data on the device -------------------------------------------------------------------------------------
enum class Fill { bf16, codes, offsets, weights, bases };
template <Fill kFill, typename T>
__global__ void fill_kernel(T* out, size_t count, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    const uint32_t h = hash(seed + i);
    if constexpr (kFill == Fill::bf16) out[i] = __bfloat16_as_ushort(__float2bfloat16_rn(normal(seed + i)));
    if constexpr (kFill == Fill::codes) out[i] = static_cast<T>(h);
    if constexpr (kFill == Fill::weights)
      out[i] = __nv_cvt_float_to_fp8(normal(seed + i) * 60.0f, __NV_SATFINITE, __NV_E4M3);
    if constexpr (kFill == Fill::bases) out[i] = exp2f(static_cast<float>(h % 4) - 16.0f);
    if constexpr (kFill == Fill::offsets)
      if (i % kFp4RecordBytes >= 4 * kSlabCodeBytes) out[i] = static_cast<T>(h % 5 + (h >> 8) % 4 + (h >> 16) % 5);
  }
}
template <Fill kFill, typename T>
T* random_array(size_t count, uint64_t seed) {
  T* data;
  check_cuda(cudaMalloc(&data, count * sizeof(T)), "cudaMalloc");
  fill_kernel<kFill><<<2048, 256>>>(data, count, seed);
  check_cuda(cudaDeviceSynchronize(), "fill");
  return data;
}
Weights random_weights(WeightFormat format, int groups, int n, int k) {
  const size_t records = size_t(groups) * (n / kRecordRows) * (k / kBlock);
  uint8_t* data;
  if (format == WeightFormat::fp4) {
    data = random_array<Fill::codes, uint8_t>(records * kFp4RecordBytes, 1);
    fill_kernel<Fill::offsets><<<2048, 256>>>(data, records * kFp4RecordBytes, 2);
  } else {
    data = random_array<Fill::weights, uint8_t>(records * kFp8RecordBytes, 3);
  }
  return {format, groups, n,
          k,      data,   random_array<Fill::bases, float>(size_t(groups) * (n / kBlock) * block_stride(k), 4)};
}
void release(const Weights& w) { cudaFree(const_cast<uint8_t*>(w.records)), cudaFree(const_cast<float*>(w.bases)); }

// ---- Routings ------------------------------------------------------------------------------------------------------
std::vector<int> uneven_counts() {  // log-normal, some experts empty, none above 2,000 rows
  std::mt19937 random(7);
  std::vector<double> weight(kExperts);
  double sum = 0;
  for (int e = 0; e < kExperts; ++e)
    sum += weight[e] = e % 17 == 3 ? 0.0 : std::exp(std::normal_distribution<double>(0, 0.8)(random));
  std::vector<int> counts(kExperts);
  int left = kRows;
  for (int e = 0; e < kExperts; ++e) left -= counts[e] = std::min(2000, static_cast<int>(kRows * weight[e] / sum));
  for (int e = 0; left > 0; e = (e + 1) % kExperts)
    if (counts[e] > 0 && counts[e] < 2000) {
      const int more = std::min(left, 40);
      counts[e] += more, left -= more;
    }
  return counts;
}
struct DevicePlan {
  Plan plan;
  int* first;
  DevicePlan(const std::vector<int>& counts, int n, int width) {
    std::vector<int> rows(counts.size() + 1);
    for (size_t g = 0; g < counts.size(); ++g) rows[g + 1] = rows[g] + counts[g];
    plan = {static_cast<int>(counts.size()), rows.back(), n, width, nullptr};
    check_cuda(cudaMalloc(&plan.workspace, plan_bytes(plan.groups, plan.rows, n, width)), "cudaMalloc");
    check_cuda(cudaMalloc(&first, rows.size() * 4), "cudaMalloc");
    check_cuda(cudaMemcpy(first, rows.data(), rows.size() * 4, cudaMemcpyHostToDevice), "copy");
    make_plan(first, plan, nullptr);
    check_cuda(cudaDeviceSynchronize(), "plan");
    plan.settled = true;
  }
  DevicePlan(const DevicePlan&) = delete;
  ~DevicePlan() { cudaFree(plan.workspace), cudaFree(first); }
};

struct Rows {  // everything that a run reads and writes for its rows
  uint8_t* values;
  float* scales;
  uint16_t* out;
  uint8_t* hidden;
  float* hidden_scales;
  float* route;
  Activations activations(int rows) const { return {values, scales, rows}; }
};

void wide_runs(Report& report, const char* layer, const Weights& w, const Rows& r, bool fused) {
  const double flop = 2.0 * kRows * w.n * w.k;
  const char* format = w.format == WeightFormat::fp4 ? "FP4" : "FP8";
  for (const bool even : {true, false}) {
    const DevicePlan p(even ? std::vector<int>(kExperts, kRows / kExperts) : uneven_counts(), w.n, kWideWidth);
    const std::string name = std::string(layer) + " " + format + (even ? ", even rows" : ", uneven rows");
    report.product(name + ", bf16 out", flop,
                   measure([&] { linear(w, r.activations(kRows), p.plan, r.out, nullptr); }, 60), kPeakTflops);
    if (fused)
      report.product(name + ", SwiGLU fused", flop,
                     measure(
                         [&] {
                           linear_swiglu(w, r.activations(kRows), p.plan, r.route, 10.0f, r.hidden, r.hidden_scales,
                                         nullptr);
                         },
                         60),
                     kPeakTflops);
  }
}

// `active` experts with rows_each rows; every launch takes other experts, so that weights come from memory and not from
// L2.
void decode_runs(Report& report, const char* layer, const Weights& w, const Rows& r, int active, int rows_each,
                 int width, bool fused) {
  const int sets = std::max(1, std::min(16, kExperts / active));
  std::vector<std::unique_ptr<DevicePlan>> plans;
  for (int s = 0; s < sets; ++s) {
    std::vector<int> counts(kExperts, 0);
    for (int i = 0; i < active; ++i) counts[(s * active + i) * 41 % kExperts] = rows_each;
    plans.push_back(std::make_unique<DevicePlan>(counts, w.n, width));
  }
  const Activations a = r.activations(active * rows_each);
  const double ms = graph_ms(4 * sets, [&](int i, cudaStream_t stream) {  // as a decode step runs
    if (fused)
      linear_swiglu(w, a, plans[i % sets]->plan, r.route, 10.0f, r.hidden, r.hidden_scales, stream);
    else
      linear(w, a, plans[i % sets]->plan, r.out, stream);
  });
  const double bytes = double(active) * (w.n / kRecordRows) * (w.k / kBlock) * record_bytes(w.format);
  report.bytes(std::string(layer) + (w.format == WeightFormat::fp4 ? " FP4" : " FP8") + ", decoding, " +
                   std::to_string(active) + " experts x " + std::to_string(rows_each) + " rows, tile " +
                   std::to_string(width),
               bytes, ms);
}

// The experts of one token's layer as a decode step runs them: products alone, and from the router's logits to the sum
// of the experts' rows. Bytes are those of the packed weights.
void chain_runs(Report& report, const Weights& fc1, const Weights& fc2, const uint16_t* x, const Rows& r) {
  constexpr int kTopK = 6, kSets = 16;
  const std::string format = fc1.format == WeightFormat::fp4 ? " FP4" : " FP8";
  const auto bytes_of = [](const Weights& w) {
    return double(kTopK) * (w.n / kRecordRows) * (w.k / kBlock) * record_bytes(w.format);
  };
  const double bytes = bytes_of(fc1) + bytes_of(fc2);
  const Array<float> logits(size_t(kSets) * kExperts, 1.0f, 21);
  const Array<int> expert(kTopK), first(kExperts + 1), source(kTopK), slots(kTopK);
  const Array<float> weight(kTopK), route(kTopK);
  const Array<uint16_t> sum(fc2.n);
  Plan plan{kExperts, kTopK, fc1.n, best_width(kTopK, kExperts), nullptr};
  const Array<uint4> workspace(plan_bytes(kExperts, kTopK, fc1.n, plan.width) / sizeof(uint4) + 1);
  plan.workspace = workspace.get(), plan.settled = true;
  const Choices choices{expert.get(), weight.get(), 1, kTopK, kExperts};
  const auto router = [&](int set, cudaStream_t stream) {
    router::route(logits.get() + size_t(set) * kExperts, {1, kExperts, kTopK}, {nullptr, nullptr, nullptr, 0, 1.5f},
                  expert.get(), weight.get(), nullptr, stream);
    sort_by_expert(choices, {first.get(), source.get(), route.get(), slots.get()}, nullptr, stream, &plan);
    quantise_rows(x, source.get(), kTopK, fc1.k, r.values, r.scales, stream);
  };
  const auto products = [&](const Plan& p, cudaStream_t stream) {
    linear_swiglu(fc1, r.activations(kTopK), p, r.route, 10.0f, r.hidden, r.hidden_scales, stream);
    linear(fc2, {r.hidden, r.hidden_scales, kTopK}, p, r.out, stream);
  };
  std::vector<std::unique_ptr<DevicePlan>> plans;
  for (int s = 0; s < kSets; ++s) {
    std::vector<int> counts(kExperts, 0);
    for (int i = 0; i < kTopK; ++i) counts[(s * kTopK + i) * 41 % kExperts] = 1;
    plans.push_back(std::make_unique<DevicePlan>(counts, fc1.n, plan.width));
  }
  report.bytes("fc1 and fc2" + format + ", decoding, 6 experts x 1 rows", bytes,
               graph_ms(4 * kSets, [&](int i, cudaStream_t stream) { products(plans[i % kSets]->plan, stream); }));
  report.bytes("router to sum" + format + ", decoding, 6 experts x 1 rows", bytes,
               graph_ms(4 * kSets, [&](int i, cudaStream_t stream) {
                 router(i % kSets, stream);
                 products(plan, stream);
                 combine(r.out, slots.get(), nullptr, 1, kTopK, fc2.n, sum.get(), stream);
               }));
}

void dense_runs(Report& report, const Rows& r) {
  struct Shape {
    const char* name;
    int n, k;
  };
  for (const Shape s :
       {Shape{"wq_b", 32768, 1024}, {"wo_b", 4096, 8192}, {"wq_a", 1024, 4096}, {"shared fc1", 4096, 4096}}) {
    const int rows = s.n > 16384 ? 8192 : 16384;
    const Weights w = random_weights(WeightFormat::fp8, 1, s.n, s.k);
    const DevicePlan p({rows}, s.n, kWideWidth);
    report.product(std::string("dense FP8 ") + s.name + " [" + std::to_string(s.n) + ", " + std::to_string(s.k) +
                       "], " + std::to_string(rows) + " rows",
                   2.0 * rows * s.n * s.k, measure([&] { linear(w, r.activations(rows), p.plan, r.out, nullptr); }, 60),
                   kPeakTflops);
    release(w);
  }
}

// One token; each launch takes another of many matrices.
void dense_decode_runs(Report& report, const Rows& r) {
  for (const auto& [n, k] : {std::pair{1024, 4096}, {4096, 4096}, {4096, 8192}, {32768, 1024}}) {
    const Weights w = random_weights(WeightFormat::fp8, kExperts, n, k);
    decode_runs(report, ("dense [" + std::to_string(n) + ", " + std::to_string(k) + "]").c_str(), w, r, 1, 1, 8, false);
    if (n == 4096 && k == 4096) decode_runs(report, "dense [4096, 4096] with SwiGLU", w, r, 1, 1, 8, true);
    release(w);
  }
}

void sort_and_combine(Report& report, const Rows& r) {
  constexpr int kTopK = 6, kTokens = kRows / kTopK;
  std::mt19937 random(12);
  std::vector<int> experts(kRows);
  for (auto& e : experts) e = static_cast<int>(random() % kExperts);
  int *expert, *source, *slots, *first;
  for (int** p : {&expert, &source, &slots, &first}) check_cuda(cudaMalloc(p, kRows * sizeof(int)), "cudaMalloc");
  check_cuda(cudaMemcpy(expert, experts.data(), kRows * sizeof(int), cudaMemcpyHostToDevice), "copy");
  for (const int tokens : {kTokens, 128}) {
    const Choices choices{expert, r.route, tokens, kTopK, kExperts};
    void* workspace;
    check_cuda(cudaMalloc(&workspace, std::max<size_t>(sort_bytes(choices), 4)), "cudaMalloc");
    const double ms = median_ms(21, [&] {
      sort_by_expert(choices, {first, source, r.hidden_scales, slots}, workspace, nullptr);
    });
    const std::string name = "sort " + std::to_string(tokens) + " tokens x top 6 by expert";
    report.time(name, ms);
    if (tokens == kTokens)
      report.bytes("combine 16384 tokens x top 6", 2.0 * (kRows + kTokens) * 4096, median_ms(9, [&] {
                     combine(r.out, slots, nullptr, kTokens, kTopK, 4096, reinterpret_cast<uint16_t*>(r.values),
                             nullptr);
                   }));
    cudaFree(workspace);
  }
  for (int* p : {expert, source, slots, first}) cudaFree(p);
}

}  // namespace

int main(int argc, char** argv) {
  Report report("grouped_linear");
  const size_t widest = 4096;
  uint16_t* x = random_array<Fill::bf16, uint16_t>(size_t(kRows) * widest, 5);
  Rows r{};
  r.out = random_array<Fill::bf16, uint16_t>(size_t(kRows) * widest, 6);
  r.values = random_array<Fill::codes, uint8_t>(size_t(kRows) * widest, 7);
  r.hidden = random_array<Fill::codes, uint8_t>(size_t(kRows) * widest / 2, 8);
  r.scales = random_array<Fill::bases, float>(size_t(kRows) * widest / kBlock, 9);
  r.hidden_scales = random_array<Fill::bases, float>(size_t(kRows) * widest / kBlock, 10);
  r.route = random_array<Fill::bases, float>(kRows, 11);
  report.bytes("quantise rows of 4,096", 3.0 * kRows * widest,
               median_ms(9, [&] { quantise_rows(x, nullptr, kRows, 4096, r.values, r.scales, nullptr); }));
  report.bytes("SwiGLU and quantise, 2 x 2,048", 2.5 * kRows * widest, median_ms(9, [&] {
                 swiglu_quantise(x, kRows, 4096, r.route, 10.0f, r.hidden, r.hidden_scales, nullptr);
               }));
  {
    const DevicePlan p(uneven_counts(), 4096, kWideWidth);
    const double ms = median_ms(21, [&] { make_plan(p.first, p.plan, nullptr); });
    report.time("plan, 256 experts", ms);
  }
  sort_and_combine(report, r);
  for (const WeightFormat format : {WeightFormat::fp4, WeightFormat::fp8}) {
    Weights w = random_weights(format, kExperts, 4096, 4096);
    quantise_rows(x, nullptr, kRows, 4096, r.values, r.scales, nullptr);
    wide_runs(report, "fc1", w, r, true);
    decode_runs(report, "fc1", w, r, 256, 8, 8, true), decode_runs(report, "fc1", w, r, 48, 8, 8, true),
        decode_runs(report, "fc1", w, r, 6, 1, 8, true);
    if (format == WeightFormat::fp4)
      decode_runs(report, "fc1", w, r, 256, 16, 16, true), decode_runs(report, "fc1", w, r, 256, 64, 64, true);
    const Weights fc1 = w;
    w = random_weights(format, kExperts, 4096, 2048);
    chain_runs(report, fc1, w, x, r);
    release(fc1);
    quantise_rows(x, nullptr, kRows, 2048, r.values, r.scales, nullptr);
    wide_runs(report, "fc2", w, r, false);
    decode_runs(report, "fc2", w, r, 256, 8, 8, false), decode_runs(report, "fc2", w, r, 48, 8, 8, false),
        decode_runs(report, "fc2", w, r, 6, 1, 8, false);
    release(w);
  }
  dense_runs(report, r);
  dense_decode_runs(report, r);
  report.write(argc, argv);
}
