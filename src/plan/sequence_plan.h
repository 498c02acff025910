// SequencePlan: a batch of token rows, described once on the CPU and then used by all layers. Packed documents, prefix
// trees, chunked prefill and one-token decoding are all just plans; ops see row numbers and never sequences.
//
// Every layer has one key buffer of `key_rows + entries` rows: first the window keys (one a token), then the compressed
// entries. When training, window key i is row i of the batch. When decoding, the buffer belongs to the cache and
// `key_slot` says where the batch's own keys are stored.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace plumb {

// CSR: list i is row[begin[i] .. begin[i+1]), in order of position, oldest first.
struct KeyLists {
  std::vector<int> begin{0};
  std::vector<int> row;
  int size() const { return static_cast<int>(begin.size()) - 1; }
};

// CSR of half-open ranges of compressed entries: row i sees the entries of range[begin[i] .. begin[i+1]), in order of
// position.
struct EntryRange {
  int first, last;
};
struct EntryRanges {
  std::vector<int> begin{0};
  std::vector<EntryRange> range;
};

// The compressed entries of one ratio, spec 3.6. An entry pools `slots` projected rows: for ratio 4 the four rows of
// the previous window (first channel half) and the four of its own (second half), for ratio 128 its own.
struct CompressionPlan {
  int ratio = 0;
  int slots = 0;  // 2 * ratio for CSA, ratio for HCA
  std::vector<int>
      source;  // [new entries, slots]: row of this batch; rows + p = pending row p of the cache; -1 = absent
  std::vector<int> position;  // [new entries] rotary position: first token of its own window
  std::vector<int> slot;      // [new entries] place among the buffer's entries; empty = identity
  int entries = 0;            // entry rows of the key buffer (new ones included)
  EntryRanges visible;        // which entries each row of the batch may see, along its own path
  std::vector<int> pending_row,
      pending_slot;  // after the step, projected row pending_row[i] is kept in pending_slot[i]
  int new_entries() const { return static_cast<int>(position.size()); }
};

struct SequencePlan {
  std::vector<int> token;     // [rows]
  std::vector<int> position;  // [rows] inside its own branch
  std::vector<int> document;  // [rows] number of the document (for losses that are means over sequences)
  KeyLists window;            // [rows] rows of the key buffer, itself last
  std::vector<int> key_slot;  // [rows] where a row's own window key is stored; empty = identity
  int key_rows = 0;           // window rows of the key buffer
  CompressionPlan csa, hca;   // ratio 0 in `ratio` = the model has no such layer
  std::vector<int> wanted;    // rows whose hidden state is returned, ascending
  int rows() const { return static_cast<int>(token.size()); }
};

// What a plan needs to know of the model.
struct PlanShape {
  int window = 128, csa_ratio = 4, hca_ratio = 128;  // ratio 0: no layer of this kind
};

// Documents packed one after the other; positions restart, nothing crosses a boundary, incomplete compression windows
// give no entry. Zero-length documents are legal. All rows are wanted.
SequencePlan plan_documents(const PlanShape& shape, const std::vector<std::vector<int>>& documents);

// A stretch of tokens of a prefix tree. What a segment sees is its path: its ancestors from the root on, then itself.
struct TreeSegment {
  int parent = -1;          // an earlier segment that it continues; -1: it begins a tree
  std::vector<int> tokens;  // may be empty
  int document = 0;
};
// Prefix trees packed one after the other: a row has the window, the entries and the positions that it would have in
// its path as a document of its own. An entry whose window straddles a branch point is made once in every branch; an
// incomplete window at the end of a segment gives no entry there. All rows are wanted. plan_documents is the case
// without parents.
SequencePlan plan_trees(const PlanShape& shape, const std::vector<TreeSegment>& segments);

// Where the rows of one growing sequence live in a cache: plain slots, one a position.
//   key slot of position t      = key_base + t mod key_capacity
//   entry slot of entry i       = {csa,hca}_base + i
//   pending slot of position t  = pending_base + t mod (slots of the ratio)
// key_capacity >= window + rows of a step - 1, or >= the whole sequence: a step must not overwrite what its rows look
// at.
struct CacheSlots {
  int key_base = 0, key_capacity = 0;
  int csa_base = 0, hca_base = 0;
  int csa_pending_base = 0, hca_pending_base = 0;
};
struct CacheShape {  // totals of the cache over all sequences
  int key_rows = 0, csa_entries = 0, hca_entries = 0;
};

// One step of several cached sequences: tokens[i] are the next tokens of sequence i, which has `length[i]` tokens
// already. Chunked prefill and decoding alike. Wanted: the last row of each sequence that has any (all rows if
// want_all).
SequencePlan plan_cached_step(const PlanShape& shape, const CacheShape& cache, const std::vector<CacheSlots>& slots,
                              const std::vector<int>& length, const std::vector<std::vector<int>>& tokens,
                              bool want_all);

// The same over a paged cache. Page number i of a sequence holds what belongs to its positions [i*P, (i+1)*P), P a
// multiple of both ratios: in a key page P window keys, in an entry page P/csa_ratio and P/hca_ratio entries. The two
// are separate pools, because keys are given back once the window has passed and entries stay. Where compression
// windows overlap (CSA), what a page's successor needs of it, the pending rows of its last csa_ratio positions, belongs
// to the entry page as well: whoever has the pages can go on from their end.
struct PageShape {
  int positions = 0;                   // P
  int key_pages = 0, entry_pages = 0;  // pages of the cache over all sequences
};
CacheShape cache_shape(const PlanShape& shape, const PageShape& pages);

struct PageTable {            // of one sequence
  std::vector<int> key_page;  // [pages] -1 = given back
  std::vector<int> entry_page;
  // Pending slots as in CacheSlots, but for those that belong to entry page p: csa slots [p*csa_ratio,
  // (p+1)*csa_ratio). csa_pending_base is behind those of all pages.
  int csa_pending_base = 0, hca_pending_base = 0;
};

// The next tokens of one sequence whose first `length` tokens are in the cache. The last `wanted` rows are wanted.
struct PagedRun {
  const PageTable* table = nullptr;
  int length = 0;
  std::span<const int> tokens;
  int wanted = 0;
};
SequencePlan plan_paged_step(const PlanShape& shape, const PageShape& pages, const std::vector<PagedRun>& runs);

// A step over a cache, all of whose rows are wanted, in the sizes of a larger one: of the rows added, each repeats row
// 0 (so it goes the same way through all experts) but keeps nothing; entries added pool row 0 alone and are stored
// nowhere. What is added has the slots -1. Rows and entries of the step keep their numbers and their results. Pending
// rows become as many as rows. Sizes not less than the step's; entries of a ratio that the model does not have: 0.
struct StepSize {
  int rows = 0, csa_entries = 0, hca_entries = 0;
  bool operator==(const StepSize&) const = default;
};
SequencePlan pad_step(const SequencePlan& step, const StepSize& size);

}  // namespace plumb
