#include "plan/sequence_plan.h"

#include <algorithm>
#include <limits>
#include <string>

#include "base/error.h"
#include "plan/plan_parts.h"

namespace plumb {
namespace {

// How the rows and entries of one sequence map to numbers in the plan: a run of `count` new rows, numbered from
// first_row, at positions start .. start + count - 1; everything before `start` lives in the cache.
struct Run {
  int first_row, start, count;
  int end() const { return start + count; }
};

// First position whose projected row an entry completed at or after position `end` may still pool: the open window and,
// where windows overlap, the one before it.
int first_needed(const CompressionPlan& plan, int end) {
  const int open = end / plan.ratio * plan.ratio;
  return std::max(0, open - (plan.slots - plan.ratio));
}

// Where the entries of one sequence are stored: `size` of them in consecutive rows from base[0], the next ones from
// base[1], and so on.
struct EntryBlocks {
  int size = std::numeric_limits<int>::max();
  std::vector<int> base;
  int row(int entry) const { return base[entry / size] + entry % size; }
};

// Where one ratio of one cached sequence lives.
struct CompressionSlots {
  EntryBlocks entries;
  int pending_base = 0;
  // Paged, if windows overlap: the rows of the last window of a page of `positions` lie with the page.
  std::span<const int> page;
  int positions = 0;

