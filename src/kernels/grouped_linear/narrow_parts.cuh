// What the kernels for few rows share (narrow.cu, slab.cu): weights as the 64-row operand, activations ("tokens") as
// the columns. M is a kernel's map of its shared memory: output(slab, token, chunk).
#pragma once
#include "kernels/grouped_linear/activation.cuh"
#include "kernels/grouped_linear/problem.cuh"
#include "kernels/hopper/barrier.cuh"
#include "kernels/hopper/launch_order.cuh"
#include "kernels/hopper/tma.cuh"
#include "kernels/hopper/wgmma_fp8.cuh"

namespace plumb::kernels::grouped_linear {

using namespace hopper;

// Where the scale of a token lies in its row: a thread then finds the four scales it needs next to each other. Even and
// odd tokens are swapped, so that a scale lands in a register of the other bank than the accumulator it multiplies.
__device__ __forceinline__ int scale_place(int token) {
  return (token / 16) * 16 + ((token % 8) / 2) * 4 + ((token / 8) & 1) * 2 + ((token & 1) ^ 1);
}

// total += partial * scale.
template <int kTokens, int kSlabs>
__device__ __forceinline__ void promote(float (&total)[kSlabs][kTokens / 2],
                                        const float (&partial)[kSlabs][kTokens / 2], uint32_t scales) {
#pragma unroll
  for (int pair = 0; pair < (kTokens + 15) / 16; ++pair) {  // 16 tokens
    const float4 s = load_shared_floats(scales + pair * 64);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
#pragma unroll
      for (int i = 8 * pair; i < 8 * pair + 8 && i < kTokens / 2; ++i)
        total[slab][i] = fmaf(partial[slab][i], i & 4 ? (i & 1 ? s.z : s.w) : (i & 1 ? s.x : s.y), total[slab][i]);
  }
}

// A thread's 64-row results -> the staging area, transposed: tokens as rows.
template <int kTokens, typename M>
__device__ __forceinline__ void stage_slab(const M& m, const float (&total)[kTokens / 2], int slab, int warp,
                                           int lane) {
  const int matrix = lane / 8;
#pragma unroll
  for (int pair = 0; pair < (kTokens + 15) / 16; ++pair) {
    const int token = (pair * 16 + (matrix / 2) * 8 + lane % 8) % kTokens;
    const uint32_t at = m.output(slab, token, warp * 2 + (matrix & 1));
    const float* v = &total[8 * pair];
    if constexpr (kTokens >= 16)
      store_matrices_transposed(at, pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                                pack_bf16(v[6], v[7]));
    else
      store_matrices_transposed(at, pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
  }
}

// A warp a token; a lane holds the four hidden units at places 4 lane .. 4 lane + 3 (place_of_row): weight rows
// 16 (lane % 8) + 2 (lane / 8) + {0, 1} and the same + 8.
template <int kConsumers, typename M>
__device__ __forceinline__ void write_hidden(const M& m, const Problem& p, const Tile& tile, int thread) {
  const int lane = thread % 32, pair = lane % 8, slab = pair / 4, chunk = pair % 4 * 2, byte = lane / 8 * 4;
  for (int token = thread / 32; token < tile.rows; token += kConsumers / 32) {
    const size_t row = tile.first_row + token;
    const float weight = p.route_weight ? p.route_weight[row] : 1.0f;
    uint32_t hidden[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      hidden[i] = swiglu_pair(load_shared_4(m.output(slab, token, chunk + i) + byte),
                              load_shared_4(m.output(2 + slab, token, chunk + i) + byte), p.limit, weight);
    float amax = largest_of_pair(max_magnitude(max_magnitude(0, hidden[0]), hidden[1]));
#pragma unroll
    for (int step = 16; step; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
    const float scale = fp8_scale(amax);
    *reinterpret_cast<uint32_t*>(p.hidden + row * (p.n / 2) + tile.weight_tile * kBlock + lane * 4) =
        quantise_four(hidden[0], hidden[1], inverse_of_power(scale));
    if (lane == 0) p.hidden_scales[row * p.hidden_stride + tile.weight_tile] = scale;
  }
}

// Of slab.cu. Whether it should take a product that launch_narrow was asked for.
bool few_tiles(int width, Epilogue epilogue, int64_t tiles, int k_blocks);
void launch_slabs(int width, const Weights& weights, const Activations& activations, Epilogue epilogue, int64_t tiles,
                  const Problem& problem, cudaStream_t stream);

}  // namespace plumb::kernels::grouped_linear
