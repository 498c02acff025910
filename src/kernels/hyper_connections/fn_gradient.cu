// d_fn[o, c] += sum over tokens of rho d_mix_o h_c. A block owns 256 channels of the four streams and one of eight
// equal runs of tokens; a warp's 24 x 128 part stays in its accumulators. rho d_mix is split into three bf16 numbers,
// so products are exact. Tokens are contracted, 16 at a time; the runs' sums are added in order.
#include <algorithm>

#include "kernels/hopper/code.cuh"
#include "kernels/hopper/copy.cuh"
#include "kernels/hopper/vectors.cuh"
#include "kernels/hyper_connections/backward_parts.cuh"
#include "kernels/launch.cuh"

namespace plumb::kernels::hyper {
namespace {

constexpr int kFnTokens = 16;
constexpr int kFnStages = hopper::kHasCode ? 4 : 2;  // that the least of shared memory has room for

struct FnShared {
  uint4 stream[kFnStages][kHyperStreams][kFnTokens / 8][kThreads];
  Record record[kFnStages][kFnTokens];
};

__global__ void __launch_bounds__(kThreads, 1) fn_gradient_kernel(const __grid_constant__ FnArguments p) {
  extern __shared__ __align__(16) uint8_t raw[];
  FnShared& s = *reinterpret_cast<FnShared*>(raw);
  static_assert(hopper::kFitsEverywhere<FnShared>);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int slices = p.width / kSlice, slice = blockIdx.x % slices, chunk = blockIdx.x / slices;
  const int chunk_rows = ((p.rows + kTokenChunks - 1) / kTokenChunks + kFnTokens - 1) / kFnTokens * kFnTokens;
  const int first_row = chunk * chunk_rows, last_row = min(p.rows, first_row + chunk_rows);
  const int first_channel = slice * kSlice + warp * 32;
  const int steps = max(0, last_row - first_row + kFnTokens - 1) / kFnTokens;
  const auto fetch = [&](int step, int stage) {
    if (step < steps) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + step * kFnTokens + half * 8 + g;
        const size_t safe = row < last_row ? row : 0;
#pragma unroll
        for (int j = 0; j < 4; ++j)
          hopper::copy16(hopper::shared_address(&s.stream[stage][j][half][threadIdx.x]),
                         p.streams + ((safe * kHyperStreams + j) * p.width + first_channel + 8 * q) * 2,
                         row < last_row ? 16 : 0);
      }
      constexpr int kPieces = kRecordFloats / 4;
      if (threadIdx.x < kPieces * kFnTokens) {
        const int token = threadIdx.x / kPieces, piece = threadIdx.x % kPieces,
                  row = first_row + step * kFnTokens + token;
        hopper::copy16(hopper::shared_address(reinterpret_cast<float4*>(&s.record[stage][token]) + piece),
                       reinterpret_cast<const float4*>(p.records + (row < last_row ? row : 0)) + piece,
                       row < last_row ? 16 : 0);
      }
    }
    hopper::copy_commit();
  };
  float first[16][4] = {}, last[16][4] = {};  // [stream * 4 + eight channels]: outputs 0 to 15, 16 to 23
#pragma unroll
  for (int i = 0; i < kFnStages - 1; ++i) fetch(i, i);
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kFnStages;
    hopper::copy_wait<kFnStages - 2>();
    __syncthreads();
    fetch(step + kFnStages - 1, (step + kFnStages - 1) % kFnStages);
    uint32_t a[3]
              [6];  // [part]: outputs g and g + 8 with token pair 2 q, the same with 2 q + 8, output g + 16 with both
#pragma unroll
    for (int block = 0; block < 3; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Record* token = &s.record[stage][2 * q + 8 * half];
        uint32_t part[3];
        split_pair(token[0].mix[8 * block + g], token[1].mix[8 * block + g], part);
#pragma unroll
        for (int i = 0; i < 3; ++i) a[i][block == 2 ? 4 + half : block + 2 * half] = part[i];
      }
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {  // two products of eight channels
        // Matrices: tokens 0-7 and 8-15 of the first eight channels, then of the second.
        const int matrix = lane / 8, token = lane % 8, tile = 2 * pair + matrix / 2;
        uint32_t b[4];
        hopper::load_matrices_transposed(
            b, hopper::shared_address(&s.stream[stage][j][matrix % 2][warp * 32 + token * 4 + tile]));
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
          for (int i = 2; i >= 0; --i) {
            hopper::multiply_16x8(first[4 * j + 2 * pair + t], a[i][0], a[i][1], a[i][2], a[i][3], b[2 * t],
                                  b[2 * t + 1]);
            hopper::multiply_16x8(last[4 * j + 2 * pair + t], a[i][4], 0, a[i][5], 0, b[2 * t], b[2 * t + 1]);
          }
      }
  }
  hopper::copy_wait<0>();
  float* out = p.partial + static_cast<size_t>(chunk) * kHyperOutputs * kHyperStreams * p.width;
#pragma unroll
  for (int t = 0; t < 16; ++t) {
    const size_t column = static_cast<size_t>(t / 4) * p.width + first_channel + t % 4 * 8 + 2 * q;
    const size_t row_step = static_cast<size_t>(kHyperStreams) * p.width;
    *reinterpret_cast<float2*>(out + g * row_step + column) = make_float2(first[t][0], first[t][1]);
    *reinterpret_cast<float2*>(out + (g + 8) * row_step + column) = make_float2(first[t][2], first[t][3]);
    *reinterpret_cast<float2*>(out + (g + 16) * row_step + column) = make_float2(last[t][0], last[t][1]);
  }
}

__global__ void __launch_bounds__(kThreads)
    add_chunks_kernel(const float* partial, int count, size_t stride, float* d_fn) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count) return;
  float sum = 0;
#pragma unroll
  for (int chunk = 0; chunk < kTokenChunks; ++chunk) sum += partial[chunk * stride + i];
  d_fn[i] += sum;
}

}  // namespace

cudaError_t fn_gradient(const FnArguments& a, int outputs, float* d_fn, cudaStream_t stream) {
  const int shared = std::min(static_cast<int>(sizeof(FnShared)), shared_memory_limit());  // of fewer stages
  const cudaError_t error =
      cudaFuncSetAttribute(fn_gradient_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  fn_gradient_kernel<<<a.width / kSlice * kTokenChunks, kThreads, shared, stream>>>(a);
  const int count = outputs * kHyperStreams * a.width;
  add_chunks_kernel<<<(count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
      a.partial, count, static_cast<size_t>(kHyperOutputs) * kHyperStreams * a.width, d_fn);
  return cudaGetLastError();
}

}  // namespace plumb::kernels::hyper
