#include "rollout/prefix_cache.h"

#include <algorithm>

#include "base/error.h"
#include "base/hash.h"

namespace plumb {

uint64_t PrefixCache::hash(uint64_t parent, std::span<const int> tokens, const AdapterSnapshot* adapter) {
  uint64_t h = hash_bytes(&parent, sizeof(parent));
  if (adapter) h = hash_bytes(&adapter->version, sizeof(adapter->version), hash_text(adapter->name, h));
  return mix_bits(hash_bytes(tokens.data(), tokens.size_bytes(), h));
}

PrefixPage* PrefixCache::find(const PrefixPage* parent, std::span<const int> tokens,
                              const AdapterSnapshot* adapter) const {
  const auto [begin, end] = pages_.equal_range(hash(parent ? parent->hash : 0, tokens, adapter));
  for (auto it = begin; it != end; ++it) {
    PrefixPage& p = *it->second;
    const bool same_adapter = adapter ? p.adapter == adapter->name && p.version == adapter->version : p.adapter.empty();
    if (p.parent == parent && same_adapter && std::ranges::equal(p.tokens, tokens)) return &p;
  }
  return nullptr;
}

PrefixPage* PrefixCache::add(PrefixPage* parent, std::span<const int> tokens, const AdapterSnapshot* adapter,
                             int key_page, int entry_page) {
  auto page = std::make_unique<PrefixPage>();
  page->parent = parent;
  if (parent) page->depth = parent->depth + 1, ++parent->children;
  page->tokens.assign(tokens.begin(), tokens.end());
  if (adapter) page->adapter = adapter->name, page->version = adapter->version;
  page->hash = hash(parent ? parent->hash : 0, tokens, adapter);
  page->entries.page = entry_page, page->entries.used = ++clock_;
  idle_entries_[place(*page, page->entries)] = page.get();
  set_keys(*page, key_page);
  return pages_.emplace(page->hash, std::move(page))->second.get();
}

void PrefixCache::set_keys(PrefixPage& p, int key_page) {
  PLUMB_CHECK(p.keys.page < 0 && p.keys.users == 0);
  p.keys.page = key_page, p.keys.used = ++clock_;
  idle_keys_[place(p, p.keys)] = &p;
}

void PrefixCache::use_keys(PrefixPage& p) {
  PLUMB_CHECK(p.keys.page >= 0);
  if (p.keys.users++ == 0) idle_keys_.erase(place(p, p.keys));
}

void PrefixCache::use_entries(PrefixPage& p) {
  if (p.entries.users++ == 0) idle_entries_.erase(place(p, p.entries));
}

void PrefixCache::leave_keys(PrefixPage& p) {
  PLUMB_CHECK(p.keys.users > 0);
  p.keys.used = ++clock_;
  if (--p.keys.users == 0) idle_keys_[place(p, p.keys)] = &p;
}

void PrefixCache::leave_entries(std::span<PrefixPage* const> pages) {
  ++clock_;
  for (PrefixPage* p : pages) {
    PLUMB_CHECK(p->entries.users > 0);
    p->entries.used = clock_;
    if (--p->entries.users == 0) idle_entries_[place(*p, p->entries)] = p;
  }
}

bool PrefixCache::make_room(int keys, int entries) {
  if (keys > available_keys() || entries > available_entries()) return false;
  while (pools_.entries.free() < entries) drop(*idle_entries_.begin()->second);
  while (pools_.keys.free() < keys) drop_keys(*idle_keys_.begin()->second);
  return true;
}

void PrefixCache::drop_keys(PrefixPage& p) {
  idle_keys_.erase(place(p, p.keys));
  pools_.keys.give(p.keys.page);
  p.keys.page = -1;
}

void PrefixCache::drop(PrefixPage& p) {
  PLUMB_CHECK(p.children == 0 && p.entries.users == 0 && p.keys.users == 0);
  if (p.keys.page >= 0) drop_keys(p);
  idle_entries_.erase(place(p, p.entries));
  pools_.entries.give(p.entries.page);
  if (p.parent) --p.parent->children;
  const auto [begin, end] = pages_.equal_range(p.hash);
  pages_.erase(std::find_if(begin, end, [&](const auto& e) { return e.second.get() == &p; }));
}

}  // namespace plumb
