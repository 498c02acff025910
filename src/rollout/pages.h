// Pages of the key-value cache: which are free, and how many a sequence needs. A page number belongs to all layers at
// once: page p of the key pool is rows [p*P, (p+1)*P) of every layer's window keys, page p of the entry pool the
// entries (and index keys) of P positions in every layer that has some.
#pragma once
#include <vector>

#include "plan/sequence_plan.h"

namespace plumb {

// Positions of a page: the least common multiple of the compression ratios (128 for the released ones), so that an
// entry never crosses a page; doubled until it is at least 16.
int page_positions(const PlanShape& shape);

class PagePool {
 public:
  explicit PagePool(int pages);
  int total() const { return static_cast<int>(taken_.size()); }
  int free() const { return static_cast<int>(free_.size()); }
  int take();           // there must be a free one
  void give(int page);  // it must be taken

 private:
  std::vector<int> free_;
  std::vector<char> taken_;
};

// Both pools of a cache.
struct PagePools {
  int positions;
  PagePool keys, entries;
  PageShape shape() const { return {positions, keys.total(), entries.total()}; }
  int pages(int length) const { return (length + positions - 1) / positions; }  // that hold `length` positions
};

// Key pages that a sequence of `total` positions holds at most, if no step has more than `chunk` of its rows.
int most_key_pages(int positions, int window, int chunk, int total);

}  // namespace plumb
