// Low-rank adapters on the device. A product gets what they add as a kernels::lora::LowRank; T and U, the rows brought
// down to the rank, are made here, and the gradients of A and B.
//
// Pairs are device tensors that model/device_adapters made: ranks are equal in a batch and multiples of four; those of
// a layer's experts lie one behind the other, so that of expert 0 stands for all of them.
#pragma once
#include <vector>

#include "kernels/lora/lora.h"
#include "ops/gpu/packed.h"
#include "ops/gpu/support.h"
#include "ops/linear.h"

namespace plumb::ops::gpu {

// The adapters of one product: for each its pair (of all groups), and which adapter each row uses.
struct LoraSet {
  struct Item {
    Tensor a;  // f32 [groups, r, in]
    Tensor b;  // f32 [groups, out, r]
    float scale;
    std::shared_ptr<PreparedPair> prepared;  // or null
  };
  std::vector<Item> items;
  int rank = 0, in = 0, out = 0;
  Tensor of_row;         // i32 [rows]: number of the item or -1; undefined: all rows use item 0
  bool gate_up = false;  // B's rows are gates, then ups, and the product's columns are in record order
  bool empty() const { return items.empty(); }
};
LoraSet lora_set(const LoraList& lora, int64_t rows, bool gate_up = false);
// Numbers of adapters on the device. The products of a pass ask for the same few again and again: those are kept.
Tensor row_numbers(std::vector<int> values);

// The rows that meet a low rank: runs of rows belong to groups (experts); x may be gathered.
struct LoraRowsIn {
  const Tensor& x;    // bf16 [*, width]
  Tensor source_row;  // i32 [rows] or undefined
  Groups groups;
  int64_t rows;
};

// What is added to a product, and the memory that it points to.
struct LowRankTerm {
  Tensor t;                     // f32 [rows, rank] (grouped outputs: [rows, groups * rank])
  std::vector<Tensor> factors;  // packed
  Tensor factor_table;          // their addresses
  Tensor of_row;                // LoraSet's
  kernels::lora::LowRank low_rank;
};

// T = scale * x A^T and the factor B, for y += T B^T.
LowRankTerm low_rank_forward(const LoraSet& set, const LoraRowsIn& x);
// U = scale * dy B and the factor A, for dx += U A.
LowRankTerm low_rank_backward(const LoraSet& set, const LoraRowsIn& dy);
// T alone.
Tensor low_rank_rows(const LoraSet& set, const LoraRowsIn& x);
// grads[i] += the gradients of item i's pair, from T and U. Tensors of grads: stacked as the pairs are; undefined: not
// wanted.
void add_lora_gradients(const LoraSet& set, const LoraRowsIn& x, const LoraRowsIn& dy, const Tensor& t, const Tensor& u,
                        const std::vector<LoraGrad>& grads);

// ---- The pieces, for wo_a, whose groups lie beside each other in a row.
// x A^T with A's planes of each item in `planes`; out [rows, rank].
Tensor go_down(const LoraSet& set, const LoraRowsIn& x, const std::vector<Tensor>& planes, int width);
std::vector<Tensor> planes_of_a(const LoraSet& set, int groups);
std::vector<Tensor> planes_of_b(const LoraSet& set, int groups, int out);
LowRankTerm term_of(const LoraSet& set, Tensor t, int t_stride, std::vector<Tensor> factors);
std::vector<Tensor> factors_of_b(const LoraSet& set, int groups, int out);
std::vector<Tensor> factors_of_a(const LoraSet& set, int groups);
void add_gradient(const kernels::lora::Gradient& g);

}  // namespace plumb::ops::gpu
