// Sorting tokens by expert and combining them, against plain loops on the CPU; and a whole layer of experts, whose rows
// must not depend on their company.
#include <gtest/gtest.h>

#include "grouped_linear_data.cuh"
#include "kernels/grouped_linear/route.h"

namespace plumb::kernels::grouped_linear {
namespace {

struct SortedOnDevice {
  Buffer<int> expert;
  Buffer<float> weight;
  Buffer<int> first, source, row_of_slot;
  Buffer<float> route_weight;
  Choices choices;
  SortedOnDevice(const std::vector<int>& e, const std::vector<float>& w, int top_k, int experts)
      : expert(e),
        weight(w),
        first(experts + 1),
        source(e.size()),
        row_of_slot(e.size()),
        route_weight(e.size()),
        choices{expert.get(), weight.get(), static_cast<int>(e.size()) / top_k, top_k, experts} {
    const Buffer<int> workspace(sort_bytes(choices) / sizeof(int) + 1);
    sort_by_expert(choices, {first.get(), source.get(), route_weight.get(), row_of_slot.get()}, workspace.get(),
                   nullptr);
    check_cuda(cudaDeviceSynchronize(), "sort_by_expert");
  }
};

TEST(ExpertRoute, SortsLikeAStableSort) {
  struct Case {
    int tokens, top_k, experts, padding;  // the last `padding` tokens choose no expert
  };
  for (const Case c : {Case{1, 1, 1, 0},
                       {1, 6, 256, 0},
                       {170, 6, 256, 3},
                       {171, 6, 8, 0},
                       {16384, 6, 256, 0},
                       {5000, 6, 384, 77},
                       {3000, 2, 512, 3000},
                       {2000, 6, 7, 1}}) {
    std::mt19937 random(c.tokens);
    std::vector<int> expert(c.tokens * c.top_k);
    std::vector<float> weight(expert.size());
    for (size_t i = 0; i < expert.size(); ++i) {
      const bool real = static_cast<int>(i) / c.top_k < c.tokens - c.padding;
      expert[i] = real ? static_cast<int>(random() % c.experts) : -1;
      if (c.experts == 7 && real && random() % 2) expert[i] = 3;  // a crowded expert
      weight[i] = static_cast<float>(random() % 1000);
    }
    std::vector<int> order;
    for (size_t i = 0; i < expert.size(); ++i)
      if (expert[i] >= 0) order.push_back(static_cast<int>(i));
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return expert[a] < expert[b]; });

    const SortedOnDevice sorted(expert, weight, c.top_k, c.experts);
    const auto first = sorted.first.host(), source = sorted.source.host(), row_of_slot = sorted.row_of_slot.host();
    const auto route_weight = sorted.route_weight.host();
    ASSERT_EQ(first[c.experts], static_cast<int>(order.size()));
    ASSERT_EQ(first[0], 0);
    for (size_t row = 0; row < order.size(); ++row) {
      const int pair = order[row];
      ASSERT_EQ(source[row], pair / c.top_k) << row;
      ASSERT_EQ(route_weight[row], weight[pair]) << row;
      ASSERT_EQ(row_of_slot[pair], static_cast<int>(row));
      ASSERT_GE(static_cast<int>(row), first[expert[pair]]);
      ASSERT_LT(static_cast<int>(row), first[expert[pair] + 1]);
    }
    for (size_t i = 0; i < expert.size(); ++i)
      if (expert[i] < 0) {
        ASSERT_EQ(row_of_slot[i], -1);
      }
    for (size_t row = order.size(); row < expert.size(); ++row) ASSERT_TRUE(source[row] == 0 && route_weight[row] == 0);
  }
}

// The work list that comes with the sort is make_plan's.
TEST(ExpertRoute, SmallSortWithItsPlan) {
  const int experts = 40, top_k = 3, n = 768;
  for (const int tokens : {1, 9, 341, 342}) {
    std::mt19937 random(tokens);
    std::vector<int> expert(tokens * top_k);
    for (auto& e : expert) e = static_cast<int>(random() % (experts + 1)) - 1;
    const int rows = static_cast<int>(expert.size());
    for (const int width : {8, 16, 64, 256}) {
      const size_t vectors = plan_bytes(experts, rows, n, width) / sizeof(uint4) + 1;
      Buffer<uint4> alone(vectors), with(vectors);
      const SortedOnDevice sorted(expert, std::vector<float>(rows), top_k, experts);
      alone.fill(0), with.fill(0);
      make_plan(sorted.first.get(), {experts, rows, n, width, alone.get()}, nullptr);
      const Plan plan{experts, rows, n, width, with.get()};
      const Buffer<int> workspace(sort_bytes(sorted.choices) / sizeof(int) + 1);
      sort_by_expert(sorted.choices,
                     {sorted.first.get(), sorted.source.get(), sorted.route_weight.get(), sorted.row_of_slot.get()},
                     workspace.get(), nullptr, &plan);
      const auto expected = alone.host(), found = with.host();
      const auto* counts = reinterpret_cast<const int*>(found.data());
      ASSERT_EQ(counts[0], reinterpret_cast<const int*>(expected.data())[0]) << tokens << " tokens, width " << width;
      ASSERT_EQ(std::memcmp(&found[16], &expected[16], (vectors - 16) * sizeof(uint4)), 0)  // behind the counters
          << tokens << " tokens, width " << width;
    }
  }
}

