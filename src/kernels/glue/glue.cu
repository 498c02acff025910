#include "kernels/glue/glue.h"

#include <limits>

#include "kernels/grouped_linear/activation.cuh"
#include "kernels/grouped_linear/weight_format.h"
#include "kernels/launch.cuh"

namespace plumb::kernels::glue {
namespace {

constexpr int kThreads = 256, kStreams = 4, kCoefficients = 24;

unsigned blocks_for(int64_t items) { return static_cast<unsigned>((items + kThreads - 1) / kThreads); }

__device__ __forceinline__ int64_t item() { return blockIdx.x * int64_t{kThreads} + threadIdx.x; }

// A thread has eight channels of all streams of a token.
__global__ void __launch_bounds__(kThreads)
    take_up_kernel(const uint4* out, const uint4* streams, const float* finished, int64_t items, int vectors,
                   uint4* next) {
  const int64_t i = item();
  if (i >= items) return;
  const int64_t row = i / vectors, column = i % vectors;
  const float* c = finished + row * kCoefficients;
  const uint4 o = out[i];
  uint4 s[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) s[j] = streams[(row * kStreams + j) * vectors + column];
  const auto mix = [&](uint32_t from, uint32_t a, uint32_t b, uint32_t d, uint32_t e, int k) {
    const uint32_t stream[kStreams] = {a, b, d, e};
    float low = __fmul_rn(c[4 + k], low_bf16(from)), high = __fmul_rn(c[4 + k], high_bf16(from));
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const float weight = c[8 + j * kStreams + k];
      low = __fmaf_rn(weight, low_bf16(stream[j]), low), high = __fmaf_rn(weight, high_bf16(stream[j]), high);
    }
    return hopper::pack_bf16(low, high);
  };
#pragma unroll
  for (int k = 0; k < kStreams; ++k)
    next[(row * kStreams + k) * vectors + column] =
        make_uint4(mix(o.x, s[0].x, s[1].x, s[2].x, s[3].x, k), mix(o.y, s[0].y, s[1].y, s[2].y, s[3].y, k),
                   mix(o.z, s[0].z, s[1].z, s[2].z, s[3].z, k), mix(o.w, s[0].w, s[1].w, s[2].w, s[3].w, k));
}

__global__ void __launch_bounds__(kThreads)
    gather_kernel(const uint32_t* x, const int* index, int64_t count, uint32_t* out) {
  const int64_t i = item();
  if (i < count) out[i] = index[i] < 0 ? 0 : x[index[i]];
}

constexpr int kWords = 32;
struct Words {
  uint64_t word[kWords];
};
__global__ void write_kernel(Words words, int count, uint64_t* to) {
  if (static_cast<int>(threadIdx.x) < count) to[threadIdx.x] = words.word[threadIdx.x];
}

template <bool add>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const float* from, int from_columns, int from_first, float* to, int to_columns, int to_first,
                   int columns, int64_t items) {
  const int64_t i = item();
  if (i >= items) return;
  const int64_t row = i / columns, column = i % columns;
  const float value = from[row * from_columns + from_first + column];
  float& target = to[row * to_columns + to_first + column];
  target = add ? target + value : value;
}

}  // namespace

void take_up(const uint16_t* out, const uint16_t* streams, const float* finished, int rows, int width, uint16_t* next,
             cudaStream_t stream) {
  require(rows >= 0 && width > 0 && width % 8 == 0 && (rows == 0 || (aligned(out, 16) && aligned(streams, 16))),
          "take_up", "width must be a multiple of 8, arrays aligned to 16 bytes");
  if (rows == 0) return;
  const int64_t items = int64_t{rows} * (width / 8);
  take_up_kernel<<<blocks_for(items), kThreads, 0, stream>>>(reinterpret_cast<const uint4*>(out),
                                                             reinterpret_cast<const uint4*>(streams), finished, items,
                                                             width / 8, reinterpret_cast<uint4*>(next));
  check_cuda(cudaGetLastError(), "take_up");
}

void gather_words(const void* x, const int* index, int count, void* out, cudaStream_t stream) {
  if (count == 0) return;
  gather_kernel<<<blocks_for(count), kThreads, 0, stream>>>(static_cast<const uint32_t*>(x), index, count,
                                                            static_cast<uint32_t*>(out));
  check_cuda(cudaGetLastError(), "gather_words");
}

void write_words(const uint64_t* words, int count, uint64_t* to, cudaStream_t stream) {
  for (int first = 0; first < count; first += kWords) {
    Words some{};
    const int n = count - first < kWords ? count - first : kWords;
    for (int i = 0; i < n; ++i) some.word[i] = words[first + i];
    write_kernel<<<1, kWords, 0, stream>>>(some, n, to + first);
    check_cuda(cudaGetLastError(), "write_words");
  }
}

void place_columns(const float* from, int rows, int columns, float* to, int to_columns, int first,
                   cudaStream_t stream) {
  const int64_t items = int64_t{rows} * columns;
  if (items == 0) return;
  columns_kernel<false>
      <<<blocks_for(items), kThreads, 0, stream>>>(from, columns, 0, to, to_columns, first, columns, items);
  check_cuda(cudaGetLastError(), "place_columns");
}

void add_columns(const float* from, int rows, int from_columns, int first, float* to, int columns,
                 cudaStream_t stream) {
  const int64_t items = int64_t{rows} * columns;
  if (items == 0) return;
  columns_kernel<true>
      <<<blocks_for(items), kThreads, 0, stream>>>(from, from_columns, first, to, columns, 0, columns, items);
  check_cuda(cudaGetLastError(), "add_columns");
}

}  // namespace plumb::kernels::glue
