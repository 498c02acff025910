// Low-rank adapters at 16,384 tokens, rank 8: what they add to the base products, the way down, the gradients.
// usage: lora_bench [RESULT.json]
#include "bench_support.cuh"
#include "kernels/grouped_linear/grouped_linear.h"
#include "kernels/row_linear/row_linear.h"

namespace {

using namespace plumb::bench;
using namespace plumb::kernels;
using namespace plumb::kernels::grouped_linear;

constexpr int kTokens = 16384, kRank = 8;

__global__ void bytes_kernel(uint8_t* out, size_t count, bool records) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    const uint32_t h = hash(i);
    const bool offset = records && i % kFp4RecordBytes >= 4 * kSlabCodeBytes;
    out[i] = static_cast<uint8_t>(offset ? h % 12 : records ? h : h & 0xbf);  // no NaN among e4m3 values
  }
}

struct Shape {
  const char* name;
  WeightFormat format;
  int groups, rows, n, k;
  bool swiglu;
};

// shared_down: ms of the way down of this product's adapter as its part of one pass for all that read x; 0: reads x
// alone.
void run(Report& report, const Shape& s, double shared_down) {
  const Array<uint8_t> records(size_t(s.groups) * (s.n / kRecordRows) * (s.k / kBlock) * record_bytes(s.format));
  bytes_kernel<<<2048, 256>>>(records.get(), records.size(), s.format == WeightFormat::fp4);
  const Array<float> bases(std::vector<float>(size_t(s.groups) * (s.n / kBlock) * block_stride(s.k), 0x1p-12f));
  const Weights w{s.format, s.groups, s.n, s.k, records.get(), bases.get()};
  std::vector<int> firsts(s.groups + 1), tokens(s.rows);
  for (int g = 0; g <= s.groups; ++g) firsts[g] = static_cast<int>(int64_t(s.rows) * g / s.groups);
  for (int r = 0; r < s.rows; ++r) tokens[r] = s.groups == 1 ? r : static_cast<int>(r * 7919LL % kTokens);
  const Array<int> first(firsts), source(tokens);
  const Array<uint8_t> space(plan_bytes(s.groups, s.rows, s.n, 256)),
      space_back(plan_bytes(s.groups, s.rows, s.k, 256));
  const Plan plan{s.groups, s.rows, s.n, 256, space.get()};
  const Plan back{s.groups, s.rows, s.k, 256, space_back.get()};
  make_plan(first.get(), plan, nullptr), make_plan(first.get(), back, nullptr);

  const int sources = s.groups == 1 ? s.rows : kTokens;
  const Array<uint16_t> x(size_t(sources) * s.k, 1, 1), dy(size_t(s.rows) * s.n, 1, 2);
  const Array<uint16_t> out(std::max(size_t(s.rows) * s.n, size_t(s.rows) * s.k));
  const Array<uint8_t> values(size_t(s.rows) * s.k), hidden(size_t(s.rows) * s.n / 2);
  const Array<float> scales(size_t(s.rows) * block_stride(s.k)), hidden_scales(size_t(s.rows) * block_stride(s.n / 2));
  const bool grouped = s.groups > 1;
  quantise_rows(x.get(), grouped ? source.get() : nullptr, s.rows, s.k, values.get(), scales.get(), nullptr);

  const Array<float> a(size_t(s.groups) * kRank * s.k, 0.02f, 3), b(size_t(s.groups) * s.n * kRank, 0.02f, 4);
  const Array<uint32_t> packed_b(lora::factor_bytes(s.groups, s.n, kRank) / 4),
      packed_a(lora::factor_bytes(s.groups, s.k, kRank) / 4);
  lora::pack_factor(b.get(), s.groups, s.n, kRank, false, s.swiglu, packed_b.get(), nullptr);
  lora::pack_factor(a.get(), s.groups, s.k, kRank, true, false, packed_a.get(), nullptr);
  const Array<const uint32_t*> table(std::vector<const uint32_t*>{packed_b.get(), packed_a.get()});
  const Array<uint16_t> planes_a(row_linear::split_bytes(s.groups, kRank, s.k) / 2);
  const Array<uint16_t> planes_b(row_linear::split_bytes(s.groups, kRank, s.n) / 2);
  row_linear::split_weight(a.get(), s.groups, kRank, s.k, 2, planes_a.get(), nullptr);
  row_linear::split_weight(b.get(), s.groups, kRank, s.n, 2, planes_b.get(), nullptr, {true, s.swiglu});
  const Array<float> t(size_t(s.rows) * kRank, 1, 5), u(size_t(s.rows) * kRank, 1, 6);
  const lora::LowRank forward{kRank, t.get(), kRank, table.get(), nullptr};
  const lora::LowRank backward{kRank, u.get(), kRank, table.get() + 1, nullptr};

  const auto product = [&](const lora::LowRank& l) {
    const Activations rows{values.get(), scales.get(), s.rows};
    if (s.swiglu)
      linear_swiglu(w, rows, plan, nullptr, 10, hidden.get(), hidden_scales.get(), nullptr, l);
    else
      linear(w, rows, plan, out.get(), nullptr, l);
  };
  const auto down = [&](const uint16_t* rows, bool gathered, int k, const uint16_t* planes, float* to) {
    row_linear::few_outputs(rows, gathered ? source.get() : nullptr, grouped ? first.get() : nullptr, s.rows,
                            {planes, s.groups, kRank, k}, to, nullptr);
  };
  const std::string name = s.name;
  const auto forwards = medians_ms(9, {[&] { product({}); }, [&] { product(forward); }});
  const double base = forwards[0], with = forwards[1];
  const double way_down = median_ms(9, [&] { down(x.get(), grouped, s.k, planes_a.get(), t.get()); });
  report.time(name + ": forward without adapter", base);
  report.bytes(name + ": T", 2.0 * s.rows * s.k, way_down);
  report.ratio(name + ": epilogue, extra time", 100 * (with / base - 1));
  report.ratio(name + ": epilogue and way down, extra time", 100 * ((with + way_down) / base - 1));
  if (shared_down > 0)
    report.ratio(name + ": epilogue and its part of a shared way down, extra time",
                 100 * ((with + shared_down) / base - 1));

  const auto dx = [&](const lora::LowRank& l) { linear_backward_input(w, dy.get(), back, out.get(), nullptr, l); };
  const auto backwards = medians_ms(9, {[&] { dx({}); }, [&] { dx(backward); }});
  const double base_dx = backwards[0], with_dx = backwards[1];
  const Array<float> d_a(a.size(), 0, 7), d_b(b.size(), 0, 8);
  lora::Gradient ga{}, gb{};
  ga.y = x.get(), ga.source_row = grouped ? source.get() : nullptr, ga.t = u.get(), ga.columns = s.k;
  ga.transposed = true, ga.out = d_a.get();
  gb.y = dy.get(), gb.t = t.get(), gb.columns = s.n, gb.gate_up = s.swiglu, gb.out = d_b.get();
  for (lora::Gradient* g : {&ga, &gb}) {
    g->t_stride = g->rank = kRank, g->rows = s.rows, g->groups = s.groups, g->parts = 1;
    g->first_row = grouped ? first.get() : nullptr;
  }
  gb.planes = planes_b.get(), gb.u = u.get();
  const Array<uint8_t> workspace(std::max(lora::gradient_bytes(ga), lora::gradient_bytes(gb)));
  const double time_b = median_ms(9, [&] { lora::add_gradient(gb, workspace.get(), nullptr); });
  const double time_a = median_ms(9, [&] { lora::add_gradient(ga, workspace.get(), nullptr); });
  report.time(name + ": dx without adapter", base_dx);
  report.bytes(name + ": U and dB", 2.0 * s.rows * s.n, time_b),
      report.bytes(name + ": dA", 2.0 * s.rows * s.k, time_a);
  report.ratio(name + ": dx, extra time of the epilogue", 100 * (with_dx / base_dx - 1));
  report.ratio(name + ": backward with dA and dB, extra time", 100 * ((with_dx + time_a + time_b) / base_dx - 1));
}

