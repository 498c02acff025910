// The mapping's products on tensor cores. A block owns a slice of 256 channels of all four streams and walks over the
// tokens, eight at a time; its 24 x 1,024 part of fn stays in registers, each FP32 weight as three bf16 numbers whose
// sum it is, so products with bf16 streams are exact. Slices leave partial sums, which finish_kernel adds in order.
//
// Warp w multiplies channels 32 w .. 32 w + 31 of the slice; lane 4 g + q has token g and channels 8 q .. 8 q + 7 of
// each stream: 16 bytes of every input and output, and at the same time the lane's part of the operand "k16 x 8 tokens"
// of two products a stream (k of a product is numbered so that it is).
#pragma once
#include "kernels/hopper/copy.cuh"
#include "kernels/hopper/vectors.cuh"
#include "kernels/hyper_connections/parts.cuh"

namespace plumb::kernels::hyper {
namespace {

constexpr int kMapTokens = 8, kMapStages = 4;

struct MapArguments {
  const uint8_t *streams, *out;
  const float* finished;
  uint8_t* next;
  const float* fn;
  float* partial;  // [slices][kSums][rows rounded up to 8]
  int rows, width, outputs;
};

struct MapWeights {         // of each of the eight products, as operand fragments of 16 x 16
  uint32_t first[8][3][4];  // [part]: outputs 0 to 15
  uint32_t last[8][6];  // outputs 16 to 23: largest part above middle part (four registers), smallest part above zeros
};

__device__ __forceinline__ void load_weights(const MapArguments& p, int first_channel, MapWeights& w) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
  for (int product = 0; product < 8; ++product)
#pragma unroll
    for (int block = 0; block < 3; ++block) {
      const int row = 8 * block + g, channel = first_channel + 8 * q + 4 * (product % 2);
      float4 v = make_float4(0, 0, 0, 0);
      if (row < p.outputs)
        v = __ldg(reinterpret_cast<const float4*>(
            p.fn + (static_cast<size_t>(row) * kHyperStreams + product / 2) * p.width + channel));
      uint32_t low[3], high[3];
      split_pair(v.x, v.y, low);
      split_pair(v.z, v.w, high);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        if (block < 2)
          w.first[product][i][block] = low[i], w.first[product][i][block + 2] = high[i];
        else if (i < 2)
          w.last[product][i] = low[i], w.last[product][i + 2] = high[i];
        else
          w.last[product][4] = low[i], w.last[product][5] = high[i];
      }
    }
}

