#include "ops/attention.h"

#include <algorithm>
#include <cmath>

#include "kernels/compressor/compressor.h"
#include "kernels/indexer/indexer.h"
#include "kernels/indexer/loss.h"
#include "kernels/rotary/rotary.h"
#include "kernels/rows/rows.h"
#include "kernels/sparse_attention/sparse_attention.h"
#include "ops/gpu/gpu_ops.h"
#include "ops/gpu/plan_buffers.h"
#include "ops/gpu/support.h"

namespace plumb::ops::gpu {
namespace {

float attention_scale(const Tensor& q) { return static_cast<float>(1 / std::sqrt(static_cast<double>(q.size(2)))); }

void check_heads(const Tensor& q) {
  if (q.size(2) == kernels::kAttentionDim && (q.size(1) == 64 || q.size(1) == 128)) return;
  fail("attention", std::to_string(q.size(1)) + " heads of " + std::to_string(q.size(2)),
       "the GPU kernels take 64 or 128 heads of 512; use kernels = \"reference\"");
}

}  // namespace

RowLists merge_keys(const RowLists& window, const RowLists& entries, int key_rows) {
  PLUMB_CHECK(window.size() == entries.size());
  const RowLists all(empty(window.begin.shape(), DType::i32),
                     empty({window.row.numel() + entries.row.numel()}, DType::i32));
  kernels::rows::merge_keys({i32(window.begin), i32(window.row)}, {i32(entries.begin), i32(entries.row)}, key_rows,
                            static_cast<int>(window.size()), i32(all.begin), i32(all.row), kStream);
  return all;
}

Tensor empty_index_keys(int64_t entries, int64_t width) {
  if (width != kernels::kIndexDim)
    fail("indexer", "keys of " + std::to_string(width), "the GPU kernels take 128; use kernels = \"reference\"");
  return zeros({entries, kernels::kIndexRecordBytes}, DType::u8);
}

Tensor index_values(const Tensor& vectors) {
  Shape shape = vectors.shape();
  PLUMB_CHECK(shape.back() == kernels::kIndexRecordBytes, to_string(shape));
  shape.back() = kernels::kIndexDim;
  Tensor values = empty(shape, DType::bf16);
  check(kernels::index_values(bytes(vectors), vectors.numel() / kernels::kIndexRecordBytes, bf16(values), kStream),
        "index_values");
  return values;
}

RowLists select_entries(const Tensor& q, const Tensor& w, const Tensor& keys, const Visibility& visible, int topk) {
  if (q.size(1) != kernels::kIndexHeads)
    fail("indexer", std::to_string(q.size(1)) + " heads",
         "the GPU kernels take 64 heads of 128; use kernels = \"reference\"");
  PLUMB_CHECK(q.size(2) == kernels::kIndexRecordBytes && keys.shape().back() == kernels::kIndexRecordBytes);
  PLUMB_CHECK(visible.device != nullptr, "the plan's tensors are on the host");
  const auto& d = *static_cast<const DeviceVisibility*>(visible.device.get());
  PLUMB_CHECK(d.topk == topk, "the plan's tensors are for the best " + std::to_string(d.topk));
  int64_t total = 0;
  for (int count : d.groups.visible_count) total += std::min(count, topk);
  const RowLists chosen(d.list_begin, empty({total}, DType::i32));
  if (total == 0) return chosen;
  constexpr size_t kScores = size_t{64} << 20;  // larger ones are not faster (docs/kernels/indexer.md)
  const Tensor memory = workspace(std::max<size_t>(kernels::index_workspace(d.groups, kScores), 256));
  kernels::IndexSelection s{};
  s.q = bytes(q), s.w = f32(w), s.keys = bytes(keys), s.entries = static_cast<int>(keys.size(0));
  s.form = kernels::IndexForm::record;
  s.groups = &d.groups;
  s.device = {i32(d.tile_begin), i32(d.tile_first), reinterpret_cast<const uint64_t*>(device<int64_t>(d.visible)),
              i32(d.visible_count)};
  s.topk = topk, s.out_begin = i32(chosen.begin), s.out = i32(chosen.row), s.out_offset = 0;
  s.workspace = memory.raw(), s.workspace_bytes = memory.bytes();
  check(kernels::select_entries(s, kStream), "select_entries");
  return chosen;
}

IndexerLossGrad indexer_loss(const IndexerLoss& options, const Tensor& q, const Tensor& w, const Tensor& keys,
                             const RowLists& valid, const Tensor& attn_q, const Tensor& attn_entries,
                             const Tensor& joint_lse) {
  const Tensor queries = index_values(q), values = index_values(keys), d_keys = zeros(values.shape(), DType::f32);
  IndexerLossGrad grad{0, zeros(queries.shape(), DType::bf16), zeros(w.shape(), DType::f32), {}};
  if (valid.row.numel() > 0) {
    const Tensor loss = empty({1}, DType::f64);
    kernels::IndexLoss p{};
    p.q = bf16(queries), p.w = f32(w), p.keys = bf16(values);
    p.rows = static_cast<int>(q.size(0)), p.entries = static_cast<int>(keys.size(0));
    p.begin = i32(valid.begin), p.entry = i32(valid.row), p.listed = static_cast<int>(valid.row.numel());
    p.attn_q = bf16(attn_q), p.attn_entries = bf16(attn_entries), p.joint_lse = f32(joint_lse);
    p.heads = static_cast<int>(attn_q.size(1)), p.scale = attention_scale(attn_q);
    p.factor = static_cast<float>(options.coefficient / options.rows_total);
    p.d_q = bf16(grad.d_q), p.d_w = f32(grad.d_w), p.d_keys = f32(d_keys), p.loss = device<double>(loss);
    const Tensor memory = workspace(kernels::index_loss_workspace(p.rows, p.entries, p.listed));
    p.workspace = memory.raw();
    check(kernels::index_loss(p, kStream), "indexer loss");
    grad.loss = *to_host(loss).ptr<double>();
  }
  grad.d_keys = converted(d_keys, DType::bf16);
  return grad;
}

RotatedAttention rotated_attention(const Tensor& q, const Tensor& keys, const RowLists& lists, const Tensor& sink,
                                   const RotaryTable& table, Numerics numerics) {
  require_kind({numerics, Point::rope_o}, PointKind::bf16, "attention");
  check_heads(q);
  RotatedAttention r;
  r.turned = empty(q.shape(), DType::bf16);
  r.core.lse = empty({q.size(0), q.size(1)}, DType::f32);
  kernels::SparseAttentionForward p{};
  p.q = bf16(q), p.kv = bf16(keys), p.lists = {i32(lists.begin), i32(lists.row)}, p.sink = f32(sink);
  p.o = bf16(r.turned), p.lse = f32(r.core.lse);
  p.queries = static_cast<int>(q.size(0)), p.heads = static_cast<int>(q.size(1)), p.scale = attention_scale(q);
  p.rotation = table.device.raw();
  check(kernels::sparse_attention_forward(p, kStream), "attention");
  return r;
}

AttentionGrad rotated_attention_backward(const Tensor& d_turned, const Tensor& q, const Tensor& keys,
                                         const RowLists& lists, const Tensor& sink, const RotaryTable& table,
                                         const RotatedAttention& forward, const Tensor& d_sink) {
  if (d_sink.defined()) not_on_gpu("training of the sinks");
  const int queries = static_cast<int>(q.size(0)), heads = static_cast<int>(q.size(1));
  check(kernels::rotate_tails(bf16(d_turned), table.device.raw(), queries, heads, static_cast<int>(q.size(2)), false,
                              kStream),
        "rotation of gradients");
  const AttentionGrad g{empty(q.shape(), DType::bf16), empty(keys.shape(), DType::bf16)};
  const Tensor unused_sink = empty({heads}, DType::f32);
  kernels::SparseAttentionBackward p{};
  p.q = bf16(q), p.kv = bf16(keys), p.lists = {i32(lists.begin), i32(lists.row)}, p.sink = f32(sink);
  p.o = bf16(forward.turned), p.lse = f32(forward.core.lse), p.d_o = bf16(d_turned);  // both rotated or both not
  p.dq = bf16(g.dq), p.dkv = bf16(g.d_keys), p.dkv_bf16 = true, p.d_sink = f32(unused_sink);
  p.queries = queries, p.heads = heads, p.rows = static_cast<int>(keys.size(0)), p.scale = attention_scale(q);
  const Tensor memory = workspace(kernels::sparse_attention_backward_workspace(p));
  p.workspace = memory.raw();
  check(kernels::sparse_attention_backward(p, kStream), "attention backward");
  return g;
}

// ---- compressor
namespace {
kernels::CompressedPooling pooling(const Compression& c, const ProjectedRows& rows, const Tensor& ape) {
  const CompressionPlan& plan = *c.plan;
  return {f32(rows.kv),
          f32(rows.gate),
          f32(rows.pending_kv),
          f32(rows.pending_gate),
          f32(ape),
          i32(c.source),
          static_cast<int>(rows.kv.size(0)),
          plan.new_entries(),
          plan.ratio,
          plan.slots,
          static_cast<int>(rows.kv.size(1)) / (plan.slots / plan.ratio)};
}
}  // namespace

Tensor pool_entries(const Compression& c, const ProjectedRows& rows, const Tensor& ape, const RoundAt& at) {
  require_kind(at, PointKind::bf16, "pool_entries");
  const kernels::CompressedPooling p = pooling(c, rows, ape);
  Tensor entries = empty({p.entries, p.width}, DType::bf16);
  check(kernels::pool_entries(p, bf16(entries), kStream), "pool_entries");
  return entries;
}

void pool_entries_backward(const Compression& c, const ProjectedRows& rows, const Tensor& ape, const Tensor& d_entries,
                           const Tensor& d_kv, const Tensor& d_gate, const Tensor& d_ape) {
  if (d_ape.defined()) not_on_gpu("training of the compressor's position embedding");
  const kernels::CompressedPooling p = pooling(c, rows, ape);
  const Tensor memory = workspace(kernels::pool_entries_backward_workspace(p, c.parts, false));
  check(kernels::pool_entries_backward(
            {p,
             bf16(d_entries),
             {i32(c.target), i32(c.joined), i32(c.part_begin), static_cast<int>(c.joined.numel()), c.parts},
             f32(d_kv),
             f32(d_gate),
             nullptr,
             memory.raw()},
            kStream),
        "pool_entries_backward");
}

}  // namespace plumb::ops::gpu
