// Rows that are looked up, moved and added by number.
#pragma once
#include <vector>

#include "base/tensor.h"
#include "ops/linear.h"

namespace plumb::ops {

// Row token[i] of the table (f32 or bf16 [V, d]), `copies` times. token i32 [rows] -> [rows, copies, d].
Tensor embed(const Linear& table, const Tensor& token, int64_t copies);
// d_table f32 [V, d]: row token[i] += the sum over the copies of dx [rows, copies, d], rows in order.
void embed_backward(const Tensor& dx, const Tensor& token, const Tensor& d_table);

// -> row row[i] of x, for each i; the shape of x but for the number of rows. row i32
Tensor gather_rows(const Tensor& x, const Tensor& row);
Tensor gather_rows(const Tensor& x, const std::vector<int>& row);
// into[row[i]] += dy[i], in order of i.
void scatter_add_rows(const Tensor& dy, const Tensor& row, const Tensor& into);

// to[offset + slot[i]] = from[row[i]]; row and slot i32 or undefined: i; where one of them is -1, nothing is copied.
// Error: a slot outside of `to`.
struct RowCopy {
  Tensor row, slot;
  int64_t offset = 0;
};
void copy_rows(const Tensor& from, const RowCopy& copy, const Tensor& to);

// x [rows, copies, d] -> [rows, d], copies in order. One copy: shares memory with x.
Tensor sum_copies(const Tensor& x);
// -> x [rows, copies, d] with row i of e [rows, d] added to each of its copies, rounded at `at`.
Tensor add_to_copies(const Tensor& e, const Tensor& x, const RoundAt& at);

}  // namespace plumb::ops
