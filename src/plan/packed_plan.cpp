// Plans whose rows are all in the batch: packed documents and prefix trees.
#include <algorithm>
#include <string>

#include "base/error.h"
#include "plan/plan_parts.h"

namespace plumb {

void check(const PlanShape& shape) {
  PLUMB_CHECK(shape.window > 0);
  PLUMB_CHECK(shape.csa_ratio >= 0 && shape.hca_ratio >= 0);
}

CompressionPlan empty_compression(int ratio, bool overlap) {
  CompressionPlan plan;
  plan.ratio = ratio;
  plan.slots = overlap ? 2 * ratio : ratio;
  return plan;
}

void add_tokens(SequencePlan& plan, std::span<const int> tokens, int start, int document) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    plan.token.push_back(tokens[i]);
    plan.position.push_back(start + static_cast<int>(i));
    plan.document.push_back(document);
  }
}

void add_range(EntryRanges& visible, size_t list_begin, int first, int last) {
  if (first == last) return;
  if (visible.range.size() > list_begin && visible.range.back().last == first)
    visible.range.back().last = last;
  else
    visible.range.push_back({first, last});
}

namespace {

// Where a segment lies: its rows are first_row, ... at positions start .. end - 1 of its path.
struct Piece {
  int parent, first_row, start, end;
};

// The row at a position of the path that ends with `segment`.
int row_at(const std::vector<Piece>& pieces, int segment, int position) {
  while (position < pieces[segment].start) segment = pieces[segment].parent;
  return pieces[segment].first_row + position - pieces[segment].start;
}

void add_window(SequencePlan& plan, const std::vector<Piece>& pieces, int segment, int window) {
  for (int t = pieces[segment].start; t < pieces[segment].end; ++t) {
    for (int p = std::max(0, t - window + 1); p <= t; ++p) plan.window.row.push_back(row_at(pieces, segment, p));
    plan.window.begin.push_back(static_cast<int>(plan.window.row.size()));
  }
}

// The entries that a segment owns: those whose window is completed inside it. Entry i of a path covers positions
// i*ratio .. (i+1)*ratio - 1, so the owners along a path share its entries out without a gap.
void add_entries(CompressionPlan& plan, const std::vector<Piece>& pieces, int segment) {
  const Piece& s = pieces[segment];
  for (int i = s.start / plan.ratio; i < s.end / plan.ratio; ++i) {
    const int end = (i + 1) * plan.ratio;
    for (int p = end - plan.slots; p < end; ++p) plan.source.push_back(p < 0 ? -1 : row_at(pieces, segment, p));
    plan.position.push_back(i * plan.ratio);
  }
}

// base[s]: number of the first entry that segment s owns. A row at position t sees the entries i < floor((t+1) / ratio)
// of its path, oldest first.
void add_visible(CompressionPlan& plan, const std::vector<Piece>& pieces, int segment, const std::vector<int>& base) {
  std::vector<int> path;
  for (int s = pieces[segment].parent; s >= 0; s = pieces[s].parent) path.push_back(s);
  const Piece& own = pieces[segment];
  for (int t = own.start; t < own.end; ++t) {
    const size_t begin = plan.visible.range.size();
    for (size_t i = path.size(); i-- > 0;) {
      const Piece& s = pieces[path[i]];
      add_range(plan.visible, begin, base[path[i]], base[path[i]] + s.end / plan.ratio - s.start / plan.ratio);
    }
    const int complete = (t + 1) / plan.ratio - own.start / plan.ratio;
    add_range(plan.visible, begin, base[segment], base[segment] + complete);
    plan.visible.begin.push_back(static_cast<int>(plan.visible.range.size()));
  }
}

}  // namespace

SequencePlan plan_trees(const PlanShape& shape, const std::vector<TreeSegment>& segments) {
  check(shape);
  SequencePlan plan;
  plan.csa = empty_compression(shape.csa_ratio, true);
  plan.hca = empty_compression(shape.hca_ratio, false);
  std::vector<Piece> pieces;
  for (const TreeSegment& s : segments) {
    const int index = static_cast<int>(pieces.size()), count = static_cast<int>(s.tokens.size());
    PLUMB_CHECK(-1 <= s.parent && s.parent < index, "segment " + std::to_string(index) + " precedes its parent");
    const int start = s.parent < 0 ? 0 : pieces[s.parent].end;
    pieces.push_back({s.parent, plan.rows(), start, start + count});
    add_tokens(plan, s.tokens, start, s.document);
    add_window(plan, pieces, index, shape.window);
  }
  for (CompressionPlan* c : {&plan.csa, &plan.hca}) {
    if (c->ratio == 0) continue;
    std::vector<int> base;
    for (int s = 0; s < static_cast<int>(pieces.size()); ++s) {
      base.push_back(c->new_entries());
      add_entries(*c, pieces, s);
      add_visible(*c, pieces, s, base);
    }
    c->entries = c->new_entries();
  }
  plan.key_rows = plan.rows();
  for (int r = 0; r < plan.rows(); ++r) plan.wanted.push_back(r);
  return plan;
}

SequencePlan plan_documents(const PlanShape& shape, const std::vector<std::vector<int>>& documents) {
  std::vector<TreeSegment> roots;
  for (size_t d = 0; d < documents.size(); ++d) roots.push_back({-1, documents[d], static_cast<int>(d)});
  return plan_trees(shape, roots);
}

}  // namespace plumb
