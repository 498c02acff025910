// The three products of sparse attention between the vectors of a row (its heads) and key rows named by number: scores,
// weighted sums of keys, and the transposed sum into the keys. No key is copied. Every result is one chain (scores:
// eight, one a lane, combined in one tree) whose order depends on the list alone. Widths are multiples of eight floats;
// `padded_to_lanes` makes them so.
#pragma once
#include <cstdint>
#include <vector>

#include "base/tensor.h"
#include "ops/lists.h"

namespace plumb::ops {

constexpr int kKeyBlock = 64;  // keys that a row meets between two updates of its running maximum

// x itself if its last dimension is a multiple of 8, else a copy filled up with zeros (which change no sum).
Tensor padded_to_lanes(const Tensor& x);
// Copies or adds the first channels of padded rows back: to[..., i] (+)= from[..., i].
void add_unpadded(const Tensor& from, const Tensor& to);

// s[h * kKeyBlock + i] = q[h] . keys[row[i]], i < n <= kKeyBlock. q [heads, width]. Up to three entries after n are
// overwritten.
void key_scores(const float* q, int64_t heads, int64_t width, const float* keys, const int* row, int n, float* s);

// o[h] += sum over i < n of p[h * kKeyBlock + i] * keys[row[i]], one chain over i a channel. o [heads, width].
void add_weighted_keys(const float* p, int64_t heads, int64_t width, const float* keys, const int* row, int n,
                       float* o);

// RowLists as the loops read them: list i is row[begin[i]] .. row[begin[i + 1] - 1].
struct ListView {
  const int* begin;
  const int* row;
};
// Every number of the lists must be in [0, keys): a wrong one is a defect of the plan.
ListView checked_lists(const RowLists& lists, int64_t rows, int64_t keys);

// The lists of rows [first, last) transposed: for each key the rows that name it, in order, and where.
struct KeyUses {
  std::vector<int> begin;     // [keys + 1]
  std::vector<int> row;       // row of the batch
  std::vector<int64_t> item;  // number of the list item, counted from the first item of row `first`
};
KeyUses transpose_lists(const ListView& lists, int first, int last, int64_t keys);

// d_keys[k] += sum over uses and heads of weight[item, h] * x[row, h], one chain over (use, head) a channel.
// weight [items, heads], x [rows, heads, width], d_keys [keys, width].
void add_uses(const KeyUses& uses, const float* weight, const float* x, int64_t heads, int64_t width, float* d_keys);

}  // namespace plumb::ops