  bool with_page(int position, int ratio) const { return positions > 0 && position % positions >= positions - ratio; }
  int pending(int position, const CompressionPlan& plan) const {
    if (with_page(position, plan.ratio)) return page[position / positions] * plan.ratio + position % plan.ratio;
    return pending_base + position % plan.slots;
  }
};

// The entries whose window is completed by a row of the run (spec 3.6): entry i pools positions
// (i+1)*ratio - slots .. (i+1)*ratio - 1, those before the sequence absent.
void add_entries(CompressionPlan& plan, const Run& run, int rows, const CompressionSlots& slots) {
  for (int i = run.start / plan.ratio; i < run.end() / plan.ratio; ++i) {
    const int end = (i + 1) * plan.ratio;
    for (int p = end - plan.slots; p < end; ++p) {
      if (p < 0) {
        plan.source.push_back(-1);
      } else if (p >= run.start) {
        plan.source.push_back(run.first_row + p - run.start);
      } else {
        plan.source.push_back(rows + slots.pending(p, plan));
      }
    }
    plan.position.push_back(i * plan.ratio);
  }
}

// Row at position t sees the entries i < floor((t+1) / ratio) of its sequence (spec 3.6).
void add_visible(CompressionPlan& plan, const Run& run, const EntryBlocks& blocks) {
  EntryRanges& visible = plan.visible;
  for (int t = run.start; t < run.end(); ++t) {
    const size_t begin = visible.range.size();
    int left = (t + 1) / plan.ratio;
    for (size_t b = 0; left > 0; ++b) {
      const int first = blocks.base[b], count = std::min(left, blocks.size);
      add_range(visible, begin, first, first + count);
      left -= count;
    }
    visible.begin.push_back(static_cast<int>(visible.range.size()));
  }
}

void check_slots(const PlanShape& shape, const CacheShape& cache, const CacheSlots& s, int start, int count) {
  const int total = start + count;
  PLUMB_CHECK(start >= 0 && s.key_base >= 0 && s.key_capacity > 0 && s.key_base + s.key_capacity <= cache.key_rows);
  // The oldest key of the first row of the step must not be overwritten by the last row of the step.
  PLUMB_CHECK(s.key_capacity >= std::min(total, shape.window + count - 1),
              "key_capacity " + std::to_string(s.key_capacity) + " for a step of " + std::to_string(count) + " rows");
  if (shape.csa_ratio > 0) {
    PLUMB_CHECK(s.csa_base >= 0 && s.csa_base + total / shape.csa_ratio <= cache.csa_entries);
    PLUMB_CHECK(s.csa_pending_base >= 0);
  }
  if (shape.hca_ratio > 0) {
    PLUMB_CHECK(s.hca_base >= 0 && s.hca_base + total / shape.hca_ratio <= cache.hca_entries);
    PLUMB_CHECK(s.hca_pending_base >= 0);
  }
}

// One ratio of one cached sequence: new entries, what its rows see, which rows stay pending afterwards.
void add_cached_compression(CompressionPlan& plan, const Run& run, int rows, const CompressionSlots& slots) {
  add_entries(plan, run, rows, slots);
  for (int i = run.start / plan.ratio; i < run.end() / plan.ratio; ++i) plan.slot.push_back(slots.entries.row(i));
  add_visible(plan, run, slots.entries);
  const int needed = first_needed(plan, run.end());
  for (int p = run.start; p < run.end(); ++p) {
    if (p < needed && !slots.with_page(p, plan.ratio)) continue;
    plan.pending_row.push_back(run.first_row + p - run.start);
    plan.pending_slot.push_back(slots.pending(p, plan));
  }
}

SequencePlan empty_step(const PlanShape& shape, const CacheShape& cache) {
  SequencePlan plan;
  plan.csa = empty_compression(shape.csa_ratio, true);
  plan.hca = empty_compression(shape.hca_ratio, false);
  plan.key_rows = cache.key_rows;
  if (shape.csa_ratio > 0) plan.csa.entries = cache.csa_entries;
  if (shape.hca_ratio > 0) plan.hca.entries = cache.hca_entries;
  return plan;
}

// The rows of one cached sequence in a step of `rows` rows; key_slot(position) says where a window key is stored. The
// last `wanted` rows are wanted.
template <class KeySlot>
void add_cached_run(SequencePlan& plan, const PlanShape& shape, const Run& run, int rows, int wanted,
                    const KeySlot& key_slot, const CompressionSlots& csa, const CompressionSlots& hca) {
  for (int t = run.start; t < run.end(); ++t) {
    for (int p = std::max(0, t - shape.window + 1); p <= t; ++p) plan.window.row.push_back(key_slot(p));
    plan.window.begin.push_back(static_cast<int>(plan.window.row.size()));
    plan.key_slot.push_back(key_slot(t));
    if (t >= run.end() - wanted) plan.wanted.push_back(run.first_row + t - run.start);
  }
  if (shape.csa_ratio > 0) add_cached_compression(plan.csa, run, rows, csa);
  if (shape.hca_ratio > 0) add_cached_compression(plan.hca, run, rows, hca);
}

// What the plan of a step reads and writes must be on pages that the sequence holds.
void check_pages(const PlanShape& shape, const PageShape& pages, const PagedRun& run) {
  const int total = run.length + static_cast<int>(run.tokens.size());
  const int count = (total + pages.positions - 1) / pages.positions;
  PLUMB_CHECK(run.length >= 0 && 0 <= run.wanted && run.wanted <= static_cast<int>(run.tokens.size()));
  PLUMB_CHECK(static_cast<int>(run.table->key_page.size()) >= count, std::to_string(total) + " positions");
  PLUMB_CHECK(static_cast<int>(run.table->entry_page.size()) >= count, std::to_string(total) + " positions");
  const int oldest = std::max(0, run.length - shape.window + 1) / pages.positions;
  for (int i = 0; i < count; ++i) {
    const int key = run.table->key_page[i], entry = run.table->entry_page[i];
    PLUMB_CHECK(key < pages.key_pages && (key >= 0 || i < oldest), "key page " + std::to_string(i));
    PLUMB_CHECK(0 <= entry && entry < pages.entry_pages, "entry page " + std::to_string(i));
  }
}

CompressionSlots paged_slots(const std::vector<int>& page, int positions, const CompressionPlan& plan,
                             int pending_base) {
  CompressionSlots slots{{}, pending_base, {}, 0};
  if (plan.ratio == 0) return slots;
  slots.entries.size = positions / plan.ratio;
  for (int p : page) slots.entries.base.push_back(p * slots.entries.size);
  if (plan.slots > plan.ratio) slots.page = page, slots.positions = positions;
  return slots;
}

}  // namespace

SequencePlan plan_cached_step(const PlanShape& shape, const CacheShape& cache, const std::vector<CacheSlots>& slots,
                              const std::vector<int>& length, const std::vector<std::vector<int>>& tokens,
                              bool want_all) {
  check(shape);
  PLUMB_CHECK(slots.size() == tokens.size() && length.size() == tokens.size());
  SequencePlan plan = empty_step(shape, cache);
  int rows = 0;
  for (const auto& t : tokens) rows += static_cast<int>(t.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const CacheSlots& s = slots[i];
    const Run run{plan.rows(), length[i], static_cast<int>(tokens[i].size())};
    if (run.count == 0) continue;
    check_slots(shape, cache, s, run.start, run.count);
    add_tokens(plan, tokens[i], run.start, static_cast<int>(i));
    const auto key_slot = [&](int position) { return s.key_base + position % s.key_capacity; };
    const CompressionSlots csa{{std::numeric_limits<int>::max(), {s.csa_base}}, s.csa_pending_base, {}, 0};
    const CompressionSlots hca{{std::numeric_limits<int>::max(), {s.hca_base}}, s.hca_pending_base, {}, 0};
    add_cached_run(plan, shape, run, rows, want_all ? run.count : 1, key_slot, csa, hca);
  }
  return plan;
}

CacheShape cache_shape(const PlanShape& shape, const PageShape& pages) {
  const auto entries = [&](int ratio) { return ratio > 0 ? pages.entry_pages * (pages.positions / ratio) : 0; };
  return {pages.key_pages * pages.positions, entries(shape.csa_ratio), entries(shape.hca_ratio)};
}

SequencePlan plan_paged_step(const PlanShape& shape, const PageShape& pages, const std::vector<PagedRun>& runs) {
  check(shape);
  for (int ratio : {shape.csa_ratio, shape.hca_ratio})
    PLUMB_CHECK(pages.positions > 0 && (ratio == 0 || pages.positions % ratio == 0));
  SequencePlan plan = empty_step(shape, cache_shape(shape, pages));
  int rows = 0;
  for (const PagedRun& r : runs) rows += static_cast<int>(r.tokens.size());
  for (size_t i = 0; i < runs.size(); ++i) {
    const PagedRun& r = runs[i];
    const Run run{plan.rows(), r.length, static_cast<int>(r.tokens.size())};
    if (run.count == 0) continue;
    check_pages(shape, pages, r);
    add_tokens(plan, r.tokens, run.start, static_cast<int>(i));
    const int size = pages.positions;
    const auto key_slot = [&](int position) { return r.table->key_page[position / size] * size + position % size; };
    add_cached_run(plan, shape, run, rows, r.wanted, key_slot,
                   paged_slots(r.table->entry_page, size, plan.csa, r.table->csa_pending_base),
                   paged_slots(r.table->entry_page, size, plan.hca, r.table->hca_pending_base));
  }
  return plan;
}

}  // namespace plumb
