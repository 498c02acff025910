// The small kernels around backward.cu's main kernel: d_sink, and the scale of the fixed-point sums
// with its proof that nothing overflowed.
//
// The scale. A dkv element is a sum of terms, one for each item that has the key, each rounded to an integer after
// multiplication by a power of two. For every row the main kernel adds up the largest |term| (`bound`): no partial sum,
// in any order, can exceed that. So after a pass the largest bound tells the largest scale that is proven to fit:
//   1. a pilot pass over a sample of the items with any scale: its bounds, times the sampling stride, give the scale;
//   2. the pass; its own bounds prove the scale good, or
//   3. give the scale for a second pass, which is then certain to fit. Launches that are not needed return at once.
// All of it is integer arithmetic or a maximum, so the choice is the same in every run.
#pragma once

#include "kernels/hopper/numbers.cuh"
#include "kernels/sparse_attention/backward_workspace.cuh"

namespace plumb::kernels::attention {

constexpr int kSinkQueries = 128;  // queries a partial sum of d_sink
constexpr double kLargestSum = 2147483648.0 * 0.999,
                 kLargestTerm = 4194304.0 * 0.999;  // 2^31, 2^22: what conversion can do

namespace {

// The largest |dO| of the sample, one block an item. Drops NaN.
__global__ void largest_gradient(const uint4* d_o, int stride, Control* control) {
  constexpr int kVectors = kTileBytes / 16;
  const uint4* item = d_o + static_cast<size_t>(blockIdx.x) * stride * kVectors;
  float largest = 0.f;
  for (int i = threadIdx.x; i < kVectors; i += 256) {
    const uint4 v = item[i];
    for (const uint32_t pair : {v.x, v.y, v.z, v.w})
      largest = fmaxf(largest, fmaxf(fabsf(low_bf16(pair)), fabsf(high_bf16(pair))));
  }
  const uint32_t top = __reduce_max_sync(~0u, __float_as_uint(largest));
  if ((threadIdx.x & 31) == 0) atomicMax(&control->largest_input, top);
}

// d_sink[h] = -sum_t exp(sink[h] - lse[t, h]) D[t, h], in two ordered steps. 256 threads: 4 or 2 queries at a time.
__global__ void sink_partial(SparseAttentionBackward p, Workspace w) {
  __shared__ float sums[256];
  const int head = threadIdx.x % p.heads, lanes = 256 / p.heads, lane = threadIdx.x / p.heads;
  const int first = blockIdx.x * kSinkQueries;
  float total = 0.f;
  for (int t = first + lane; t < min(p.queries, first + kSinkQueries); t += lanes) {
    const size_t at = static_cast<size_t>(t) * p.heads + head;
    total -= __expf(p.sink[head] - p.lse[at]) * w.delta[at];
  }
  sums[threadIdx.x] = total;
  __syncthreads();
  if (lane != 0) return;
  for (int i = 1; i < lanes; ++i) total += sums[i * p.heads + head];
  w.sink_partial[blockIdx.x * p.heads + head] = total;
}
__global__ void sink_total(const float* partial, int count, float* d_sink) {
  float total = 0.f;
#pragma unroll 8
  for (int i = 0; i < count; ++i) total += partial[i * blockDim.x + threadIdx.x];
  d_sink[threadIdx.x] = total;
}

// ---- the scale ----

__device__ inline float power_of_two_below(double x) {
  int exponent;
  frexp(x, &exponent);
  return exp2f(static_cast<float>(min(max(exponent - 1, -120), 120)));
}

// For the pilot: bounds count terms from 2^-20 to 2^18 of the largest |dO|.
__global__ void start_pilot(Control* control) {
  const float largest = __uint_as_float(control->largest_input);
  control->scale = largest > 0.f && isfinite(largest) ? power_of_two_below(kBoundUnit * 1048576.0 / largest) : 1.f;
  control->run = 1;
}

__global__ void find_largest_bound(const unsigned long long* bound, int64_t count, Control* control) {
  if (!control->run) return;
  unsigned long long top = 0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x)
    top = max(top, bound[i]);
  for (int step = 16; step > 0; step >>= 1) top = max(top, __shfl_xor_sync(~0u, top, step));
  if ((threadIdx.x & 31) == 0 && top > 0) atomicMax(&control->largest_bound, top);
}

// The largest scale for which sums and terms fit, if they are these multiples of what this pass met.
__device__ inline float fitting_scale(const Control& c, double sums, double terms) {
  const double term = __uint_as_float(c.largest_term);
  if (!(term > 0) || !isfinite(term)) return c.scale;
  double bound = static_cast<double>(c.largest_bound) * kBoundUnit / c.scale;
  // Saturated terms counted kLargestUnits and are at most the largest, so the true bound is at most this:
  const double units = term * c.scale / kBoundUnit;
  if (units >= kLargestUnits) bound *= 1 + units / kLargestUnits;
  return power_of_two_below(min(kLargestSum / (bound * sums), kLargestTerm / (term * terms)));
}
__global__ void choose_scale(Control* control, int stride) {
  // A sample of zeros says nothing: too large a scale makes the pass one that measures.
  control->scale = control->largest_term == 0 ? 0x1p100f : fitting_scale(*control, 2.0 * stride, 4.0);
  control->largest_term = 0;
  control->largest_bound = 0;
}
// After the pass. A chosen scale is never more than 2^9 below the best (the sample's bounds are parts of the whole's,
// margins are at most 256), which still leaves 2^22 steps to the bound; so only too large a scale needs another pass.
__global__ void check_scale(Control* control) {
  const float best = fitting_scale(*control, 1.0, 1.0);
  control->run = control->scale > best;
  if (!control->run) return;
  control->scale = best;
  control->largest_term = 0;
}

__global__ void clear_sums(int4* sums, size_t count, const Control* control) {
  if (!control->run) return;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<size_t>(gridDim.x) * blockDim.x)
    sums[i] = make_int4(0, 0, 0, 0);
}

__global__ void convert_sums(const int2* sums, void* dkv, bool bf16, size_t count, const Control* control) {
  float step = 1.f / control->scale;
  if (!isfinite(__uint_as_float(control->largest_term))) step = __int_as_float(0x7fffffff);
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    const int2 sum = sums[i];
    const float2 value = make_float2(static_cast<float>(sum.x) * step, static_cast<float>(sum.y) * step);
    if (bf16)
      static_cast<uint32_t*>(dkv)[i] = hopper::pack_bf16(value.x, value.y);
    else
      static_cast<float2*>(dkv)[i] = value;
  }
}

}  // namespace
}  // namespace plumb::kernels::attention
