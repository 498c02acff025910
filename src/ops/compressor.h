// Pooling of projected rows into compressed entries, spec 3.6. FP32; per channel softmax over the slots.
#pragma once
#include "base/tensor.h"
#include "ops/numerics.h"
#include "ops/plan_tensors.h"

namespace plumb::ops {

// Rows that an entry may pool: those of this batch, then (decoding) the pending rows of the cache.
struct ProjectedRows {
  Tensor kv, gate;                  // f32 [rows, co*c]: x wkv^T and x wgate^T, ape not added
  Tensor pending_kv, pending_gate;  // f32 [pending slots, co*c] or undefined
};

// ape f32 [ratio, co*c], c = entry width. -> entries [new entries, c], rounded at `at`. For 2*ratio slots the first
// half reads channels [0,c) of the previous window's rows, the second half channels [c,2c) of the own window's.
Tensor pool_entries(const Compression& compression, const ProjectedRows& rows, const Tensor& ape,
                    const RoundAt& at = {});

// d_kv, d_gate [rows, co*c] +=, on a device written, whatever they held; d_ape += if defined. Pending rows get no
// gradient (they exist only when decoding).
void pool_entries_backward(const Compression& compression, const ProjectedRows& rows, const Tensor& ape,
                           const Tensor& d_entries, const Tensor& d_kv, const Tensor& d_gate, const Tensor& d_ape);

}  // namespace plumb::ops
