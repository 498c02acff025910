// Grouped linear kernels on a GPU. Oracles: kernels without pipeline, packing or swizzle for the bits; FP64 on the CPU
// for the values; the scalar conversions of base/float_formats.h for everything that is quantised.
//
// Tests named Small* also run under compute-sanitizer (tools/test-gpu.sh --sanitize). By hand:
//   nvcc -gencode arch=compute_90a,code=sm_90a -std=c++20 -O2 --expt-relaxed-constexpr -Isrc -o grouped_linear_test
//     tests/kernels/grouped_linear_test.cu src/kernels/grouped_linear/*.cu -lgtest -lgtest_main
#include "kernels/grouped_linear/grouped_linear.h"

#include <gtest/gtest.h>

#include <cuda_fp8.h>

#include <cstring>

#include "grouped_linear_data.cuh"
#include "kernels/device.h"
#include "kernels/grouped_linear/problem.cuh"
#include "kernels/hopper/barrier.cuh"
#include "kernels/hopper/wgmma_fp8.cuh"

namespace plumb::kernels::grouped_linear {
namespace {

constexpr int kWidths[] = {8, 16, 64, 256};

// The bit oracle: the plainest kernel that uses the FP8 warpgroup product. Another operand layout (no swizzle), weights
// as rows, no pipeline; the same order of K and the same promotion points. Grid: (n / 64, row tiles of 64 of a group).
__global__ void __launch_bounds__(128)
    oracle_kernel(const uint8_t* weights, const float* bases, const uint8_t* tokens, const float* scales, int first_row,
                  int rows, int n, int k, uint16_t* out) {
  __shared__ __align__(128) uint8_t weight_tile[64 * kBlock];
  __shared__ __align__(128) uint8_t token_tile[64 * kBlock];
  const int thread = threadIdx.x, lane = thread % 32, first_weight = blockIdx.x * 64, first_token = blockIdx.y * 64;
  float total[32] = {}, partial[32];
  for (int kb = 0; kb < k / kBlock; ++kb) {
    const float base = bases[first_weight / kBlock * block_stride(k) + kb];
    __syncthreads();
    for (int i = thread; i < 64 * kBlock; i += 128) {
      const int row = i / kBlock, place = i % kBlock;
      const int at = (row / 8) * 1024 + (place / 16) * 128 + (row % 8) * 16 + place % 16;  // 8 x 16-byte blocks
      weight_tile[at] = weights[static_cast<size_t>(first_weight + row) * k + kb * kBlock + k_of_place(place)];
      token_tile[at] =
          tokens[static_cast<size_t>(first_row + min(first_token + row, rows - 1)) * k + kb * kBlock + place];
    }
    hopper::async_proxy_fence();
    __syncthreads();
    for (int i = 0; i < 32; ++i) partial[i] = 0;
    hopper::product_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      hopper::Fp8Product<64>::rows_from_shared(
          partial, hopper::plain_operand(hopper::shared_address(weight_tile) + step * 256, 128, 1024),
          hopper::plain_operand(hopper::shared_address(token_tile) + step * 256, 128, 1024), step > 0);
    hopper::product_commit();
    hopper::product_wait<0>();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int token = min(first_token + (i / 4) * 8 + (lane % 4) * 2 + (i & 1), rows - 1);
      total[i] =
          fmaf(partial[i], scales[static_cast<size_t>(first_row + token) * block_stride(k) + kb] * base, total[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int token = first_token + (i / 4) * 8 + (lane % 4) * 2 + (i & 1);
    const int row = first_weight + (thread / 32) * 16 + lane / 4 + ((i >> 1) & 1) * 8;
    if (token < rows)
      out[static_cast<size_t>(first_row + token) * n + row] = __bfloat16_as_ushort(__float2bfloat16_rn(total[i]));
  }
}

// The bits of the portable kernels: a thread an output, one FP32 chain over the places of K. Grid: (n / 64, rows).
__global__ void chain_kernel(const uint8_t* weights, const float* bases, const uint8_t* tokens, const float* scales,
                             int first_row, int n, int k, uint16_t* out) {
  const auto value = [](uint8_t code) {
    __nv_fp8_e4m3 v;
    v.__x = code;
    return static_cast<float>(v);
  };
  const int c = blockIdx.x * 64 + threadIdx.x;
  const size_t row = first_row + blockIdx.y;
  float sum = 0;
  for (int l = 0; l < k; ++l) {
    const int block = l / kBlock;
    sum = fmaf(value(tokens[row * k + l]) * scales[row * block_stride(k) + block],
               value(weights[static_cast<size_t>(c) * k + block * kBlock + k_of_place(l % kBlock)]) *
                   bases[c / kBlock * block_stride(k) + block],
               sum);
  }
  out[row * n + c] = __bfloat16_as_ushort(__float2bfloat16_rn(sum));
}

std::vector<uint16_t> oracle(const Matrices& w, const Activations& a, const std::vector<int>& counts) {
  const Buffer<uint8_t> weights(w.plain);
  const Buffer<float> bases(w.bases);
  Buffer<uint16_t> out(static_cast<size_t>(a.rows) * w.n);
  const std::vector<int> first = first_rows(counts);
  for (int g = 0; g < w.groups; ++g) {
    const uint8_t* own = weights.get() + static_cast<size_t>(g) * w.n * w.k;
    const float* own_bases = bases.get() + g * w.n / kBlock * block_stride(w.k);
    if (counts[g] > 0 && is_hopper())
      oracle_kernel<<<dim3(w.n / 64, (counts[g] + 63) / 64), 128>>>(own, own_bases, a.values, a.scales, first[g],
                                                                    counts[g], w.n, w.k, out.get());
    else if (counts[g] > 0)
      chain_kernel<<<dim3(w.n / 64, counts[g]), 64>>>(own, own_bases, a.values, a.scales, first[g], w.n, w.k,
                                                      out.get());
  }
  return out.host();
}

struct Case {
  const char* what;
  int n, k;
  std::vector<int> counts;
  int spare_rows;  // capacity beyond the groups' rows
};
std::vector<Case> cases() {
  return {{"one row", 256, 128, {1}, 0},
          {"dense, odd number of K blocks", 512, 1408, {300}, 7},
          {"empty groups, tiles of every filling", 512, 384, {0, 1, 257, 64, 0, 323, 129, 8}, 0},
          {"all rows on one group", 256, 1024, {0, 0, 900, 0}, 20},
          {"no rows at all", 256, 256, {0, 0, 0}, 5},
          {"more tiles than multiprocessors", 1024, 256, {1200, 17}, 0},
          {"many groups of a few rows", 512, 512, {3, 1, 0, 9, 17, 2, 2, 2, 0, 5, 33, 4, 8, 7, 1, 16}, 1}};
}

// ---- Tests ---------------------------------------------------------------------------------------------------------
TEST(GroupedLinear, QuantisesLikeTheScalarFormats) {
  const int rows = 37, k = 1152;
  std::vector<uint16_t> x = random_rows(50, k, 1);
  for (int c = 0; c < k; ++c) x[3 * k + c] = 0;  // a row of zeros takes the smallest scale
  x[4 * k + 5] = float_to_bf16(3.0e38f);         // a huge value saturates nothing
  std::vector<int> source(rows);
  for (int r = 0; r < rows; ++r) source[r] = (r * 29 + 3) % 50;
  const Buffer<uint16_t> x_device(x);
  const Buffer<int> source_device(source);
  Buffer<uint8_t> values(rows * k);
  Buffer<float> scales(rows * block_stride(k));
  quantise_rows(x_device.get(), source_device.get(), rows, k, values.get(), scales.get(), nullptr);
  const auto v = values.host();
  const auto s = scales.host();
  for (int r = 0; r < rows; ++r)
    for (int kb = 0; kb < k / kBlock; ++kb) {
      const uint16_t* from = &x[source[r] * k + kb * kBlock];
      float amax = 0;
      for (int c = 0; c < kBlock; ++c) amax = std::max(amax, std::fabs(bf16_to_float(from[c])));
      const float scale = fp8_scale(amax);
      ASSERT_EQ(s[r * block_stride(k) + kb], scale) << "row " << r << " block " << kb;
      for (int place = 0; place < kBlock; ++place)
        ASSERT_EQ(v[r * k + kb * kBlock + place], float_to_e4m3(bf16_to_float(from[k_of_place(place)]) / scale));
    }
}

// All codes at all places of a word, all exponents, through the device's byte permutation.
__global__ void expand_kernel(const uint32_t* words, int count, uint32_t* out) {
  for (int i = threadIdx.x; i < count * (kLargestSpan + 1); i += blockDim.x) {
    const MagnitudeTable table = magnitude_table(i / count);
    out[2 * i] = expand_first(table, words[i % count]), out[2 * i + 1] = expand_second(table, words[i % count]);
  }
}
TEST(GroupedLinear, ExpandsAllCodesAndExponents) {
  std::vector<uint32_t> words;
  for (int code = 0; code < 16; ++code)
    for (int neighbour = 0; neighbour < 16; ++neighbour) {
      const auto pair = static_cast<uint16_t>(code | neighbour << 4 | code << 8 | neighbour << 12);
      words.push_back(arrange_codes(pair, static_cast<uint16_t>(pair << 4 | pair >> 12)));
    }
  const int count = static_cast<int>(words.size());
  const Buffer<uint32_t> in(words);
  Buffer<uint32_t> out(2 * count * (kLargestSpan + 1));
  expand_kernel<<<1, 256>>>(in.get(), count, out.get());
  const auto result = out.host();
  for (int i = 0; i < count * (kLargestSpan + 1); ++i)
    for (int c = 0; c < 8; ++c) {
      const int code = i % count / 16, neighbour = i % count % 16;
      const int expected = (c < 4 ? c % 2 == 0 : c % 2 == 1) ? code : neighbour;
      const uint8_t byte = static_cast<uint8_t>(result[2 * i + c / 4] >> (8 * (c % 4)));
      ASSERT_EQ(e4m3_to_float(byte), e2m1_to_float(expected) * std::ldexp(1.0f, i / count - 5));
      ASSERT_EQ(byte >> 7, expected >> 3);
    }
}

// Every width, both formats, every shape: the oracle's bits, everything written, nothing else touched.
void check_linear(const Case& c, WeightFormat format) {
  const int used = first_rows(c.counts).back(), rows = used + c.spare_rows;
  const Matrices w = random_weights(format, static_cast<int>(c.counts.size()), c.n, c.k, false, 3);
  const Buffer<uint8_t> records(w.records);
  const Buffer<float> bases(w.bases);
  const Quantised a(random_rows(rows, c.k, 4), rows, c.k);
  const auto expected = oracle(w, a.get(), c.counts);
  for (const int width : kWidths) {
    const PlanOnDevice p(c.counts, rows, c.n, width);
    Buffer<uint16_t> out(static_cast<size_t>(rows) * c.n);
    for (int use = 0; use < 2; ++use)  // a plan may be used again
      linear(w.on_device(records, bases), a.get(), p.plan, out.get(), nullptr);
    ASSERT_EQ(differences(out.host(), expected), 0u)
        << c.what << ", width " << width << (format == WeightFormat::fp4 ? ", FP4" : ", FP8");
  }
}
TEST(GroupedLinear, BitsOfTheOracleAtEveryWidth) {
  for (const Case& c : cases())
    for (const WeightFormat format : {WeightFormat::fp4, WeightFormat::fp8}) check_linear(c, format);
}

// The value, against FP64 on the formats' exact numbers. Bound: a tensor-core sum keeps about 13 bits below the largest
// of its 33 addends, four times in 128 of K (measured: 2^-12.8 of the sum of magnitudes); 2^-10 of that sum leaves room
// for the truncations to agree in sign. The FP32 additions are far smaller; bf16 rounds by 2^-9.
TEST(GroupedLinear, ErrorAgainstDoublePrecision) {
  const std::vector<int> counts = {70, 0, 31};
  const int rows = 101, n = 256, k = 2048;
  for (const WeightFormat format : {WeightFormat::fp4, WeightFormat::fp8}) {
    const Matrices w = random_weights(format, 3, n, k, false, 5);
    const Buffer<uint8_t> records(w.records);
    const Buffer<float> bases(w.bases);
    const Quantised a(random_rows(rows, k, 6), rows, k);
    const auto values = a.values.host();
    const auto scales = a.scales.host();
    const PlanOnDevice p(counts, rows, n, 256);
    Buffer<uint16_t> out(rows * n);
    linear(w.on_device(records, bases), a.get(), p.plan, out.get(), nullptr);
    const auto result = out.host();
    double error = 0, size = 0;
    for (int r = 0; r < rows; ++r)
      for (int c = r % 7; c < n; c += 7) {
        const int g = r < 70 ? 0 : 2;
        double sum = 0, magnitudes = 0;
        for (int kk = 0; kk < k; ++kk) {
          const int source = kk / kBlock * kBlock + k_of_place(kk % kBlock);
          const double term = static_cast<double>(e4m3_to_float(values[r * k + kk])) *
                              scales[r * block_stride(k) + kk / kBlock] *
                              e4m3_to_float(w.plain[(static_cast<size_t>(g) * n + c) * k + source]) *
                              w.bases[(g * n + c) / kBlock * block_stride(k) + kk / kBlock];
          sum += term, magnitudes += std::fabs(term);
        }
        const double difference = bf16_to_float(result[r * n + c]) - sum;
        ASSERT_LE(std::fabs(difference), std::ldexp(magnitudes, -10) + std::ldexp(std::fabs(sum), -8)) << r << " " << c;
        error += difference * difference, size += sum * sum;
      }
    EXPECT_LT(std::sqrt(error / size), 2.5e-3);  // bf16 rounding alone gives 1.66e-3
  }
}

// FP4 weights and the same numbers stored as FP8: one result.
TEST(GroupedLinear, Fp4EqualsItsFp8Expansion) {
  const Matrices w4 = random_weights(WeightFormat::fp4, 2, 256, 512, false, 7);
  Matrices w8{WeightFormat::fp8, 2, 256, 512, false, w4.plain, {}, w4.plain, w4.bases, {}};
  for (const float base : w4.bases) w8.scales.push_back(pow2_to_e8m0(base));
  w8.records.resize(w4.records.size() / kFp4RecordBytes * kFp8RecordBytes);
  for (int g = 0; g < 2; ++g) pack<Fp8Matrix>(w8, g, 512, 4, kBlock);
  ASSERT_EQ(w8.bases, w4.bases);
  const Quantised a(random_rows(150, 512, 8), 150, 512);
  std::vector<std::vector<uint16_t>> results;
  for (const Matrices* w : std::vector<const Matrices*>{&w4, &w8}) {
    const Buffer<uint8_t> records(w->records);
    const Buffer<float> bases(w->bases);
    const PlanOnDevice p({50, 100}, 150, 256, 256);
    Buffer<uint16_t> out(150 * 256);
    linear(w->on_device(records, bases), a.get(), p.plan, out.get(), nullptr);
    results.push_back(out.host());
  }
  EXPECT_EQ(differences(results[0], results[1]), 0u);
}

// The first r of 20,000 rows give the same bits as all of them, for r around every tile edge.
TEST(GroupedLinear, RowCountDoesNotMatter) {
  const int most = 20000, n = 256, k = 256;
  const Matrices w = random_weights(WeightFormat::fp4, 1, n, k, false, 9);
  const Buffer<uint8_t> records(w.records);
  const Buffer<float> bases(w.bases);
  const auto x = random_rows(most, k, 10);
  std::vector<uint16_t> all;
  for (const int rows :
       {most, 1, 2, 7, 8, 9, 15, 17, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 511, 513, 4095, 10007, 19999}) {
    const Quantised a({x.begin(), x.begin() + static_cast<size_t>(rows) * k}, rows, k);
    const PlanOnDevice p({rows}, rows, n, best_width(rows, 1));
    Buffer<uint16_t> out(static_cast<size_t>(rows) * n);
    linear(w.on_device(records, bases), a.get(), p.plan, out.get(), nullptr);
    const auto result = out.host();
    if (rows == most) all = result;
    ASSERT_TRUE(std::equal(result.begin(), result.end(), all.begin())) << rows << " rows";
  }
}

// SwiGLU as a kernel of its own, against double precision. Bounds: bf16 rounding of h (2^-9) and e4m3 rounding (2^-4,
// or half of the smallest step 2^-9 scaled), so |result - h| <= (2^-4 + 2^-8) |h| + 2^-10 scale; the scale comes from
// amax exactly.
TEST(GroupedLinear, SwigluAgainstDoublePrecision) {
  const int rows = 40, n = 512;
  const float limit = 1.5f;
  const auto x = random_rows(rows, n, 11);
  std::vector<float> route(rows);
  std::mt19937 random(12);
  for (auto& r : route) r = 0.1f + static_cast<float>(random() % 1000) * 1e-3f;
  const Buffer<uint16_t> x_device(x);
  const Buffer<float> route_device(route);
  for (const bool clamped : {true, false})
    for (const bool routed : {true, false}) {
      Buffer<uint8_t> hidden(rows * n / 2);
      Buffer<float> scales(rows * block_stride(n / 2));
      swiglu_quantise(x_device.get(), rows, n, routed ? route_device.get() : nullptr, clamped ? limit : 0.0f,
                      hidden.get(), scales.get(), nullptr);
      const auto values = hidden.host();
      const auto s = scales.host();
      for (int r = 0; r < rows; ++r)
        for (int block = 0; block < n / 256; ++block) {
          double amax = 0;
          for (int row = 0; row < 128; ++row) {  // row of the record's gate half
            double g = bf16_to_float(x[r * n + block * 256 + row]),
                   u = bf16_to_float(x[r * n + block * 256 + 128 + row]);
            if (clamped) g = std::min<double>(g, limit), u = std::clamp<double>(u, -limit, limit);
            const double h = g / (1 + std::exp(-g)) * u * (routed ? route[r] : 1.0f);
            amax = std::max(amax, std::fabs(h));
            const float scale = s[r * block_stride(n / 2) + block];
            const double result =
                e4m3_to_float(values[r * (n / 2) + block * 128 + place_of_row(row)]) * static_cast<double>(scale);
            ASSERT_LE(std::fabs(result - h),
                      std::ldexp(std::fabs(h), -4) + std::ldexp(std::fabs(h), -8) + std::ldexp(scale, -10))
                << "row " << r << " unit " << block * 128 + hidden_of_row(row);
          }
          const float expected = fp8_scale(round_bf16(static_cast<float>(amax)));
          ASSERT_EQ(s[r * block_stride(n / 2) + block], expected) << "scale of row " << r << ", block " << block;
        }
    }
}

TEST(Swiglu, SmallHiddenRowsInTheNaturalOrder) {
  const int rows = 4, n = 512, hidden = n / 2;
  const float limit = 1.5f;
  const auto gate_up = random_bf16(rows * n, 1, 11);
  const auto weight = random_floats(rows, 1, 12);
  const Buffer<uint16_t> gate_up_device(gate_up), out(rows * hidden);
  const Buffer<float> weight_device(weight);
  const Buffer<uint8_t> values(rows * hidden);
  const Buffer<float> scales(rows * block_stride(hidden));
  swiglu_quantise(gate_up_device.get(), rows, n, weight_device.get(), limit, values.get(), scales.get(), nullptr,
                  out.get());
  const auto found = out.host();
  const Buffer<uint16_t> alone(rows * hidden);
  swiglu_quantise(gate_up_device.get(), rows, n, weight_device.get(), limit, nullptr, nullptr, nullptr, alone.get());
  EXPECT_EQ(differences(alone.host(), found), 0u);
  for (int r = 0; r < rows; ++r)
    for (int at = 0; at < n; ++at) {
      const int natural = natural_row(at, n);
      if (natural >= hidden) continue;  // an up
      const double g = std::min(bf16_to_float(gate_up[r * n + at]), limit);
      const double u = std::clamp(bf16_to_float(gate_up[r * n + at + kBlock]), -limit, limit);
      const double want = g / (1 + std::exp(-g)) * u * weight[r];
      // One rounding to bf16, and the approximations of activation.cuh.
      EXPECT_NEAR(bf16_to_float(found[r * hidden + natural]), want, std::fabs(want) * (0x1p-8 + 0x1p-18));
    }
}

// The fused epilogue at every width has the bits of the oracle's product followed by swiglu_quantise; rows of no group
// stay as they were.
void check_fused_swiglu(const Case& c, WeightFormat format) {
  const int used = first_rows(c.counts).back(), rows = used + c.spare_rows, groups = static_cast<int>(c.counts.size());
  const int stride = block_stride(c.n / 2);
  const Matrices w = random_weights(format, groups, c.n, c.k, true, 13);
  const Buffer<uint8_t> records(w.records);
  const Buffer<float> bases(w.bases);
  const Quantised a(random_rows(rows, c.k, 14), rows, c.k);
  const Buffer<uint16_t> gate_up(oracle(w, a.get(), c.counts));
  std::vector<float> route(rows);
  for (int r = 0; r < rows; ++r) route[r] = 0.25f + 0.01f * static_cast<float>(r % 100);
  const Buffer<float> route_device(route);
  const size_t values = static_cast<size_t>(rows) * c.n / 2, blocks = static_cast<size_t>(rows) * stride;
  Buffer<uint8_t> expected(values);
  Buffer<float> expected_scales(blocks);
  swiglu_quantise(gate_up.get(), rows, c.n, route_device.get(), 10.0f, expected.get(), expected_scales.get(), nullptr);
  auto v = expected.host();
  auto s = expected_scales.host();
  std::fill(v.begin() + static_cast<size_t>(used) * c.n / 2, v.end(), uint8_t{0xff});
  std::memset(s.data() + static_cast<size_t>(used) * stride, 0xff,
              static_cast<size_t>(c.spare_rows) * stride * sizeof(float));
  for (const int width : kWidths) {
    const PlanOnDevice p(c.counts, rows, c.n, width);
    Buffer<uint8_t> hidden(values);
    Buffer<float> scales(blocks);
    linear_swiglu(w.on_device(records, bases), a.get(), p.plan, route_device.get(), 10.0f, hidden.get(), scales.get(),
                  nullptr);
    const auto got_scales = scales.host();
    ASSERT_EQ(differences(hidden.host(), v), 0u) << c.what << ", width " << width;
    ASSERT_EQ(std::memcmp(got_scales.data(), s.data(), s.size() * 4), 0) << "scales: " << c.what << ", width " << width;
  }
}
TEST(GroupedLinear, FusedSwigluHasTheBitsOfTheSeparateKernel) {
  for (const Case& c : cases())
    for (const WeightFormat format : {WeightFormat::fp4, WeightFormat::fp8}) check_fused_swiglu(c, format);
}
TEST(GroupedLinear, SmallProductsOfEveryKind) {
  for (const WeightFormat format : {WeightFormat::fp4, WeightFormat::fp8}) {
    const Case c{"small", 256, 384, {3, 0, 70}, 2};
    check_linear(c, format);
    check_fused_swiglu(c, format);
  }
}

// One captured graph (plan, quantise, product) serves every routing of its capacity: nothing depends on the host.
TEST(GroupedLinear, SmallGraphReplayedWithAnotherRouting) {
  const int groups = 4, rows = 600, n = 256, k = 256, width = 256;
  const Matrices w = random_weights(WeightFormat::fp4, groups, n, k, false, 15);
  const Buffer<uint8_t> records(w.records);
  const Buffer<float> bases(w.bases);
  const Buffer<uint16_t> x(random_rows(rows, k, 16));
  Buffer<uint8_t> values(rows * k);
  Buffer<float> scales(rows * block_stride(k));
  Buffer<uint16_t> out(rows * n);
  Buffer<int> first(groups + 1);
  Buffer<uint4> workspace(plan_bytes(groups, rows, n, width) / 16 + 1);
  const Plan plan{groups, rows, n, width, workspace.get()};
  const Activations a{values.get(), scales.get(), rows};

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check_cuda(cudaStreamCreate(&stream), "stream");
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  make_plan(first.get(), plan, stream);
  quantise_rows(x.get(), nullptr, rows, k, values.get(), scales.get(), stream);
  linear(w.on_device(records, bases), a, plan, out.get(), stream);
  check_cuda(cudaStreamEndCapture(stream, &graph), "end of capture");
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "graph");
  for (const auto& counts : {std::vector<int>{100, 0, 500, 0}, {0, 600, 0, 0}, {1, 2, 3, 4}, {150, 150, 150, 150}}) {
    first.set(first_rows(counts));
    out.poison();
    check_cuda(cudaGraphLaunch(executable, stream), "graph launch");
    check_cuda(cudaStreamSynchronize(stream), "graph run");
    EXPECT_EQ(differences(out.host(), oracle(w, a, counts)), 0u);
  }
  cudaGraphExecDestroy(executable), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
}

// Launches that begin before the one ahead of them is complete (launch_dependent): a run of layers which share their
// work list and all buffers but the result, each with other rows and groups, has the bits of the same layers one launch
// at a time. Plain and as a graph.
struct Layers {
  static constexpr int kGroups = 12, kCount = 16, kRows = 40, kWidth = 512;
  Matrices up = random_weights(WeightFormat::fp4, kGroups, kWidth, 512, true, 17);
  Matrices down = random_weights(WeightFormat::fp4, kGroups, kWidth, kWidth / 2, false, 18);
  Buffer<uint8_t> up_records{up.records}, down_records{down.records};
  Buffer<float> up_bases{up.bases}, down_bases{down.bases};
  Buffer<uint16_t> x{random_rows(kCount * kRows, 512, 19)};
  Buffer<uint8_t> values{size_t{kRows} * 512}, hidden{size_t{kRows} * kWidth / 2};
  Buffer<float> scales{size_t{kRows} * block_stride(512)}, hidden_scales{size_t{kRows} * block_stride(kWidth / 2)};
  Buffer<uint16_t> out{size_t{kCount} * kRows * kWidth};
  Buffer<int> first{size_t{kCount} * (kGroups + 1)}, source{size_t{kCount} * kRows};  // of the layers

  Layers() {
    std::mt19937 random(20);
    std::vector<int> firsts, sources(kCount * kRows);
    for (int layer = 0; layer < kCount; ++layer) {
      std::vector<int> counts(kGroups, 0);
      for (int r = 0; r < kRows; ++r) ++counts[random() % kGroups];
      for (const int row : first_rows(counts)) firsts.push_back(row);
    }
    std::iota(sources.begin(), sources.end(), 0);
    first.set(firsts), source.set(sources);
  }
  // alone: each launch is complete before the next one.
  void run(Plan plan, bool alone, cudaStream_t stream) {
    const auto next = [&] {
      if (alone) check_cuda(cudaStreamSynchronize(stream), "launch");
    };
    for (int layer = 0; layer < kCount; ++layer) {
      plan.settled = false;
      make_plan(first.get() + layer * (kGroups + 1), plan, stream), next();
      quantise_rows(x.get(), source.get() + layer * kRows, kRows, 512, values.get(), scales.get(), stream), next();
      plan.settled = !alone;
      linear_swiglu(up.on_device(up_records, up_bases), {values.get(), scales.get(), kRows}, plan, nullptr, 10.0f,
                    hidden.get(), hidden_scales.get(), stream);
      next();
      linear(down.on_device(down_records, down_bases), {hidden.get(), hidden_scales.get(), kRows}, plan,
             out.get() + size_t{kRows} * kWidth * layer, stream);
      next();
    }
  }
};
TEST(GroupedLinear, SmallLaunchesThatOverlap) {
  Layers layers;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check_cuda(cudaStreamCreate(&stream), "stream");
  for (const int width : {8, 16, 64}) {
    const Buffer<uint4> workspace(plan_bytes(Layers::kGroups, Layers::kRows, Layers::kWidth, width) / 16 + 1);
    const Plan plan{Layers::kGroups, Layers::kRows, Layers::kWidth, width, workspace.get()};
    layers.out.poison();
    layers.run(plan, true, stream);
    const auto expected = layers.out.host();
    layers.out.poison();
    layers.run(plan, false, stream);
    check_cuda(cudaStreamSynchronize(stream), "layers");
    EXPECT_EQ(differences(layers.out.host(), expected), 0u) << "width " << width;

    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    layers.run(plan, false, stream);
    check_cuda(cudaStreamEndCapture(stream, &graph), "end of capture");
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "graph");
    for (int replay = 0; replay < 3; ++replay) {
      layers.out.poison();
      check_cuda(cudaGraphLaunch(executable, stream), "graph launch");
      check_cuda(cudaStreamSynchronize(stream), "graph run");
      EXPECT_EQ(differences(layers.out.host(), expected), 0u) << "as a graph, width " << width;
    }
    cudaGraphExecDestroy(executable), cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}

std::string message_of(const auto& call) {
  try {
    call();
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "no error";
}
TEST(GroupedLinear, WrongArgumentsAreNamed) {
  EXPECT_NE(message_of([] { plan_bytes(1, 10, 300, 8); }).find("n = 300 is no multiple of 256"), std::string::npos);
  EXPECT_NE(message_of([] { plan_bytes(1, 10, 256, 32); }).find("width = 32"), std::string::npos);
  EXPECT_NE(message_of([] { plan_bytes(1, 0, 256, 8); }).find("rows = 0"), std::string::npos);
  EXPECT_NE(message_of([] { quantise_rows(nullptr, nullptr, 1, 100, nullptr, nullptr, nullptr); }).find("k = 100"),
            std::string::npos);
  const PlanOnDevice p({4}, 4, 256, 8);
  const Buffer<uint8_t> bytes(kFp8RecordBytes);
  const Buffer<float> floats(64);
  Buffer<uint16_t> out(4 * 256);
  const auto product = [&](int n, int k, int rows) {
    return message_of([&] {
      linear({WeightFormat::fp8, 1, n, k, bytes.get(), floats.get()}, {bytes.get(), floats.get(), rows}, p.plan,
             out.get(), nullptr);
    });
  };
  EXPECT_NE(product(256, 192, 4).find("k = 192 is no multiple of 128"), std::string::npos);
  EXPECT_NE(product(512, 128, 4).find("n = 256; the product has 1, 4, 512"), std::string::npos);
  EXPECT_NE(product(256, 128, 5).find("the product has 1, 5, 256"), std::string::npos);
  EXPECT_EQ(product(256, 128, 4), "no error");
  check_cuda(cudaDeviceSynchronize(), "product");
}

}  // namespace
}  // namespace plumb::kernels::grouped_linear
