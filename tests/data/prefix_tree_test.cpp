#include "data/prefix_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "base/error.h"
#include "base/philox.h"

namespace plumb {
namespace {

std::vector<int> run(int n, int from) {
  std::vector<int> v(n);
  std::iota(v.begin(), v.end(), from);
  return v;
}
std::vector<int> join(std::vector<int> a, const std::vector<int>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
std::vector<int> sizes(const TreeRow& row) {
  std::vector<int> s;
  for (const TreeSegment& x : row.segments) s.push_back(static_cast<int>(x.tokens.size()));
  return s;
}

// What every packing must keep: each sample once, its tokens on its path, rows not too long, parents first, and no
// token of a segment with several samples below it behind what one of them may share.
void expect_sound(const std::vector<TreeSample>& samples, const TreePacking& packing, const TreeOptions& options) {
  std::vector<int> met(samples.size());
  int64_t physical = 0;
  for (const TreeRow& row : packing.rows) {
    std::vector<int> row_tokens;
    std::vector<int> users(row.segments.size()), allowed(row.segments.size(), 1 << 30), end(row.segments.size());
    for (size_t s = 0; s < row.segments.size(); ++s) {
      const TreeSegment& x = row.segments[s];
      ASSERT_LT(x.parent, static_cast<int>(s));
      ASSERT_FALSE(x.tokens.empty());
      row_tokens.insert(row_tokens.end(), x.tokens.begin(), x.tokens.end());
      end[s] = static_cast<int>(x.tokens.size()) + (x.parent < 0 ? 0 : end[x.parent]);
    }
    ASSERT_EQ(static_cast<int>(row_tokens.size()), row.tokens);
    ASSERT_LE(row.tokens, options.row_tokens);
    physical += row.tokens;
    for (const TreeRow::Leaf& l : row.leaves) {
      ++met[l.sample];
      std::vector<int> tokens;
      for (int r : path_rows(row, l.segment)) tokens.push_back(row_tokens[r]);
      ASSERT_EQ(tokens, samples[l.sample].tokens);
      for (int s = l.segment; s >= 0; s = row.segments[s].parent) {
        ++users[s];
        allowed[s] = std::min(allowed[s], samples[l.sample].shareable);
      }
    }
    for (size_t s = 0; s < users.size(); ++s) {
      ASSERT_GE(users[s], 1);
      ASSERT_TRUE(users[s] == 1 || end[s] <= allowed[s]);
    }
  }
  EXPECT_EQ(physical, packing.physical_tokens);
  EXPECT_EQ(std::count(met.begin(), met.end(), 1), static_cast<int64_t>(samples.size()));
}

TEST(PrefixTree, AGroupSharesItsPrompt) {
  const std::vector<int> prompt = run(100, 0);
  std::vector<TreeSample> samples;
  for (int i = 0; i < 3; ++i) samples.push_back({join(prompt, run(10 + i, 1000 * (i + 1))), 99, 0});
  const TreePacking p = pack_trees(samples, {1000});
  ASSERT_EQ(p.rows.size(), 1u);
  // The last token of the prompt is in every branch: its row predicts the first token that is trained.
  EXPECT_EQ(sizes(p.rows[0]), (std::vector<int>{99, 11, 12, 13}));
  EXPECT_EQ(p.logical_tokens, 333);
  EXPECT_EQ(p.physical_tokens, 135);
  EXPECT_EQ(path_rows(p.rows[0], 2)[98], 98);
  EXPECT_EQ(path_rows(p.rows[0], 2)[99], 110);
  expect_sound(samples, p, {1000});
}

TEST(PrefixTree, ShortBeginningsAreNotSharedButLongerOnesBelowThemAre) {
  const std::vector<int> start = run(10, 0), a = join(start, run(80, 100)), b = join(start, run(80, 300));
  const std::vector<TreeSample> samples = {
      {join(a, {1}), 90, 0}, {join(b, {2}), 90, 0}, {join(a, {3}), 90, 0}, {join(b, {4}), 90, 0}};
  EXPECT_EQ(sizes(pack_trees(samples, {1000, 64}).rows[0]), (std::vector<int>{90, 1, 1, 90, 1, 1}));
  EXPECT_EQ(sizes(pack_trees(samples, {1000, 10}).rows[0]), (std::vector<int>{10, 80, 1, 1, 80, 1, 1}));
  EXPECT_EQ(sizes(pack_trees(samples, {1000, 91}).rows[0]), (std::vector<int>{91, 91, 91, 91}));
}

TEST(PrefixTree, GroupsDoNotShareAndFillRowsTogether) {
  std::vector<TreeSample> samples;
  for (int i = 0; i < 4; ++i) samples.push_back({join(run(70, 0), run(5, 1000 * i)), 70, i / 2});
  const TreePacking p = pack_trees(samples, {160});
  ASSERT_EQ(p.rows.size(), 1u);
  EXPECT_EQ(sizes(p.rows[0]), (std::vector<int>{70, 5, 5, 70, 5, 5}));
  EXPECT_EQ(p.rows[0].segments[1].document, 0);
  EXPECT_EQ(p.rows[0].segments[4].document, 1);
}

TEST(PrefixTree, AGroupThatIsTooLargeTakesItsAncestorsIntoEveryRow) {
  std::vector<TreeSample> samples;
  for (int i = 0; i < 5; ++i) samples.push_back({join(run(100, 0), run(50, 1000 * (i + 1))), 100, 0});
  const TreePacking p = pack_trees(samples, {210});
  EXPECT_EQ(p.rows.size(), 3u);
  EXPECT_EQ(p.physical_tokens, 3 * 100 + 5 * 50);
  expect_sound(samples, p, {210});
}

TEST(PrefixTree, EqualSamplesShareAllButTheirOwnTokens) {
  const std::vector<TreeSample> samples(3, {run(80, 0), 70, 0});
  EXPECT_EQ(sizes(pack_trees(samples, {1000}).rows[0]), (std::vector<int>{70, 10, 10, 10}));
  const std::vector<TreeSample> careless(3, {run(80, 0), 500, 0});  // clamped: one token stays their own
  EXPECT_EQ(sizes(pack_trees(careless, {1000}).rows[0]), (std::vector<int>{79, 1, 1, 1}));
}

TEST(PrefixTree, RandomGroups) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Random random(seed, 5);
    std::vector<TreeSample> samples;
    std::vector<std::vector<int>> stems{{}};
    for (int i = 0, n = 1 + random.below(20); i < n; ++i) {
      TreeSample s;
      s.tokens = stems[random.below(static_cast<uint32_t>(stems.size()))];
      for (int t = 0, m = 1 + random.below(20); t < m; ++t) s.tokens.push_back(random.below(3));
      s.shareable = random.below(static_cast<uint32_t>(s.tokens.size()));
      s.group = random.below(3);
      if (s.tokens.size() < 60) stems.push_back(s.tokens);
      samples.push_back(std::move(s));
    }
    const TreeOptions options{80 + static_cast<int>(random.below(200)), 1 + static_cast<int>(random.below(6)), seed};
    const TreePacking p = pack_trees(samples, options), again = pack_trees(samples, options);
    expect_sound(samples, p, options);
    ASSERT_EQ(p.rows.size(), again.rows.size());
    for (size_t r = 0; r < p.rows.size(); ++r) ASSERT_EQ(sizes(p.rows[r]), sizes(again.rows[r]));

    // All in one row with nothing too short to share: one token for each different beginning that may be shared, and
    // the others.
    std::set<std::pair<int, std::vector<int>>> beginnings;
    int64_t own = 0;
    for (const TreeSample& s : samples) {
      own += static_cast<int64_t>(s.tokens.size()) - s.shareable;
      for (int t = 1; t <= s.shareable; ++t) beginnings.insert({s.group, {s.tokens.begin(), s.tokens.begin() + t}});
    }
    EXPECT_EQ(pack_trees(samples, {1 << 20, 1}).physical_tokens, own + static_cast<int64_t>(beginnings.size()));
  }
}

TEST(PrefixTreeRefuses, SamplesThatFitIntoNoRow) {
  EXPECT_THROW(pack_trees({{run(11, 0), 0, 0}}, {10}), Error);
  EXPECT_THROW(pack_trees({{{}, 0, 0}}, {10}), Error);
}

}  // namespace
}  // namespace plumb
