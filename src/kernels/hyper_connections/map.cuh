// The mapping's products on tensor cores. A block owns a slice of 256 channels of all four streams and walks over the
// tokens, sixteen at a time; its 24 x 1,024 part of fn stays in registers, each FP32 weight as three bf16 numbers whose
// sum it is, so products with bf16 streams are exact. Slices leave partial sums, which finish_kernel adds in order.
//
// Warp w multiplies channels 32 w .. 32 w + 31 of the slice; lane 4 g + q has tokens g and g + 8 and channels 8 q ..
// 8 q + 7 of each stream: 16 bytes of every input and output, which it copies itself, and at the same time the lane's
// part of the operand "16 tokens x k16" of two products a stream (k of a product is numbered so that it is).
#pragma once
#include "kernels/hopper/code.cuh"
#include "kernels/hopper/copy.cuh"
#include "kernels/hopper/vectors.cuh"
#include "kernels/hyper_connections/parts.cuh"

namespace plumb::kernels::hyper {
namespace {

constexpr int kMapTokens = 16;

struct MapArguments {
  const uint8_t *streams, *out;
  const float* finished;
  uint8_t* next;
  const float* fn;
  float *products, *squares;  // [slices][rows rounded up to 16][24], [slices][rows rounded up to 16]
  int rows, width, outputs;
};

// Of each of the eight products: operand fragments of eight outputs x 16, largest part of the weights first.
using MapWeights = uint32_t[8][3][3][2];  // [product][part][outputs / 8]

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
      for (int part = 0; part < 3; ++part)
        w[product][part][block][0] = low[part], w[product][part][block][1] = high[part];
    }
}

template <bool kPost>
struct MapShared {
  static constexpr int kInputs = kPost ? 5 : 4;  // streams, output
  // Other GPUs than Hopper: what the least of shared memory has room for.
  static constexpr int kStages = !hopper::kHasCode ? 1 : kPost ? 4 : 3;
  static constexpr int kBatch = !hopper::kHasCode || kPost ? 1 : 4;  // steps between barriers
  uint4 input[kStages][kInputs][2][kThreads];              // of a token half; each thread reads what it copied itself
  float coefficient[kPost ? kStages : 1][kMapTokens][20];  // post, comb
  float product[2][kBatch][kWarps][kMapTokens][kHyperOutputs];
  float square[2][kBatch][kWarps][kMapTokens];
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
  using Shared = MapShared<kPost>;
  static_assert(hopper::kFitsEverywhere<Shared>);
  constexpr int kStages = Shared::kStages, kBatch = Shared::kBatch;
  auto& s = *reinterpret_cast<Shared*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int slices = p.width / kSlice, slice = blockIdx.x % slices;
  const int stride = gridDim.x / slices, steps = (p.rows + kMapTokens - 1) / kMapTokens;
  const int first_step = blockIdx.x / slices;
  MapWeights w;
  load_weights(p, slice * kSlice + warp * 32, w);

  const size_t row_bytes = static_cast<size_t>(p.width) * 2, own_bytes = (slice * kSlice + warp * 32 + q * 8) * 2;
  const auto fetch = [&](int step, int stage) {
    if (step < steps) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int row = step * kMapTokens + g + 8 * u;
        const uint32_t bytes = row < p.rows ? 16 : 0;
        const size_t safe = row < p.rows ? row : 0;
        const uint8_t* from = p.streams + safe * kHyperStreams * row_bytes + own_bytes;
#pragma unroll
        for (int j = 0; j < 4; ++j)
          hopper::copy16(hopper::shared_address(&s.input[stage][j][u][threadIdx.x]), from + j * row_bytes, bytes);
        if constexpr (kPost)
          hopper::copy16(hopper::shared_address(&s.input[stage][4][u][threadIdx.x]),
                         p.out + safe * row_bytes + own_bytes, bytes);
      }
      if constexpr (kPost)
        if (threadIdx.x < 5 * kMapTokens) {
          const int token = threadIdx.x / 5, piece = threadIdx.x % 5, from = step * kMapTokens + token;
          hopper::copy16(hopper::shared_address(&s.coefficient[stage][token][piece * 4]),
                         p.finished + static_cast<size_t>(from < p.rows ? from : 0) * kHyperOutputs + 4 + piece * 4,
                         from < p.rows ? 16 : 0);
        }
    }
    hopper::copy_commit();
  };
  // Adds the warps' sums of the block's steps number `first` to `last`, in order of the warps, and writes them.
  const auto write_sums = [&](int first, int last) {
    constexpr int kQuads = kMapTokens * kHyperOutputs / 4, kItems = kQuads + kMapTokens / 4;
    for (int i = threadIdx.x; i < (last - first) * kItems; i += kThreads) {
      const int number = first + i / kItems, item = i % kItems;
      const int set = number / kBatch % 2, place = number % kBatch;
      const bool square = item >= kQuads;
      const float4* from = square ? reinterpret_cast<const float4*>(s.square[set][place][0]) + item - kQuads
                                  : reinterpret_cast<const float4*>(s.product[set][place][0]) + item;
      const int distance = square ? kMapTokens / 4 : kQuads;
      float4 total = from[0];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) {
        const float4 more = from[w * distance];
        total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
      }
      const size_t row = static_cast<size_t>(slice * steps + first_step + number * stride) * kMapTokens;
      if (square)
        reinterpret_cast<float4*>(p.squares + row)[item - kQuads] = total;
      else
        reinterpret_cast<float4*>(p.products + row * kHyperOutputs)[item] = total;
    }
  };

