#include "rollout/pages.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace plumb {

int page_positions(const PlanShape& shape) {
  int positions = std::lcm(std::max(1, shape.csa_ratio), std::max(1, shape.hca_ratio));
  while (positions < 16) positions *= 2;
  return positions;
}

PagePool::PagePool(int pages) : taken_(pages) {
  for (int p = pages; p-- > 0;) free_.push_back(p);
}

int PagePool::take() {
  PLUMB_CHECK(!free_.empty());
  const int page = free_.back();
  free_.pop_back();
  taken_[page] = true;
  return page;
}

void PagePool::give(int page) {
  PLUMB_CHECK(0 <= page && page < total() && taken_[page], "page " + std::to_string(page));
  taken_[page] = false;
  free_.push_back(page);
}

int most_key_pages(int positions, int window, int chunk, int total) {
  // A step looks at window - 1 + chunk positions in a row, which may begin at the last position of a page.
  const int span = window - 1 + chunk;
  const auto pages = [&](int length) { return (length + positions - 1) / positions; };
  return std::min(pages(total), pages(span - 1) + 1);
}

}  // namespace plumb
