// Speed of the products with unquantised weights and of the router, at 16,384 rows and when decoding. Decoding launches
// take other weights each time, so that they come from memory. usage: row_linear_bench [RESULT.json]
#include "bench_support.cuh"
#include "kernels/router/router.h"
#include "kernels/row_linear/row_linear.h"

namespace {

using namespace plumb::bench;
using namespace plumb::kernels::row_linear;
namespace lora = plumb::kernels::lora;
namespace router = plumb::kernels::router;

constexpr int kRows = 16384, kWidth = 4096;

void thin_runs(Report& report, const char* name, int n) {
  constexpr int kSets = 24;
  const Array<uint16_t> x(size_t{kRows} * kWidth, 1, 1), data(size_t{kSets} * n * kWidth, 0.02f, 2);
  const Array<float> out(size_t{kRows} * n), workspace(size_t{1} << 22);
  const Weight w{data.get(), n, kWidth};
  const std::string title = std::string(name) + " [" + std::to_string(n) + ", 4096]";
  const Timing t = measure([&] { linear(x.get(), kRows, w, out.get(), workspace.get(), nullptr); });
  report.product(title + ", 16384 rows", 2.0 * kRows * n * kWidth, t);
  for (const int rows : {1, 256})
    report.bytes(
        title + ", decoding " + std::to_string(rows) + " rows", 2.0 * n * kWidth + 2.0 * rows * kWidth + 4.0 * rows * n,
        graph_ms(kSets, [&](int i, cudaStream_t stream) {
          linear(x.get(), rows, {data.get() + size_t(i) * n * kWidth, n, kWidth}, out.get(), workspace.get(), stream);
        }));
}

void few_runs(Report& report, const char* name, int n, int k) {
  const Array<uint16_t> x(size_t{kRows} * k, 1, 3), planes(split_bytes(1, n, k) / 2);
  const Array<float> weight(size_t(n) * k, 0.02f, 4), out(size_t{kRows} * n);
  split_weight(weight.get(), 1, n, k, 1, planes.get(), nullptr);
  const SplitWeight w{planes.get(), 1, n, k};
  const std::string title = std::string(name) + " FP32 [" + std::to_string(n) + ", " + std::to_string(k) + "]";
  report.bytes(title + ", 16384 rows", 2.0 * kRows * k + 4.0 * kRows * n,
               median_ms(9, [&] { few_outputs(x.get(), nullptr, nullptr, kRows, w, out.get(), nullptr); }));
  for (const int rows : {1, 256})
    report.time(title + ", decoding " + std::to_string(rows) + " rows", graph_ms(20, [&](int i, cudaStream_t stream) {
                  few_outputs(x.get() + size_t(i) * 256 * k, nullptr, nullptr, rows, w, out.get(), stream);
                }));
}

void mapping_runs(Report& report) {
  constexpr int kOutputs = 24, kInputs = 16384;
  const Array<uint16_t> x(size_t{kRows} * kInputs, 1, 8), planes(split_bytes(1, kOutputs, kInputs) / 2);
  const Array<float> weight(size_t{kOutputs} * kInputs, 0.02f, 9), out(size_t{kRows} * kOutputs);
  split_weight(weight.get(), 1, kOutputs, kInputs, 1, planes.get(), nullptr);
  const SplitWeight w{planes.get(), 1, kOutputs, kInputs};
  const Array<float> workspace(std::max(split_workspace_bytes(kRows, w), split_workspace_bytes(256, w)) / 4);
  report.bytes("mHC mapping FP32 [24, 16384], 16384 rows", 2.0 * kRows * kInputs,
               median_ms(9, [&] { linear_split(x.get(), kRows, w, out.get(), workspace.get(), nullptr); }));
  for (const int rows : {1, 256})
    report.time("mHC mapping, decoding " + std::to_string(rows) + " rows",
                graph_ms(20, [&](int i, cudaStream_t stream) {
                  linear_split(x.get() + size_t(i) * 256 * kInputs, rows, w, out.get(), workspace.get(), stream);
                }));
}

void router_runs(Report& report) {
  const router::Sizes sizes{kRows, 256, 6};
  const Array<float> logits(size_t{kRows} * 256, 1, 5), bias(256, 0.1f, 6), weight(kRows * 6), d_logit(kRows * 6),
      dx(size_t{kRows} * kWidth);
  const Array<uint16_t> gate(256 * kWidth, 0.02f, 7);
  const Array<int> expert(kRows * 6);
  for (const int rows : {kRows, 256, 1})
    report.time("router: choice and weights, " + std::to_string(rows) + " rows",
                graph_ms(10, [&](int, cudaStream_t stream) {
                  router::route(logits.get(), {rows, 256, 6}, {bias.get(), nullptr, nullptr, 0, 1.5f}, expert.get(),
                                weight.get(), nullptr, stream);
                }));
  report.time("router: gradient of the logits, 16384 rows", median_ms(9, [&] {
                router::route_backward(weight.get(), logits.get(), expert.get(), sizes, 1.5f, d_logit.get(), nullptr);
              }));
  report.bytes("router: gradient of x, added, 16384 rows", 8.0 * kRows * kWidth, median_ms(9, [&] {
                 router::route_backward_input(d_logit.get(), expert.get(), sizes, gate.get(), kWidth, true, dx.get(),
                                              nullptr);
               }));
}

// wo_a: eight groups of [1024, 4096], 64 heads of 512; with an adapter of rank 8.
void grouped_runs(Report& report) {
  constexpr int kGroups = 8, kOutputs = 1024, kSets = 6, kRank = 8;
  constexpr size_t kSize = size_t{kGroups} * kOutputs * kWidth;
  const Array<uint16_t> x(size_t{kRows} * kGroups * kWidth, 1, 11), data(kSets * kSize, 0.02f, 12),
      y(size_t{kRows} * kGroups * kOutputs, 1, 13);
  const Array<float> t(size_t{kRows} * kGroups * kRank, 1, 16), a(kRank * kWidth, 0.1f, 17),
      b(size_t{kGroups} * kOutputs * kRank, 0.1f, 18);
  const Array<uint32_t> a_packed(lora::factor_bytes(1, kWidth, kRank) / 4),
      b_packed(lora::factor_bytes(1, kGroups * kOutputs, kRank) / 4);
  lora::pack_factor(a.get(), 1, kWidth, kRank, true, false, a_packed.get(), nullptr);
  lora::pack_factor(b.get(), 1, kGroups * kOutputs, kRank, false, false, b_packed.get(), nullptr);
  const Array<const uint32_t*> factors(std::vector<const uint32_t*>{a_packed.get(), b_packed.get()});
  const lora::LowRank forward{kRank, t.get(), kGroups * kRank, factors.get() + 1},
      backward{kRank, t.get(), kGroups * kRank, factors.get()};
  const Weight w{data.get(), kOutputs, kWidth, kGroups};
  const double flop = 2.0 * kRows * kSize;
  for (const bool adapter : {false, true}) {
    const std::string with = adapter ? ", with an adapter" : "";
    report.product("wo_a, 8 x [1024, 4096], 16384 rows" + with, flop, measure([&] {
                     linear_bf16(x.get(), kRows, w, y.get(), nullptr, nullptr, adapter ? forward : lora::LowRank{});
                   }));
    report.product("wo_a, input gradient" + with, flop, measure([&] {
                     linear_backward_input_bf16(y.get(), kRows, w, x.get(), nullptr,
                                                adapter ? backward : lora::LowRank{});
                   }));
  }
  size_t most = 1;
  for (const int rows : {1, 16, 64, 128, 256, 1024}) most = std::max(most, workspace_bytes(rows, w));
  const Array<float> workspace(most / 4 + 1);
  for (const int rows : {1, 16, 64, 128, 256, 1024})
    report.bytes("wo_a, decoding " + std::to_string(rows) + " rows",
                 2.0 * kSize + 2.0 * rows * kGroups * (kWidth + kOutputs),
                 graph_ms(kSets, [&](int i, cudaStream_t stream) {
                   linear_bf16(x.get(), rows, {data.get() + i * kSize, kOutputs, kWidth, kGroups}, y.get(),
                               workspace.get(), stream, forward);
                 }));
}

void gate_gradient_run(Report& report) {
  constexpr int kExperts = 256, kSlots = 6;
  std::vector<int> first(kExperts + 1), source(kRows * kSlots), row_of_slot(kRows * kSlots);
  for (int e = 0; e <= kExperts; ++e) first[e] = e * (kRows * kSlots / kExperts);
  std::vector<int> next(first.begin(), first.end() - 1);
  for (int i = 0; i < kRows * kSlots; ++i) {
    const int e = (i / kSlots * 7 + i % kSlots * 37) % kExperts;
    row_of_slot[i] = next[e], source[next[e]++] = i / kSlots;
  }
  const Array<int> first_device(first), source_device(source), slots_device(row_of_slot);
  const Array<float> d_logit(kRows * kSlots, 1, 14), d_gate(kExperts * kWidth);
  const Array<uint16_t> x(size_t{kRows} * kWidth, 1, 15);
  report.bytes("router: gradient of the gate, 16384 rows", 2.0 * kRows * kSlots * kWidth, median_ms(9, [&] {
                 router::route_backward_gate(d_logit.get(),
                                             {first_device.get(), source_device.get(), slots_device.get()},
                                             {kRows, kExperts, kSlots}, x.get(), kWidth, d_gate.get(), nullptr);
               }));
}

}  // namespace

int main(int argc, char** argv) {
  Report report("row_linear");
  thin_runs(report, "router gate", 256), thin_runs(report, "indexer weights", 64);
  thin_runs(report, "compressor", 1024), thin_runs(report, "wide product", 4096);
  mapping_runs(report), few_runs(report, "into a LoRA rank", 8, kWidth);
  few_runs(report, "into four LoRA ranks", 32, kWidth);
  grouped_runs(report);
  router_runs(report), gate_gradient_run(report);
  report.write(argc, argv);
}
