// Low-rank adapters (LoRA), unmerged: y = base + T B^T with T = scale * x A^T. T, B and all sums are FP32; T B^T is
// added to the sum of the base product before y is rounded (T and B enter with 16 bits each, see low_rank.cuh). T comes
// from row_linear::few_outputs; T B^T is added in the epilogues of the base products; this folder has what they share
// (low_rank.cuh) and the gradients of A and B. Many adapters may share a batch: each row names its own.
//
// Backward, with U = scale * dy B from few_outputs: dx = dy W + U A (in the epilogue of the input gradient),
// dA += U^T x, dB += dy^T T.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace plumb::kernels::lora {

// What an epilogue adds to output (row, n): the sum over j = 0 .. rank - 1, in order, of t[row, j] * factor(n, j).
// Forward: t = T, the factor is B; backward: t = U, the factor is A.
struct LowRank {
  int rank = 0;                             // a multiple of 4; 0: nothing is added
  const float* t = nullptr;                 // FP32 [rows, t_stride], rows aligned to 16 bytes
  int t_stride = 0;                         // a multiple of 4, at least the rank
  const uint32_t* const* factor = nullptr;  // device, for each adapter: packed by pack_factor
  const int* adapter = nullptr;             // device, [rows]: the row's adapter, -1 for none; null: all rows use 0
};

// A factor as the epilogues read it (low_rank.cuh), outputs in the order of the weight's rows; aligned to 16 bytes.
// from: B [groups, n, rank], or (transposed) A [groups, rank, n]; n a multiple of 32. gate_up: B's rows are n/2 gates,
// then n/2 ups, and the weight was packed as gate and up (weight_format.h).
size_t factor_bytes(int groups, int n, int rank);
void pack_factor(const float* from, int groups, int n, int rank, bool transposed, bool gate_up, uint32_t* packed,
                 cudaStream_t stream);

// One gradient of one adapter: out[c, j] += sum over the rows, in order, of y[row, c] * t[row, j].
//   dB: y = dy, t = T, out [n, rank];  dA: y = x, t = U, out [rank, k] (`transposed`)
// With `u`, the same pass over y also makes u[row, j] = sum over c of y[row, c] * W[j, c], W in planes (split_weight):
//   U = scale * dy B
struct Gradient {
  const uint16_t* y;      // bf16 [*, columns]
  const int* source_row;  // the row of y that row r is, or null for r
  const float* t;         // FP32 [rows, t_stride]
  int t_stride, rank;     // rank a multiple of 4, at most kMostRank
  int rows, columns;      // columns: a multiple of 8
  const int* first_row;   // device, [groups + 1], or null for one group of all rows
  int groups;
  const int* adapter;        // [rows], or null: all rows count
  int which;                 // rows of other adapters do not count, and theirs of u are not written
  bool transposed, gate_up;  // gate_up: columns of y are in record order, out's rows natural
  float* out;                // [groups][columns][rank], or [groups][rank][columns]; null: u alone is wanted, t not read
  // Columns in equal parts (wo_a's groups, which lie beside each other): part p meets numbers p * rank .. of t's rows.
  int parts = 1;
  const uint16_t* planes = nullptr;  // [groups or parts][3][rank rounded up to 8][columns of a part]
  float* u = nullptr;                // FP32 [rows, parts * rank], or null: not wanted
};
constexpr int kMostRank = 32;

// Several groups: one block walks a group's rows. One group: blocks of rows leave their sums in the workspace, which
// are then added in order; so are the sums of u over blocks of columns. How rows are cut depends on the sizes alone,
// so results depend on the inputs alone.
size_t gradient_bytes(const Gradient& g);
void add_gradient(const Gradient& g, void* workspace, cudaStream_t stream);

}  // namespace plumb::kernels::lora
