// The mapping's products on tensor cores. A block owns a slice of 256 channels of all four streams and walks over the
// tokens, eight at a time; its 24 x 1,024 part of fn stays in registers, each FP32 weight as three bf16 numbers whose
// sum it is, so products with bf16 streams are exact. Slices leave partial sums, which finish_kernel adds in order.
//
// Warp w multiplies channels 16 w .. 16 w + 15 of the slice; lane 4 g + q has token g and channels 4 q .. 4 q + 3 of
// each stream: eight bytes of every input and output, and at the same time the lane's part of the operand "k16 x 8
// tokens" of one product a stream (k of a product is numbered so that it is). Sixteen warps, because a step is a chain
// of latencies.
#pragma once
#include "kernels/hopper/copy.cuh"
#include "kernels/hopper/vectors.cuh"
#include "kernels/hyper_connections/parts.cuh"

namespace plumb::kernels::hyper {
namespace {

constexpr int kMapTokens = 8, kMapStages = 6;
constexpr int kMapWarps = 16, kMapThreads = 32 * kMapWarps;

struct MapArguments {
  const uint8_t *streams, *out;
  const float* finished;
  uint8_t* next;
  const float* fn;
  float* partial;  // [slices][kSums][rows rounded up to 8]
  int rows, width, outputs;
};

// Operand fragments of 16 x 16. `last` holds outputs 16 to 23: their largest parts above their middle parts in one
// fragment, their smallest parts above zeros in another (two registers).
struct MapWeights {
  uint32_t first[kHyperStreams][3][4];  // [stream][part]: outputs 0 to 15
  uint32_t last[kHyperStreams][6];
};

__device__ __forceinline__ void load_weights(const MapArguments& p, int first_channel, MapWeights& w) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kHyperStreams; ++j)
#pragma unroll
    for (int block = 0; block < 3; ++block) {
      const int row = 8 * block + g;
      float4 v = make_float4(0, 0, 0, 0);
      if (row < p.outputs)
        v = __ldg(reinterpret_cast<const float4*>(p.fn + (static_cast<size_t>(row) * kHyperStreams + j) * p.width +
                                                  first_channel + 4 * q));
      uint32_t low[3], high[3];
      split_pair(v.x, v.y, low);
      split_pair(v.z, v.w, high);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        if (block < 2)
          w.first[j][i][block] = low[i], w.first[j][i][block + 2] = high[i];
        else if (i < 2)
          w.last[j][i] = low[i], w.last[j][i + 2] = high[i];
        else
          w.last[j][4] = low[i], w.last[j][5] = high[i];
      }
    }
}

template <bool kPost>
struct MapShared {
  static constexpr int kInputs = kPost ? 5 : 4;  // streams, output
  // Units of eight channels, at unit_place; a step's results take the place of its streams.
  uint4 input[kMapStages][kInputs][kMapTokens][kSlice / 8];
  float coefficient[kMapStages][kMapTokens][20];  // post, comb
  float sum[2][kMapWarps][kSums][kMapTokens];
};
// No bank conflicts, whether a warp has one token's units or a lane two words of its own token.
__device__ __forceinline__ int unit_place(int token, int unit) { return unit ^ (2 * token & 7); }

// Streams after the sublayer: word i of each (two channels), bf16.
__device__ __forceinline__ void mix_words(const uint32_t (&h)[4], uint32_t out, const float4 (&c)[5],
                                          uint32_t (&next)[4]) {
  const float* post = &c[0].x;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float low = post[k] * low_bf16(out), high = post[k] * high_bf16(out);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float comb = (&c[1 + j].x)[k];
      low = fmaf(comb, low_bf16(h[j]), low), high = fmaf(comb, high_bf16(h[j]), high);
    }
    next[k] = hopper::pack_bf16(low, high);
  }
}

