// Speed of the input gradients of packed linears: 256 experts x 384 rows (16,384 tokens x 6), dense linears at 16,384
// rows, and what lies between them. usage: grouped_linear_backward_bench [RESULT.json]
#include <cmath>
#include <memory>
#include <random>

#include "bench_support.cuh"
#include "kernels/grouped_linear/grouped_linear.h"

namespace {

using namespace plumb::bench;
using namespace plumb::kernels::grouped_linear;
namespace lora = plumb::kernels::lora;

constexpr int kExperts = 256, kRows = 98304;

__global__ void bytes_kernel(uint8_t* out, size_t count, bool records) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    const uint32_t h = hash(i);
    const bool offset = records && i % kFp4RecordBytes >= 4 * kSlabCodeBytes;
    out[i] = static_cast<uint8_t>(offset ? h % 12 : records ? h : h & 0xbf);  // no NaN among e4m3 values
  }
}
struct Packed {
  Array<uint8_t> records;
  Array<float> bases;
  Weights weights;
  Packed(WeightFormat format, int groups, int n, int k)
      : records(size_t(groups) * (n / kRecordRows) * (k / kBlock) * record_bytes(format)),
        bases(std::vector<float>(size_t(groups) * (n / kBlock) * block_stride(k), 0x1p-12f)),
        weights{format, groups, n, k, records.get(), bases.get()} {
    bytes_kernel<<<2048, 256>>>(records.get(), records.size(), format == WeightFormat::fp4);
    check_cuda(cudaDeviceSynchronize(), "random records");
  }
};
// Rows of the experts: all the same; 0, 2/3, 4/3, 2 times the mean; as if every token chose at random.
enum class Spread { even, uneven, random };
struct DevicePlan {
  Array<int> first;
  Array<uint8_t> workspace;
  Plan plan;
  static std::vector<int> first_rows(int groups, int rows, Spread spread) {
    std::vector<int> first(groups + 1);
    std::mt19937 random(7);
    std::normal_distribution<double> normal(double(rows) / groups, std::sqrt(double(rows) / groups));
    for (int g = 0; g < groups; ++g)
      first[g + 1] = first[g] + (spread == Spread::even     ? rows / groups
                                 : spread == Spread::uneven ? rows / groups * (g * 5 % 4) * 2 / 3
                                                            : static_cast<int>(normal(random)));
    first[groups] = rows;
    return first;
  }
  DevicePlan(int groups, int rows, int n, Spread spread)
      : first(first_rows(groups, rows, spread)),
        workspace(plan_bytes(groups, rows, n, 256)),
        plan{groups, rows, n, 256, workspace.get()} {
    make_plan(first.get(), plan, nullptr);
  }
};

void product_runs(Report& report, const Array<uint16_t>& dy, const Array<uint16_t>& dx) {
  constexpr int kRank = 8;
  struct Shape {
    const char* name;
    WeightFormat format;
    int groups, rows, n, k;
    Spread spread;
    bool adapter;
  };
  const Array<float> t(size_t{kRows} * kRank, 1, 3);
  for (const Shape& s :
       {Shape{"experts fc1 FP4 [4096, 4096], even", WeightFormat::fp4, kExperts, kRows, 4096, 4096, Spread::even,
              false},
        {"experts fc1 FP4 [4096, 4096], uneven", WeightFormat::fp4, kExperts, kRows, 4096, 4096, Spread::uneven, false},
        {"experts fc1 FP4 [4096, 4096], random", WeightFormat::fp4, kExperts, kRows, 4096, 4096, Spread::random, false},
        {"experts fc1 FP4 [4096, 4096], random, with an adapter", WeightFormat::fp4, kExperts, kRows, 4096, 4096,
         Spread::random, true},
        {"experts fc1 FP4 [4096, 4096], random", WeightFormat::fp4, kExperts, kRows / 4, 4096, 4096, Spread::random,
         false},
        {"experts fc2 FP4 [4096, 2048], even", WeightFormat::fp4, kExperts, kRows, 4096, 2048, Spread::even, false},
        {"experts fc2 FP4 [4096, 2048], random, with an adapter", WeightFormat::fp4, kExperts, kRows, 4096, 2048,
         Spread::random, true},
        {"experts fc1 FP8 [4096, 4096], even", WeightFormat::fp8, kExperts, kRows, 4096, 4096, Spread::even, false},
        {"dense wq_b FP8 [32768, 1024]", WeightFormat::fp8, 1, 8192, 32768, 1024, Spread::even, false},
        {"dense wo_b FP8 [4096, 8192]", WeightFormat::fp8, 1, 16384, 4096, 8192, Spread::even, false},
        {"dense wq_a FP8 [1024, 4096]", WeightFormat::fp8, 1, 16384, 1024, 4096, Spread::even, false},
        {"dense shared fc1 FP8 [4096, 4096]", WeightFormat::fp8, 1, 16384, 4096, 4096, Spread::even, false}}) {
    const Packed w(s.format, s.groups, s.n, s.k);
    const DevicePlan p(s.groups, s.rows, s.k, s.spread);
    const Array<uint32_t> factor(lora::factor_bytes(s.groups, s.k, kRank) / 4);
    const Array<const uint32_t*> factors(std::vector<const uint32_t*>{factor.get()});
    const lora::LowRank low_rank = s.adapter ? lora::LowRank{kRank, t.get(), kRank, factors.get()} : lora::LowRank{};
    report.product(
        std::string("dx, ") + s.name + ", " + std::to_string(s.rows) + " rows", 2.0 * s.rows * s.n * s.k,
        measure([&] { linear_backward_input(w.weights, dy.get(), p.plan, dx.get(), nullptr, low_rank); }, 20));
  }
}

}  // namespace

int main(int argc, char** argv) {
  Report report("grouped_linear_backward");
  const Array<uint16_t> dy(size_t{kRows} * 4096, 1, 1), dx(size_t{kRows} * 4096), gates(size_t{kRows} * 4096, 1, 2);
  const Array<float> route(kRows, 1, 3), d_route(kRows);
  product_runs(report, dy, dx);
  report.bytes("SwiGLU backward, 98304 rows, 2 x 2048", 10.0 * kRows * 2048, median_ms(9, [&] {
                 swiglu_backward(dy.get(), gates.get(), kRows, 4096, route.get(), 10, dx.get(), d_route.get(), nullptr);
               }));
  report.write(argc, argv);
}
