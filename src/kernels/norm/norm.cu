// Bound by memory: each kernel reads its rows once and keeps them in registers between the sum and its use. A row of up
// to 1,024 channels belongs to a warp, a longer one to a block; in both a thread has eight neighbouring channels at a
// time.
#include "kernels/norm/norm.h"

#include "kernels/hopper/launch_order.cuh"
#include "kernels/hopper/vectors.cuh"
#include "kernels/launch.cuh"
#include "kernels/norm/partial_sums.cuh"

namespace plumb::kernels {
namespace norm {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kNarrow = 1024;  // widest row of a warp
// Rows whose d_weight one block sums up: about two blocks a multiprocessor for 16,384 rows, which a warp, or else a
// block has one after the other.
template <bool kNarrowRow>
constexpr int kChunk = kNarrowRow ? 64 : 32;

// The threads of a row, and sums over them.
template <bool kNarrowRow>
struct Team {
  static constexpr int kSize = kNarrowRow ? 32 : kThreads;
  static constexpr int kRows = kNarrowRow ? kWarps : 1;  // rows of a block at a time
  static __device__ int thread() { return threadIdx.x % kSize; }
  static __device__ int row() { return threadIdx.x / kSize; }
  // shared: alternates between two calls in a row.
  template <int kCount>
  static __device__ __forceinline__ void sums(float (&v)[kCount], float (*shared)[kCount]) {
    if constexpr (kNarrowRow) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = warp_sum(v[i]);
    } else {
      warp_sums(v, shared[threadIdx.x / 32]);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = block_sum<kWarps>(&shared[0][0], kCount, i);
    }
  }
};

// A thread has kVectors times eight channels.
template <int kVectors, bool kNarrowRow>
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ RmsNorm p) {
  hopper::take_turn();
  using T = Team<kNarrowRow>;
  __shared__ float shared[kWarps][1];
  const int row = blockIdx.x * T::kRows + T::row();
  if (row >= p.rows) return;
  const auto* x = static_cast<const uint8_t*>(p.x) + static_cast<size_t>(row) * p.width * 2;
  const auto channel_of = [](int i) { return (i * T::kSize + T::thread()) * 8; };
  uint4 in[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i)
    if (channel_of(i) < p.width) in[i] = *reinterpret_cast<const uint4*>(x + channel_of(i) * 2);
  float square[1] = {0};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (channel_of(i) >= p.width) break;
    float v[8];
    unpack(in[i], v);
#pragma unroll
    for (int k = 0; k < 8; ++k) square[0] = fmaf(v[k], v[k], square[0]);
  }
  T::sums(square, shared);
  const float rho = inverse_rms(square[0], p.width, p.eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int channel = channel_of(i);
    if (channel >= p.width) break;  // whole warps: width is a multiple of 256
    float v[8], w[8];
    unpack(in[i], v);
    load_eight(p.weight + channel, w);
#pragma unroll
    for (int k = 0; k < 8; ++k) w[k] *= v[k] * rho;
    const uint4 y = pack(w);
    const size_t at = static_cast<size_t>(row) * p.width;
    *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.y) + (at + channel) * 2) = y;
    if (p.values)
      store_fp8_block(y, channel, p.values + at, p.scales + static_cast<size_t>(row) * fp8_scale_stride(p.width));
  }
}

