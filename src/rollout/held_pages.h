// The pages that one sequence holds: the first ones in the prefix cache, maybe together with other sequences; the
// others its own. A page is written only while it is somebody's own.
#pragma once
#include <span>
#include <vector>

#include "plan/sequence_plan.h"
#include "rollout/prefix_cache.h"

namespace plumb {

struct HeldPages {
  PageTable table;
  std::vector<PrefixPage*> shared;  // its first pages, as far as they are in the prefix cache
};

// What a sequence takes pages from.
struct PageSource {
  PagePools& pools;
  PrefixCache& prefixes;
};

// Takes the pages for positions < length that are missing. false: there are too few, nothing was taken.
bool grow(HeldPages& held, int length, PageSource from);
// Lets go of the key pages that no row at position `length` or later looks at.
void release_passed_keys(HeldPages& held, int length, int window, PageSource from);
// Lets go of everything.
void release_all(HeldPages& held, PageSource from);
int held_key_pages(const HeldPages& held);

// Whether the sequence could go on behind `pages`, which follow those it shares: their keys are there as far as the
// window of the next row reaches.
bool window_is_there(const HeldPages& held, std::span<PrefixPage* const> pages, int window, int positions);
// Takes such pages; all that the sequence holds must be shared.
void adopt(HeldPages& held, std::span<PrefixPage* const> pages, int window, PageSource from);
// Puts its first own page, which is complete, into the prefix cache. If it is there already, the sequence goes on with
// that one, which has the same bits, and its own is free.
PrefixPage& share(HeldPages& held, std::span<const int> tokens, const AdapterSnapshot* adapter, PageSource from);

}  // namespace plumb