// The way down of all that reads x in attention: wq_a, wkv and the compressor's two, together and each on its own. ->
// ms together for kTokens.
double run_shared_down(Report& report) {
  constexpr int kProducts = 4, kWidth = 4096;
  double many = 0;
  for (const int rows : {1, 256, kTokens}) {
    const Array<uint16_t> x(size_t(rows) * kWidth, 1, 1);
    const Array<float> a(size_t(kProducts) * kRank * kWidth, 0.02f, 3), t(size_t(kProducts) * rows * kRank);
    const size_t size = row_linear::split_bytes(1, kRank, kWidth) / 2;
    const int copies = cold_copies(2.0 * x.size() + 2.0 * size * kProducts);
    const Array<uint16_t> planes(size * kProducts * copies);
    for (int i = 0; i < kProducts * copies; ++i)
      row_linear::split_weight(a.get() + i % kProducts * kRank * kWidth, 1, kRank, kWidth, 2, planes.get() + i * size,
                               nullptr);
    const auto down = [&](int first, int count, int copy, cudaStream_t stream) {
      std::vector<row_linear::Down> downs;
      for (int i = first; i < first + count; ++i)
        downs.push_back(
            {planes.get() + (copy * kProducts + i) * size, nullptr, kRank, t.get() + size_t(i) * rows * kRank});
      row_linear::few_outputs(x.get(), nullptr, nullptr, rows, 1, kWidth, downs, stream);
    };
    const double together = cold_ms(copies, [&](int copy, cudaStream_t stream) { down(0, kProducts, copy, stream); });
    const double alone = cold_ms(copies, [&](int copy, cudaStream_t stream) {
      for (int i = 0; i < kProducts; ++i) down(i, 1, copy, stream);
    });
    const std::string name = "T of four products of x, " + std::to_string(rows) + (rows == 1 ? " row" : " rows");
    report.time(name + ", one launch", together), report.time(name + ", a launch each", alone);
    many = together;
  }
  return many;
}

