// Input gradients of packed linears and the derivative of SwiGLU against FP64. Tests named Small* also run under
// compute-sanitizer.
#include <gtest/gtest.h>

#include "grouped_linear_data.cuh"

namespace plumb::kernels::grouped_linear {
namespace {

struct Case {
  int n, k;
  std::vector<int> counts;
  int spare_rows;
};

struct Problem {
  const Case& c;
  Matrices w;
  Buffer<uint8_t> records;
  Buffer<float> bases;
  int rows;
  Problem(const Case& c_, WeightFormat format, bool gate_up)
      : c(c_),
        w(random_weights(format, static_cast<int>(c.counts.size()), c.n, c.k, gate_up, 1)),
        records(w.records),
        bases(w.bases),
        rows(first_rows(c.counts).back() + c.spare_rows) {}
  std::vector<uint16_t> run(const std::vector<uint16_t>& dy, const std::vector<int>& counts, int capacity) const {
    const PlanOnDevice p(counts, capacity, c.k, 256);
    const Buffer<uint16_t> dy_device(dy);
    Buffer<uint16_t> dx(static_cast<size_t>(capacity) * c.k);
    linear_backward_input(w.on_device(records, bases), dy_device.get(), p.plan, dx.get(), nullptr);
    return dx.host();
  }
};

// Bound: n / 16 tensor-core steps that truncate below the 24th bit, then bf16 (2^-9 of the result, 2^-8 to be safe at
// binade edges).
void check(const Case& c, WeightFormat format) {
  const Problem p(c, format, false);
  const auto dy = random_rows(p.rows, c.n, 2);
  const auto result = p.run(dy, c.counts, p.rows);
  const Buffer<uint16_t> dy_device(dy);
  const Buffer<float> weights(widened(p.w));
  const auto first = first_rows(c.counts);
  for (size_t g = 0; g < c.counts.size(); ++g) {
    if (c.counts[g] == 0) continue;
    const auto expected = reference_product<uint16_t, float>(
        {dy_device.get() + static_cast<size_t>(first[g]) * c.n, c.n, 1},
        {weights.get() + g * static_cast<size_t>(c.n) * c.k, 1, c.k}, c.counts[g], c.k, c.n);
    for (size_t i = 0; i < expected.sum.size(); ++i) {
      const double v = bf16_to_float(result[static_cast<size_t>(first[g]) * c.k + i]);
      ASSERT_LE(std::fabs(v - expected.sum[i]),
                expected.magnitude[i] * (c.n / 16 + 2) * std::ldexp(1.0, -23) + std::fabs(expected.sum[i]) * 0x1p-8)
          << "group " << g << " row " << i / c.k << " column " << i % c.k
          << (format == WeightFormat::fp4 ? " FP4" : " FP8");
    }
  }
  for (size_t i = static_cast<size_t>(first.back()) * c.k; i < result.size(); ++i)
    ASSERT_EQ(result[i], 0xffff) << "a row of nobody was written";
}
TEST(GroupedLinearBackward, SmallAgainstDoublePrecision) {
  for (const WeightFormat format : {WeightFormat::fp4, WeightFormat::fp8}) {
    check({256, 256, {1}, 0}, format);
    check({512, 256, {0, 70, 300, 0, 129}, 3}, format);
  }
}
TEST(GroupedLinearBackward, AgainstDoublePrecision) {
  for (const WeightFormat format : {WeightFormat::fp4, WeightFormat::fp8}) {
    check({2048, 512, {300}, 0}, format);
    check({1280, 768, {3, 1, 0, 9, 257, 2, 64, 600, 0, 5, 33, 4, 512, 7, 1, 191}, 1}, format);
  }
}

// A row alone has the bits that it has in any batch; repeats agree.
TEST(GroupedLinearBackward, RowCountDoesNotMatter) {
  for (const WeightFormat format : {WeightFormat::fp4, WeightFormat::fp8}) {
    const Case c{512, 256, {20000}, 0};
    const Problem p(c, format, false);
    const auto dy = random_rows(p.rows, c.n, 3);
    const auto all = p.run(dy, c.counts, p.rows);
    for (const int rows : {1, 2, 63, 64, 65, 127, 129, 191, 193, 255, 257, 4095, 19999}) {
      const size_t first = p.rows - rows;
      const auto some = p.run({dy.begin() + first * c.n, dy.end()}, {rows}, rows);
      ASSERT_TRUE(std::equal(some.begin(), some.end(), all.begin() + first * c.k)) << rows << " rows";
    }
    for (int i = 0; i < 20; ++i) ASSERT_EQ(differences(p.run(dy, c.counts, p.rows), all), 0u);
  }
}

// d_hidden [rows, n/2] in natural order; gates and ups in record order. Bound: bf16 rounding of the results (2^-9) and
// FP32 arithmetic with an exponential of 2^-19.
TEST(GroupedLinearBackward, SmallSwigluAgainstDoublePrecision) {
  const int rows = 21, n = 768;
  const float limit = 1.5f;
  const auto gate_up = random_bf16(rows * n, 1.5f, 4), d_hidden = random_bf16(rows * n / 2, 1, 5);
  const auto route = random_floats(rows, 1, 6);
  const Buffer<uint16_t> gate_up_device(gate_up), d_hidden_device(d_hidden);
  const Buffer<float> route_device(route);
  Buffer<uint16_t> d_gate_up(rows * n);
  Buffer<float> d_route(rows);
  swiglu_backward(d_hidden_device.get(), gate_up_device.get(), rows, n, route_device.get(), limit, d_gate_up.get(),
                  d_route.get(), nullptr);
  const auto d = d_gate_up.host();
  const auto dr = d_route.host();
  for (int r = 0; r < rows; ++r) {
    double to_route = 0, size = 0;
    for (int i = 0; i < n / 2; ++i) {  // record i / 128, row i % 128 of its gates
      const int at = r * n + i / 128 * 256 + i % 128;
      const double raw_g = bf16_to_float(gate_up[at]), raw_u = bf16_to_float(gate_up[at + 128]);
      const double dh = bf16_to_float(d_hidden[r * n / 2 + i / 128 * 128 + hidden_of_row(i % 128)]);
      const double g = std::min<double>(raw_g, limit), u = std::clamp<double>(raw_u, -limit, limit);
      const double s = 1 / (1 + std::exp(-g));
      const double d_gate = raw_g > limit ? 0 : dh * route[r] * u * s * (1 + g * (1 - s));
      const double d_up = std::fabs(raw_u) > limit ? 0 : dh * route[r] * g * s;
      ASSERT_NEAR(bf16_to_float(d[at]), d_gate, std::fabs(d_gate) * 0x1p-8 + 1e-6) << r << " " << i;
      ASSERT_NEAR(bf16_to_float(d[at + 128]), d_up, std::fabs(d_up) * 0x1p-8 + 1e-6) << r << " " << i;
      to_route += dh * g * s * u, size += std::fabs(dh * g * s * u);
    }
    ASSERT_NEAR(dr[r], to_route, 1e-6 * size);
  }
}

}  // namespace
}  // namespace plumb::kernels::grouped_linear