template <bool kPost>
struct MapShared {
  static constexpr int kInputs = kPost ? 5 : 4;   // streams, output
  uint4 input[kMapStages][kInputs][kThreads];     // at place_of
  float coefficient[kMapStages][kMapTokens][20];  // post, comb
  float sum[2][kWarps][kSums][kMapTokens];
};

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
__global__ void __launch_bounds__(kThreads, 1) map_kernel(const __grid_constant__ MapArguments p) {
  extern __shared__ __align__(16) uint8_t raw[];
  auto& s = *reinterpret_cast<MapShared<kPost>*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int slices = p.width / kSlice, slice = blockIdx.x % slices;
  const int stride = gridDim.x / slices, steps = (p.rows + kMapTokens - 1) / kMapTokens;
  const int first_step = blockIdx.x / slices;
  MapWeights w;
  load_weights(p, slice * kSlice + warp * 32, w);

  // From memory to shared memory warp w has token w of the step, its lanes eight neighbouring channels each: runs
  // of 512 bytes. From shared memory to registers a lane has its own token and channels.
  const auto place_of = [](int token, int unit) {  // unit: eight channels of the slice. No bank conflicts either way
    return unit / 4 * 32 + (token ^ (unit / 4 & 1)) * 4 + unit % 4;
  };
  const int copied = place_of(warp, lane), own = place_of(g, 4 * warp + q);
  const size_t slice_bytes = (slice * kSlice + lane * 8) * 2;
  const auto fetch = [&](int step, int stage) {
    if (step < steps) {
      const int row = step * kMapTokens + warp;
      const uint32_t bytes = row < p.rows ? 16 : 0;
      const size_t safe = row < p.rows ? row : 0;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        hopper::copy16(hopper::shared_address(&s.input[stage][j][copied]),
                       p.streams + (safe * kHyperStreams + j) * p.width * 2 + slice_bytes, bytes);
      if constexpr (kPost) {
        hopper::copy16(hopper::shared_address(&s.input[stage][4][copied]), p.out + safe * p.width * 2 + slice_bytes,
                       bytes);
        if (threadIdx.x < 5 * kMapTokens) {
          const int token = threadIdx.x / 5, piece = threadIdx.x % 5, from = step * kMapTokens + token;
          hopper::copy16(hopper::shared_address(&s.coefficient[stage][token][piece * 4]),
                         p.finished + static_cast<size_t>(from < p.rows ? from : 0) * kHyperOutputs + 4 + piece * 4,
                         from < p.rows ? 16 : 0);
        }
      }
    }
    hopper::copy_commit();
  };
  // Adds the warps' sums of a step, in order, and writes them.
  const auto write_sums = [&](int step, int buffer) {
    const int padded = steps * kMapTokens;
    if (threadIdx.x < kSums * kMapTokens) {
      const int output = threadIdx.x / kMapTokens, token = threadIdx.x % kMapTokens;
      float total = s.sum[buffer][0][output][token];
#pragma unroll
      for (int i = 1; i < kWarps; ++i) total += s.sum[buffer][i][output][token];
      p.partial[(static_cast<size_t>(slice) * kSums + output) * padded + step * kMapTokens + token] = total;
    }
  };

#pragma unroll
  for (int i = 0; i < kMapStages - 1; ++i) fetch(first_step + i * stride, i);
  int count = 0;
  for (int step = first_step; step < steps; step += stride, ++count) {
    const int stage = count % kMapStages, buffer = count & 1;
    hopper::copy_wait<kMapStages - 2>();
    __syncthreads();  // this step's inputs are there, and the sums of the one before
    const int before = (count + kMapStages - 1) % kMapStages;
    fetch(step + (kMapStages - 1) * stride, before);
    if (count > 0) write_sums(step - stride, buffer ^ 1);

    uint4 h[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) h[j] = s.input[stage][j][own];
    if constexpr (kPost) {
      const uint4 out = s.input[stage][4][own];
      float4 c[5];
#pragma unroll
      for (int i = 0; i < 5; ++i) c[i] = *reinterpret_cast<const float4*>(&s.coefficient[stage][g][i * 4]);
      uint32_t next[4][4];  // [word][stream]
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word[4] = {word_of(h[0], i), word_of(h[1], i), word_of(h[2], i), word_of(h[3], i)};
        mix_words(word, word_of(out, i), c, next[i]);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        h[k] = make_uint4(next[0][k], next[1][k], next[2][k], next[3][k]);
      }
      // From registers, runs of 64 bytes: neighbouring warps fill the lines in L2. Other tokens' inputs are not
      // touched, so `next` may be `streams`.
      const int row = step * kMapTokens + g;
      if (row < p.rows)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          *reinterpret_cast<uint4*>(
              p.next + ((static_cast<size_t>(row) * kHyperStreams + k) * p.width + slice * kSlice + warp * 32 + q * 8) *
                           2) = h[k];
    }
    float first[3][4] = {}, last[2][4] = {}, square = 0;  // five chains of eight products, for their latency
#pragma unroll
    for (int product = 0; product < 8; ++product) {
      const uint32_t b0 = word_of(h[product / 2], product % 2 * 2), b1 = word_of(h[product / 2], product % 2 * 2 + 1);
      square = fmaf(low_bf16(b0), low_bf16(b0), square), square = fmaf(high_bf16(b0), high_bf16(b0), square);
      square = fmaf(low_bf16(b1), low_bf16(b1), square), square = fmaf(high_bf16(b1), high_bf16(b1), square);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const uint32_t(&a)[4] = w.first[product][i];
        hopper::multiply_16x8(first[i], a[0], a[1], a[2], a[3], b0, b1);
      }
      const uint32_t(&a)[6] = w.last[product];
      hopper::multiply_16x8(last[0], a[0], a[1], a[2], a[3], b0, b1);
      hopper::multiply_16x8(last[1], a[4], 0, a[5], 0, b0, b1);
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
  }
  hopper::copy_wait<0>();
  __syncthreads();
  if (count == 0) return;
  write_sums(first_step + (count - 1) * stride, (count - 1) & 1);
}

}  // namespace
}  // namespace plumb::kernels::hyper
