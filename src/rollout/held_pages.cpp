#include "rollout/held_pages.h"

#include <algorithm>

#include "base/error.h"

namespace plumb {
namespace {

void release_key(HeldPages& held, size_t page, PageSource from) {
  int& key = held.table.key_page[page];
  if (page < held.shared.size())
    from.prefixes.leave_keys(*held.shared[page]);
  else
    from.pools.keys.give(key);
  key = -1;
}

// The first page whose keys a row at position `length` looks at.
int oldest_key_page(int length, int window, int positions) { return std::max(0, length - window + 1) / positions; }

}  // namespace

bool grow(HeldPages& held, int length, PageSource from) {
  PageTable& t = held.table;
  const int missing = std::max(0, from.pools.pages(length) - static_cast<int>(t.entry_page.size()));
  if (!from.prefixes.make_room(missing, missing)) return false;
  for (int i = 0; i < missing; ++i) {
    t.key_page.push_back(from.pools.keys.take());
    t.entry_page.push_back(from.pools.entries.take());
  }
  return true;
}

void release_passed_keys(HeldPages& held, int length, int window, PageSource from) {
  for (int i = oldest_key_page(length, window, from.pools.positions); i-- > 0 && held.table.key_page[i] >= 0;)
    release_key(held, i, from);  // all before one that is let go are let go
}

void release_all(HeldPages& held, PageSource from) {
  PageTable& t = held.table;
  for (size_t i = 0; i < t.key_page.size(); ++i)
    if (t.key_page[i] >= 0) release_key(held, i, from);
  for (size_t i = held.shared.size(); i < t.entry_page.size(); ++i) from.pools.entries.give(t.entry_page[i]);
  from.prefixes.leave_entries(held.shared);
  t.key_page.clear(), t.entry_page.clear(), held.shared.clear();
}

int held_key_pages(const HeldPages& held) {
  return static_cast<int>(std::ranges::count_if(held.table.key_page, [](int p) { return p >= 0; }));
}

bool window_is_there(const HeldPages& held, std::span<PrefixPage* const> pages, int window, int positions) {
  const size_t first = held.shared.size(), end = first + pages.size();
  for (size_t i = oldest_key_page(static_cast<int>(end) * positions, window, positions); i < end; ++i)
    if ((i < first ? held.table.key_page[i] : pages[i - first]->keys.page) < 0) return false;
  return true;
}

void adopt(HeldPages& held, std::span<PrefixPage* const> pages, int window, PageSource from) {
  PageTable& t = held.table;
  PLUMB_CHECK(t.entry_page.size() == held.shared.size());
  const size_t end = held.shared.size() + pages.size();
  const size_t oldest = oldest_key_page(static_cast<int>(end) * from.pools.positions, window, from.pools.positions);
  for (PrefixPage* p : pages) {
    const bool looked_at = held.shared.size() >= oldest;
    if (looked_at) from.prefixes.use_keys(*p);
    from.prefixes.use_entries(*p);
    t.key_page.push_back(looked_at ? p->keys.page : -1);
    t.entry_page.push_back(p->entries.page);
    held.shared.push_back(p);
  }
  release_passed_keys(held, static_cast<int>(end) * from.pools.positions, window, from);
}

PrefixPage& share(HeldPages& held, std::span<const int> tokens, const AdapterSnapshot* adapter, PageSource from) {
  const size_t at = held.shared.size();
  int &key = held.table.key_page[at], &entry = held.table.entry_page[at];
  PLUMB_CHECK(key >= 0);
  PrefixPage* parent = held.shared.empty() ? nullptr : held.shared.back();
  PrefixPage* p = from.prefixes.find(parent, tokens, adapter);
  if (!p) {
    p = from.prefixes.add(parent, tokens, adapter, key, entry);
  } else {
    from.pools.entries.give(entry);
    if (p->keys.page < 0)
      from.prefixes.set_keys(*p, key);
    else
      from.pools.keys.give(key);
  }
  key = p->keys.page, entry = p->entries.page;
  from.prefixes.use_keys(*p), from.prefixes.use_entries(*p);
  held.shared.push_back(p);
  return *p;
}

}  // namespace plumb
