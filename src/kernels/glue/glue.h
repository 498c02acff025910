// Small kernels between the others: no sums over rows, all bound by memory. Nothing synchronises with the host. CUDA
// errors raise std::runtime_error. Pointers are to device memory, aligned to 16 bytes; bf16 values are their bits.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace plumb::kernels::glue {

// What a finished sublayer does to the residual streams, where no other sublayer follows at once (hyper_connections.h
// has both in one pass): next_k = bf16(post_k * out + sum_j comb[j, k] * streams_j), four streams. out [rows, width],
// streams and next [rows, 4, width], finished [rows, 24]; width a multiple of 8.
void take_up(const uint16_t* out, const uint16_t* streams, const float* finished, int rows, int width, uint16_t* next,
             cudaStream_t stream);

// out[i] = x[index[i]], 32-bit words; a negative index gives 0.
void gather_words(const void* x, const int* index, int count, void* out, cudaStream_t stream);

// Host values into device memory as arguments of a kernel, so that the host waits for nothing: to[i] = words[i].
void write_words(const uint64_t* words, int count, uint64_t* to, cudaStream_t stream);

// A matrix [rows, columns] into or from columns `first` .. of wider rows: to = from, and to += from.
void place_columns(const float* from, int rows, int columns, float* to, int to_columns, int first, cudaStream_t stream);
void add_columns(const float* from, int rows, int from_columns, int first, float* to, int columns, cudaStream_t stream);

}  // namespace plumb::kernels::glue
