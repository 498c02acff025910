#include "kernels/optimizer/optimizer.h"

#include <algorithm>
#include <cmath>

#include "kernels/launch.cuh"

namespace plumb::kernels::optimizer {
namespace {

constexpr int kThreads = 256, kPerThread = kPieceElements / kThreads;

__device__ __forceinline__ double warp_sum(double v) {
#pragma unroll
  for (int step = 16; step; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

// Thread t adds its elements t, t + 256, ... in order; then a tree over the warp, then the warps in order.
__global__ void __launch_bounds__(kThreads) squares_kernel(const Tensor* pieces, double* sums) {
  __shared__ double of_warp[kThreads / 32];
  const Tensor p = pieces[blockIdx.x];
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int at = i * kThreads + threadIdx.x;
    const double g = at < p.count ? static_cast<double>(p.gradient[at]) : 0.0;
    sum = fma(g, g, sum);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0;
    for (const double v : of_warp) sum += v;
    sums[blockIdx.x] = sum;
  }
}

// Thread t adds the pieces of its own contiguous share in order; then the shares in order.
__global__ void __launch_bounds__(1024) norm_kernel(const double* sums, int count, double scale, double* norm) {
  __shared__ double shares[1024];
  const int share = (count + 1023) / 1024, first = threadIdx.x * share, last = min(first + share, count);
  double sum = 0;
  for (int i = first; i < last; ++i) sum += sums[i];
  shares[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0;
    for (const double v : shares) sum += v;
    *norm = sqrt(sum) * scale;
  }
}

struct Step {
  double beta1, beta2, rest1, rest2, correct1, correct2, keep, learning_rate, eps, scale, largest_norm;
};

// Every operation is rounded on its own (no contraction): the order is that of train/adamw.cpp.
__device__ __forceinline__ void update(const Step& s, double scale, float& weight, float gradient, float& first,
                                       float& second) {
  const double g = __dmul_rn(scale, gradient);
  const double m = __dadd_rn(__dmul_rn(s.beta1, first), __dmul_rn(s.rest1, g));
  const double v = __dadd_rn(__dmul_rn(s.beta2, second), __dmul_rn(__dmul_rn(s.rest2, g), g));
  first = static_cast<float>(m), second = static_cast<float>(v);
  const double root = __dadd_rn(__dsqrt_rn(__dmul_rn(v, s.correct2)), s.eps);
  const double move = __ddiv_rn(__dmul_rn(s.learning_rate, __dmul_rn(m, s.correct1)), root);
  weight = static_cast<float>(__dsub_rn(__dmul_rn(weight, s.keep), move));
}

__global__ void __launch_bounds__(kThreads) adamw_kernel(const Tensor* pieces, Step s, const double* norm, bool clear) {
  const Tensor p = pieces[blockIdx.x];
  double scale = s.scale;
  if (s.largest_norm > 0 && *norm > s.largest_norm) scale = __dmul_rn(scale, __ddiv_rn(s.largest_norm, *norm));
#pragma unroll 2
  for (int64_t i = threadIdx.x * 4; i < p.count; i += kThreads * 4) {
    if (i + 4 <= p.count) {
      float4 w = *reinterpret_cast<float4*>(p.weight + i), m = *reinterpret_cast<float4*>(p.first + i);
      float4 v = *reinterpret_cast<float4*>(p.second + i);
      const float4 g = *reinterpret_cast<const float4*>(p.gradient + i);
      update(s, scale, w.x, g.x, m.x, v.x), update(s, scale, w.y, g.y, m.y, v.y);
      update(s, scale, w.z, g.z, m.z, v.z), update(s, scale, w.w, g.w, m.w, v.w);
      *reinterpret_cast<float4*>(p.weight + i) = w, *reinterpret_cast<float4*>(p.first + i) = m;
      *reinterpret_cast<float4*>(p.second + i) = v;
      if (clear) *reinterpret_cast<float4*>(p.gradient + i) = make_float4(0, 0, 0, 0);
    } else {
      for (int64_t j = i; j < p.count; ++j) {
        update(s, scale, p.weight[j], p.gradient[j], p.first[j], p.second[j]);
        if (clear) p.gradient[j] = 0;
      }
    }
  }
}

}  // namespace

std::vector<Tensor> pieces_of(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> pieces;
  for (const Tensor& t : tensors) {
    const bool moments = t.first || t.second;
    require(aligned(t.weight, 16) && aligned(t.gradient, 16) &&
                (!moments || (aligned(t.first, 16) && aligned(t.second, 16))),
            "optimizer: pieces_of", "all arrays of a tensor must be aligned to 16 bytes");
    for (int64_t at = 0; at < t.count; at += kPieceElements)
      pieces.push_back({t.weight + at, t.gradient + at, moments ? t.first + at : nullptr,
                        moments ? t.second + at : nullptr, std::min<int64_t>(kPieceElements, t.count - at)});
  }
  return pieces;
}

void gradient_norm(const Tensor* pieces, int piece_count, double scale, double* workspace, double* norm,
                   cudaStream_t stream) {
  require(piece_count > 0, "optimizer: gradient_norm", "there is nothing to train");
  squares_kernel<<<piece_count, kThreads, 0, stream>>>(pieces, workspace);
  norm_kernel<<<1, 1024, 0, stream>>>(workspace, piece_count, scale, norm);
  check_cuda(cudaGetLastError(), "optimizer: gradient_norm");
}

void adamw(const Tensor* pieces, int piece_count, const AdamW& o, const double* norm, bool clear_gradients,
           cudaStream_t stream) {
  require(piece_count > 0 && o.step > 0, "optimizer: adamw", "pieces and step must be positive");
  require(o.largest_norm <= 0 || norm, "optimizer: adamw", "clipping needs the norm");
  const Step s{o.beta1,
               o.beta2,
               1 - o.beta1,
               1 - o.beta2,
               1 / (1 - std::pow(o.beta1, static_cast<double>(o.step))),
               1 / (1 - std::pow(o.beta2, static_cast<double>(o.step))),
               1 - o.learning_rate * o.weight_decay,
               o.learning_rate,
               o.eps,
               o.gradient_scale,
               o.largest_norm};
  adamw_kernel<<<piece_count, kThreads, 0, stream>>>(pieces, s, norm, clear_gradients);
  check_cuda(cudaGetLastError(), "optimizer: adamw");
}

}  // namespace plumb::kernels::optimizer
