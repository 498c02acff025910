// The way of tokens to their experts and back, on the device: nothing depends on the host, so that all of it can be
// captured in a CUDA graph.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/grouped_linear/grouped_linear.h"

namespace plumb::kernels::grouped_linear {

// The chosen experts of a batch. A pair is a (token, slot); its expert is 0 .. experts - 1, or negative for no expert
// (a token that only pads the batch).
struct Choices {
  const int* expert;           // [tokens, top_k]
  const float* weight;         // [tokens, top_k]
  int tokens, top_k, experts;  // at most kLargestExperts experts
};
constexpr int kLargestExperts = 512;

// Pairs sorted by expert, those of an expert in order of token and slot. Arrays of tokens * top_k, except first_row.
struct Routing {
  int* first_row;       // [experts + 1]; the rows after first_row[experts] name token 0, with weight 0
  int* source_row;      // [row]: its token
  float* route_weight;  // [row]
  int* row_of_slot;     // [tokens, top_k]: where the pair went, -1 for no expert
};
size_t sort_bytes(const Choices& choices);  // of workspace, aligned to 4
// plan: make_plan(routing.first_row, *plan, stream) as well; up to 1,024 pairs it costs no launch of its own.
void sort_by_expert(const Choices& choices, const Routing& routing, void* workspace, cudaStream_t stream,
                    const Plan* plan = nullptr);

// out[token] = bf16(rows of its slots in order, then shared[token], summed in FP32). rows: bf16 bits [row, n];
// shared: [tokens, n] or null; n: a multiple of 8; arrays aligned to 16 bytes.
void combine(const uint16_t* rows, const int* row_of_slot, const uint16_t* shared, int tokens, int top_k, int n,
             uint16_t* out, cudaStream_t stream);

}  // namespace plumb::kernels::grouped_linear
