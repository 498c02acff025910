// Sparse attention over key lists with a sink, spec 3.5: one shared key = value row a key, all heads attend to the same
// list.
#pragma once
#include "base/tensor.h"
#include "ops/lists.h"
#include "ops/numerics.h"
#include "ops/rope.h"

namespace plumb::ops {

// window [rows] as in the plan; entries [rows] (may be empty lists): numbers of compressed entries; key_rows: where
// entries start in the key buffer. -> one list a row: window keys, then entries (+ key_rows).
RowLists merge_keys(const RowLists& window, const RowLists& entries, int key_rows);

struct AttentionResult {
  Tensor o;    // [rows, H, c] rounded at out_attn, not yet rotated back
  Tensor lse;  // [rows, H] log of the whole denominator, sink included
};
// q [rows,H,c], keys [key buffer rows, c], sink f32 [H]; scale = c^-1/2. Each list is walked in blocks of 64 with a
// running maximum over keys; P is rounded at attn_p relative to it; the sink joins at the end. Empty list: o = 0, lse =
// sink.
AttentionResult sparse_attention(const Tensor& q, const Tensor& keys, const RowLists& lists, const Tensor& sink,
                                 Numerics numerics);

// d_keys [key buffer rows, c] += ; d_sink [H] += if defined. -> dq. Every sum in a fixed order: same bits with any
// number of threads.
Tensor sparse_attention_backward(const Tensor& d_o, const Tensor& q, const Tensor& keys, const RowLists& lists,
                                 const Tensor& sink, const AttentionResult& forward, const Tensor& d_keys,
                                 const Tensor& d_sink);

// The same with the outputs rotated back by the table of the rows, rounded at rope_o: what the output projection reads.
struct RotatedAttention {
  AttentionResult core;  // on a GPU o is undefined: only the rotated one is written
  Tensor turned;         // [rows, H, c]
};
RotatedAttention rotated_attention(const Tensor& q, const Tensor& keys, const RowLists& lists, const Tensor& sink,
                                   const RotaryTable& table, Numerics numerics);

struct AttentionGrad {
  Tensor dq, d_keys;
};
// d_turned is used up. d_sink [H] += if defined.
AttentionGrad rotated_attention_backward(const Tensor& d_turned, const Tensor& q, const Tensor& keys,
                                         const RowLists& lists, const Tensor& sink, const RotaryTable& table,
                                         const RotatedAttention& forward, const Tensor& d_sink);

}  // namespace plumb::ops
