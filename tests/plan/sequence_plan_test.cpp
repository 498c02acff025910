#include "plan/sequence_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <string>

#include "base/error.h"

namespace plumb {
namespace {

std::vector<int> numbers(int n, int from = 0) {
  std::vector<int> v(n);
  std::iota(v.begin(), v.end(), from);
  return v;
}
std::vector<int> list(const KeyLists& l, int i) { return {l.row.begin() + l.begin[i], l.row.begin() + l.begin[i + 1]}; }
std::vector<int> seen(const EntryRanges& v, int i) {
  std::vector<int> out;
  for (int r = v.begin[i]; r < v.begin[i + 1]; ++r)
    for (int e = v.range[r].first; e < v.range[r].last; ++e) out.push_back(e);
  return out;
}

// The definitions of spec 3.4 and 3.6 for one document alone, spelled out by testing every candidate.
std::vector<int> window_by_definition(int t, int window) {
  std::vector<int> out;
  for (int j = 0; j <= t; ++j)
    if (t - j < window) out.push_back(j);
  return out;
}
std::vector<int> visible_by_definition(int t, int ratio, int length) {
  std::vector<int> out;
  for (int i = 0; (i + 1) * ratio <= length; ++i)
    if ((i + 1) * ratio - 1 <= t) out.push_back(i);
  return out;
}
std::vector<int> source_by_definition(int i, int ratio, bool overlap) {
  std::vector<int> out;
  if (overlap)
    for (int j = 0; j < ratio; ++j) out.push_back(i == 0 ? -1 : (i - 1) * ratio + j);
  for (int j = 0; j < ratio; ++j) out.push_back(i * ratio + j);
  return out;
}

void expect_compression(const CompressionPlan& p, int ratio, bool overlap, int length) {
  ASSERT_EQ(p.new_entries(), length / ratio);
  ASSERT_EQ(p.entries, length / ratio);
  for (int i = 0; i < p.new_entries(); ++i) {
    EXPECT_EQ(p.position[i], i * ratio);
    EXPECT_EQ(std::vector<int>(p.source.begin() + i * p.slots, p.source.begin() + (i + 1) * p.slots),
              source_by_definition(i, ratio, overlap));
  }
  ASSERT_EQ(p.visible.begin.size(), length + 1u);
  for (int t = 0; t < length; ++t) ASSERT_EQ(seen(p.visible, t), visible_by_definition(t, ratio, length)) << t;
}

TEST(PlanDocuments, OneDocumentFollowsTheDefinitions) {
  for (int length : {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 127, 128, 129, 257, 300}) {
    const PlanShape shape{16, 4, 32};
    const SequencePlan p = plan_documents(shape, {numbers(length, 100)});
    ASSERT_EQ(p.rows(), length);
    EXPECT_EQ(p.key_rows, length);
    EXPECT_EQ(p.token, numbers(length, 100));
    EXPECT_EQ(p.position, numbers(length));
    EXPECT_EQ(p.wanted, numbers(length));
    EXPECT_TRUE(p.key_slot.empty());
    ASSERT_EQ(p.window.size(), length);
    for (int t = 0; t < length; ++t) ASSERT_EQ(list(p.window, t), window_by_definition(t, 16));
    expect_compression(p.csa, 4, true, length);
    expect_compression(p.hca, 32, false, length);
  }
}

TEST(PlanDocuments, ShortDocumentHasNoEntries) {
  const SequencePlan p = plan_documents({128, 4, 128}, {numbers(3)});
  EXPECT_EQ(p.csa.new_entries(), 0);
  EXPECT_EQ(p.hca.new_entries(), 0);
  EXPECT_TRUE(p.csa.visible.range.empty());
  EXPECT_EQ(list(p.window, 2), numbers(3));
}

TEST(PlanDocuments, AbsentRatioHasNoPlan) {
  const SequencePlan p = plan_documents({8, 0, 0}, {numbers(40)});
  for (const CompressionPlan* c : {&p.csa, &p.hca}) {
    EXPECT_EQ(c->ratio, 0);
    EXPECT_EQ(c->entries, 0);
  }
}

TEST(PlanDocuments, PackedEqualsSeparateShifted) {
  const PlanShape shape{8, 4, 16};
  const std::vector<int> lengths = {5, 0, 17, 3, 1, 32, 0, 47, 16};
  std::vector<std::vector<int>> documents;
  for (int n : lengths) documents.push_back(numbers(n, 1000 * static_cast<int>(documents.size())));
  const SequencePlan packed = plan_documents(shape, documents);
  int row = 0;
  std::map<std::string, int> entry{{"csa", 0}, {"hca", 0}};
  for (size_t d = 0; d < documents.size(); ++d) {
    const SequencePlan alone = plan_documents(shape, {documents[d]});
    const auto shift = [](std::vector<int> v, int by) {
      for (int& x : v) x += x < 0 ? 0 : by;
      return v;
    };
    for (int t = 0; t < lengths[d]; ++t) {
      ASSERT_EQ(packed.token[row + t], alone.token[t]);
      ASSERT_EQ(packed.position[row + t], t);
      ASSERT_EQ(packed.document[row + t], static_cast<int>(d));
      ASSERT_EQ(list(packed.window, row + t), shift(list(alone.window, t), row));
      ASSERT_EQ(seen(packed.csa.visible, row + t), shift(seen(alone.csa.visible, t), entry["csa"]));
      ASSERT_EQ(seen(packed.hca.visible, row + t), shift(seen(alone.hca.visible, t), entry["hca"]));
    }
    for (auto [name, member] : {std::pair{"csa", &SequencePlan::csa}, std::pair{"hca", &SequencePlan::hca}}) {
      const CompressionPlan &all = packed.*member, &one = alone.*member;
      int& at = entry[name];
      const std::vector<int> part(all.source.begin() + at * all.slots,
                                  all.source.begin() + (at + one.new_entries()) * all.slots);
      ASSERT_EQ(part, shift(one.source, row));
      for (int i = 0; i < one.new_entries(); ++i) ASSERT_EQ(all.position[at + i], one.position[i]);
      at += one.new_entries();
    }
    row += lengths[d];
  }
  EXPECT_EQ(packed.csa.entries, entry["csa"]);
  EXPECT_EQ(packed.hca.entries, entry["hca"]);
}

// A cache that remembers which position of which sequence each of its slots holds. A step is checked by reading every
// slot that it names: the positions must be those of the definitions.
struct PositionCache {
  PlanShape shape;
  CacheShape totals;
  std::vector<CacheSlots> slots;
  std::vector<int> length;
  using Place = std::pair<int, int>;  // sequence, position (or entry)
  std::map<int, Place> keys;
  std::map<int, Place> entries[2], pending[2];

