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
// The same where a row of the product is `parts` rows of x, which meet one A and lie beside each other in T (wo_a's
// groups). of_parts: the set for the rows of x.
LowRankTerm low_rank_forward(const LoraSet& set, const LoraSet& of_parts, const LoraRowsIn& x, int parts);
// The same from T.
LowRankTerm low_rank_forward(const LoraSet& set, const Tensor& t);
// T alone; of several sets with the same rows for their items, in one pass over x.
Tensor low_rank_rows(const LoraSet& set, const LoraRowsIn& x);
std::vector<Tensor> low_rank_rows(const std::vector<LoraSet>& sets, const LoraRowsIn& x);
// U = scale * dy B and the factor A, for dx += U A; on the same way over dy, grads[i].b += the gradient of item i's B,
// from T. Tensors of grads: stacked as the pairs are; undefined: not wanted, and if none is, T may be undefined. parts:
// of the columns of dy, which meet as many parts of T's rows and of B's outputs (wo_a's groups).
LowRankTerm low_rank_backward(const LoraSet& set, const LoraRowsIn& dy, const Tensor& t,
                              const std::vector<LoraGrad>& grads, int parts = 1);
// grads[i].a += the gradient of item i's A, from U.
void add_gradients_of_a(const LoraSet& set, const LoraRowsIn& x, const Tensor& u, const std::vector<LoraGrad>& grads);

}  // namespace plumb::ops::gpu
