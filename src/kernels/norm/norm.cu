// Bound by memory: each kernel reads its rows once and keeps them in registers between the sum and its use.
#include "kernels/norm/norm.h"

#include "kernels/hopper/vectors.cuh"

namespace plumb::kernels {
namespace norm {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kChunk = 32;  // rows whose d_weight one block sums up

// One block a row; a thread has kVectors times eight channels, 2,048 apart.
template <int kVectors>
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ RmsNorm p) {
  __shared__ float partial[kWarps];
  const size_t row = blockIdx.x;
  const auto* x = static_cast<const uint8_t*>(p.x) + row * p.width * 2;
  float v[kVectors][8], square[1] = {0};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int channel = (i * kThreads + threadIdx.x) * 8;
    if (channel < p.width) unpack(__ldcs(reinterpret_cast<const uint4*>(x + channel * 2)), v[i]);
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i)
    if ((i * kThreads + threadIdx.x) * 8 < p.width)
#pragma unroll
      for (int k = 0; k < 8; ++k) square[0] = fmaf(v[i][k], v[i][k], square[0]);
  warp_sums(square, &partial[threadIdx.x / 32]);
  __syncthreads();
  const float rho = inverse_rms(block_sum<kWarps>(partial, 1, 0), p.width, p.eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int channel = (i * kThreads + threadIdx.x) * 8;
    if (channel >= p.width) break;  // whole warps: width is a multiple of 256
    float w[8];
    load_eight(p.weight + channel, w);
#pragma unroll
    for (int k = 0; k < 8; ++k) w[k] *= v[i][k] * rho;
    const uint4 y = pack(w);
    *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.y) + (row * p.width + channel) * 2) = y;
    if (p.values) store_fp8_block(y, channel, p.values + row * p.width, p.scales + row * fp8_scale_stride(p.width));
  }
}

// One block a chunk of rows, in order. With g = weight d_y: d_x = rho (g - x rho^2 mean(g x)); d_weight = d_y x rho.
template <int kVectors, bool kWeight>
__global__ void __launch_bounds__(kThreads) norm_backward_kernel(const __grid_constant__ RmsNormBackward p) {
  __shared__ float partial[2][kWarps][2];  // by parity of the row
  float d_weight[kVectors][8] = {};
  const int first = blockIdx.x * (kWeight ? kChunk : 1), last = min(p.rows, first + (kWeight ? kChunk : 1));
  for (int row = first; row < last; ++row) {
    uint4 xs[kVectors], ds[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int channel = (i * kThreads + threadIdx.x) * 8;
      const size_t at = (static_cast<size_t>(row) * p.width + channel) * 2;
      if (channel >= p.width) break;
      xs[i] = *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.x) + at);
      ds[i] = *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.d_y) + at);
    }
    float sums[2] = {0, 0};  // x x, g x
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int channel = (i * kThreads + threadIdx.x) * 8;
      if (channel >= p.width) break;
      float x[8], d[8], w[8];
      unpack(xs[i], x), unpack(ds[i], d);
      load_eight(p.weight + channel, w);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        sums[0] = fmaf(x[k], x[k], sums[0]);
        sums[1] = fmaf(w[k] * d[k], x[k], sums[1]);
      }
    }
    float(&shared)[kWarps][2] = partial[row & 1];
    warp_sums(sums, shared[threadIdx.x / 32]);
    __syncthreads();
    const float rho = inverse_rms(block_sum<kWarps>(&shared[0][0], 2, 0), p.width, p.eps);
    const float slope = block_sum<kWarps>(&shared[0][0], 2, 1) * rho * rho / static_cast<float>(p.width);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int channel = (i * kThreads + threadIdx.x) * 8;
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
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int channel = (i * kThreads + threadIdx.x) * 8;
      if (channel >= p.width) break;
#pragma unroll
      for (int k = 0; k < 8; k += 4)
        *reinterpret_cast<float4*>(out + channel + k) =
            make_float4(d_weight[i][k], d_weight[i][k + 1], d_weight[i][k + 2], d_weight[i][k + 3]);
    }
  }
}

// The chunks' sums, in order: a warp's lanes have neighbouring channels.
__global__ void __launch_bounds__(64) add_chunks_kernel(const float* partial, int chunks, int width, float* d_weight) {
  const int channel = blockIdx.x * 64 + threadIdx.x;
  float sum = 0;
#pragma unroll 16
  for (int c = 0; c < chunks; ++c) sum += partial[static_cast<size_t>(c) * width + channel];
  d_weight[channel] += sum;
}

bool wrong_shape(int rows, int width) { return rows < 0 || width <= 0 || width % 256 != 0 || width > 8192; }

template <int kVectors>
void launch_backward(const RmsNormBackward& p, cudaStream_t stream) {
  if (p.d_weight == nullptr) {
    norm_backward_kernel<kVectors, false><<<p.rows, kThreads, 0, stream>>>(p);
    return;
  }
  const int chunks = (p.rows + kChunk - 1) / kChunk;
  norm_backward_kernel<kVectors, true><<<chunks, kThreads, 0, stream>>>(p);
  add_chunks_kernel<<<p.width / 64, 64, 0, stream>>>(static_cast<const float*>(p.workspace), chunks, p.width,
                                                     p.d_weight);
}

}  // namespace
}  // namespace norm

cudaError_t rms_norm(const RmsNorm& p, cudaStream_t stream) {
  using namespace norm;
  if (wrong_shape(p.rows, p.width) || (p.values != nullptr) != (p.scales != nullptr)) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  switch ((p.width + 2047) / 2048) {
    case 1:
      norm_kernel<1><<<p.rows, kThreads, 0, stream>>>(p);
      break;
    case 2:
      norm_kernel<2><<<p.rows, kThreads, 0, stream>>>(p);
      break;
    default:
      norm_kernel<4><<<p.rows, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

size_t rms_norm_backward_workspace(int rows, int width) {
  return sizeof(float) * ((rows + norm::kChunk - 1) / norm::kChunk) * static_cast<size_t>(width);
}

cudaError_t rms_norm_backward(const RmsNormBackward& p, cudaStream_t stream) {
  using namespace norm;
  if (wrong_shape(p.rows, p.width) || (p.d_x == nullptr && p.d_weight == nullptr)) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  switch ((p.width + 2047) / 2048) {
    case 1:
      launch_backward<1>(p, stream);
      break;
    case 2:
      launch_backward<2>(p, stream);
      break;
    default:
      launch_backward<4>(p, stream);
  }
  return cudaGetLastError();
}

}  // namespace plumb::kernels