#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch(first_step + i * stride, i);
  int count = 0, stage = 0;
  for (int step = first_step; step < steps; step += stride, ++count) {
    if constexpr (kStages > 1) hopper::copy_wait<kStages - 2>();
    if (count % kBatch == 0) __syncthreads();  // the sums of the batch before are there, and this step's coefficients
    fetch(step + (kStages - 1) * stride, stage == 0 ? kStages - 1 : stage - 1);
    if constexpr (kStages == 1) {
      hopper::copy_wait<0>();
      __syncthreads();
    }
    if (count > 0 && count % kBatch == 0) write_sums(count - kBatch, count);

    uint32_t h[2][4][4];  // [token half][stream][word]
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int token = g + 8 * u;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4 v = s.input[stage][j][u][threadIdx.x];
        h[u][j][0] = v.x, h[u][j][1] = v.y, h[u][j][2] = v.z, h[u][j][3] = v.w;
      }
      if constexpr (kPost) {
        const uint4 out = s.input[stage][4][u][threadIdx.x];
        float4 c[5];
#pragma unroll
        for (int i = 0; i < 5; ++i) c[i] = *reinterpret_cast<const float4*>(&s.coefficient[stage][token][i * 4]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t word[4] = {h[u][0][i], h[u][1][i], h[u][2][i], h[u][3][i]};
          uint32_t next[4];
          mix_words(word, word_of(out, i), c, next);
#pragma unroll
          for (int k = 0; k < 4; ++k) h[u][k][i] = next[k];
        }
        // From registers, runs of 64 bytes: neighbouring warps fill the lines in L2. Other tokens' inputs are not
        // touched, so `next` may be `streams`.
        const int row = step * kMapTokens + token;
        if (row < p.rows)
#pragma unroll
          for (int k = 0; k < 4; ++k)
            *reinterpret_cast<uint4*>(p.next + ((static_cast<size_t>(row) * kHyperStreams + k) * p.width +
                                                slice * kSlice + warp * 32 + q * 8) *
                                                   2) = make_uint4(h[u][k][0], h[u][k][1], h[u][k][2], h[u][k][3]);
      }
    }
    const int set = count / kBatch % 2, place = count % kBatch;
    float sum[3][3][4] = {}, square[2] = {0, 0};  // nine chains of eight products
#pragma unroll
    for (int product = 0; product < 8; ++product) {
      const int j = product / 2, first = product % 2 * 2;
#pragma unroll
      for (int part = 0; part < 3; ++part)
#pragma unroll
        for (int block = 0; block < 3; ++block)
          hopper::multiply_16x8(sum[part][block], h[0][j][first], h[1][j][first], h[0][j][first + 1],
                                h[1][j][first + 1], w[product][part][block][0], w[product][part][block][1]);
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int i = first; i < first + 2; ++i) {
          square[u] = fmaf(low_bf16(h[u][j][i]), low_bf16(h[u][j][i]), square[u]);
          square[u] = fmaf(high_bf16(h[u][j][i]), high_bf16(h[u][j][i]), square[u]);
        }
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      square[u] += __shfl_xor_sync(~0u, square[u], 1);
      square[u] += __shfl_xor_sync(~0u, square[u], 2);
      const int token = g + 8 * u;
      if (q == 0) s.square[set][place][warp][token] = square[u];
#pragma unroll
      for (int block = 0; block < 3; ++block) {
        const auto parts = [&](int i) { return (sum[2][block][i] + sum[1][block][i]) + sum[0][block][i]; };
        *reinterpret_cast<float2*>(&s.product[set][place][warp][token][8 * block + 2 * q]) =
            make_float2(parts(2 * u), parts(2 * u + 1));
      }
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  hopper::copy_wait<0>();
  __syncthreads();
  if (count > 0) write_sums((count - 1) / kBatch * kBatch, count);
}

}  // namespace
}  // namespace plumb::kernels::hyper
