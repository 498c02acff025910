// Key lists as ops exchange them: CSR in two tensors, so that they can live where the ops run.
#pragma once
#include "base/tensor.h"
#include "plan/sequence_plan.h"

namespace plumb::ops {

// List i is row[begin[i] .. begin[i+1]), in order of position, oldest first.
struct RowLists {
  Tensor begin;  // i32 [lists + 1], begin[0] = 0
  Tensor row;    // i32 [items]
  RowLists() = default;
  RowLists(Tensor begin, Tensor row) : begin(std::move(begin)), row(std::move(row)) {}
  RowLists(const KeyLists& lists) : begin(Tensor::of(lists.begin)), row(Tensor::of(lists.row)) {}
  operator KeyLists() const;  // the same as vectors, whichever side the lists are on
  int64_t size() const { return begin.numel() - 1; }
};

}  // namespace plumb::ops