  void step(const std::vector<std::vector<int>>& tokens, bool want_all) {
    const SequencePlan p = plan_cached_step(shape, totals, slots, length, tokens, want_all);
    std::vector<Place> rows;
    std::vector<int> wanted;
    for (size_t s = 0; s < tokens.size(); ++s)
      for (size_t i = 0; i < tokens[s].size(); ++i) {
        if (want_all || i + 1 == tokens[s].size()) wanted.push_back(static_cast<int>(rows.size()));
        rows.push_back({static_cast<int>(s), length[s] + static_cast<int>(i)});
      }
    ASSERT_EQ(p.rows(), static_cast<int>(rows.size()));
    EXPECT_EQ(p.wanted, wanted);
    EXPECT_EQ(p.key_rows, totals.key_rows);
    for (int r = 0; r < p.rows(); ++r) {
      ASSERT_EQ(p.position[r], rows[r].second);
      ASSERT_LT(p.key_slot[r], totals.key_rows);
      keys[p.key_slot[r]] = rows[r];
    }
    check_compression(p.csa, 0, rows);
    check_compression(p.hca, 1, rows);
    for (int r = 0; r < p.rows(); ++r) {  // all rows of the step are stored before any of them looks
      std::vector<int> positions;
      for (int slot : list(p.window, r)) {
        ASSERT_EQ(keys.at(slot).first, rows[r].first);
        positions.push_back(keys.at(slot).second);
      }
      ASSERT_EQ(positions, window_by_definition(rows[r].second, shape.window));
    }
    for (size_t s = 0; s < tokens.size(); ++s) length[s] += static_cast<int>(tokens[s].size());
  }

