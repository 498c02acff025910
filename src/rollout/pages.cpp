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

int most_key_pages(const PagePools& pools, int window, int chunk, int total) {
  // A step looks at window - 1 + chunk positions in a row, which may begin at the last position of a page.
  const int span = window - 1 + chunk;
  return std::min(pools.pages(total), pools.pages(span - 1) + 1);
}

bool grow(PageTable& table, int length, PagePools& pools) {
  const int wanted = pools.pages(length), missing = wanted - static_cast<int>(table.entry_page.size());
  if (missing > pools.keys.free() || missing > pools.entries.free()) return false;
  for (int i = 0; i < missing; ++i) {
    table.key_page.push_back(pools.keys.take());
    table.entry_page.push_back(pools.entries.take());
  }
  return true;
}

void release_passed_keys(PageTable& table, int length, int window, PagePools& pools) {
  const int passed = std::max(0, length - window + 1) / pools.positions;
  for (int i = passed; i-- > 0 && table.key_page[i] >= 0;) {  // all before a given back page are given back
    pools.keys.give(table.key_page[i]);
    table.key_page[i] = -1;
  }
}

int held_key_pages(const PageTable& table) {
  return static_cast<int>(std::count_if(table.key_page.begin(), table.key_page.end(), [](int p) { return p >= 0; }));
}

void release_all(PageTable& table, PagePools& pools) {
  for (int p : table.key_page)
    if (p >= 0) pools.keys.give(p);
  for (int p : table.entry_page) pools.entries.give(p);
  table.key_page.clear(), table.entry_page.clear();
}

}  // namespace plumb
