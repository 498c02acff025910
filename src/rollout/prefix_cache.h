// The prefix cache: whole pages of what sequences have computed, to be found by later sequences that begin with the
// same tokens under the same adapter. A page is in a chain with those before it; it holds all that a sequence needs to
// go on from its end (sequence_plan.h), so a hit copies nothing: the page is used by several sequences at a time.
//
// Pages that nobody uses stay until somebody needs room. Its keys matter only where a hit ends (the next rows' window),
// its entries to whoever goes through the page; so the two are dropped apart, each the least recently used first.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "rollout/adapters.h"
#include "rollout/pages.h"

namespace plumb {

struct PrefixPage {
  PrefixPage* parent = nullptr;  // the page before it; nullptr = first page of its sequences
  int depth = 0;                 // pages before it
  int children = 0;
  std::vector<int> tokens;  // [P]
  std::string adapter;      // that computed the rows, and its version; empty = base model
  int64_t version = 0;
  uint64_t hash = 0;
  struct Part {
    int page = -1;      // number in its pool; -1: dropped (keys only)
    int users = 0;      // sequences that hold it
    uint64_t used = 0;  // when the last one let go
  };
  Part keys, entries;
  std::vector<int32_t> routed;  // [P, layers, experts of a token]; empty = nobody has recorded them
};

class PrefixCache {
 public:
  // The pools must outlive the cache.
  explicit PrefixCache(PagePools& pools) : pools_(pools) {}

  // Hash of a page behind a chain with hash `parent` (0 = first page). adapter: nullptr = base model.
  static uint64_t hash(uint64_t parent, std::span<const int> tokens, const AdapterSnapshot* adapter);
  // The page with these tokens behind `parent`, compared token by token; nullptr: not there.
  PrefixPage* find(const PrefixPage* parent, std::span<const int> tokens, const AdapterSnapshot* adapter) const;
  // Puts in a page that is not there yet; the pages of the pools become its own. It has no user yet.
  PrefixPage* add(PrefixPage* parent, std::span<const int> tokens, const AdapterSnapshot* adapter, int key_page,
                  int entry_page);
  // Gives keys to a page that has none.
  void set_keys(PrefixPage& p, int key_page);

  void use_keys(PrefixPage& p);
  void use_entries(PrefixPage& p);
  void leave_keys(PrefixPage& p);
  // pages: the whole chain that a sequence holds, from the first page on. So a page is never left later than those
  // before it, and when room is made, it goes before them.
  void leave_entries(std::span<PrefixPage* const> pages);

  // Pages that can be had: free ones and those that nobody uses.
  int available_keys() const { return pools_.keys.free() + static_cast<int>(idle_keys_.size()); }
  int available_entries() const { return pools_.entries.free() + static_cast<int>(idle_entries_.size()); }
  // Drops what is needed for so many free pages. false: cannot be had; nothing was dropped.
  bool make_room(int keys, int entries);
  int size() const { return static_cast<int>(pages_.size()); }

 private:
  // By when they were left; of one chain, the last page first.
  using Idle = std::map<std::pair<uint64_t, int>, PrefixPage*>;
  static std::pair<uint64_t, int> place(const PrefixPage& p, const PrefixPage::Part& part) {
    return {part.used, -p.depth};
  }
  void drop_keys(PrefixPage& p);
  void drop(PrefixPage& p);

  PagePools& pools_;
  std::unordered_multimap<uint64_t, std::unique_ptr<PrefixPage>> pages_;  // by hash
  Idle idle_keys_, idle_entries_;
  uint64_t clock_ = 0;
};

}  // namespace plumb
