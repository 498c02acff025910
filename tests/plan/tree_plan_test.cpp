// Every row of a prefix tree must see what it would see in its path as a document of its own: window, entries, the rows
// that entries pool, positions. The tree's row numbers are translated to positions of the path and compared with the
// plan of that document, which sequence_plan_test.cpp checks against the definitions.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/error.h"
#include "base/philox.h"
#include "plan/sequence_plan.h"

namespace plumb {
namespace {

std::vector<int> list(const KeyLists& l, int i) { return {l.row.begin() + l.begin[i], l.row.begin() + l.begin[i + 1]}; }
std::vector<int> seen(const EntryRanges& v, int i) {
  std::vector<int> out;
  for (int r = v.begin[i]; r < v.begin[i + 1]; ++r)
    for (int e = v.range[r].first; e < v.range[r].last; ++e) out.push_back(e);
  return out;
}

struct Path {
  std::vector<int> token, row;  // of each position: its token and its row in the tree's plan
  std::map<int, int> position;  // of a row
};
std::vector<Path> paths_of(const std::vector<TreeSegment>& segments) {
  std::vector<Path> paths;
  int row = 0;
  for (const TreeSegment& s : segments) {
    Path p = s.parent < 0 ? Path{} : paths[s.parent];
    for (int token : s.tokens) {
      p.position[row] = static_cast<int>(p.row.size());
      p.token.push_back(token);
      p.row.push_back(row++);
    }
    paths.push_back(p);
  }
  return paths;
}

void expect_same_entries(const CompressionPlan& tree, int tree_row, const CompressionPlan& alone, int t,
                         const Path& path) {
  const std::vector<int> here = seen(tree.visible, tree_row), there = seen(alone.visible, t);
  ASSERT_EQ(here.size(), there.size()) << "position " << t;
  for (size_t i = 0; i < here.size(); ++i) {
    ASSERT_EQ(tree.position[here[i]], alone.position[there[i]]);
    for (int s = 0; s < tree.slots; ++s) {
      const int source = tree.source[here[i] * tree.slots + s];
      ASSERT_EQ(source < 0 ? -1 : path.position.at(source), alone.source[there[i] * alone.slots + s]);
    }
  }
}

void expect_paths_as_documents(const PlanShape& shape, const std::vector<TreeSegment>& segments) {
  const SequencePlan tree = plan_trees(shape, segments);
  const std::vector<Path> paths = paths_of(segments);
  for (size_t s = 0; s < segments.size(); ++s) {
    const Path& path = paths[s];
    const SequencePlan alone = plan_documents(shape, {path.token});
    for (int t = alone.rows() - static_cast<int>(segments[s].tokens.size()); t < alone.rows(); ++t) {
      const int row = path.row[t];
      ASSERT_EQ(tree.token[row], path.token[t]);
      ASSERT_EQ(tree.position[row], t);
      ASSERT_EQ(tree.document[row], segments[s].document);
      std::vector<int> window;
      for (int key : list(tree.window, row)) window.push_back(path.position.at(key));
      ASSERT_EQ(window, list(alone.window, t));
      expect_same_entries(tree.csa, row, alone.csa, t, path);
      expect_same_entries(tree.hca, row, alone.hca, t, path);
    }
  }
}

TreeSegment segment(int parent, int length, int first_token, int document = 0) {
  TreeSegment s{parent, {}, document};
  for (int i = 0; i < length; ++i) s.tokens.push_back(first_token + i);
  return s;
}

TEST(PlanTrees, BranchPointsAtEveryResidueOfBothRatios) {
  for (int prefix = 0; prefix <= 70; ++prefix)
    expect_paths_as_documents({8, 4, 16}, {segment(-1, prefix, 0), segment(0, 37, 1000), segment(0, 5, 2000)});
}

TEST(PlanTrees, AtTheReleasedRatios) {
  for (int prefix : {1, 126, 127, 128, 129, 131, 255, 256, 600})
    expect_paths_as_documents({128, 4, 128}, {segment(-1, prefix, 0), segment(0, 130, 1000), segment(0, 3, 2000)});
}

TEST(PlanTrees, DeepChainsOfShortSegments) {  // windows that span many segments, entries that straddle several
  std::vector<TreeSegment> chain{segment(-1, 3, 0)};
  for (int i = 0; i < 30; ++i) chain.push_back(segment(i, i % 4, 100 * i));
  expect_paths_as_documents({8, 4, 16}, chain);
}

TEST(PlanTrees, RandomForests) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed, 1);
    std::vector<TreeSegment> segments;
    for (int i = 0, n = 1 + random.below(10); i < n; ++i) {
      const int parent = static_cast<int>(random.below(i + 1)) - 1;
      segments.push_back(segment(parent, random.below(40), 100 * i, parent < 0 ? i : segments[parent].document));
    }
    expect_paths_as_documents({8, 4, 16}, segments);
  }
}

TEST(PlanTrees, EntriesOfCompleteWindowsAreMadeOnce) {
  // 9 tokens shared: entries 0 and 1 are the parent's; the window 8..11 is made anew in each branch.
  const SequencePlan p =
      plan_trees({8, 4, 0}, {segment(-1, 9, 0), segment(0, 3, 100), segment(0, 3, 200), segment(0, 2, 300)});
  EXPECT_EQ(p.csa.position, (std::vector<int>{0, 4, 8, 8}));
  EXPECT_EQ(seen(p.csa.visible, 11), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(seen(p.csa.visible, 14), (std::vector<int>{0, 1, 3}));
  EXPECT_EQ(seen(p.csa.visible, 16), (std::vector<int>{0, 1}));
}

TEST(PlanTrees, ParentsComeFirst) {
  EXPECT_THROW(plan_trees({8, 4, 16}, {segment(1, 3, 0), segment(-1, 3, 0)}), Error);
  EXPECT_THROW(plan_trees({8, 4, 16}, {segment(0, 3, 0)}), Error);
}

}  // namespace
}  // namespace plumb
