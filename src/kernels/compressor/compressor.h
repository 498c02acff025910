// Pooling of projected rows into compressed entries on Hopper: per channel a softmax over an entry's slots,
//   score_s = gate_s + ape_s, entry = sum_s softmax(score)_s kv_s,
// FP32 throughout, rounded to bf16 at the end. An entry of ratio 128 has 128 slots; one of ratio 4 has eight: the rows
// of the previous window, read in the first half of their channels, then those of its own, in the second half. Which
// row fills a slot is the plan's matter: rows of this batch, pending rows of a cache, or none. An entry's bits depend
// on its own slots alone. Norm, rotation and storage form come after it: kernels/rotary.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace plumb::kernels {

// Device memory, aligned to 16 bytes. A projected row has (slots / ratio) * width channels.
struct CompressedPooling {
  const float *kv, *gate;                  // [rows, slots / ratio * width]
  const float *pending_kv, *pending_gate;  // [*, slots / ratio * width]; null: no source is pending
  const float* ape;                        // [ratio, slots / ratio * width]
  const int* source;                       // [entries, slots]: row; rows + p = pending row p; -1 = absent
  int rows, entries;                       // entries may be 0
  int ratio, slots;                        // 4 and 8, or 128 and 128
  int width;                               // of an entry, a multiple of 128
};

// entries: bf16 [entries, width], written. total, value: FP32 [entries, width], written for the backward pass: the
// logarithm of the softmax's denominator and the unrounded entry; both may be null. At least one source of each entry
// is present.
cudaError_t pool_entries(const CompressedPooling& pooling, void* entries, float* total, float* value,
                         cudaStream_t stream);

// Which slots read a row. Key of a row's half h: row * (slots / ratio) + h.
struct SlotUses {
  const int* begin;  // [rows * (slots / ratio) + 1]
  const int* use;    // entry * slots + slot, ascending
};
// Host side: the transposition of `source`. Pending rows get no gradient.
struct SlotUseLists {
  std::vector<int> begin, use;
};
inline SlotUseLists transpose_sources(const std::vector<int>& source, int rows, int ratio, int slots) {
  const int halves = slots / ratio;
  SlotUseLists lists{std::vector<int>(static_cast<size_t>(rows) * halves + 1, 0), {}};
  const auto key = [&](size_t i) {
    return source[i] < 0 || source[i] >= rows ? -1 : source[i] * halves + static_cast<int>(i) % slots / ratio;
  };
  for (size_t i = 0; i < source.size(); ++i)
    if (key(i) >= 0) ++lists.begin[key(i) + 1];
  for (size_t i = 1; i < lists.begin.size(); ++i) lists.begin[i] += lists.begin[i - 1];
  lists.use.resize(lists.begin.back());
  std::vector<int> next(lists.begin.begin(), lists.begin.end() - 1);
  for (size_t i = 0; i < source.size(); ++i)
    if (key(i) >= 0) lists.use[next[key(i)]++] = static_cast<int>(i);
  return lists;
}

struct CompressedPoolingBackward {
  CompressedPooling pooling;   // as in the forward pass; pending rows get no gradient
  const float *total, *value;  // from it
  const void* d_entries;       // bf16 [entries, width]
  SlotUses uses;
  float *d_kv, *d_gate;  // [rows, slots / ratio * width], written
  float* d_ape;          // [ratio, slots / ratio * width], +=, entries in a fixed tree; null: frozen
  void* workspace;       // pool_entries_backward_workspace(pooling) bytes; null without d_ape
};
cudaError_t pool_entries_backward(const CompressedPoolingBackward& arguments, cudaStream_t stream);
size_t pool_entries_backward_workspace(const CompressedPooling& pooling);

// Keeps projected rows for windows that are still open: pending row slot[i] = row from[i], for kv and gate.
cudaError_t keep_pending(const float* kv, const float* gate, float* pending_kv, float* pending_gate, const int* from,
                         const int* slot, int count, int row_width, cudaStream_t stream);

}  // namespace plumb::kernels