// With g = weight d_y: d_x = rho (g - x rho^2 mean(g x)); d_weight = d_y x rho. With kWeight a block takes a chunk of
// rows, each team every kRows-th in order.
template <int kVectors, bool kNarrowRow, bool kWeight>
__global__ void __launch_bounds__(kThreads) norm_backward_kernel(const __grid_constant__ RmsNormBackward p) {
  // The sum of d_weight behind it gains nothing from coming early, and takes room.
  if constexpr (kWeight)
    hopper::wait_for_earlier_launches();
  else
    hopper::take_turn();
  using T = Team<kNarrowRow>;
  __shared__ float shared[2][kWarps][2];  // by parity of the row
  const auto channel_of = [](int i) { return (i * T::kSize + T::thread()) * 8; };
  float d_weight[kVectors][8] = {};
  const int rows = kWeight ? kChunk<kNarrowRow> : T::kRows, first = blockIdx.x * rows, last = min(p.rows, first + rows);
  for (int row = first + T::row(), parity = 0; row < last; row += T::kRows, parity ^= 1) {
    uint4 xs[kVectors], ds[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const size_t at = (static_cast<size_t>(row) * p.width + channel_of(i)) * 2;
      if (channel_of(i) >= p.width) break;
      xs[i] = *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.x) + at);
      ds[i] = *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.d_y) + at);
    }
    float sums[2] = {0, 0};  // x x, g x
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (channel_of(i) >= p.width) break;
      float x[8], d[8], w[8];
      unpack(xs[i], x), unpack(ds[i], d);
      load_eight(p.weight + channel_of(i), w);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        sums[0] = fmaf(x[k], x[k], sums[0]);
        sums[1] = fmaf(w[k] * d[k], x[k], sums[1]);
      }
    }
    T::sums(sums, shared[parity]);
    const float rho = inverse_rms(sums[0], p.width, p.eps);
    const float slope = sums[1] * rho * rho / static_cast<float>(p.width);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int channel = channel_of(i);
      if (channel >= p.width) break;
      float x[8], d[8], w[8];
      unpack(xs[i], x), unpack(ds[i], d);
      load_eight(p.weight + channel, w);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if constexpr (kWeight) d_weight[i][k] = fmaf(d[k], x[k] * rho, d_weight[i][k]);
        w[k] = rho * (w[k] * d[k] - x[k] * slope);
      }
      if (p.d_x)
        *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.d_x) + (static_cast<size_t>(row) * p.width + channel) * 2) =
            pack(w);
    }
  }
  if constexpr (kWeight) {
    float* out = static_cast<float*>(p.workspace) + static_cast<size_t>(blockIdx.x) * p.width;
    if constexpr (kNarrowRow) {  // the teams' sums, in order
      __shared__ float team[kWarps][kNarrow];
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
#pragma unroll
        for (int k = 0; k < 8; ++k) team[T::row()][channel_of(i) + k] = d_weight[i][k];
      __syncthreads();
      for (int channel = threadIdx.x; channel < p.width; channel += kThreads) {
        float sum = team[0][channel];
#pragma unroll
        for (int t = 1; t < kWarps; ++t) sum += team[t][channel];
        out[channel] = sum;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (channel_of(i) >= p.width) break;
#pragma unroll
        for (int k = 0; k < 8; k += 4)
          *reinterpret_cast<float4*>(out + channel_of(i) + k) =
              make_float4(d_weight[i][k], d_weight[i][k + 1], d_weight[i][k + 2], d_weight[i][k + 3]);
      }
    }
  }
}

bool wrong_shape(int rows, int width) { return rows < 0 || width <= 0 || width % 256 != 0 || width > 8192; }

int blocks_for(int rows, int block_rows) { return (rows + block_rows - 1) / block_rows; }

template <int kVectors, bool kNarrowRow>
void launch_backward(const RmsNormBackward& p, cudaStream_t stream) {
  if (p.d_weight == nullptr) {
    const int blocks = blocks_for(p.rows, Team<kNarrowRow>::kRows);
    launch_dependent(norm_backward_kernel<kVectors, kNarrowRow, false>, {dim3(blocks), kThreads}, stream, p);
    return;
  }
  const int chunks = blocks_for(p.rows, kChunk<kNarrowRow>);
  launch_dependent(norm_backward_kernel<kVectors, kNarrowRow, true>, {dim3(chunks), kThreads}, stream, p);
  launch_dependent(add_partial_sums, {dim3(p.width / 32), kPartialSumThreads}, stream,
                   static_cast<const float*>(p.workspace), chunks, p.width, p.d_weight);
}

// Calls f.template operator()<vectors of a thread, narrow row>().
template <class F>
void dispatch(int width, const F& f) {
  if (width <= kNarrow) return f.template operator()<4, true>();
  if (width <= 2048) return f.template operator()<1, false>();
  if (width <= 4096) return f.template operator()<2, false>();
  f.template operator()<4, false>();
}

}  // namespace
}  // namespace norm

cudaError_t rms_norm(const RmsNorm& p, cudaStream_t stream) {
  using namespace norm;
  if (wrong_shape(p.rows, p.width) || (p.values != nullptr) != (p.scales != nullptr)) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  dispatch(p.width, [&]<int kVectors, bool kNarrowRow>() {
    launch_dependent(norm_kernel<kVectors, kNarrowRow>, {dim3(blocks_for(p.rows, Team<kNarrowRow>::kRows)), kThreads},
                     stream, p);
  });
  return cudaGetLastError();
}

size_t rms_norm_backward_workspace(int rows, int width) {
  using namespace norm;
  const int chunks = blocks_for(rows, width <= kNarrow ? kChunk<true> : kChunk<false>);
  return sizeof(float) * chunks * static_cast<size_t>(width);
}

cudaError_t rms_norm_backward(const RmsNormBackward& p, cudaStream_t stream) {
  using namespace norm;
  if (wrong_shape(p.rows, p.width) || (p.d_x == nullptr && p.d_weight == nullptr)) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  dispatch(p.width, [&]<int kVectors, bool kNarrowRow>() { launch_backward<kVectors, kNarrowRow>(p, stream); });
  return cudaGetLastError();
}

}  // namespace plumb::kernels
