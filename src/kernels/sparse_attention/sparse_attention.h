// Attention of each query over its own list of keys. One key is one row of 512 that serves as key
// and as value for all heads; each head has a sink that joins the denominator of the softmax and adds nothing else:
//   s[h, k] = scale * q[h] . kv[k]    lse[h] = log(exp(sink[h]) + sum_k exp(s[h, k]))    o[h] = sum_k exp(s[h, k] -
//   lse[h]) kv[k]
// bf16 in and out, FP32 scores, softmax and sums; weights are rounded to bf16 before they meet the values. A list may
// have any length; -1 is no key; a key that is listed twice counts twice; a query without keys gets o = 0, lse = sink.
// Lists are walked in their order, in blocks of 64 entries cut from the start, so a query's bits depend on its own
// inputs alone. docs/kernels/sparse_attention.md says how the kernels work and what limits them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace plumb::kernels {

constexpr int kAttentionDim = 512;  // width of a query head, of a key row and of an output head

// Key lists as CSR: query t has row[begin[t]] .. row[begin[t + 1] - 1]. Device memory.
struct KeyLists {
  const int* begin;  // [queries + 1], begin[0] = 0
  const int* row;    // [begin[queries]], rows of kv (not checked); -1 = no key
};

// A key row of a cache: 448 e4m3 codes, the 64 rotated channels as bf16, seven scale exponents (scale = 2^(byte - 127),
// one for 64 codes), zeros up to 592 bytes. Keys that went through that storage form have the same bits here as in
// bf16, and so has what is computed from them.
constexpr int kFp8KeyBytes = 592, kFp8KeyCodes = 448, kFp8KeyScales = 576;

// Pointers are to device memory, aligned to 16 bytes; "bf16" pointers are untyped, so that callers need no CUDA header
// types.
struct SparseAttentionForward {
  const void* q;      // bf16 [queries, heads, 512]
  const void* kv;     // bf16 [rows, 512], or with kv_fp8 [rows] of kFp8KeyBytes
  KeyLists lists;     // of the queries
  const float* sink;  // [heads], natural logarithm
  void* o;            // bf16 [queries, heads, 512], written
  float* lse;         // [queries, heads], natural logarithm, sink included, written
  int queries;        // may be 0
  int heads;          // 64 or 128
  float scale;        // > 0, usually 512^-1/2
  // Rotary table of the queries (kernels/rotary): the last 64 channels of the outputs are rotated back, from bf16 to
  // bf16. null: they are not. The backward pass takes o and d_o as they are here, o . d_o being the same either way, if
  // d_o has been rotated forth.
  const void* rotation = nullptr;
  bool kv_fp8 = false;
};

struct SparseAttentionBackward {
  const void* q;      // bf16 [queries, heads, 512]
  const void* kv;     // bf16 [rows, 512]
  KeyLists lists;     // of the queries
  const float* sink;  // [heads]
  const void* o;      // bf16 [queries, heads, 512], from the forward pass
  const float* lse;   // [queries, heads], from the forward pass
  const void* d_o;    // bf16 [queries, heads, 512], gradient of o
  void* dq;           // bf16 [queries, heads, 512], written
  void* dkv;          // [rows, 512], written: FP32, or bf16 if dkv_bf16
  bool dkv_bf16;      // format of dkv
  float* d_sink;      // [heads], written
  void* workspace;    // sparse_attention_backward_workspace() bytes, aligned to 256
  int queries;        // may be 0
  int heads;          // 64 or 128
  int rows;           // rows of kv
  float scale;        // > 0
};

// Keys, bf16 [rows, 512], into rows slot[r] (null: r) of a cache of kFp8KeyBytes a row. Codes are the nearest ones
// under the smallest power-of-two scale at or above max(|x|, 1e-4) / 448 of their 64 channels.
cudaError_t store_fp8_keys(const void* keys, const int* slot, int rows, void* cache, cudaStream_t stream);

// Both enqueue on the stream and return at once. They return cudaErrorInvalidValue for arguments outside the ranges
// above, and otherwise what the launch returned.
cudaError_t sparse_attention_forward(const SparseAttentionForward& arguments, cudaStream_t stream);

// Gradients have the same bits in every run: dkv is summed in 32-bit fixed point, whose order cannot matter. The
// power-of-two scale is chosen on the device from the gradients themselves; if the sums that were met would not fit,
// the pass is repeated on the device with a scale that is proven to fit; then the first 32-bit word of the workspace is
// 1, otherwise 0. A gradient that is not finite makes all of dkv NaN.
cudaError_t sparse_attention_backward(const SparseAttentionBackward& arguments, cudaStream_t stream);

// Bytes of workspace; reads queries, heads and rows.
size_t sparse_attention_backward_workspace(const SparseAttentionBackward& arguments);

}  // namespace plumb::kernels
