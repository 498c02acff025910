// The indexer's scores against FP64 on the CPU, and its selection, which must be the exact top-k of its own scores,
// over ranges as documents, trees and caches have them.
#include "kernels/indexer/indexer.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "device_data.cuh"
#include "index_records.h"

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
  IndexForm form;
  std::vector<float> q, keys, w;
  // bf16: normally distributed. Records: FP4, whose exponents are up to `spread` apart.
  Problem(const Visible& visible, int entries, int topk, IndexForm form, int spread = 1)
      : visible(visible), entries(entries), topk(topk), form(form) {
    const auto vectors = [&](size_t count, int seed) {
      return form == IndexForm::record ? random_fp4(count * kIndexDim, spread, seed)
                                       : from_bf16(random_bf16(count * kIndexDim, 1, seed));
    };
    q = vectors(static_cast<size_t>(visible.rows()) * kIndexHeads, 1), keys = vectors(entries, 2);
    w = random_floats(static_cast<size_t>(visible.rows()) * kIndexHeads, 0.01f, 3);
  }
  // Few different scores: ties everywhere.
  void make_coarse() {
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<float>(i / kIndexDim % 5 == i % 5);
  }
  // As the kernel reads vectors.
  std::vector<uint8_t> packed(const std::vector<float>& values) const {
    if (form == IndexForm::record) return records_of(values);
    std::vector<uint8_t> bytes(2 * values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      const uint16_t bits = float_to_bf16(values[i]);
      std::memcpy(&bytes[2 * i], &bits, 2);
    }
    return bytes;
  }
};