template <bool kPost>
__global__ void __launch_bounds__(kMapThreads, 1) map_kernel(const __grid_constant__ MapArguments p) {
  extern __shared__ __align__(16) uint8_t raw[];
  using S = MapShared<kPost>;
  S& s = *reinterpret_cast<S*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int slices = p.width / kSlice, slice = blockIdx.x % slices;
  const int stride = gridDim.x / slices, steps = (p.rows + kMapTokens - 1) / kMapTokens;
  const int first_step = blockIdx.x / slices;
  MapWeights w;
  load_weights(p, slice * kSlice + warp * 16, w);

  // Between memory and shared memory a warp has whole runs of 512 bytes: run 8 j + t is token t's of input j.
  const size_t row_bytes = static_cast<size_t>(p.width) * 2, lane_byte = (slice * kSlice + lane * 8) * 2;
  const auto fetch = [&](int step, int stage) {
    if (step < steps) {
#pragma unroll
      for (int run = warp; run < kMapTokens * S::kInputs; run += kMapWarps) {
        const int input = run / kMapTokens, token = run % kMapTokens, row = step * kMapTokens + token;
        const size_t safe = row < p.rows ? row : 0;
        const uint8_t* from =
            input < kHyperStreams ? p.streams + (safe * kHyperStreams + input) * row_bytes : p.out + safe * row_bytes;
        hopper::copy16(hopper::shared_address(&s.input[stage][input][token][unit_place(token, lane)]), from + lane_byte,
                       row < p.rows ? 16 : 0);
      }
      if (kPost && threadIdx.x < 5 * kMapTokens) {
        const int token = threadIdx.x / 5, piece = threadIdx.x % 5, from = step * kMapTokens + token;
        hopper::copy16(hopper::shared_address(&s.coefficient[stage][token][piece * 4]),
                       p.finished + static_cast<size_t>(from < p.rows ? from : 0) * kHyperOutputs + 4 + piece * 4,
                       from < p.rows ? 16 : 0);
      }
    }
    hopper::copy_commit();
  };
  // Writes the mixed streams of a step, which its threads have left in the places of the old ones.
  const auto write_streams = [&](int step, int stage) {
    if constexpr (kPost) {
#pragma unroll
      for (int run = warp; run < kMapTokens * kHyperStreams; run += kMapWarps) {
        const int k = run / kMapTokens, token = run % kMapTokens, row = step * kMapTokens + token;
        if (row < p.rows)
          *reinterpret_cast<uint4*>(p.next + (static_cast<size_t>(row) * kHyperStreams + k) * row_bytes + lane_byte) =
              s.input[stage][k][token][unit_place(token, lane)];
      }
    }
  };
  // Adds the warps' sums of a step, in order, and writes them.
  const auto write_sums = [&](int step, int buffer) {
    const int padded = steps * kMapTokens;
    if (threadIdx.x < kSums * kMapTokens) {
      const int output = threadIdx.x / kMapTokens, token = threadIdx.x % kMapTokens;
      float total = s.sum[buffer][0][output][token];
#pragma unroll
      for (int i = 1; i < kMapWarps; ++i) total += s.sum[buffer][i][output][token];
      p.partial[(static_cast<size_t>(slice) * kSums + output) * padded + step * kMapTokens + token] = total;
    }
  };

#pragma unroll
  for (int i = 0; i < kMapStages - 1; ++i) fetch(first_step + i * stride, i);
  int count = 0, stage = 0, before = kMapStages - 1;  // steps so far; the ring's slots of this step and the one before
  for (int step = first_step; step < steps; step += stride, ++count) {
    const int buffer = count & 1;
    hopper::copy_wait<kMapStages - 2>();
    __syncthreads();  // this step's inputs are there, and the results of the one before
    if (count > 0) write_streams(step - stride, before);
    fetch(step + (kMapStages - 1) * stride, before);
    if (count > 0) write_sums(step - stride, buffer ^ 1);

    uint2 h[kHyperStreams];
    const auto own = [&](int input) -> uint2& {
      return reinterpret_cast<uint2*>(&s.input[stage][input][g][unit_place(g, 2 * warp + q / 2)])[q % 2];
    };
#pragma unroll
    for (int j = 0; j < kHyperStreams; ++j) h[j] = own(j);
    if constexpr (kPost) {
      const uint2 out = own(4);
      float4 c[5];
#pragma unroll
      for (int i = 0; i < 5; ++i) c[i] = *reinterpret_cast<const float4*>(&s.coefficient[stage][g][i * 4]);
      uint32_t low[4], high[4];
      mix_words({h[0].x, h[1].x, h[2].x, h[3].x}, out.x, c, low);
      mix_words({h[0].y, h[1].y, h[2].y, h[3].y}, out.y, c, high);
#pragma unroll
      for (int k = 0; k < kHyperStreams; ++k) own(k) = h[k] = make_uint2(low[k], high[k]);
    }
    float first[3][4] = {}, last[2][4] = {}, square = 0;  // five chains of four products, for their latency
#pragma unroll
    for (int j = 0; j < kHyperStreams; ++j) {
      square = fmaf(low_bf16(h[j].x), low_bf16(h[j].x), square),
      square = fmaf(high_bf16(h[j].x), high_bf16(h[j].x), square);
      square = fmaf(low_bf16(h[j].y), low_bf16(h[j].y), square),
      square = fmaf(high_bf16(h[j].y), high_bf16(h[j].y), square);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const uint32_t(&a)[4] = w.first[j][i];
        product_16x8(first[i], a[0], a[1], a[2], a[3], h[j].x, h[j].y);
      }
      const uint32_t(&a)[6] = w.last[j];
      product_16x8(last[0], a[0], a[1], a[2], a[3], h[j].x, h[j].y);
      product_16x8(last[1], a[4], 0, a[5], 0, h[j].x, h[j].y);
    }
    square += __shfl_xor_sync(~0u, square, 1);
    square += __shfl_xor_sync(~0u, square, 2);
    auto& sum = s.sum[buffer][warp];
    const auto parts = [&](int i) { return (first[2][i] + first[1][i]) + first[0][i]; };
    *reinterpret_cast<float2*>(&sum[g][2 * q]) = make_float2(parts(0), parts(1));
    *reinterpret_cast<float2*>(&sum[g + 8][2 * q]) = make_float2(parts(2), parts(3));
    *reinterpret_cast<float2*>(&sum[g + 16][2 * q]) =
        make_float2((last[1][0] + last[0][2]) + last[0][0], (last[1][1] + last[0][3]) + last[0][1]);
    if (q == 0) sum[kHyperOutputs][g] = square;
    before = stage;
    stage = stage == kMapStages - 1 ? 0 : stage + 1;
  }
  hopper::copy_wait<0>();
  __syncthreads();
  if (count == 0) return;
  write_streams(first_step + (count - 1) * stride, before);
  write_sums(first_step + (count - 1) * stride, (count - 1) & 1);
}

}  // namespace
}  // namespace plumb::kernels::hyper
