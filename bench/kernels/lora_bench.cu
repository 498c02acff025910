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

void run(Report& report, const Shape& s) {
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
  report.time(name + ": forward without adapter", base), report.time(name + ": way down", way_down);
  report.ratio(name + ": epilogue, extra time", 100 * (with / base - 1));
  report.ratio(name + ": epilogue and way down, extra time", 100 * ((with + way_down) / base - 1));

  const auto dx = [&](const lora::LowRank& l) { linear_backward_input(w, dy.get(), back, out.get(), nullptr, l); };
  const auto backwards = medians_ms(9, {[&] { dx({}); }, [&] { dx(backward); }});
  const double base_dx = backwards[0], with_dx = backwards[1];
  const double way_back = median_ms(9, [&] { down(dy.get(), false, s.n, planes_b.get(), u.get()); });
  const Array<float> d_a(a.size(), 0, 7), d_b(b.size(), 0, 8);
  lora::Gradient ga{x.get(),  grouped ? source.get() : nullptr,
                    u.get(),  kRank,
                    kRank,    s.rows,
                    s.k,      grouped ? first.get() : nullptr,
                    s.groups, nullptr,
                    0,        true,
                    false,    d_a.get()};
  lora::Gradient gb{dy.get(), nullptr, t.get(), kRank, kRank,    s.rows,   s.n, grouped ? first.get() : nullptr,
                    s.groups, nullptr, 0,       false, s.swiglu, d_b.get()};
  const Array<uint8_t> workspace(std::max(lora::gradient_bytes(ga), lora::gradient_bytes(gb)));
  const double time_a = median_ms(9, [&] { lora::add_gradient(ga, workspace.get(), nullptr); });
  const double time_b = median_ms(9, [&] { lora::add_gradient(gb, workspace.get(), nullptr); });
  report.time(name + ": dx without adapter", base_dx), report.time(name + ": way back", way_back);
  report.bytes(name + ": dA", 2.0 * s.rows * s.k, time_a), report.bytes(name + ": dB", 2.0 * s.rows * s.n, time_b);
  report.ratio(name + ": dx, extra time of the epilogue", 100 * (with_dx / base_dx - 1));
  report.ratio(name + ": backward with dA and dB, extra time",
               100 * ((with_dx + way_back + time_a + time_b) / base_dx - 1));
}

}  // namespace

int main(int argc, char** argv) {
  Report report("lora");
  for (const Shape& s :
       {Shape{"experts w1 w3, FP4 [4096, 4096]", WeightFormat::fp4, 256, 6 * kTokens, 4096, 4096, true},
        {"experts w2, FP4 [4096, 2048]", WeightFormat::fp4, 256, 6 * kTokens, 4096, 2048, false},
        {"wq_b, FP8 [32768, 1024]", WeightFormat::fp8, 1, kTokens, 32768, 1024, false},
        {"wo_b, FP8 [4096, 8192]", WeightFormat::fp8, 1, kTokens, 4096, 8192, false},
        {"wq_a, FP8 [1024, 4096]", WeightFormat::fp8, 1, kTokens, 1024, 4096, false}})
    run(report, s);
  report.write(argc, argv);
}
