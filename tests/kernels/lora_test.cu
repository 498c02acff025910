// Low-rank adapters: in the epilogues of all base products, the way down, and the gradients, against FP64. Tests named
// Small* also run under compute-sanitizer.
#include "kernels/lora/lora.h"

#include <gtest/gtest.h>

#include <memory>

#include "grouped_linear_data.cuh"
#include "kernels/lora/prepare.h"
#include "kernels/row_linear/row_linear.h"

namespace plumb::kernels::lora {
namespace {

using namespace grouped_linear;

// Two adapters for outputs of `groups` matrices, rows that use them (or none), and T.
struct Adapters {
  int groups, n, rank, rows;
  std::vector<float> b[2];  // [groups, n, rank], natural
  std::vector<float> t;
  std::vector<int> adapter;
  std::unique_ptr<Buffer<uint32_t>> packed[2];
  Buffer<float> t_device;
  Buffer<int> adapter_device;
  std::unique_ptr<Buffer<const uint32_t*>> table;
  Adapters(int groups_, int n_, int rank_, int rows_, bool gate_up, float size)
      : groups(groups_),
        n(n_),
        rank(rank_),
        rows(rows_),
        t(random_floats(static_cast<size_t>(rows) * rank, 1, 11)),
        t_device(t),
        adapter_device(rows_) {
    std::vector<const uint32_t*> pointers;
    for (int a = 0; a < 2; ++a) {
      b[a] = random_floats(static_cast<size_t>(groups) * n * rank, size, 12 + a);
      const Buffer<float> natural(b[a]);
      packed[a] = std::make_unique<Buffer<uint32_t>>(factor_bytes(groups, n, rank) / sizeof(uint32_t));
      pack_factor(natural.get(), groups, n, rank, false, gate_up, packed[a]->get(), nullptr);
      check_cuda(cudaDeviceSynchronize(), "pack_factor");
      pointers.push_back(packed[a]->get());
    }
    table = std::make_unique<Buffer<const uint32_t*>>(pointers);
    for (int r = 0; r < rows; ++r) adapter.push_back(r * 7 % 10 < 4 ? 0 : r * 7 % 10 < 8 ? 1 : -1);
    adapter_device.set(adapter);
  }
  LowRank mixed() const { return {rank, t_device.get(), rank, table->get(), adapter_device.get()}; }
  LowRank only(int a) const { return {rank, t_device.get(), rank, table->get() + a, nullptr}; }
  // What an adapter adds, and the bound of its error: T and B enter with 16 bits (2^-17 each, relative), so 2^-15 of
  // the sum of magnitudes is plenty.
  struct Delta {
    double sum, error;
  };
  Delta delta(int a, int group, int row, int output) const {
    double sum = 0, magnitude = 0;
    for (int j = 0; j < rank; ++j) {
      const double term =
          double{t[static_cast<size_t>(row) * rank + j]} * b[a][(static_cast<size_t>(group) * n + output) * rank + j];
      sum += term, magnitude += std::fabs(term);
    }
    return {sum, magnitude * 0x1p-15};
  }
};

struct Layer {
  std::vector<int> counts;
  int n, k, rows;
  Matrices w;
  Buffer<uint8_t> records;
  Buffer<float> bases;
  Quantised x;
  Layer(WeightFormat format, const std::vector<int>& counts_, int n_, int k_, bool gate_up)
      : counts(counts_),
        n(n_),
        k(k_),
        rows(first_rows(counts_).back()),
        w(random_weights(format, static_cast<int>(counts.size()), n, k, gate_up, 1)),
        records(w.records),
        bases(w.bases),
        x(random_rows(rows, k, 2), rows, k) {}
  std::vector<uint16_t> run(int width, const LowRank& low_rank) const {
    const PlanOnDevice p(counts, rows, n, width);
    Buffer<uint16_t> out(static_cast<size_t>(rows) * n);
    linear(w.on_device(records, bases), x.get(), p.plan, out.get(), nullptr, low_rank);
    return out.host();
  }
};

// Rows that use adapter a have the bits of a run in which all rows use it; rows without one those of the base.
template <typename T>
void expect_rows_of(const std::vector<T>& mixed, const std::vector<T>& base, const std::vector<T> (&only)[2],
                    const std::vector<int>& adapter, int n) {
  for (size_t row = 0; row < adapter.size(); ++row) {
    const std::vector<T>& source = adapter[row] < 0 ? base : only[adapter[row]];
    ASSERT_TRUE(std::equal(mixed.begin() + row * n, mixed.begin() + (row + 1) * n, source.begin() + row * n))
        << "row " << row << " adapter " << adapter[row];
  }
}

// Bound: two roundings to bf16 (base alone, and the sum), 2^-9 of each; FP32 arithmetic is far below.
void check_epilogue(WeightFormat format, const std::vector<int>& counts, int n, int k, int rank, bool gate_up) {
  const Layer layer(format, counts, n, k, gate_up);
  const Adapters l(static_cast<int>(counts.size()), n, rank, layer.rows, gate_up, 4);
  const auto base = layer.run(256, {});
  const std::vector<uint16_t> only[2] = {layer.run(256, l.only(0)), layer.run(256, l.only(1))};
  const auto first = first_rows(counts);
  for (size_t g = 0; g < counts.size(); ++g)
    for (int row = first[g]; row < first[g + 1]; ++row)
      for (int c = row % 3; c < n; c += 3) {
        const int output = gate_up ? natural_row(c, n) : c;
        const size_t at = static_cast<size_t>(row) * n + c;
        const double before = bf16_to_float(base[at]);
        const auto [delta, error] = l.delta(1, static_cast<int>(g), row, output);
        ASSERT_NEAR(bf16_to_float(only[1][at]), before + delta,
                    (std::fabs(before) + std::fabs(before + delta)) * 0x1p-8 + error)
            << "row " << row << " column " << c;
      }
  const auto mixed = layer.run(256, l.mixed());
  expect_rows_of(mixed, base, only, l.adapter, n);
  for (const int width : {8, 16, 64})
    ASSERT_EQ(differences(layer.run(width, l.mixed()), mixed), 0u) << "width " << width << " rank " << rank;
}
TEST(Lora, SmallEpilogues) {
  check_epilogue(WeightFormat::fp4, {0, 70, 3}, 256, 256, 8, false);
  check_epilogue(WeightFormat::fp8, {130}, 512, 128, 4, true);
}
TEST(Lora, Epilogues) {
  check_epilogue(WeightFormat::fp4, {5, 0, 257, 64, 190, 1}, 512, 512, 8, true);
  check_epilogue(WeightFormat::fp8, {5, 300, 0, 513}, 1024, 384, 8, false);
  check_epilogue(WeightFormat::fp8, {700}, 768, 1024, 32, false);
  check_epilogue(WeightFormat::fp4, {90, 300}, 256, 384, 20, false);
}

// One launch for a factor and planes leaves what two leave, and their addresses.
TEST(Lora, SmallFormsOfAPair) {
  const int groups = 3, n = 256, k = 96, rank = 12;
  const Buffer<float> a(random_floats(groups * rank * k, 1, 30)), b(random_floats(groups * n * rank, 1, 31));
  for (const bool forward : {true, false}) {
    const int width = forward ? k : n, outputs = forward ? n : k;
    const size_t words = factor_bytes(groups, outputs, rank) / 4,
                 halves = row_linear::split_bytes(groups, rank, width) / 2;
    const Buffer<uint32_t> factor(words), both_factor(words);
    const Buffer<uint16_t> planes(halves), both_planes(halves);
    const Buffer<const uint32_t*> factor_address(2);
    const Buffer<const uint16_t*> planes_address(2);
    const row_linear::Source source{!forward, !forward};
    const Factor f{forward ? b.get() : a.get(), groups, outputs, rank, !forward, forward, both_factor.get()};
    const row_linear::Split p{forward ? a.get() : b.get(), groups, rank, width, 0.7f, source, both_planes.get()};
    prepare(f, p, {factor_address.get() + 1, planes_address.get()}, nullptr);
    pack_factor(f.from, groups, outputs, rank, f.transposed, f.gate_up, factor.get(), nullptr);
    row_linear::split_weight(p.weight, groups, rank, width, p.scale, planes.get(), nullptr, source);
    EXPECT_EQ(differences(both_factor.host(), factor.host()), 0u);
    EXPECT_EQ(differences(both_planes.host(), planes.host()), 0u);
    EXPECT_EQ(factor_address.host()[1], both_factor.get());
    EXPECT_EQ(planes_address.host()[0], both_planes.get());
  }
}

// The fused epilogue equals the product with its low rank, then SwiGLU as a kernel of its own.
void check_swiglu(WeightFormat format) {
  const std::vector<int> counts = {3, 0, 200, 64, 330};
  const Layer layer(format, counts, 512, 256, true);
  const Adapters l(5, 512, 8, layer.rows, true, 4);
  const auto route = random_floats(layer.rows, 1, 3);
  const Buffer<float> route_device(route);
  for (const LowRank& low_rank : {l.mixed(), l.only(1)}) {
    const Buffer<uint16_t> gate_up(layer.run(256, low_rank));
    Buffer<uint8_t> expected(layer.rows * 256);
    Buffer<float> expected_scales(layer.rows * block_stride(256));
    swiglu_quantise(gate_up.get(), layer.rows, 512, route_device.get(), 10, expected.get(), expected_scales.get(),
                    nullptr);
    for (const int width : {8, 16, 64, 256}) {
      const PlanOnDevice p(counts, layer.rows, 512, width);
      Buffer<uint8_t> hidden(layer.rows * 256);
      Buffer<float> scales(layer.rows * block_stride(256));
      linear_swiglu(layer.w.on_device(layer.records, layer.bases), layer.x.get(), p.plan, route_device.get(), 10,
                    hidden.get(), scales.get(), nullptr, low_rank);
      ASSERT_EQ(differences(hidden.host(), expected.host()), 0u) << "width " << width;
    }
  }
}
TEST(Lora, SwigluEqualsItsParts) { check_swiglu(WeightFormat::fp4), check_swiglu(WeightFormat::fp8); }

TEST(Lora, InputGradients) {
  const std::vector<int> counts = {70, 0, 300};
  const int n = 512, k = 256, rows = 370;
  for (const WeightFormat format : {WeightFormat::fp4, WeightFormat::fp8}) {
    const Layer layer(format, counts, n, k, false);
    const Adapters l(3, k, 8, rows, false, 4);
    const Buffer<uint16_t> dy(random_rows(rows, n, 4));
    const auto run = [&](const LowRank& low_rank) {
      const PlanOnDevice p(counts, rows, k, 256);
      Buffer<uint16_t> dx(rows * k);
      linear_backward_input(layer.w.on_device(layer.records, layer.bases), dy.get(), p.plan, dx.get(), nullptr,
                            low_rank);
      return dx.host();
    };
    const auto base = run({});
    const std::vector<uint16_t> only[2] = {run(l.only(0)), run(l.only(1))};
    expect_rows_of(run(l.mixed()), base, only, l.adapter, k);
    for (int row = 0; row < rows; ++row)
      for (int c = 0; c < k; ++c) {
        const double before = bf16_to_float(base[row * k + c]);
        const auto [delta, error] = l.delta(0, row < 70 ? 0 : 2, row, c);
        ASSERT_NEAR(bf16_to_float(only[0][row * k + c]), before + delta,
                    (std::fabs(before) + std::fabs(before + delta)) * 0x1p-8 + error);
      }
  }
}

// bf16 weights, one group and several (wo_a); few rows (parts, or the narrow kernel), more (thin) and many (wide, where
// tiles of 256 outputs do not cross groups).
void check_row_linear(int n, int k, int groups) {
  const int rows = 9000, outputs = n * groups;
  const Buffer<uint16_t> x(random_bf16(static_cast<size_t>(rows) * k * groups, 1, 5));
  const Buffer<uint16_t> data(random_bf16(static_cast<size_t>(outputs) * k, 0.02f, 6));
  const row_linear::Weight w{data.get(), n, k, groups};
  const Adapters l(1, outputs, 8, rows * groups, false, 0.5f);  // T of group g lies behind the others of its row
  LowRank low_rank = l.only(1);
  low_rank.t_stride = 8 * groups;
  const auto run = [&](int count, const LowRank& lr) {
    Buffer<float> out(static_cast<size_t>(count) * outputs), space(row_linear::workspace_bytes(count, w) / 4);
    row_linear::linear(x.get(), count, w, out.get(), space.get(), nullptr, lr);
    return out.host();
  };
  const auto base = run(rows, {}), all = run(rows, low_rank);
  for (const int count : {1, 33, 128, 129, 700}) {
    const auto some = run(count, low_rank);
    ASSERT_TRUE(std::equal(some.begin(), some.end(), all.begin())) << count;
  }
  for (int row = 0; row < rows; row += 97)
    for (int c = 0; c < outputs; ++c) {
      const size_t at = static_cast<size_t>(row) * outputs + c;
      const auto [delta, error] = l.delta(1, 0, row * groups + c / n, c);
      ASSERT_NEAR(all[at], base[at] + delta, error + 1e-6) << "row " << row << " output " << c;
    }
  if (groups == 1) return;
  for (int g = 0; g < groups; ++g) {  // the base product of a group, against FP64
    const auto expected =
        reference_product<uint16_t, uint16_t>({x.get() + g * k, static_cast<int64_t>(k) * groups, 1},
                                              {data.get() + static_cast<size_t>(g) * n * k, k, 1}, 50, n, k);
    for (int row = 0; row < 50; ++row)
      for (int c = 0; c < n; ++c)
        ASSERT_NEAR(base[static_cast<size_t>(row) * outputs + g * n + c], expected.sum[row * n + c],
                    expected.magnitude[row * n + c] * 1e-5);
  }
}
TEST(Lora, RowLinear) { check_row_linear(256, 1024, 1), check_row_linear(128, 512, 4), check_row_linear(256, 512, 4); }

// The way back through bf16 weights: U A, the same A for all groups, in FP32 before the result is rounded.
void check_row_linear_backward(int rows, int n, int k, int groups) {
  const Buffer<uint16_t> dy(random_bf16(static_cast<size_t>(rows) * n * groups, 1, 15));
  const Buffer<uint16_t> data(random_bf16(static_cast<size_t>(n) * groups * k, 0.02f, 16));
  const row_linear::Weight w{data.get(), n, k, groups};
  const Adapters l(1, k, 8, rows * groups, false, 0.5f);  // U of group g lies behind the others of its row
  const auto run = [&](LowRank lr) {
    lr.t_stride = 8 * groups;
    Buffer<float> dx(static_cast<size_t>(rows) * groups * k);
    row_linear::linear_backward_input(dy.get(), rows, w, dx.get(), nullptr, lr);
    return dx.host();
  };
  LowRank mixed_rows = l.mixed();  // one adapter a row, all groups
  const auto base = run({}), first = run(l.only(0)), second = run(l.only(1)), mixed = run(mixed_rows);
  for (int row = 0; row < rows; ++row)
    for (int c = row % 3; c < groups * k; c += 3) {
      const size_t at = static_cast<size_t>(row) * groups * k + c;
      const auto [delta, error] = l.delta(1, 0, row * groups + c / k, c % k);
      ASSERT_NEAR(second[at], base[at] + delta, error + 1e-6) << "row " << row << " input " << c;
      ASSERT_EQ(mixed[at], l.adapter[row] < 0 ? base[at] : l.adapter[row] == 0 ? first[at] : second[at]) << row;
    }
  Buffer<uint16_t> rounded(base.size());
  LowRank lr = l.only(1);
  lr.t_stride = 8 * groups;
  row_linear::linear_backward_input_bf16(dy.get(), rows, w, rounded.get(), nullptr, lr);
  std::vector<uint16_t> expected(base.size());
  std::transform(second.begin(), second.end(), expected.begin(), float_to_bf16);
  EXPECT_EQ(differences(rounded.host(), expected), 0u);
}
TEST(Lora, SmallRowLinearBackward) { check_row_linear_backward(70, 64, 256, 2); }
TEST(Lora, RowLinearBackward) {
  check_row_linear_backward(900, 1024, 512, 1), check_row_linear_backward(300, 256, 768, 4);
}

// Each row goes down by its own adapter, with the bits that it has alone.
TEST(Lora, SmallWayDownOfManyAdapters) {
  const int rows = 90, n = 8, k = 256;
  const Buffer<uint16_t> x(random_rows(rows, k, 7));
  std::vector<std::unique_ptr<Buffer<uint16_t>>> planes;
  std::vector<const uint16_t*> pointers;
  for (int a = 0; a < 3; ++a) {
    const Buffer<float> weight(random_floats(n * k, 0.02f, 20 + a));
    planes.push_back(std::make_unique<Buffer<uint16_t>>(row_linear::split_bytes(1, n, k) / 2));
    row_linear::split_weight(weight.get(), 1, n, k, 2, planes.back()->get(), nullptr);
    check_cuda(cudaDeviceSynchronize(), "split");
    pointers.push_back(planes.back()->get());
  }
  const Buffer<const uint16_t*> table(pointers);
  std::vector<int> adapter(rows);
  for (int r = 0; r < rows; ++r) adapter[r] = r < 40 ? 1 : r % 4 - 1;
  const Buffer<int> adapter_device(adapter);
  Buffer<float> out(rows * n);
  row_linear::few_outputs(x.get(), nullptr, nullptr, rows, {nullptr, 1, n, k}, out.get(), nullptr,
                          {table.get(), adapter_device.get(), 3});
  const auto mixed = out.host();
  for (int r = 0; r < rows; ++r) {
    if (adapter[r] < 0) {
      ASSERT_TRUE(std::isnan(mixed[r * n])) << "a row without adapter was written";
      continue;
    }
    Buffer<float> alone(n);
    row_linear::few_outputs(x.get() + r * k, nullptr, nullptr, 1, {pointers[adapter[r]], 1, n, k}, alone.get(),
                            nullptr);
    const auto v = alone.host();
    ASSERT_TRUE(std::equal(v.begin(), v.end(), mixed.begin() + r * n)) << "row " << r;
  }
}

// Several products of the same rows go down in one launch (or two: more than 32 outputs), some rows or many: an output
// has the bits that it has alone. With adapters, rows name theirs.
void check_way_down_together(const std::vector<int>& counts, int k, bool adapters) {
  const int most = counts.back(), ranks[] = {8, 4, 16, 12};
  const Buffer<uint16_t> x(random_rows(most, k, 7));
  std::vector<int> adapter(most);
  for (int r = 0; r < most; ++r) adapter[r] = r * 7 % 10 < 4 ? 0 : r * 7 % 10 < 8 ? 1 : -1;
  const Buffer<int> of_row(adapter);
  const int* rows_adapter = adapters ? of_row.get() : nullptr;
  std::vector<std::unique_ptr<Buffer<uint16_t>>> planes;
  std::vector<std::unique_ptr<Buffer<const uint16_t*>>> tables;
  std::vector<std::vector<float>> all;  // of each product, of most rows
  for (const int n : ranks) {
    std::vector<const uint16_t*> pointers;
    for (int a = 0; a < 2; ++a) {
      const Buffer<float> weight(
          random_floats(static_cast<size_t>(n) * k, 0.02f, 40 + static_cast<int>(planes.size())));
      planes.push_back(std::make_unique<Buffer<uint16_t>>(row_linear::split_bytes(1, n, k) / 2));
      row_linear::split_weight(weight.get(), 1, n, k, 2, planes.back()->get(), nullptr);
      check_cuda(cudaDeviceSynchronize(), "split");
      pointers.push_back(planes.back()->get());
    }
    tables.push_back(std::make_unique<Buffer<const uint16_t*>>(pointers));
    Buffer<float> out(static_cast<size_t>(most) * n);
    row_linear::few_outputs(x.get(), nullptr, nullptr, most, {pointers[0], 1, n, k}, out.get(), nullptr,
                            {tables.back()->get(), rows_adapter, 2});
    all.push_back(out.host());
  }
  for (const int count : counts) {
    std::vector<std::unique_ptr<Buffer<float>>> out;
    std::vector<row_linear::Down> downs;
    for (size_t i = 0; i < std::size(ranks); ++i) {
      out.push_back(std::make_unique<Buffer<float>>(static_cast<size_t>(count) * ranks[i]));
      downs.push_back({planes[2 * i]->get(), tables[i]->get(), ranks[i], out.back()->get()});
    }
    row_linear::few_outputs(x.get(), nullptr, nullptr, count, 1, k, downs, nullptr, rows_adapter, 2);
    for (size_t i = 0; i < std::size(ranks); ++i) {
      const auto together = out[i]->host();
      for (int r = 0; r < count; ++r) {
        const size_t at = static_cast<size_t>(r) * ranks[i];
        if (adapters && adapter[r] < 0)
          ASSERT_TRUE(std::isnan(together[at])) << "a row without adapter was written";
        else
          ASSERT_TRUE(std::equal(together.begin() + at, together.begin() + at + ranks[i], all[i].begin() + at))
              << count << " rows, row " << r << " of product " << i;
      }
    }
  }
}
TEST(Lora, SmallWayDownTogether) { check_way_down_together({1, 40, 70}, 512, true); }
TEST(Lora, WayDownTogether) {
  for (const bool adapters : {false, true}) {
    check_way_down_together({1, 16, 17, 300, 900, 5000}, 4096, adapters);
    check_way_down_together({3, 600, 4100}, 8192, adapters);
    check_way_down_together({3, 600, 4100}, 1056, adapters);  // parts of different sizes
  }
}

// Rows of groups, few and many: an output has the bits that its row has alone.
TEST(Lora, WayDownOfGroups) {
  const int groups = 40, n = 8, k = 1024;
  const Buffer<float> weight(random_floats(static_cast<size_t>(groups) * n * k, 0.02f, 60));
  const Buffer<uint16_t> planes(row_linear::split_bytes(groups, n, k) / 2);
  row_linear::split_weight(weight.get(), groups, n, k, 2, planes.get(), nullptr);
  for (const int size : {0, 1, 20, 300}) {  // 0: six groups have a row
    std::vector<int> counts(groups), group;
    for (int g = 0; g < groups; ++g) {
      counts[g] = size == 0 ? g % 7 == 3 : g % 5 == 2 ? 0 : size + g % 4 * size;
      group.insert(group.end(), counts[g], g);
    }
    const int rows = static_cast<int>(group.size());
    const Buffer<uint16_t> x(random_rows(rows, k, 8));
    const Buffer<int> first(first_rows(counts));
    Buffer<float> out(static_cast<size_t>(rows) * n), alone(n);
    row_linear::few_outputs(x.get(), nullptr, first.get(), rows, {planes.get(), groups, n, k}, out.get(), nullptr);
    const auto all = out.host();
    for (int r = 0; r < rows; r += 1 + rows / 100) {
      const uint16_t* own = planes.get() + row_linear::split_bytes(1, n, k) / 2 * group[r];
      row_linear::few_outputs(x.get() + static_cast<size_t>(r) * k, nullptr, nullptr, 1, {own, 1, n, k}, alone.get(),
                              nullptr);
      const auto v = alone.host();
      ASSERT_TRUE(std::equal(v.begin(), v.end(), all.begin() + static_cast<size_t>(r) * n)) << size << " row " << r;
    }
  }
}

// Bounds. Tensor cores add 16 exact products and the running sum with an error of an ulp of the largest: three times
// (one for each part of t) for 16 rows, less than rows * 2^-24 of the sum of magnitudes, where segments of rows add one
// rounding each. u: three parts of W, chains of up to 128 columns, then sums of up to 300 numbers.
struct GradientCase {
  std::vector<int> counts;  // one: a single group
  int columns, rank, stride;
  bool gathered, adapters, transposed, gate_up;
  bool u = false;
  int parts = 1;
};
void check_gradient(const GradientCase& c) {
  const std::vector<int> first = first_rows(c.counts);
  const int rows = first.back(), groups = static_cast<int>(c.counts.size()), sources = c.gathered ? 50 : rows;
  const int part_columns = c.columns / c.parts, plane_groups = groups * c.parts;
  const auto y = random_bf16(static_cast<size_t>(sources) * c.columns, 1, 8);
  const auto t = random_floats(static_cast<size_t>(rows) * c.stride, 1, 9);
  const auto w = random_floats(static_cast<size_t>(plane_groups) * c.rank * part_columns, 1, 10);
  std::vector<int> source(rows), adapter(rows);
  for (int r = 0; r < rows; ++r) source[r] = c.gathered ? r * 37 % sources : r, adapter[r] = r * 3 % 5 < 3 ? 1 : 0;
  const Buffer<uint16_t> y_device(y), planes(row_linear::split_bytes(plane_groups, c.rank, part_columns) / 2);
  const Buffer<float> t_device(t), w_device(w);
  Buffer<float> u(static_cast<size_t>(rows) * c.parts * c.rank);
  row_linear::split_weight(w_device.get(), plane_groups, c.rank, part_columns, 2, planes.get(), nullptr);
  const Buffer<int> source_device(source), adapter_device(adapter), first_device(first);
  const size_t size = static_cast<size_t>(groups) * c.columns * c.rank;
  Gradient g{y_device.get(),
             c.gathered ? source_device.get() : nullptr,
             t_device.get(),
             c.stride,
             c.rank,
             rows,
             c.columns,
             groups > 1 ? first_device.get() : nullptr,
             groups,
             c.adapters ? adapter_device.get() : nullptr,
             1,
             c.transposed,
             c.gate_up,
             nullptr,
             c.parts};
  if (c.u) g.planes = planes.get(), g.u = u.get();
  std::vector<float> result, u_result;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const Buffer<float> out(std::vector<float>(size, 0.5f));
    u.poison();
    g.out = out.get();
    const Buffer<float> workspace(gradient_bytes(g) / 4);
    add_gradient(g, workspace.get(), nullptr);
    const auto now = out.host(), u_now = u.host();
    if (repeat == 0) result = now, u_result = u_now;
    ASSERT_TRUE(same_bits(now, result) && same_bits(u_now, u_result)) << "repeat";
  }
  for (int group = 0; group < groups; ++group)
    for (int column = 0; column < c.columns; column += 1 + column % 5)
      for (int j = 0; j < c.rank; ++j) {
        double sum = 0.5, magnitude = 0.5;
        for (int r = first[group]; r < first[group + 1]; ++r) {
          if (c.adapters && adapter[r] != 1) continue;
          const double term = double{bf16_to_float(y[static_cast<size_t>(source[r]) * c.columns + column])} *
                              t[static_cast<size_t>(r) * c.stride + column / part_columns * c.rank + j];
          sum += term, magnitude += std::fabs(term);
        }
        const int natural = c.gate_up ? natural_row(column, c.columns) : column;
        const size_t at =
            c.transposed ? static_cast<size_t>(j) * c.columns + natural : static_cast<size_t>(natural) * c.rank + j;
        ASSERT_NEAR(result[static_cast<size_t>(group) * c.columns * c.rank + at], sum,
                    magnitude * (c.counts[group] + 16) * 0x1p-24)
            << "group " << group << " column " << column << " rank " << j;
      }
  if (!c.u) return;
  for (int group = 0; group < groups; ++group)
    for (int r = first[group]; r < first[group + 1]; r += 1 + r % 3)
      for (int part = 0; part < c.parts; ++part)
        for (int j = 0; j < c.rank; ++j) {
          const float found = u_result[(static_cast<size_t>(r) * c.parts + part) * c.rank + j];
          if (c.adapters && adapter[r] != 1) {
            ASSERT_TRUE(std::isnan(found)) << "row " << r << " of another adapter was written";
            continue;
          }
          double sum = 0, magnitude = 0;
          for (int column = 0; column < part_columns; ++column) {
            const double term =
                double{bf16_to_float(y[static_cast<size_t>(source[r]) * c.columns + part * part_columns + column])} *
                2 * w[(static_cast<size_t>(group * c.parts + part) * c.rank + j) * part_columns + column];
            sum += term, magnitude += std::fabs(term);
          }
          ASSERT_NEAR(found, sum, magnitude * 64 * 0x1p-24) << "row " << r << " part " << part << " rank " << j;
        }
  // U alone has the same bits.
  g.out = nullptr, g.t = nullptr;
  u.poison();
  const Buffer<float> workspace(gradient_bytes(g) / 4);
  add_gradient(g, workspace.get(), nullptr);
  ASSERT_TRUE(same_bits(u.host(), u_result));
}
TEST(Lora, SmallGradients) {
  check_gradient({{1}, 8, 4, 4, false, false, false, false});
  check_gradient({{300}, 520, 8, 12, false, true, true, false});
  check_gradient({{0, 70, 3}, 256, 8, 8, true, false, false, true});
}
TEST(Lora, SmallGradientsWithU) {
  check_gradient({{1}, 8, 4, 4, false, false, false, false, true});
  check_gradient({{0, 70, 3}, 768, 8, 8, true, true, false, true, true});
  check_gradient({{95}, 3 * 520, 8, 24, false, false, false, false, true, 3});
  check_gradient({{33}, 160, 32, 32, false, false, false, false, true});
}
TEST(Lora, Gradients) {
  check_gradient({{5000}, 1032, 20, 32, false, false, false, false});
  check_gradient({{100, 0, 700, 65, 1}, 512, 16, 16, true, true, true, false});
  check_gradient({{3000}, 1024, 8, 8, false, false, false, true});
}
TEST(Lora, GradientsWithU) {
  check_gradient({{5000}, 1032, 20, 32, false, false, false, false, true});
  check_gradient({{100, 0, 700, 65, 1}, 1536, 16, 16, true, true, true, false, true});
  check_gradient({{3000}, 1024, 8, 8, false, true, false, true, true});
  check_gradient({{1500}, 4096, 12, 48, false, true, false, false, true, 4});
  check_gradient({{16, 17, 15, 0, 250, 33}, 1032, 28, 28, false, false, false, false, true});
  check_gradient({{7}, 8192, 8, 8, false, false, false, false, true});
}

}  // namespace
}  // namespace plumb::kernels::lora
