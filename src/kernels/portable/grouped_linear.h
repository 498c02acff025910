// The products of grouped_linear.h for any GPU. Tiles: those of 256 weight rows (of 256 of K), `tiles` at most.
#pragma once
#include "kernels/grouped_linear/problem.cuh"

namespace plumb::kernels::grouped_linear {

// width: rows of a tile at most; tokens: [rows, k] e4m3.
void launch_portable(WeightFormat format, Epilogue epilogue, int width, int64_t tiles, const uint8_t* tokens,
                     const Problem& problem, cudaStream_t stream);
// p.n, p.k_blocks are the weight's; dy: bf16 [rows, n]; p.out: dx.
void launch_portable_backward_input(WeightFormat format, int64_t tiles, const uint16_t* dy, const Problem& problem,
                                    cudaStream_t stream);

}  // namespace plumb::kernels::grouped_linear