  void check_compression(const CompressionPlan& p, int kind, const std::vector<Place>& rows) {
    const int n = static_cast<int>(rows.size());
    ASSERT_EQ(p.entries, kind == 0 ? totals.csa_entries : totals.hca_entries);
    for (int i = 0; i < p.new_entries(); ++i) {
      const int number = p.position[i] / p.ratio;
      std::vector<int> positions;
      int sequence = -1;
      for (int j = 0; j < p.slots; ++j) {
        const int source = p.source[i * p.slots + j];
        const Place place = source < 0 ? Place{-1, -1} : source < n ? rows[source] : pending[kind].at(source - n);
        positions.push_back(place.second);
        if (place.first >= 0) {
          ASSERT_TRUE(sequence < 0 || sequence == place.first);
          sequence = place.first;
        }
      }
      ASSERT_EQ(positions, source_by_definition(number, p.ratio, kind == 0));
      ASSERT_LT(p.slot[i], p.entries);
      entries[kind][p.slot[i]] = {sequence, number};
    }
    for (int r = 0; r < n; ++r) {
      std::vector<int> numbers;
      for (int slot : seen(p.visible, r)) {
        ASSERT_EQ(entries[kind].at(slot).first, rows[r].first);
        numbers.push_back(entries[kind].at(slot).second);
      }
      ASSERT_EQ(numbers, visible_by_definition(rows[r].second, p.ratio, rows[r].second + 1));
    }
    ASSERT_EQ(p.pending_row.size(), p.pending_slot.size());
    for (size_t i = 0; i < p.pending_row.size(); ++i) pending[kind][p.pending_slot[i]] = rows[p.pending_row[i]];
  }
};

PositionCache cache_for(const PlanShape& shape, int sequences, int longest, int step) {
  PositionCache c{shape, {}, {}, std::vector<int>(sequences), {}, {}, {}};
  const int capacity = shape.window + step - 1;
  int csa_pending = 3, hca_pending = 5;  // bases need not start at 0
  for (int s = 0; s < sequences; ++s) {
    c.slots.push_back(
        {c.totals.key_rows, capacity, c.totals.csa_entries, c.totals.hca_entries, csa_pending, hca_pending});
    c.totals.key_rows += capacity;
    c.totals.csa_entries += longest / std::max(1, shape.csa_ratio);
    c.totals.hca_entries += longest / std::max(1, shape.hca_ratio);
    csa_pending += 2 * shape.csa_ratio;
    hca_pending += shape.hca_ratio;
  }
  return c;
}

TEST(PlanCachedStep, EveryChunkSizeSeesTheSamePositions) {
  const PlanShape shape{16, 4, 32};
  for (int chunk = 1; chunk <= 300; chunk += chunk < 40 ? 1 : 37) {
    PositionCache c = cache_for(shape, 1, 300, chunk);
    for (int done = 0; done < 300; done += chunk) {
      c.step({numbers(std::min(chunk, 300 - done))}, chunk % 2 == 0);
      if (HasFatalFailure()) FAIL() << "chunk " << chunk << ", after " << done;
    }
  }
}

TEST(PlanCachedStep, PrefillOfEveryLengthThenDecode) {
  const PlanShape shape{8, 4, 16};
  for (int prompt = 1; prompt <= 300; ++prompt) {
    PositionCache c = cache_for(shape, 1, 320, prompt);
    c.step({numbers(prompt)}, false);
    for (int i = 0; i < 6; ++i) c.step({{7}}, false);
    if (HasFatalFailure()) FAIL() << "prompt " << prompt;
  }
}

TEST(PlanCachedStep, SeveralSequencesOfDifferentPaceShareOneCache) {
  PositionCache c = cache_for({16, 4, 32}, 3, 400, 50);
  for (int i = 0; i < 40; ++i) {
    c.step({numbers(i % 5 == 0 ? 33 : 1), numbers(i % 3), i < 8 ? numbers(50) : std::vector<int>{}}, i % 7 == 0);
    if (HasFatalFailure()) FAIL() << "step " << i;
  }
  EXPECT_EQ(c.length, (std::vector<int>{8 * 33 + 32, 39, 400}));
}

TEST(PlanCachedStep, WholeDocumentEqualsPlanDocuments) {
  const PlanShape shape{16, 4, 32};
  const SequencePlan a = plan_documents(shape, {numbers(77)});
  CacheSlots slots;
  slots.key_capacity = 77;  // no wrap needed: the whole sequence fits
  const SequencePlan b = plan_cached_step(shape, {77, 19, 2}, {slots}, {0}, {numbers(77)}, true);
  EXPECT_EQ(a.window.row, b.window.row);
  EXPECT_EQ(a.csa.source, b.csa.source);
  EXPECT_EQ(a.hca.source, b.hca.source);
  EXPECT_EQ(b.key_slot, numbers(77));
  EXPECT_EQ(b.csa.slot, numbers(19));
  EXPECT_EQ(a.wanted, b.wanted);
}

TEST(PlanCachedStep, TooSmallCachesAreRefused) {
  const PlanShape shape{16, 4, 32};
  CacheSlots slots;
  slots.key_capacity = 18;
  const auto step = [&](CacheShape cache, int length, int count) {
    return plan_cached_step(shape, cache, {slots}, {length}, {numbers(count)}, false);
  };
  EXPECT_NO_THROW(step({18, 25, 3}, 97, 3));
  EXPECT_THROW(step({18, 25, 3}, 96, 4), Error);  // ring: 16 + 4 - 1 rows needed
  EXPECT_THROW(step({17, 25, 3}, 97, 3), Error);  // ring outside the buffer
  EXPECT_THROW(step({18, 24, 3}, 97, 3), Error);  // no room for entry 24
  EXPECT_THROW(step({18, 25, 2}, 97, 3), Error);
  EXPECT_THROW(plan_cached_step(shape, {18, 25, 3}, {slots}, {0, 0}, {{1}}, false), Error);
}

}  // namespace
}  // namespace plumb
