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

// entries: bf16 [entries, width], written. At least one source of each entry is present.
cudaError_t pool_entries(const CompressedPooling& pooling, void* entries, cudaStream_t stream);

// Where the gradients of an entry's slots go, and the halves of rows that get theirs otherwise: those that several
// slots read (branches of a prefix tree), whose parts lie in the workspace, and those that none reads. Key of a row's
// half h: row * (slots / ratio) + h. Pending rows get no gradient.
struct SlotTargets {
  const int* target;  // [entries, slots]: the row, if no other slot reads that half of it; rows + i: part i; -1: none
  const int* key;     // [joined]
  const int* begin;   // [joined + 1] the parts of each key, in order of the slots that read it
  int joined, parts;
};
// Host side, from `source`.
struct SlotTargetLists {
  std::vector<int> target, key, begin;
  int joined() const { return static_cast<int>(key.size()); }
  int parts() const { return begin.back(); }
};
inline SlotTargetLists slot_targets(const std::vector<int>& source, int rows, int ratio, int slots) {
  const int halves = slots / ratio;
  const auto key = [&](size_t i) { return source[i] * halves + static_cast<int>(i) % slots / ratio; };
  const auto has_row = [&](size_t i) { return source[i] >= 0 && source[i] < rows; };
  std::vector<int> count(static_cast<size_t>(rows) * halves, 0);
  for (size_t i = 0; i < source.size(); ++i)
    if (has_row(i)) ++count[key(i)];
  SlotTargetLists lists{std::vector<int>(source.size(), -1), {}, {0}};
  std::vector<int> next(count.size());
  for (size_t k = 0; k < count.size(); ++k) {
    if (count[k] == 1) continue;
    next[k] = rows + lists.begin.back();
    lists.key.push_back(static_cast<int>(k)), lists.begin.push_back(lists.begin.back() + count[k]);
  }
  for (size_t i = 0; i < source.size(); ++i)
    if (has_row(i)) lists.target[i] = count[key(i)] == 1 ? source[i] : next[key(i)]++;
  return lists;
}

struct CompressedPoolingBackward {
  CompressedPooling pooling;  // as in the forward pass
  const void* d_entries;      // bf16 [entries, width]
  SlotTargets targets;
  float *d_kv, *d_gate;  // [rows, slots / ratio * width], written
  float* d_ape;          // [ratio, slots / ratio * width], +=, entries in a fixed tree; null: frozen
  void* workspace;       // pool_entries_backward_workspace() bytes, aligned to 16; null if that is 0
};
cudaError_t pool_entries_backward(const CompressedPoolingBackward& arguments, cudaStream_t stream);
size_t pool_entries_backward_workspace(const CompressedPooling& pooling, int parts, bool with_ape);

// Keeps projected rows for windows that are still open: pending row slot[i] = row from[i], for kv and gate.
cudaError_t keep_pending(const float* kv, const float* gate, float* pending_kv, float* pending_gate, const int* from,
                         const int* slot, int count, int row_width, cudaStream_t stream);

}  // namespace plumb::kernels
