// What lies between the kernels of their own: rows that move (embedding, gathering, cache slots), sums of whole tensors
// and of rows that meet, and key lists. Nothing synchronises with the host. Arguments that a caller can get wrong raise
// std::invalid_argument; CUDA errors raise std::runtime_error.
//
// Every sum has one order, that of ops/elementwise on the CPU: FP32 from left to right, rounded once at the end.
// Pointers are to device memory, aligned to 16 bytes; bf16 values are their bits. No rows (or elements) is no error.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace plumb::kernels::rows {

// out[i, c] = table[token[i]] for c = 0 .. copies - 1: one copy for each residual stream. table: bf16 [vocabulary,
// width], out: bf16 [rows, copies, width]; width a multiple of 8. A token outside of the vocabulary gives a row of NaN.
void embed(const uint16_t* table, int vocabulary, int width, const int* token, int rows, int copies, uint16_t* out,
           cudaStream_t stream);

// out[to[i]] = x[from[i]] for i = 0 .. rows - 1; null: row i; a negative number: nothing moves. Rows of any element
// type, row_bytes a multiple of 16. Gathering (from), storing into cache slots (to; no slot twice), and copies from
// slot to slot, if no row is read and written at once.
void copy(const void* x, const int* from, void* out, const int* to, int rows, size_t row_bytes, cudaStream_t stream);

// A summand, [rows / shared, width]: `shared` neighbouring rows of the result use the same row of it (an embedding that
// meets all streams of its token).
struct Term {
  const void* data;
  bool bf16;  // else FP32
  int shared = 1;
};
constexpr int kMostTerms = 6;

// out = round(scale * (term 0 + term 1 + ...)), rounded to bf16 or not at all. One term: a conversion. May be in place.
struct Sum {
  Term term[kMostTerms];
  int terms;
  int64_t rows;  // a multiple of each `shared`
  int width;     // a multiple of 8
  float scale;   // 1 changes nothing
  void* out;     // [rows, width]
  bool out_bf16;
};
void sum(const Sum& arguments, cudaStream_t stream);

// Rows that meet: row[begin[u]] .. row[begin[u + 1] - 1], ascending, all belong to to[u].
struct Meetings {
  std::vector<int> to, begin, row;
};
// Host side, once a plan: row i belongs to to[i]; -1: to nothing.
Meetings meetings(const std::vector<int>& to);

// out[to[u]] += x[row, 0] + x[row, 1] + ... for the rows of meeting u, in order: the gradient of gathering (rows that
// were wanted) and of the embedding (a token's rows, all streams of each). With null lists row u meets nobody but
// itself: the sum over the streams of each row.
struct MeetingSums {
  const uint16_t* x;            // bf16 [*, copies, width]
  int copies, width;            // copies 1 or 4; width a multiple of 8
  const int *to, *begin, *row;  // a Meetings on the device, or all null
  int meetings;
  void* out;      // [*, width]
  bool out_bf16;  // else FP32
  bool add;       // false: assigned
};
void add_meetings(const MeetingSums& arguments, cudaStream_t stream);

// CSR lists of keys (sparse_attention.h), begin[0] = 0.
struct Lists {
  const int* begin;  // [rows + 1]
  const int* row;    // [begin[rows]]
};
// List t of the result is window list t, then entry list t with `offset` added to each number. begin: [rows + 1], row:
// as long as both together, written. (select_entries can write its part in place, indexer.h: out_begin.)
void merge_keys(const Lists& window, const Lists& entries, int offset, int rows, int* begin, int* row,
                cudaStream_t stream);

}  // namespace plumb::kernels::rows
