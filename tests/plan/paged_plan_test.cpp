// A step over pages against the same step over plain slots, which sequence_plan_test.cpp checks against definitions:
// every row of the cache that the paged plan names, read back through the page tables, is that of the plain plan.
#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "base/error.h"
#include "plan/sequence_plan.h"

namespace plumb {
namespace {

constexpr PlanShape kShape{8, 4, 16};
constexpr PageShape kPages{16, 40, 50};

std::vector<int> entries_of(const EntryRanges& v, int row) {
  std::vector<int> all;
  for (int r = v.begin[row]; r < v.begin[row + 1]; ++r)
    for (int e = v.range[r].first; e < v.range[r].last; ++e) all.push_back(e);
  return all;
}

// Row of the paged cache -> row of the plain one, where position p is row p and entry i is row i.
std::vector<int> read_back(const std::vector<int>& rows, const std::vector<int>& page, int size) {
  std::vector<int> plain;
  for (int r : rows) {
    const auto at = std::find(page.begin(), page.end(), r / size);
    plain.push_back(at == page.end() ? -1 : static_cast<int>(at - page.begin()) * size + r % size);
  }
  return plain;
}

// Pending slots of the paged plan: those of the pages, then those of the sequence.
constexpr int kCsaBase = kPages.entry_pages * kShape.csa_ratio;

// The slot that the plain plan has for what is in `slot` of the paged one; -1 if the page is not of this sequence.
int plain_slot(int slot, const CompressionPlan& plan, const std::vector<int>& page) {
  if (plan.slots == plan.ratio) return slot;
  if (slot >= kCsaBase) return slot - kCsaBase;
  const bool known = std::find(page.begin(), page.end(), slot / plan.ratio) != page.end();
  return known ? (kPages.positions - plan.ratio + slot % plan.ratio) % plan.slots : -1;
}

void expect_same(const CompressionPlan& paged, const CompressionPlan& plain, const std::vector<int>& page,
                 int first_row_position, int rows) {
  const int size = kPages.positions / plain.ratio;
  EXPECT_EQ(paged.entries, kPages.entry_pages * size);
  EXPECT_EQ(paged.position, plain.position);
  std::vector<int> source = paged.source;
  for (int& s : source)
    if (s >= rows) s = rows + plain_slot(s - rows, paged, page);
  EXPECT_EQ(source, plain.source);
  // What the plain plan keeps, and the last window of every page on the way.
  std::map<int, int> kept;
  for (size_t i = 0; i < plain.pending_row.size(); ++i) kept[plain.pending_row[i]] = plain.pending_slot[i];
  for (int row = 0; row < rows; ++row) {
    const int position = first_row_position + row;
    if (plain.slots > plain.ratio && position % kPages.positions >= kPages.positions - plain.ratio)
      kept[row] = position % plain.slots;
  }
  std::map<int, int> found;
  for (size_t i = 0; i < paged.pending_row.size(); ++i) {
    const int row = paged.pending_row[i], slot = paged.pending_slot[i];
    found[row] = plain_slot(slot, paged, page);
    if (paged.slots > paged.ratio && slot < kCsaBase) {
      EXPECT_EQ(slot / paged.ratio, page[(first_row_position + row) / kPages.positions]);
    }
  }
  EXPECT_EQ(found, kept);
  EXPECT_EQ(found.size(), paged.pending_row.size());
  EXPECT_EQ(read_back(paged.slot, page, size), plain.slot);
  for (size_t row = 0; row + 1 < plain.visible.begin.size(); ++row)
    ASSERT_EQ(read_back(entries_of(paged.visible, row), page, size), entries_of(plain.visible, row)) << row;
}

PageTable scattered_pages(int count) {  // none next to the one before, but the last two
  PageTable table;
  for (int i = 0; i < count; ++i) {
    table.key_page.push_back((7 + 11 * i) % kPages.key_pages);
    table.entry_page.push_back((3 + 17 * i) % kPages.entry_pages);
  }
  if (count > 1) table.entry_page.back() = table.entry_page[count - 2] + 1;
  return table;
}

TEST(PlanPagedStep, NamesTheRowsOfThePlainPlan) {
  for (int length : {0, 1, 7, 15, 16, 17, 60, 63, 64, 100})
    for (int count : {1, 2, 5, 16, 33}) {
      const int total = length + count, pages = (total + 15) / 16;
      PageTable table = scattered_pages(pages);
      table.csa_pending_base = kCsaBase;
      const std::vector<int> held = table.key_page;
      for (int i = 0; i < std::max(0, length - 7) / 16; ++i) table.key_page[i] = -1;  // passed
      std::vector<int> tokens(count);
      std::iota(tokens.begin(), tokens.end(), 5);
      const SequencePlan paged = plan_paged_step(kShape, kPages, {{&table, length, tokens, 1}});
      CacheSlots slots;
      slots.key_capacity = total;
      const SequencePlan plain =
          plan_cached_step(kShape, {total, total / 4, total / 16}, {slots}, {length}, {tokens}, false);
      EXPECT_EQ(paged.token, plain.token);
      EXPECT_EQ(paged.position, plain.position);
      EXPECT_EQ(paged.wanted, plain.wanted);
      EXPECT_EQ(paged.key_rows, kPages.key_pages * 16);
      EXPECT_EQ(paged.window.begin, plain.window.begin);
      EXPECT_EQ(read_back(paged.window.row, held, 16), plain.window.row);
      EXPECT_EQ(read_back(paged.key_slot, held, 16), plain.key_slot);
      expect_same(paged.csa, plain.csa, table.entry_page, length, count);
      expect_same(paged.hca, plain.hca, table.entry_page, length, count);
      if (HasFailure()) FAIL() << length << " + " << count;
    }
}

TEST(PlanPagedStep, EachRunSaysHowManyOfItsRowsAreWanted) {
  PageTable a = scattered_pages(2), b = scattered_pages(1), c = scattered_pages(1);
  b.key_page[0] = 1, b.entry_page[0] = 1, c.key_page[0] = 2, c.entry_page[0] = 2;
  const std::vector<int> tokens = {1, 2, 3, 4};
  const SequencePlan plan =
      plan_paged_step(kShape, kPages, {{&a, 20, tokens, 2}, {&b, 0, {}, 0}, {&b, 3, tokens, 0}, {&c, 0, tokens, 4}});
  EXPECT_EQ(plan.wanted, (std::vector<int>{2, 3, 8, 9, 10, 11}));
}

TEST(PlanPagedStep, MissingPagesAreRefused) {
  const std::vector<int> tokens = {1, 2};
  PageTable table = scattered_pages(2);
  const auto plan = [&](int length) { return plan_paged_step(kShape, kPages, {{&table, length, tokens, 1}}); };
  EXPECT_NO_THROW(plan(30));
  EXPECT_THROW(plan(31), Error);
  table.key_page[0] = -1;
  EXPECT_THROW(plan(22), Error);  // its window reaches back to position 15
  EXPECT_NO_THROW(plan(23));
  table.entry_page[0] = kPages.entry_pages;
  EXPECT_THROW(plan(23), Error);
  EXPECT_THROW(plan_paged_step(kShape, {8, 40, 50}, {}), Error);  // a page holds no whole entry of ratio 16
}

}  // namespace
}  // namespace plumb
