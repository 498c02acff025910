// Lightning indexer of ratio-4 layers, spec 3.7: scores and exact top-k; its own loss, spec 4.3.
#pragma once
#include "base/tensor.h"
#include "ops/plan_tensors.h"

namespace plumb::ops {

// Index queries and keys are what finish_vectors makes of them: f32 [.., cI] on the host, on a device records of bytes
// in place of the cI channels (kernels/indexer). This is what they mean: f32 or bf16 [.., cI].
Tensor index_values(const Tensor& vectors);
// Zeros, as many index keys as `entries`.
Tensor empty_index_keys(int64_t entries, int64_t width, Space space);

// q [rows, HI, cI], w [rows, HI] (both scale factors included), keys [entries, cI]. Score of entry s for row t:
// sum_h w_th * max(0, q_th . k_s), FP32, heads in order. -> for each row the min(topk, visible) best entries, listed in
// order of position (the order of `visible`); equal scores: the earlier entry wins.
RowLists select_entries(const Tensor& q, const Tensor& w, const Tensor& keys, const Visibility& visible, int topk);

// All visible entries of each row, in order (HCA layers; CSA when topk >= entries).
RowLists visible_entries(const EntryRanges& visible);

// Loss of the indexer against the attention's own distribution over compressed entries (teacher: detached), spec 4.3.
struct IndexerLoss {
  float coefficient = 0;
  bool sparse = true;     // valid set = the selected entries; false: all visible ones
  double rows_total = 1;  // rows of the whole optimizer step: loss = coefficient * sum over rows of KL / rows_total
};
struct IndexerLossGrad {
  double loss;              // sum over rows of KL (not multiplied by anything)
  Tensor d_q, d_w, d_keys;  // [rows,HI,cI], [rows,HI], [entries,cI]; what finish_vectors_backward reads there
};
// valid: the entries that count for each row. attn_q [rows,H,c], attn_entries [entries,c] as the attention meets them;
// joint_lse [rows,H]: log-sum-exp over window keys, sink and valid entries; where those are the ones that the attention
// attended to, it is the attention's own.
IndexerLossGrad indexer_loss(const IndexerLoss& options, const Tensor& q, const Tensor& w, const Tensor& keys,
                             const RowLists& valid, const Tensor& attn_q, const Tensor& attn_entries,
                             const Tensor& joint_lse);

}  // namespace plumb::ops
