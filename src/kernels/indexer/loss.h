// The indexer's own loss and its gradient: of each row, the divergence of its scores' softmax from the
// attention's distribution over the same compressed entries (spec 4.3).
//   target[i]  = sum over the attention's heads of exp(scale * q_h . entry_i - joint_lse_h), divided by its sum over i
//   score[i]   = sum_h w_h max(0, q_h . key_i), as in indexer.h
//   loss       = sum_i target_i (log max(target_i, 1e-10) - log softmax(score)_i)
// The target is a constant. Products take bf16 operands, everything else is FP32; d score * w is rounded to bf16 before
// it meets queries and keys. Every sum has one fixed order: gradients have the same bits in every run. A block takes
// 130 KB of shared memory (64 heads; 195 KB for 128), which not every GPU has: cudaErrorInvalidValue.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace plumb::kernels {

// Device memory, aligned to 16 bytes; "bf16" pointers are untyped.
struct IndexLoss {
  const void* q;     // bf16 [rows, 64, 128]
  const float* w;    // [rows, 64]
  const void* keys;  // bf16 [entries, 128]
  int rows, entries;
  // The entries that count for each row, ascending, none twice: row t has entry[begin[t]] .. entry[begin[t + 1] - 1].
  const int *begin, *entry;
  int listed;                // begin[rows]
  const void* attn_q;        // bf16 [rows, heads, 512], as the attention meets them
  const void* attn_entries;  // bf16 [entries, 512]
  // [rows, heads]: log-sum-exp over window keys, the listed entries and the sink. If the lists are what the attention
  // attended to, it is the attention's own.
  const float* joint_lse;
  int heads;        // of the attention, 64 or 128
  float scale;      // of its scores
  float factor;     // of all gradients: coefficient / rows of the optimizer's step
  void* d_q;        // bf16 [rows, 64, 128], written
  float* d_w;       // [rows, 64], written
  float* d_keys;    // [entries, 128], written
  double* loss;     // [1], written: the sum of the rows' losses, without the factor
  void* workspace;  // index_loss_workspace() bytes, aligned to 256
};
cudaError_t index_loss(const IndexLoss& arguments, cudaStream_t stream);
size_t index_loss_workspace(int rows, int entries, int listed);

}  // namespace plumb::kernels
