// What plans for training (packed_plan.cpp) and over a cache (sequence_plan.cpp) have in common.
#pragma once
#include "plan/sequence_plan.h"

namespace plumb {

void check(const PlanShape& shape);

// overlap: an entry pools its own window and the one before it (CSA).
CompressionPlan empty_compression(int ratio, bool overlap);

// Rows at positions start, start + 1, ...
void add_tokens(SequencePlan& plan, std::span<const int> tokens, int start, int document);

// Adds entries [first, last) to the list of the row that is being written; a range that touches the one before it is
// joined to it. list_begin: size of visible.range when the row was begun.
void add_range(EntryRanges& visible, size_t list_begin, int first, int last);

}  // namespace plumb
