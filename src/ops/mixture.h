// The feed-forward half of a layer behind its router, spec 3.8: the routed experts and the shared one, summed.
#pragma once
#include <vector>

#include "ops/moe.h"

namespace plumb::ops {

struct MixtureWeights {
  const std::vector<ExpertWeights>& experts;
  const ExpertWeights& shared;
  float limit;  // of the clamp; 0 = none
};
struct MixtureLora {
  std::vector<ExpertLoraRows> routed;
  SharedLora shared;
};
struct MixtureGrads {
  std::vector<ExpertGrads> experts;  // [E] or empty: frozen
  ExpertGrads shared;
  std::vector<ExpertLoraGrad> routed_lora;  // one for each element of MixtureLora::routed
  SharedLoraGrad shared_lora;
};

// What the backward pass needs; without it hidden rows are recomputed.
struct SortedPairs {    // on a GPU: the pairs (row, slot) sorted by expert
  Tensor first_row;     // i32 [E + 1]
  Tensor source_row;    // i32 [rows*K]: the row of each
  Tensor route_weight;  // f32 [rows*K]
  Tensor row_of_slot;   // i32 [rows,K]: where each pair went
};
struct ExpertRows {          // on a GPU, bf16: n pairs of all routed experts, or n rows of the shared one
  Tensor gate_up;            // [n, 2f] before SwiGLU
  Tensor hidden;             // [n, f] behind it; adapters of w2 only
  Tensor t_gate_up, t_down;  // f32 [n, rank] x A^T of both products' adapters
};
struct MixtureSaved {
  std::vector<ExpertHidden> routed;  // [E]
  ExpertHidden shared;
  SortedPairs pairs;  // on a GPU instead of these two
  ExpertRows routed_rows, shared_rows;
};

// x [rows,d] (rounded at norm_block) -> [rows,d]: routed experts in slot order, then the shared one, rounded at
// moe_sum. saved: filled if not null.
Tensor mixture(const Tensor& x, const Routing& r, const MixtureWeights& w, const MixtureLora& lora, Numerics numerics,
               MixtureSaved* saved = nullptr);

RoutedBackward mixture_backward(const Tensor& d_sum, const Tensor& x, const Routing& r, const MixtureWeights& w,
                                const MixtureLora& lora, Numerics numerics, const MixtureGrads& grads,
                                const MixtureSaved& saved);

// Rows that were routed to each of the experts.
std::vector<int64_t> count_rows(const Routing& r, int64_t experts);

}  // namespace plumb::ops
