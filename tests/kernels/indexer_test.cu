// The indexer's scores against FP64 on the CPU, and its selection, which must be the exact top-k of its own scores,
// over ranges as documents, trees and caches have them.
#include "kernels/indexer/indexer.h"

#include <numeric>

#include "device_data.cuh"

namespace plumb::kernels {
namespace {

struct Visible {
  std::vector<int> begin{0};
  std::vector<IndexRange> range;
  void row(std::initializer_list<IndexRange> ranges) {
    range.insert(range.end(), ranges);
    begin.push_back(static_cast<int>(range.size()));
  }
  int rows() const { return static_cast<int>(begin.size()) - 1; }
  std::vector<int> entries(int row) const {
    std::vector<int> list;
    for (int i = begin[row]; i < begin[row + 1]; ++i)
      for (int e = range[i].first; e < range[i].last; ++e) list.push_back(e);
    return list;
  }
};
Visible causal(const std::vector<int>& lengths, int ratio = 4) {
  Visible v;
  int first = 0;
  for (int length : lengths) {
    for (int t = 0; t < length; ++t) v.row({{first, first + (t + 1) / ratio}});
    first += length / ratio;
  }
  return v;
}

struct Problem {
  Visible visible;
  int entries, topk;
  std::vector<uint16_t> q, keys;
  std::vector<float> w;
  Problem(const Visible& visible, int entries, int topk, bool coarse = false)
      : visible(visible), entries(entries), topk(topk) {
    q = random_bf16(static_cast<size_t>(visible.rows()) * kIndexHeads * kIndexDim, 1, 1);
    keys = random_bf16(static_cast<size_t>(entries) * kIndexDim, 1, 2);
    w = random_floats(static_cast<size_t>(visible.rows()) * kIndexHeads, 0.01f, 3);
    if (!coarse) return;  // few different scores: ties everywhere
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = float_to_bf16(static_cast<float>(i / kIndexDim % 5 == i % 5));
  }
};

struct Selection {
  std::vector<int> begin{0};  // of each row in `out`
  Buffer<uint16_t> q, keys;
  Buffer<float> w;
  IndexGroups groups;
  Buffer<int> tile_begin, tile_first, visible_count, out_begin, out;
  Buffer<uint64_t> visible;
  Buffer<uint8_t> workspace;
  IndexSelection arguments;
  explicit Selection(const Problem& p, size_t workspace_limit = 64 << 20)
      : q(p.q),
        keys(p.keys),
        w(p.w),
        groups(make_index_groups(p.visible.begin, p.visible.range)),
        tile_begin(groups.tile_begin),
        tile_first(groups.tile_first),
        visible_count(groups.visible_count),
        out_begin(begins(p)),
        out(begin.back()),
        visible(groups.visible),
        workspace(index_workspace(groups, workspace_limit)) {
    arguments = {q.get(),   w.get(),         keys.get(),
                 p.entries, &groups,         {tile_begin.get(), tile_first.get(), visible.get(), visible_count.get()},
                 p.topk,    out_begin.get(), out.get(),
                 0,         workspace.get(), workspace.size()};
    run();
  }
  std::vector<int> begins(const Problem& p) {
    for (int r = 0; r < p.visible.rows(); ++r)
      begin.push_back(begin.back() + std::min<int>(p.topk, p.visible.entries(r).size()));
    return begin;
  }
  void run() {
    check(select_entries(arguments, nullptr));
    check(cudaDeviceSynchronize());
  }
};

// The scores of one row for its visible entries, as the kernel made them.
struct Scores {
  int group_rows, columns = 0;
  const IndexGroups& groups;
  std::vector<float> all;
  explicit Scores(const Selection& s) : group_rows(s.groups.group_rows), groups(s.groups) {
    const int count = static_cast<int>(groups.tile_begin.size()) - 1;
    for (int g = 0; g < count; ++g) columns = std::max(columns, (groups.tile_begin[g + 1] - groups.tile_begin[g]) * 64);
    Buffer<float> scores(static_cast<size_t>(count) * group_rows * columns);
    IndexSelection a = s.arguments;
    a.topk = 1;  // of all rows that see more than one entry
    check(index_scores(a, 0, count, columns, scores.get(), nullptr));
    all = scores.host();
  }
  std::vector<float> of(int row) const {
    std::vector<float> list;
    const int first = groups.tile_begin[row / group_rows], last = groups.tile_begin[row / group_rows + 1];
    for (int tile = first; tile < last; ++tile)
      for (int i = 0; i < 64; ++i)
        if (groups.visible[static_cast<size_t>(tile) * group_rows + row % group_rows] >> i & 1)
          list.push_back(all[static_cast<size_t>(row) * columns + (tile - first) * 64 + i]);
    return list;
  }
};

void compare(const Problem& p, int scored_rows, size_t workspace = 64 << 20) {
  const Selection s(p, workspace);
  const Scores scores(s);
  const auto out = s.out.host();
  const int rows = p.visible.rows();
  for (int r = 0; r < rows; ++r) {
    const auto entries = p.visible.entries(r);
    const int keep = s.begin[r + 1] - s.begin[r];
    std::vector<int> order(entries.size());
    std::iota(order.begin(), order.end(), 0);
    if (keep < static_cast<int>(entries.size())) {
      const auto score = scores.of(r);
      ASSERT_EQ(score.size(), entries.size());
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return score[a] > score[b]; });
      order.resize(keep);
      std::sort(order.begin(), order.end());
    }
    for (int i = 0; i < keep; ++i) ASSERT_EQ(out[s.begin[r] + i], entries[order[i]]) << "row " << r << " place " << i;
  }
  // Scores: products of bf16 are exact; FP32 sums of 128 (tensor cores) and of 64 heads.
  for (int n = 0; n < scored_rows; ++n) {
    const int r = n * 37 % rows;
    const auto entries = p.visible.entries(r);
    if (entries.size() < 2) continue;
    const auto score = scores.of(r);
    for (size_t i = 0; i < entries.size(); i += 1 + entries.size() / 50) {
      double want = 0, size = 0;
      for (int h = 0; h < kIndexHeads; ++h) {
        double product = 0;
        for (int c = 0; c < kIndexDim; ++c)
          product += value(p.q[(static_cast<size_t>(r) * kIndexHeads + h) * kIndexDim + c]) *
                     value(p.keys[static_cast<size_t>(entries[i]) * kIndexDim + c]);
        const double term = p.w[static_cast<size_t>(r) * kIndexHeads + h] * std::max(product, 0.0);
        want += term, size += std::abs(term);
      }
      ASSERT_NEAR(score[i], want, size * 4e-6) << "row " << r << " entry " << entries[i];
    }
  }
}
TEST(Indexer, DocumentsSmall) {
  compare(Problem(causal({3, 0, 300, 90}), 100, 16), 20);
  compare(Problem(causal({1}), 1, 16), 1);
}
TEST(Indexer, TiesGoToTheEarlierEntrySmall) { compare(Problem(causal({700}), 175, 32, true), 5); }
TEST(Indexer, Documents) {
  compare(Problem(causal({4000, 1, 37, 2500}), 2000, 512), 30);
  compare(Problem(causal({6000}), 1500, 1024), 30);
}
TEST(Indexer, SeveralLaunchesGiveTheSame) { compare(Problem(causal({4000}), 1000, 256), 5, 1 << 20); }
TEST(Indexer, TreesSmall) {  // a prefix of 400 rows, then branches that see it and their own entries
  Visible v = causal({400});
  for (int branch = 0; branch < 3; ++branch)
    for (int t = 0; t < 61; ++t) {
      const int own = 100 + branch * 20;
      v.row({{0, 100}, {own, own + t / 4}});
    }
  compare(Problem(v, 160, 64), 20);
}
TEST(Indexer, CachePagesSmall) {  // decoding: each row its own sequence, pages of 32 entries out of order
  Visible v;
  for (int r = 0; r < 9; ++r)
    v.row({{r * 32, r * 32 + 32}, {1000 - r * 32, 1032 - r * 32}, {2000 + r * 32, 2003 + r * 32}});
  const Problem p(v, 2400, 40);
  EXPECT_EQ(make_index_groups(v.begin, v.range).group_rows, 1);
  compare(p, 9);
}
TEST(Indexer, LongRows) {
  Visible v;
  for (int r = 0; r < 5; ++r) v.row({{r, 50000 + r * 3000}});
  compare(Problem(v, 65000, 512), 2);
}
TEST(Indexer, NanRanksLastSmall) {
  Problem p(causal({400}), 100, 20);
  for (int c = 0; c < kIndexDim; ++c) p.keys[7 * kIndexDim + c] = float_to_bf16(NAN);
  const Selection s(p);
  const auto out = s.out.host();
  for (int r = 0; r < 400; ++r)
    if (p.visible.entries(r).size() > 30)
      for (int i = s.begin[r]; i < s.begin[r + 1]; ++i) ASSERT_NE(out[i], 7);
}
// The same row in a group of eight, in another one, and alone.
TEST(Indexer, ARowsScoresDependOnThatRowAlone) {
  const Problem p(causal({3000}), 750, 64);
  const Selection all(p);
  const Scores scores(all);
  for (const int row : {2999, 1500, 801}) {
    Visible one;
    one.row({{0, (row + 1) / 4}});
    Problem alone(one, 750, 64);
    const size_t q = static_cast<size_t>(kIndexHeads) * kIndexDim;
    alone.q.assign(p.q.begin() + row * q, p.q.begin() + (row + 1) * q);
    alone.w.assign(p.w.begin() + row * kIndexHeads, p.w.begin() + (row + 1) * kIndexHeads);
    const Selection s(alone);
    EXPECT_EQ(s.groups.group_rows, 1);
    EXPECT_TRUE(same_bits(Scores(s).of(0), scores.of(row))) << row;
  }
}
TEST(Indexer, RepeatsBitwiseBesideOtherWork) {
  Selection s(Problem(causal({3000}), 750, 256));
  const auto out = s.out.host();
  OtherWork work;
  for (int i = 0; i < 100; ++i) {
    work.start(i);
    s.out.poison();
    s.run();
    ASSERT_TRUE(same_bits(s.out.host(), out)) << i;
  }
}

}  // namespace
}  // namespace plumb::kernels
