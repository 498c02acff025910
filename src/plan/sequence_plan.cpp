#include "plan/sequence_plan.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace plumb {
namespace {

void check_shape(const PlanShape& shape) {
  PLUMB_CHECK(shape.window > 0);
  PLUMB_CHECK(shape.csa_ratio >= 0 && shape.hca_ratio >= 0);
}

// How the rows and entries of one sequence map to numbers in the plan: a run of `count` new rows, numbered from
// first_row, at positions start .. start + count - 1; everything before `start` lives in the cache.
struct Run {
  int first_row, start, count;
  int end() const { return start + count; }
};

CompressionPlan empty_compression(int ratio, bool overlap) {
  CompressionPlan plan;
  plan.ratio = ratio;
  plan.slots = overlap ? 2 * ratio : ratio;
  return plan;
}

// First position whose projected row an entry completed at or after position `end` may still pool: the open window and,
// where windows overlap, the one before it.
int first_needed(const CompressionPlan& plan, int end) {
  const int open = end / plan.ratio * plan.ratio;
  return std::max(0, open - (plan.slots - plan.ratio));
}

// The entries whose window is completed by a row of the run (spec 3.6): entry i pools positions
// (i+1)*ratio - slots .. (i+1)*ratio - 1, those before the sequence absent. pending_base < 0: nothing is pending.
void add_entries(CompressionPlan& plan, const Run& run, int rows, int pending_base) {
  for (int i = run.start / plan.ratio; i < run.end() / plan.ratio; ++i) {
    const int end = (i + 1) * plan.ratio;
    for (int p = end - plan.slots; p < end; ++p) {
      if (p < 0) {
        plan.source.push_back(-1);
      } else if (p >= run.start) {
        plan.source.push_back(run.first_row + p - run.start);
      } else {
        PLUMB_CHECK(pending_base >= 0, "an entry needs rows of an earlier step, but nothing is pending");
        plan.source.push_back(rows + pending_base + p % plan.slots);
      }
    }
    plan.position.push_back(i * plan.ratio);
  }
}

// Row at position t sees the entries i < floor((t+1) / ratio) of its sequence, numbered from `base` (spec 3.6).
void add_visible(CompressionPlan& plan, const Run& run, int base) {
  EntryRanges& visible = plan.visible;
  for (int t = run.start; t < run.end(); ++t) {
    const int count = (t + 1) / plan.ratio;
    if (count > 0) visible.range.push_back({base, base + count});
    visible.begin.push_back(static_cast<int>(visible.range.size()));
  }
}

void add_tokens(SequencePlan& plan, const std::vector<int>& tokens, int start, int document) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    plan.token.push_back(tokens[i]);
    plan.position.push_back(start + static_cast<int>(i));
    plan.document.push_back(document);
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
void add_cached_compression(CompressionPlan& plan, const Run& run, int rows, int entry_base, int pending_base) {
  const int first_new = run.start / plan.ratio;
  add_entries(plan, run, rows, pending_base);
  for (int i = first_new; i < run.end() / plan.ratio; ++i) plan.slot.push_back(entry_base + i);
  add_visible(plan, run, entry_base);
  for (int p = std::max(run.start, first_needed(plan, run.end())); p < run.end(); ++p) {
    plan.pending_row.push_back(run.first_row + p - run.start);
    plan.pending_slot.push_back(pending_base + p % plan.slots);
  }
}

}  // namespace

SequencePlan plan_documents(const PlanShape& shape, const std::vector<std::vector<int>>& documents) {
  check_shape(shape);
  SequencePlan plan;
  plan.csa = empty_compression(shape.csa_ratio, true);
  plan.hca = empty_compression(shape.hca_ratio, false);
  int rows = 0;
  for (const auto& d : documents) rows += static_cast<int>(d.size());
  for (size_t d = 0; d < documents.size(); ++d) {
    const Run run{plan.rows(), 0, static_cast<int>(documents[d].size())};
    add_tokens(plan, documents[d], 0, static_cast<int>(d));
    for (int t = 0; t < run.count; ++t) {
      for (int p = std::max(0, t - shape.window + 1); p <= t; ++p) plan.window.row.push_back(run.first_row + p);
      plan.window.begin.push_back(static_cast<int>(plan.window.row.size()));
    }
    for (CompressionPlan* c : {&plan.csa, &plan.hca}) {
      if (c->ratio == 0) continue;
      const int base = c->new_entries();
      add_entries(*c, run, rows, -1);
      add_visible(*c, run, base);
    }
  }
  plan.key_rows = rows;
  plan.csa.entries = plan.csa.new_entries();
  plan.hca.entries = plan.hca.new_entries();
  for (int r = 0; r < rows; ++r) plan.wanted.push_back(r);
  return plan;
}

SequencePlan plan_cached_step(const PlanShape& shape, const CacheShape& cache, const std::vector<CacheSlots>& slots,
                              const std::vector<int>& length, const std::vector<std::vector<int>>& tokens,
                              bool want_all) {
  check_shape(shape);
  PLUMB_CHECK(slots.size() == tokens.size() && length.size() == tokens.size());
  SequencePlan plan;
  plan.csa = empty_compression(shape.csa_ratio, true);
  plan.hca = empty_compression(shape.hca_ratio, false);
  plan.key_rows = cache.key_rows;
  if (shape.csa_ratio > 0) plan.csa.entries = cache.csa_entries;
  if (shape.hca_ratio > 0) plan.hca.entries = cache.hca_entries;
  int rows = 0;
  for (const auto& t : tokens) rows += static_cast<int>(t.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const CacheSlots& s = slots[i];
    const Run run{plan.rows(), length[i], static_cast<int>(tokens[i].size())};
    if (run.count == 0) continue;
    check_slots(shape, cache, s, run.start, run.count);
    add_tokens(plan, tokens[i], run.start, static_cast<int>(i));
    const auto key_slot = [&](int position) { return s.key_base + position % s.key_capacity; };
    for (int t = run.start; t < run.end(); ++t) {
      for (int p = std::max(0, t - shape.window + 1); p <= t; ++p) plan.window.row.push_back(key_slot(p));
      plan.window.begin.push_back(static_cast<int>(plan.window.row.size()));
      plan.key_slot.push_back(key_slot(t));
      if (want_all || t + 1 == run.end()) plan.wanted.push_back(run.first_row + t - run.start);
    }
    if (shape.csa_ratio > 0) add_cached_compression(plan.csa, run, rows, s.csa_base, s.csa_pending_base);
    if (shape.hca_ratio > 0) add_cached_compression(plan.hca, run, rows, s.hca_base, s.hca_pending_base);
  }
  return plan;
}

}  // namespace plumb