struct Selection {
  std::vector<int> begin{0};  // of each row in `out`
  Buffer<uint8_t> q, keys;
  Buffer<float> w;
  IndexGroups groups;
  Buffer<int> tile_begin, tile_first, visible_count, out_begin, out;
  Buffer<uint64_t> visible;
  Buffer<uint8_t> workspace;
  IndexSelection arguments;
  explicit Selection(const Problem& p, size_t workspace_limit = 64 << 20)
      : q(p.packed(p.q)),
        keys(p.packed(p.keys)),
        w(p.w),
        groups(make_index_groups(p.visible.begin, p.visible.range)),
        tile_begin(groups.tile_begin),
        tile_first(groups.tile_first),
        visible_count(groups.visible_count),
        out_begin(begins(p)),
        out(begin.back()),
        visible(groups.visible),
        workspace(index_workspace(groups, workspace_limit)) {
    arguments = {q.get(),
                 w.get(),
                 keys.get(),
                 p.entries,
                 p.form,
                 &groups,
                 {tile_begin.get(), tile_first.get(), visible.get(), visible_count.get()},
                 p.topk,
                 out_begin.get(),
                 out.get(),
                 0,
                 workspace.get(),
                 workspace.size()};
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
  // Scores: products of two channels are exact; FP32 sums of 128 (tensor cores) and of 64 heads.
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
constexpr IndexForm kForms[] = {IndexForm::bf16, IndexForm::record};

TEST(Indexer, DocumentsSmall) {
  for (const IndexForm form : kForms) {
    compare(Problem(causal({3, 0, 300, 90}), 100, 16, form), 20);
    compare(Problem(causal({1}), 1, 16, form), 1);
  }
}
TEST(Indexer, TiesGoToTheEarlierEntrySmall) {
  for (const IndexForm form : kForms) {
    Problem p(causal({700}), 175, 32, form);
    p.make_coarse();
    compare(p, 5);
  }
}
TEST(Indexer, Documents) {
  compare(Problem(causal({4000, 1, 37, 2500}), 2000, 512, IndexForm::record), 30);
  for (const IndexForm form : kForms) compare(Problem(causal({6000}), 1500, 1024, form), 30);
}
TEST(Indexer, SeveralLaunchesGiveTheSame) {
  compare(Problem(causal({4000}), 1000, 256, IndexForm::record), 5, 1 << 20);
}
TEST(Indexer, TreesSmall) {  // a prefix of 400 rows, then branches that see it and their own entries
  Visible v = causal({400});
  for (int branch = 0; branch < 3; ++branch)
    for (int t = 0; t < 61; ++t) {
      const int own = 100 + branch * 20;
      v.row({{0, 100}, {own, own + t / 4}});
    }
  for (const IndexForm form : kForms) compare(Problem(v, 160, 64, form), 20);
}
TEST(Indexer, CachePagesSmall) {  // decoding: each row its own sequence, in pages of 32 entries
  Visible v;
  for (int r = 0; r < 9; ++r)
    v.row({{r * 32, r * 32 + 32}, {1000 - r * 32, 1032 - r * 32}, {2000 + r * 32, 2003 + r * 32}});
  EXPECT_EQ(make_index_groups(v.begin, v.range).group_rows, 1);
  for (const IndexForm form : kForms) compare(Problem(v, 2400, 40, form), 9);
}
// Chunks of prompts and decoding steps of sequences whose pages lie anywhere, in one batch: the order is that of
// positions, also among equal scores.
TEST(Indexer, PagesAnywhereSmall) {
  constexpr int kPages = 40;
  std::vector<int> page(kPages);
  std::iota(page.begin(), page.end(), 0);
  std::mt19937 random(5);
  std::shuffle(page.begin(), page.end(), random);
  Visible v;
  const auto add = [&](int first_page, int entries) {
    for (int e = 0; e < entries; e += 32) {
      const int first = page[first_page + e / 32] * 32, last = first + std::min(32, entries - e);
      if (e > 0 && v.range.back().last == first)
        v.range.back().last = last;
      else
        v.range.push_back({first, last});
    }
    v.begin.push_back(static_cast<int>(v.range.size()));
  };
  for (int t = 0; t < 100; ++t) add(0, (300 + t) / 4);  // five pages
  for (int t = 0; t < 53; ++t) add(5, t / 4);
  for (int t = 0; t < 7; ++t) add(6 + t * 4, 97 + t);
  for (int t = 0; t < 30; ++t) add(34, (150 + t) / 4);
  for (const IndexForm form : kForms) {
    Problem p(v, kPages * 32, 40, form);
    compare(p, 20);
    p.make_coarse();
    compare(p, 20);
  }
}
TEST(Indexer, LongRows) {
  Visible v;
  for (int r = 0; r < 5; ++r) v.row({{r, 50000 + r * 3000}});
  for (const IndexForm form : kForms) compare(Problem(v, 65000, 512, form), 2);
}
TEST(Indexer, NanRanksLastSmall) {
  for (const IndexForm form : kForms) {
    Problem p(causal({400}), 100, 20, form);
    for (int c = 0; c < kIndexDim; ++c) p.keys[7 * kIndexDim + c] = NAN;
    const Selection s(p);
    const auto out = s.out.host();
    for (int r = 0; r < 400; ++r)
      if (p.visible.entries(r).size() > 30)
        for (int i = s.begin[r]; i < s.begin[r + 1]; ++i) ASSERT_NE(out[i], 7);
  }
}

// ---- Records: exponents that are a little apart make some pairs too long for FP8 sums, more make most of them, and
// those of 24 cannot be folded.
TEST(Indexer, RecordsOfAnyExponentsSmall) {
  for (const int spread : {0, 2, 5, 24}) compare(Problem(causal({330, 7}), 100, 16, IndexForm::record, spread), 30);
}
// Products of a head and a key need at most 14 bits and those of the exponents' distances: FP32 sums have them all.
TEST(Indexer, RecordsHaveTheBitsOfBf16) {
  for (const int spread : {0, 1, 2, 4}) {
    const Problem records(causal({1500, 3}), 400, 64, IndexForm::record, spread);
    Problem bf16 = records;
    bf16.form = IndexForm::bf16;
    const Selection a(records), b(bf16);
    EXPECT_TRUE(same_bits(a.out.host(), b.out.host())) << spread;
    const Scores of_records(a), of_bf16(b);
    for (int row = 0; row < 1503; row += 7) ASSERT_TRUE(same_bits(of_records.of(row), of_bf16.of(row))) << spread;
  }
}
// Query and key are the same vector of `large` channels of 6 and some of 0.5, in any order inside of each block: their
// product is the square of their length, odd, and as long as FP8 sums are trusted with: below 2^14 steps of a quarter.
TEST(Indexer, NothingIsLostUpToTheLongestVectors) {
  for (const int large : {7, 14, 28, 56, 111, 112, 113}) {
    Visible v;
    for (int r = 0; r < 8; ++r) v.row({{0, 64}});
    Problem p(v, 64, 1, IndexForm::record);
    std::mt19937 random(large);
    std::vector<float> vector(kIndexDim);
    for (int i = 0; i < kIndexDim; ++i)
      vector[i % 4 * 32 + i / 4] = i < large ? 6 : i < 127 - large % 2 ? .5f : 0;  // all blocks have the same exponent
    double length = 0;
    for (const float x : vector) length += 4 * x * x;
    ASSERT_EQ(static_cast<int>(length) % 2, 1);
    for (int i = 0; i < 64; ++i) {
      for (int b = 0; b < kIndexDim; b += 32) std::shuffle(&vector[b], &vector[b] + 32, random);
      for (float& x : vector) x = random() % 2 ? x : -x;
      std::copy(vector.begin(), vector.end(), &p.keys[i * kIndexDim]);
      for (int r = 0; r < 8; ++r) std::copy(vector.begin(), vector.end(), &p.q[(r * kIndexHeads + i) * kIndexDim]);
    }
    EXPECT_EQ(tail_of(records_of(p.keys).data()).length, length);
    for (int i = 0; i < 64; ++i) {  // the score is this head's product
      for (int r = 0; r < 8; ++r)
        for (int h = 0; h < kIndexHeads; ++h) p.w[r * kIndexHeads + h] = h == i;
      const Selection selection(p);
      EXPECT_EQ(Scores(selection).of(i % 8)[i], length / 4) << large << " channels of 6, vector " << i;
    }
  }
}
// The same row in a group of eight, in another one, and alone: with its neighbours' vectors it may be multiplied in
// another way.
TEST(Indexer, ARowsScoresDependOnThatRowAlone) {
  for (const auto& [form, spread] :
       {std::pair{IndexForm::bf16, 0}, {IndexForm::record, 1}, {IndexForm::record, 2}, {IndexForm::record, 24}}) {
    const Problem p(causal({3000}), 750, 64, form, spread);
    const Selection all(p);
    const Scores scores(all);
    for (const int row : {2999, 1500, 801}) {
      Visible one;
      one.row({{0, (row + 1) / 4}});
      Problem alone = p;
      alone.visible = one;
      const size_t q = static_cast<size_t>(kIndexHeads) * kIndexDim;
      alone.q.assign(p.q.begin() + row * q, p.q.begin() + (row + 1) * q);
      alone.w.assign(p.w.begin() + row * kIndexHeads, p.w.begin() + (row + 1) * kIndexHeads);
      const Selection s(alone);
      EXPECT_EQ(s.groups.group_rows, 1);
      EXPECT_TRUE(same_bits(Scores(s).of(0), scores.of(row))) << row << ", spread " << spread;
    }
  }
}
TEST(Indexer, RepeatsBitwiseBesideOtherWork) {
  Selection s(Problem(causal({3000}), 750, 256, IndexForm::record, 2));
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
