// The lightning indexer: for each row the best of the compressed entries it may see.
//   score[t, s] = sum_h w[t, h] * max(0, q[t, h] . keys[s])        64 heads of 128; FP32 from the products on
//   selected[t] = the min(topk, visible) entries of the highest score, listed in order of position; equal scores: the
//                 earlier entry; NaN ranks last
// Rows are taken in groups, whose visible entries are cut into tiles of 64; scores of some groups at a time
// live in a workspace of bounded size, never a [rows, entries] tensor. A score depends on its row and entry alone, so a
// row's selection does not depend on its group. docs/kernels/indexer.md.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace plumb::kernels {

constexpr int kIndexHeads = 64, kIndexDim = 128;
constexpr int kIndexTile = 64;  // entries

// How index queries and keys are kept.
//   bf16    [vectors, 128]
//   record  [vectors, kIndexRecordBytes], for vectors of the released profile: e2m1 values times a power of two for
//   each
//           32 channels. 128 codes (e4m3), then an IndexTail. Scores have the bits that the same vectors get as bf16
//           wherever products of a query head and a key fit into FP32; FP8 products compute them at twice the rate.
enum class IndexForm { bf16, record };
// Channel i is code[i] * 2^(byte i / 32 of exponents - 127). Where the exponents of a vector are at most kFoldedSpan
// apart, they are folded into its codes, which hold them exactly, and all four bytes are the largest one.
struct alignas(16) IndexTail {
  float power;         // 2^(largest byte - 127)
  float length;        // square of the vector's length, in units of half its smallest power; infinite if not folded
  uint32_t exponents;  // a byte for 32 channels
  uint32_t zero;
};
constexpr int kIndexRecordBytes = kIndexDim + static_cast<int>(sizeof(IndexTail));
constexpr int kFoldedSpan = 8;  // 0.5 * 2^-8 is the smallest number of e4m3
// A record's values as bf16, exactly: values [vectors, 128].
cudaError_t index_values(const void* records, int64_t vectors, void* values, cudaStream_t stream);

struct IndexRange {
  int first, last;  // entries [first, last)
};

// Which tiles the groups walk over: made once a plan on the host, used by all layers.
struct IndexGroups {
  int rows = 0;
  int group_rows = 8;              // 8: neighbouring rows see mostly the same; 1: each row its own (decoding)
  std::vector<int> tile_begin;     // [groups + 1]
  std::vector<int> tile_first;     // [tiles] first entry
  std::vector<uint64_t> visible;   // [tiles, group_rows]: bit i: the row sees entry tile_first + i
  std::vector<int> visible_count;  // [rows]
};
// begin [rows + 1]: row t sees range[begin[t]] .. range[begin[t + 1] - 1], disjoint and in order of position, which need
// not be that of the entries: pages of a cache lie anywhere.
// group_rows: 8 or 1; 0 = whichever costs less.
IndexGroups make_index_groups(const std::vector<int>& begin, const std::vector<IndexRange>& range, int group_rows = 0);

// The vectors of IndexGroups on the device.
struct IndexGroupsDevice {
  const int *tile_begin, *tile_first;
  const uint64_t* visible;
  const int* visible_count;
};

// Device memory, aligned to 16 bytes; "bf16" pointers are untyped.
struct IndexSelection {
  const void* q;     // [rows, 64] vectors
  const float* w;    // [rows, 64]
  const void* keys;  // [entries] vectors
  int entries;
  IndexForm form;             // of both
  const IndexGroups* groups;  // host
  IndexGroupsDevice device;
  int topk;              // > 0
  const int* out_begin;  // [rows]: row t's list is out[out_begin[t]] .. of min(topk, visible_count[t]) numbers
  int* out;              // entry + out_offset, written
  int out_offset;
  void* workspace;         // aligned to 256
  size_t workspace_bytes;  // at least index_workspace(groups, 1); more means fewer launches
};
cudaError_t select_entries(const IndexSelection& arguments, cudaStream_t stream);
// Bytes for the scores of as many groups at a time as fit into `limit`, but at least one.
size_t index_workspace(const IndexGroups& groups, size_t limit);

// The scores alone, of the groups from first_group on, as select_entries computes them: scores[row - first row,
// column], column = 64 * (tile - the group's first tile) + i. Of groups that select everything they see, nothing is
// written.
cudaError_t index_scores(const IndexSelection& arguments, int first_group, int groups, int columns, float* scores,
                         cudaStream_t stream);

}  // namespace plumb::kernels