TEST(ExpertRoute, SmallCombineInSlotOrder) {
  const int tokens = 33, top_k = 6, n = 264;
  const auto rows = random_rows(tokens * top_k, n, 1), shared = random_rows(tokens, n, 2);
  std::vector<int> row_of_slot(tokens * top_k);
  for (int i = 0; i < tokens * top_k; ++i) row_of_slot[i] = i % 11 == 5 ? -1 : (i * 37 + 11) % (tokens * top_k);
  const Buffer<uint16_t> rows_device(rows), shared_device(shared);
  const Buffer<int> slots_device(row_of_slot);
  for (const bool with_shared : {true, false}) {
    Buffer<uint16_t> out(tokens * n);
    combine(rows_device.get(), slots_device.get(), with_shared ? shared_device.get() : nullptr, tokens, top_k, n,
            out.get(), nullptr);
    const auto result = out.host();
    for (int t = 0; t < tokens; ++t)
      for (int c = 0; c < n; ++c) {
        float sum = 0;
        for (int slot = 0; slot < top_k; ++slot)
          if (const int row = row_of_slot[t * top_k + slot]; row >= 0) sum += bf16_to_float(rows[row * n + c]);
        if (with_shared) sum += bf16_to_float(shared[t * n + c]);
        ASSERT_EQ(result[t * n + c], float_to_bf16(sum)) << "token " << t << " column " << c;
      }
  }
}

// A layer of experts: sort, quantise, gate and up with SwiGLU, down, combine. `width` 0: the best one.
std::vector<uint16_t> run_layer(const Weights& gate_up, const Weights& down, const std::vector<uint16_t>& x,
                                const std::vector<int>& expert, const std::vector<float>& weight, int top_k,
                                int width) {
  const int rows = static_cast<int>(expert.size()), tokens = rows / top_k, d = gate_up.k, hidden = gate_up.n / 2;
  if (width == 0) width = best_width(rows, gate_up.groups);
  const SortedOnDevice sorted(expert, weight, top_k, gate_up.groups);
  const Buffer<uint16_t> x_device(x);
  Buffer<uint8_t> values(static_cast<size_t>(rows) * d), hidden_values(static_cast<size_t>(rows) * hidden);
  Buffer<float> scales(static_cast<size_t>(rows) * block_stride(d)),
      hidden_scales(static_cast<size_t>(rows) * block_stride(hidden));
  Buffer<uint16_t> down_out(static_cast<size_t>(rows) * down.n), out(static_cast<size_t>(tokens) * down.n);
  Buffer<uint4> space_up(plan_bytes(gate_up.groups, rows, gate_up.n, width) / 16 + 1),
      space_down(plan_bytes(gate_up.groups, rows, down.n, width) / 16 + 1);
  const Plan up_plan{gate_up.groups, rows, gate_up.n, width, space_up.get()},
      down_plan{gate_up.groups, rows, down.n, width, space_down.get()};
  make_plan(sorted.first.get(), up_plan, nullptr);
  make_plan(sorted.first.get(), down_plan, nullptr);
  quantise_rows(x_device.get(), sorted.source.get(), rows, d, values.get(), scales.get(), nullptr);
  linear_swiglu(gate_up, {values.get(), scales.get(), rows}, up_plan, sorted.route_weight.get(), 10.0f,
                hidden_values.get(), hidden_scales.get(), nullptr);
  linear(down, {hidden_values.get(), hidden_scales.get(), rows}, down_plan, down_out.get(), nullptr);
  combine(down_out.get(), sorted.row_of_slot.get(), nullptr, tokens, top_k, down.n, out.get(), nullptr);
  return out.host();
}

// Each token alone, as in decoding, gives the bits that it has in a batch; so does any tile width.
TEST(ExpertRoute, LayerIsTheSameForATokenAloneAndInABatch) {
  const int experts = 8, d = 512, hidden = 384, top_k = 3, tokens = 700;
  const Matrices up = random_weights(WeightFormat::fp4, experts, 2 * hidden, d, true, 21);
  const Matrices down = random_weights(WeightFormat::fp4, experts, d, hidden, false, 22);
  const Buffer<uint8_t> up_records(up.records), down_records(down.records);
  const Buffer<float> up_bases(up.bases), down_bases(down.bases);
  const Weights w13 = up.on_device(up_records, up_bases), w2 = down.on_device(down_records, down_bases);
  const auto x = random_rows(tokens, d, 23);
  std::mt19937 random(24);
  std::vector<int> expert;
  std::vector<float> weight;
  for (int t = 0; t < tokens; ++t)
    for (int slot = 0, e = static_cast<int>(random() % experts); slot < top_k; ++slot) {
      expert.push_back(e), e = (e + 1 + static_cast<int>(random() % 2)) % experts;  // distinct within a token
      weight.push_back(static_cast<float>(random() % 1000) * 1e-3f);
    }
  const auto batch = run_layer(w13, w2, x, expert, weight, top_k, 0);
  for (const int width : {8, 16, 64, 256})
    ASSERT_EQ(differences(run_layer(w13, w2, x, expert, weight, top_k, width), batch), 0u) << "width " << width;
  for (int t = 0; t < tokens; t += 53) {
    const std::vector<uint16_t> row(x.begin() + t * d, x.begin() + (t + 1) * d);
    const std::vector<int> e(expert.begin() + t * top_k, expert.begin() + (t + 1) * top_k);
    const std::vector<float> r(weight.begin() + t * top_k, weight.begin() + (t + 1) * top_k);
    const auto alone = run_layer(w13, w2, row, e, r, top_k, 0);
    ASSERT_TRUE(std::equal(alone.begin(), alone.end(), batch.begin() + t * d)) << "token " << t;
  }
}

}  // namespace
}  // namespace plumb::kernels::grouped_linear