// wo_a: eight groups of heads beside each other in a row, one A for all.
void run_grouped_output(Report& report) {
  constexpr int kGroups = 8, kIn = 4096, kOut = 1024;
  const Array<uint16_t> x(size_t(kTokens) * kGroups * kIn, 1, 1), dy(size_t(kTokens) * kGroups * kOut, 1, 2);
  const Array<float> a(kRank * kIn, 0.02f, 3), b(kGroups * kOut * kRank, 0.02f, 4);
  const Array<float> t(size_t(kTokens) * kGroups * kRank, 1, 5), u(t.size(), 1, 6), d_a(a.size()), d_b(b.size());
  const Array<uint16_t> planes_a(row_linear::split_bytes(1, kRank, kIn) / 2);
  const Array<uint16_t> planes_b(row_linear::split_bytes(kGroups, kRank, kOut) / 2);
  row_linear::split_weight(a.get(), 1, kRank, kIn, 2, planes_a.get(), nullptr);
  row_linear::split_weight(b.get(), kGroups, kRank, kOut, 2, planes_b.get(), nullptr, {true, false});
  lora::Gradient ga{}, gb{};
  ga.y = x.get(), ga.t = u.get(), ga.t_stride = kRank, ga.rows = kTokens * kGroups, ga.columns = kIn;
  ga.transposed = true, ga.out = d_a.get(), ga.parts = 1;
  gb.y = dy.get(), gb.t = t.get(), gb.t_stride = kGroups * kRank, gb.rows = kTokens, gb.columns = kGroups * kOut;
  gb.out = d_b.get(), gb.parts = kGroups, gb.planes = planes_b.get(), gb.u = u.get();
  ga.rank = gb.rank = kRank, ga.groups = gb.groups = 1;
  const Array<uint8_t> workspace(std::max(lora::gradient_bytes(ga), lora::gradient_bytes(gb)));
  const std::string name = "wo_a, 8 x [1024, 4096]";
  report.bytes(name + ": T", 2.0 * x.size(), median_ms(9, [&] {
                 row_linear::few_outputs(x.get(), nullptr, nullptr, kTokens * kGroups, {planes_a.get(), 1, kRank, kIn},
                                         t.get(), nullptr);
               }));
  report.bytes(name + ": U and dB", 2.0 * dy.size(),
               median_ms(9, [&] { lora::add_gradient(gb, workspace.get(), nullptr); }));
  report.bytes(name + ": dA", 2.0 * x.size(), median_ms(9, [&] { lora::add_gradient(ga, workspace.get(), nullptr); }));
}

}  // namespace

int main(int argc, char** argv) {
  Report report("lora");
  const double shared_down = run_shared_down(report) / 4;
  const auto fp4 = WeightFormat::fp4, fp8 = WeightFormat::fp8;
  run(report, {"experts w1 w3, FP4 [4096, 4096]", fp4, 256, 6 * kTokens, 4096, 4096, true}, 0);
  run(report, {"experts w2, FP4 [4096, 2048]", fp4, 256, 6 * kTokens, 4096, 2048, false}, 0);
  run(report, {"wq_b, FP8 [32768, 1024]", fp8, 1, kTokens, 32768, 1024, false}, 0);
  run(report, {"wo_b, FP8 [4096, 8192]", fp8, 1, kTokens, 4096, 8192, false}, 0);
  run(report, {"wq_a, FP8 [1024, 4096]", fp8, 1, kTokens, 1024, 4096, false}, shared_down);
  run_grouped_output(report);
  report.write(argc, argv);
}
