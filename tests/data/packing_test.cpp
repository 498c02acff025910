#include "data/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "base/philox.h"

namespace plumb {
namespace {

std::vector<int> random_lengths(int n, int longest) {
  Random random(3);
  std::vector<int> lengths(n);
  for (int& l : lengths) l = 1 + static_cast<int>(random.below(longest));
  return lengths;
}

TEST(Packing, EverySampleOnceAndNoRowTooLong) {
  const std::vector<int> lengths = random_lengths(500, 100);
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    std::vector<int> seen(lengths.size());
    for (const Row& row : pack_epoch(lengths, 100, 1, epoch)) {
      int tokens = 0;
      for (int s : row) ++seen[s], tokens += lengths[s];
      EXPECT_GE(tokens, 1);
      EXPECT_LE(tokens, 100);
    }
    EXPECT_EQ(std::ranges::count(seen, 1), 500);
  }
}

TEST(Packing, FillsRowsWell) {
  const std::vector<int> lengths = random_lengths(2000, 100);
  const int tokens = std::accumulate(lengths.begin(), lengths.end(), 0);
  // Best fit needs at most 1.7 times the fewest rows; for many short samples it is within a few percent.
  EXPECT_LE(pack_epoch(lengths, 400, 1, 0).size(), 1.03 * tokens / 400);
}

TEST(Packing, SamplesOfTheFullLengthStandAlone) {
  for (const Row& row : pack_epoch({10, 10, 3}, 10, 0, 0)) EXPECT_EQ(row.size(), 1u);
}

TEST(Packing, DependsOnSeedAndEpochAlone) {
  const std::vector<int> lengths = random_lengths(50, 20);
  EXPECT_EQ(pack_epoch(lengths, 40, 7, 2), pack_epoch(lengths, 40, 7, 2));
  EXPECT_NE(pack_epoch(lengths, 40, 7, 2), pack_epoch(lengths, 40, 7, 3));
  EXPECT_NE(pack_epoch(lengths, 40, 7, 2), pack_epoch(lengths, 40, 8, 2));
}

TEST(RowStream, ContinuesExactlyFromAnyCursor) {
  const std::vector<int> lengths = random_lengths(20, 10);
  RowStream whole(lengths, 16, 5);
  const int64_t count = whole.rows_in(3);
  std::vector<Row> rows;
  std::vector<DataCursor> cursors;
  for (int64_t i = 0; i < count; ++i) cursors.push_back(whole.cursor()), rows.push_back(whole.next());
  for (int64_t i = 0; i < count; ++i) {
    RowStream resumed(lengths, 16, 5);
    resumed.seek(cursors[i]);
    for (int64_t j = i; j < count; ++j) EXPECT_EQ(resumed.next(), rows[j]) << "from row " << i;
  }
  EXPECT_EQ(whole.cursor().epoch, 2);
}

}  // namespace
}  // namespace plumb
