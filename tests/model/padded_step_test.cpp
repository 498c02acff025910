// A decoding step in the sizes of a larger one: its rows have their own bits, and the cache is what it would be.
#include <gtest/gtest.h>

#include "base/error.h"
#include "model/forward.h"
#include "support/same_bits.h"
#include "support/tiny_model.h"

namespace plumb {
namespace {

using testing::same_bits;

// Sequences of different lengths grow by a token a step, so that entries of both ratios are made in some steps, by some
// of the rows.
TEST(PaddedStep, RowsAndCacheHaveTheBitsOfTheStepItself) {
  const ModelConfig c = testing::released_ratios_config();
  auto m = testing::random_model(c, 31);
  const PlanShape shape = plan_shape(c);
  std::vector<int> length = {126, 3, 250};
  constexpr int kKeys = 264, kCsa = 68, kHca = 3;
  std::vector<CacheSlots> slots;
  for (int i = 0; i < 3; ++i)
    slots.push_back({i * kKeys, kKeys, i * kCsa, i * kHca, i * 2 * shape.csa_ratio, i * shape.hca_ratio});
  const CacheShape totals{3 * kKeys, 3 * kCsa, 3 * kHca};
  KvCache own = make_cache(c, totals, 6 * shape.csa_ratio, 3 * shape.hca_ratio),
          padded = make_cache(c, totals, 6 * shape.csa_ratio, 3 * shape.hca_ratio);
  const auto run = [&](const SequencePlan& plan, KvCache& cache) {
    ForwardOptions o;
    o.cache = &cache;
    return forward(*m, plan, o).hidden;
  };
  std::vector<std::vector<int>> next;
  for (int i = 0; i < 3; ++i) next.push_back(testing::random_tokens(c, length[i], i));
  const SequencePlan prefill = plan_cached_step(shape, totals, slots, {0, 0, 0}, next, false);
  run(prefill, own), run(prefill, padded);
  for (int step = 0; step < 7; ++step) {
    for (int i = 0; i < 3; ++i) next[i] = testing::random_tokens(c, 1, 10 * step + i);
    const SequencePlan plan = plan_cached_step(shape, totals, slots, length, next, true);
    const SequencePlan larger = pad_step(plan, {5, plan.csa.new_entries() ? 5 : 0, 4});
    EXPECT_EQ(larger.rows(), 5);
    EXPECT_EQ(larger.hca.new_entries(), 4);
    const Tensor hidden = run(plan, own), filled_up = run(larger, padded);
    EXPECT_TRUE(same_bits(filled_up.rows(0, 3), hidden)) << "step " << step;
    for (int r = 3; r < 5; ++r) EXPECT_TRUE(same_bits(filled_up.rows(r, r + 1), hidden.rows(0, 1))) << "step " << step;
    EXPECT_TRUE(same_bits(own, padded)) << "step " << step;
    for (int& l : length) ++l;
  }
}

TEST(PaddedStep, ChunksAndSmallerSizesAreRefused) {
  const PlanShape shape;
  const CacheShape totals{400, 100, 4};
  const std::vector<CacheSlots> slots = {{0, 140, 0, 0, 0, 0}};
  const SequencePlan two = plan_cached_step(shape, totals, slots, {6}, {{1, 2}}, true);
  EXPECT_THROW(pad_step(two, {1, 1, 0}), Error);
  EXPECT_THROW(pad_step(two, {2, 0, 0}), Error);  // it makes an entry
  const SequencePlan last_wanted = plan_cached_step(shape, totals, slots, {6}, {{1, 2}}, false);
  EXPECT_THROW(pad_step(last_wanted, {4, 4, 0}), Error);
}

}  // namespace
}  // namespace plumb
