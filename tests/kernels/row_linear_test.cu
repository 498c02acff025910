// Products with bf16 and FP32 weights against FP64. Tests named Small* also run under compute-sanitizer.
//
// Bound of the errors: the products are exact; a tensor core adds 16 of them to the accumulator and truncates below the
// 24th bit of the largest addend, so k / 16 steps lose at most k / 16 * 2^-23 of the sum of magnitudes; the FP32
// additions of the parts add eight roundings.
#include "kernels/row_linear/row_linear.h"

#include <gtest/gtest.h>

#include <memory>

#include "device_data.cuh"
#include "kernels/grouped_linear/weight_format.h"

namespace plumb::kernels::row_linear {
namespace {

double bound(int k) { return (k / 16 + 10) * std::ldexp(1.0, -23); }

struct Case {
  int rows, n, k;
};

std::vector<float> run_linear(const uint16_t* x, int rows, const Weight& w) {
  Buffer<float> out(static_cast<size_t>(rows) * w.n);
  Buffer<float> workspace(workspace_bytes(rows, w) / sizeof(float));
  linear(x, rows, w, out.get(), workspace.get(), nullptr);
  return out.host();
}

void check_linear(const Case& c) {
  const Buffer<uint16_t> x(random_rows(c.rows, c.k, 1)), data(random_bf16(static_cast<size_t>(c.n) * c.k, 0.02f, 2));
  const Weight w{data.get(), c.n, c.k};
  const auto result = run_linear(x.get(), c.rows, w);
  const Reference expected =
      reference_product<uint16_t, uint16_t>({x.get(), c.k, 1}, {data.get(), c.k, 1}, c.rows, c.n, c.k);
  EXPECT_LE(worst_error(result, expected), bound(c.k)) << c.rows << " x " << c.n << " x " << c.k;

  Buffer<uint16_t> rounded(result.size());
  Buffer<float> workspace(workspace_bytes(c.rows, w) / sizeof(float));
  linear_bf16(x.get(), c.rows, w, rounded.get(), workspace.get(), nullptr);
  std::vector<uint16_t> expected_bits(result.size());
  std::transform(result.begin(), result.end(), expected_bits.begin(), float_to_bf16);
  EXPECT_EQ(differences(rounded.host(), expected_bits), 0u) << c.rows << " x " << c.n << " x " << c.k;
}
TEST(RowLinear, SmallAgainstDoublePrecision) {
  for (const Case c : {Case{1, 8, 8}, {3, 64, 1024}, {130, 256, 520}, {257, 1032, 136}}) check_linear(c);
}
TEST(RowLinear, AgainstDoublePrecision) {
  for (const Case c : {Case{1, 256, 4096}, {700, 64, 4096}, {2000, 1024, 4096}, {1000, 4104, 4096}, {9, 2048, 7168}})
    check_linear(c);
}

// The first r of 20,000 rows give the same bits as all of them, for r around every tile edge and every way to spread
// the work; so do rows that lie elsewhere.
TEST(RowLinear, RowCountDoesNotMatter) {
  const int most = 20000;
  for (const auto& [n, k] : {std::pair{256, 1544}, {64, 2048}, {1280, 264}}) {
    const Buffer<uint16_t> x(random_rows(most, k, 3)), data(random_bf16(static_cast<size_t>(n) * k, 0.02f, 4));
    const Weight w{data.get(), n, k};
    const auto all = run_linear(x.get(), most, w);
    for (const int rows : {1, 2, 7, 8, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4095, 8448, 8449, 19999}) {
      const auto result = run_linear(x.get(), rows, w);
      ASSERT_TRUE(std::equal(result.begin(), result.end(), all.begin())) << rows << " rows, n = " << n;
      const int first = most - rows;
      const auto moved = run_linear(x.get() + static_cast<size_t>(first) * k, rows, w);
      ASSERT_TRUE(std::equal(moved.begin(), moved.end(), all.begin() + static_cast<size_t>(first) * n)) << rows;
    }
    for (int i = 0; i < 20; ++i) ASSERT_EQ(differences(run_linear(x.get(), most, w), all), 0u) << "repeat " << i;
  }
}

// Products that begin before the one ahead of them is complete (launch_dependent): a chain of layers, each of which
// reads the result of the one before and writes where that one read, has the bits of one launch at a time.
TEST(RowLinear, SmallLaunchesThatOverlap) {
  const int width = 1024, wide = 2048, layers = 12, most = 130;
  const Buffer<uint16_t> first(random_bf16(static_cast<size_t>(width) * wide, 0.03f, 31)),
      second(random_bf16(static_cast<size_t>(width) * wide, 0.03f, 32)), x(random_bf16(most * width, 1, 33));
  const Buffer<float> a(random_floats(8 * width, 0.03f, 34));
  const Buffer<uint16_t> planes(split_bytes(1, 8, width) / 2);
  const Weight up{first.get(), wide, width}, down{second.get(), width, wide};
  for (const int rows : {1, 40, most}) {
    const Buffer<float> workspace(workspace_bytes(rows, down) / sizeof(float));
    const auto run = [&](bool alone) {
      Buffer<uint16_t> here(static_cast<size_t>(rows) * width), there(static_cast<size_t>(rows) * wide);
      Buffer<float> few(static_cast<size_t>(layers) * rows * 8);
      check_cuda(cudaMemcpy(here.get(), x.get(), here.size() * 2, cudaMemcpyDeviceToDevice), "copy");
      const auto next = [&] {
        if (alone) check_cuda(cudaDeviceSynchronize(), "launch");
      };
      for (int layer = 0; layer < layers; ++layer) {
        linear_bf16(here.get(), rows, up, there.get(), nullptr, nullptr), next();
        linear_bf16(there.get(), rows, down, here.get(), workspace.get(), nullptr), next();
        split_weight(a.get(), 1, 8, width, 1.0f + layer, planes.get(), nullptr), next();
        few_outputs(here.get(), nullptr, nullptr, rows, {planes.get(), 1, 8, width}, few.get() + layer * rows * 8,
                    nullptr);
        next();
      }
      return std::pair{here.host(), few.host()};
    };
    const auto expected = run(true), found = run(false);
    EXPECT_EQ(differences(found.first, expected.first), 0u) << rows << " rows";
    EXPECT_EQ(differences(found.second, expected.second), 0u) << rows << " rows";
  }
}

TEST(RowLinear, SmallGradientsAgainstDoublePrecision) {
  for (const Case c : {Case{5, 72, 40}, {300, 264, 520}, {1, 1024, 256}}) {
    const Buffer<uint16_t> x(random_bf16(c.rows * c.k, 1, 5)), dy(random_bf16(c.rows * c.n, 0.1f, 6));
    const Buffer<uint16_t> data(random_bf16(c.n * c.k, 0.02f, 7));
    Buffer<float> dx(c.rows * c.k), dw(std::vector<float>(c.n * c.k, 0.5f));
    linear_backward_input(dy.get(), c.rows, {data.get(), c.n, c.k}, dx.get(), nullptr);
    const auto to_x = reference_product<uint16_t, uint16_t>({dy.get(), c.n, 1}, {data.get(), 1, c.k}, c.rows, c.k, c.n);
    EXPECT_LE(worst_error(dx.host(), to_x), bound(c.n)) << c.rows;
    linear_backward_weight(dy.get(), x.get(), c.rows, c.n, c.k, dw.get(), nullptr);
    auto to_w = reference_product<uint16_t, uint16_t>({dy.get(), 1, c.n}, {x.get(), 1, c.k}, c.n, c.k, c.rows);
    for (auto& v : to_w.sum) v += 0.5;
    for (auto& v : to_w.magnitude) v += 0.5;
    EXPECT_LE(worst_error(dw.host(), to_w), bound(c.rows)) << c.rows;
  }
}

// Groups (wo_a): each group's gradients against FP64; bf16 results are the FP32 ones rounded.
void check_group_gradients(int rows, int n, int k, int groups) {
  const int outs = groups * n, ins = groups * k;
  const Buffer<uint16_t> x(random_bf16(static_cast<size_t>(rows) * ins, 1, 21)),
      dy(random_bf16(static_cast<size_t>(rows) * outs, 0.1f, 22)),
      data(random_bf16(static_cast<size_t>(outs) * k, 1, 23));
  const Weight w{data.get(), n, k, groups};
  Buffer<float> dx(static_cast<size_t>(rows) * ins), dw(std::vector<float>(static_cast<size_t>(outs) * k, 0.5f));
  Buffer<uint16_t> dx_bf16(static_cast<size_t>(rows) * ins);
  linear_backward_input(dy.get(), rows, w, dx.get(), nullptr);
  linear_backward_input_bf16(dy.get(), rows, w, dx_bf16.get(), nullptr);
  linear_backward_weight(dy.get(), x.get(), rows, n, k, dw.get(), nullptr, groups);
  const auto to_x = dx.host(), to_w = dw.host();
  std::vector<uint16_t> rounded(to_x.size());
  std::transform(to_x.begin(), to_x.end(), rounded.begin(), float_to_bf16);
  EXPECT_EQ(differences(dx_bf16.host(), rounded), 0u);
  for (int g = 0; g < groups; ++g) {
    const Operand<uint16_t> own_dy{dy.get() + g * n, outs, 1};
    const auto want_x =
        reference_product<uint16_t, uint16_t>(own_dy, {data.get() + static_cast<size_t>(g) * n * k, 1, k}, rows, k, n);
    std::vector<float> own(static_cast<size_t>(rows) * k);
    for (int r = 0; r < rows; ++r)
      std::copy_n(to_x.begin() + static_cast<size_t>(r) * ins + g * k, k, own.begin() + static_cast<size_t>(r) * k);
    EXPECT_LE(worst_error(own, want_x), bound(n)) << "group " << g;
    auto want_w =
        reference_product<uint16_t, uint16_t>({dy.get() + g * n, 1, outs}, {x.get() + g * k, 1, ins}, n, k, rows);
    for (auto& v : want_w.sum) v += 0.5;
    for (auto& v : want_w.magnitude) v += 0.5;
    const auto first = to_w.begin() + static_cast<size_t>(g) * n * k;
    EXPECT_LE(worst_error({first, first + static_cast<size_t>(n) * k}, want_w), bound(rows)) << "group " << g;
  }
}
TEST(RowLinear, SmallGroupGradients) { check_group_gradients(130, 256, 256, 3); }
TEST(RowLinear, GroupGradients) { check_group_gradients(700, 1024, 4096, 8), check_group_gradients(1, 256, 512, 2); }

std::vector<float> run_few(const uint16_t* x, const int* source, const int* first, int rows, const SplitWeight& w) {
  Buffer<float> out(static_cast<size_t>(rows) * w.n);
  few_outputs(x, source, first, rows, w, out.get(), nullptr);
  return out.host();
}

// FP32 weights: the split keeps all 24 bits.
TEST(FewOutputs, SmallAgainstDoublePrecision) {
  for (const Case c : {Case{1, 24, 1024}, {33, 8, 96}, {100, 1, 32}, {70, 32, 4096}, {40, 13, 544}}) {
    const Buffer<uint16_t> x(random_rows(c.rows, c.k, 8));
    const Buffer<float> weight(random_floats(c.n * c.k, 0.02f, 9));
    Buffer<uint16_t> planes(split_bytes(1, c.n, c.k) / 2);
    split_weight(weight.get(), 1, c.n, c.k, 1.0f, planes.get(), nullptr);
    const auto result = run_few(x.get(), nullptr, nullptr, c.rows, {planes.get(), 1, c.n, c.k});
    const auto expected =
        reference_product<uint16_t, float>({x.get(), c.k, 1}, {weight.get(), c.k, 1}, c.rows, c.n, c.k);
    EXPECT_LE(worst_error(result, expected), bound(3 * c.k)) << c.rows << " x " << c.n << " x " << c.k;
  }
}

std::vector<float> run_split(const uint16_t* x, int rows, const SplitWeight& w) {
  Buffer<float> out(static_cast<size_t>(rows) * w.n), workspace(split_workspace_bytes(rows, w) / 4);
  linear_split(x, rows, w, out.get(), workspace.get(), nullptr);
  return out.host();
}

// The same numbers through tiles (the mHC mapping), for any number of rows.
TEST(SplitWeight, SmallAgainstDoublePrecision) {
  for (const Case c : {Case{1, 24, 1024}, {150, 5, 96}}) {
    const Buffer<uint16_t> x(random_rows(c.rows, c.k, 14));
    const Buffer<float> weight(random_floats(c.n * c.k, 0.02f, 15));
    Buffer<uint16_t> planes(split_bytes(1, c.n, c.k) / 2);
    split_weight(weight.get(), 1, c.n, c.k, 1.0f, planes.get(), nullptr);
    const auto result = run_split(x.get(), c.rows, {planes.get(), 1, c.n, c.k});
    const auto expected =
        reference_product<uint16_t, float>({x.get(), c.k, 1}, {weight.get(), c.k, 1}, c.rows, c.n, c.k);
    EXPECT_LE(worst_error(result, expected), bound(c.k)) << c.rows << " x " << c.n << " x " << c.k;
  }
}
TEST(SplitWeight, RowCountDoesNotMatter) {
  const int most = 20000, n = 24, k = 4096;
  const Buffer<uint16_t> x(random_bf16(static_cast<size_t>(most) * k, 1, 16));
  const Buffer<float> weight(random_floats(n * k, 0.02f, 17));
  Buffer<uint16_t> planes(split_bytes(1, n, k) / 2);
  split_weight(weight.get(), 1, n, k, 1.0f, planes.get(), nullptr);
  const SplitWeight w{planes.get(), 1, n, k};
  const auto all = run_split(x.get(), most, w);
  for (const int rows : {1, 2, 127, 128, 129, 3000, 8448, 8449, 19999}) {
    const auto moved = run_split(x.get() + static_cast<size_t>(most - rows) * k, rows, w);
    ASSERT_TRUE(std::equal(moved.begin(), moved.end(), all.begin() + static_cast<size_t>(most - rows) * n)) << rows;
  }
}

// Transposed sources and the order of gate and up: the same weight, the same planes.
void check_sources(int n, int k) {
  const auto weight = random_floats(n * k, 1, 18);  // [n, k], natural
  std::vector<float> transposed(n * k), permuted(n * k);
  for (int j = 0; j < n; ++j)
    for (int l = 0; l < k; ++l) {
      transposed[l * n + j] = weight[j * k + l];
      permuted[j * k + l] = weight[j * k + grouped_linear::natural_row(l, k)];
    }
  const auto split = [&](const std::vector<float>& from, const Source& source) {
    const Buffer<float> device(from);
    Buffer<uint16_t> planes(split_bytes(1, n, k) / 2);
    split_weight(device.get(), 1, n, k, 1, planes.get(), nullptr, source);
    return planes.host();
  };
  EXPECT_EQ(differences(split(transposed, {true, false}), split(weight, {})), 0u);
  EXPECT_EQ(differences(split(transposed, {true, true}), split(permuted, {})), 0u);
}
TEST(SplitWeight, SmallSources) { check_sources(5, 512), check_sources(12, 256); }

// Groups of rows with gathered sources give the bits that each row has alone with its group's weight.
TEST(FewOutputs, SmallGroupsAndSources) {
  const int groups = 7, n = 8, k = 256, tokens = 50;
  const std::vector<int> first = {0, 0, 1, 34, 34, 97, 100, 132};
  const int rows = 140;  // the last eight belong to nobody
  std::vector<int> source(rows);
  for (int r = 0; r < rows; ++r) source[r] = (r * 37 + 5) % tokens;
  const Buffer<uint16_t> x(random_rows(tokens, k, 10));
  const Buffer<float> weight(random_floats(groups * n * k, 0.02f, 11));
  const Buffer<int> first_device(first), source_device(source);
  Buffer<uint16_t> planes(split_bytes(groups, n, k) / 2);
  split_weight(weight.get(), groups, n, k, 0.5f, planes.get(), nullptr);
  const auto result = run_few(x.get(), source_device.get(), first_device.get(), rows, {planes.get(), groups, n, k});
  for (int g = 0; g < groups; ++g)
    for (int r = first[g]; r < first[g + 1]; ++r) {
      const SplitWeight own{planes.get() + g * split_bytes(1, n, k) / 2, 1, n, k};
      const auto alone = run_few(x.get() + source[r] * k, nullptr, nullptr, 1, own);
      ASSERT_TRUE(std::equal(alone.begin(), alone.end(), result.begin() + r * n)) << "row " << r;
    }
  for (int i = 132 * n; i < rows * n; ++i) ASSERT_TRUE(std::isnan(result[i])) << "a row of nobody was written";
}

// Few and many rows take different kernels.
void check_few_row_counts(int n, int k, int most) {
  const Buffer<uint16_t> x(random_rows(most, k, 12));
  const Buffer<float> weight(random_floats(n * k, 0.02f, 13));
  Buffer<uint16_t> planes(split_bytes(1, n, k) / 2);
  split_weight(weight.get(), 1, n, k, 1.0f, planes.get(), nullptr);
  const SplitWeight w{planes.get(), 1, n, k};
  const auto all = run_few(x.get(), nullptr, nullptr, most, w);
  for (const int rows : {1, 2, 15, 16, 17, 31, 32, 33, 1000, most - 1}) {
    const int start = most - rows;
    const auto moved = run_few(x.get() + static_cast<size_t>(start) * k, nullptr, nullptr, rows, w);
    ASSERT_TRUE(std::equal(moved.begin(), moved.end(), all.begin() + static_cast<size_t>(start) * n))
        << rows << " rows, " << n << " x " << k;
  }
  for (int start = 0; start < most; start += 3000) {
    const int rows = std::min(3000, most - start);
    const auto some = run_few(x.get() + static_cast<size_t>(start) * k, nullptr, nullptr, rows, w);
    ASSERT_TRUE(std::equal(some.begin(), some.end(), all.begin() + static_cast<size_t>(start) * n))
        << start << ", " << n << " x " << k;
  }
}
TEST(FewOutputs, SmallRowCountDoesNotMatter) { check_few_row_counts(5, 96, 4099); }
TEST(FewOutputs, RowCountDoesNotMatter) {
  check_few_row_counts(24, 1024, 20000);
  check_few_row_counts(8, 4096, 4300), check_few_row_counts(16, 8192, 5000), check_few_row_counts(32, 4096, 4097);
  check_few_row_counts(8, 32, 4096), check_few_row_counts(13, 544, 4500), check_few_row_counts(4, 12288, 4100);
}

// Many rows, gathered, in groups of all sizes, each row with one of two adapters or none: the bits of few rows.
TEST(FewOutputs, ManyRowsOfGroupsAndAdapters) {
  const std::vector<int> counts = {300, 0, 1, 2000, 256, 7, 1600, 0};
  const int groups = static_cast<int>(counts.size()), n = 8, k = 608, sources = 900;
  std::vector<int> first{0};
  for (const int c : counts) first.push_back(first.back() + c);
  const int rows = first.back() + 50;  // the last are nobody's
  const Buffer<uint16_t> x(random_rows(sources, k, 21));
  std::vector<std::unique_ptr<Buffer<uint16_t>>> planes;
  std::vector<const uint16_t*> pointers;
  for (int a = 0; a < 2; ++a) {
    const Buffer<float> weight(random_floats(static_cast<size_t>(groups) * n * k, 0.02f, 22 + a));
    planes.push_back(std::make_unique<Buffer<uint16_t>>(split_bytes(groups, n, k) / 2));
    split_weight(weight.get(), groups, n, k, 1, planes.back()->get(), nullptr);
    check_cuda(cudaDeviceSynchronize(), "split");
    pointers.push_back(planes.back()->get());
  }
  std::vector<int> source(rows), adapter(rows);
  for (int r = 0; r < rows; ++r) source[r] = r * 37 % sources, adapter[r] = r < 600 ? 1 : r % 3 - 1;
  const Buffer<int> first_device(first), source_device(source), adapter_device(adapter);
  const Buffer<const uint16_t*> table(pointers);
  const Buffer<float> mixed(static_cast<size_t>(rows) * n);
  few_outputs(x.get(), source_device.get(), first_device.get(), rows, {nullptr, groups, n, k}, mixed.get(), nullptr,
              {table.get(), adapter_device.get(), 2});
  const auto result = mixed.host();
  std::vector<float> of_source[2];
  for (int g = 0; g < groups; ++g) {
    if (counts[g] == 0) continue;
    for (int a = 0; a < 2; ++a)
      of_source[a] = run_few(x.get(), nullptr, nullptr, sources, {pointers[a] + g * split_bytes(1, n, k) / 2, 1, n, k});
    for (int r = first[g]; r < first[g + 1]; ++r)
      for (int j = 0; j < n; ++j)
        if (adapter[r] < 0)
          ASSERT_TRUE(std::isnan(result[r * n + j])) << "a row without adapter was written";
        else
          ASSERT_EQ(result[r * n + j], of_source[adapter[r]][source[r] * n + j]) << "row " << r;
  }
  for (int i = first.back() * n; i < rows * n; ++i) ASSERT_TRUE(std::isnan(result[i])) << "a row of nobody was written";
}

}  // namespace
}  // namespace plumb::kernels::row_linear
