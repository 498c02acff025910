// A warp chooses for a row; lane l holds the experts l, l + 32, ...
#include "kernels/router/router.h"

#include <cmath>

#include "kernels/hopper/vectors.cuh"
#include "kernels/launch.cuh"

namespace plumb::kernels::router {
namespace {

constexpr int kWarps = 8, kPerLane = kMostExperts / 32;
constexpr double kEps = 1e-20;  // all chosen scores may underflow

__device__ __forceinline__ double sqrt_softplus(double z) { return sqrt(log1p(exp(-fabs(z))) + fmax(z, 0.0)); }

// Its derivative sigmoid(z) / (2 score). Far below zero both underflow, but their ratio tends to exp(z / 2) / 2.
__device__ __forceinline__ double slope(double z) {
  return z < -20 ? exp(z / 2) / 2 : 1 / (1 + exp(-z)) / (2 * sqrt_softplus(z));
}

// Larger keys are better: by value, then by lower index; NaN is worse than anything.
__device__ __forceinline__ uint64_t key_of(float value, int index) {
  const uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0f));  // -0 ties with 0
  const uint32_t order = value != value ? 0 : bits ^ (bits >> 31 ? ~0u : 0x80000000u);
  return static_cast<uint64_t>(order) << 32 | static_cast<uint32_t>(~index);
}
__device__ __forceinline__ uint64_t warp_largest(uint64_t key) {
#pragma unroll
  for (int step = 16; step; step /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, key, step);
    key = other > key ? other : key;
  }
  return key;
}

// kTogether: a block's warps share the scores of one row, in FP64 the longest part; else each warp has a row.
template <bool kTogether>
__global__ void __launch_bounds__(32 * kWarps)
    route_kernel(const float* logits, Sizes s, Choice c, int* expert, float* weight, float* score) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = kTogether ? blockIdx.x : blockIdx.x * kWarps + warp;
  if (row >= s.rows) return;
  logits += static_cast<size_t>(row) * s.experts;
  const auto score_of = [&](int e) {
    const float value = static_cast<float>(sqrt_softplus(logits[e]));
    if (score) score[static_cast<size_t>(row) * s.experts + e] = value;
    return value;
  };
  float mine[kPerLane];
  if constexpr (kTogether) {
    __shared__ float all[kMostExperts];
    for (int e = threadIdx.x; e < s.experts; e += 32 * kWarps) all[e] = score_of(e);
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) mine[i] = lane + 32 * i < s.experts ? all[lane + 32 * i] : 0.0f;
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) mine[i] = lane + 32 * i < s.experts ? score_of(lane + 32 * i) : 0.0f;
  }

  int chosen = -1;  // lane j: the expert of slot j
  if (c.table) {
    const int token = c.token[row];
    if (lane < s.slots && token >= 0 && token < c.vocabulary) {
      const int e = c.table[static_cast<size_t>(token) * s.slots + lane];
      if (e >= 0 && e < s.experts) chosen = e;
    }
  } else {
    uint64_t last = ~uint64_t{0};
    for (int slot = 0; slot < s.slots; ++slot) {
      uint64_t best = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int e = lane + 32 * i;
        if (e >= s.experts) break;
        const uint64_t key = key_of(c.bias ? __fadd_rn(mine[i], c.bias[e]) : mine[i], e);
        if (key < last && key > best) best = key;
      }
      last = warp_largest(best);
      if (lane == slot) chosen = ~static_cast<int>(static_cast<uint32_t>(last));
    }
  }
  const float own = chosen >= 0 ? static_cast<float>(sqrt_softplus(logits[chosen])) : 0.0f;
  float total = 0;
  for (int slot = 0; slot < s.slots; ++slot) total = __fadd_rn(total, __shfl_sync(~0u, own, slot));
  if (lane >= s.slots) return;
  const size_t at = static_cast<size_t>(row) * s.slots + lane;
  expert[at] = chosen;
  weight[at] = __fmul_rn(__fdiv_rn(own, __fadd_rn(total, static_cast<float>(kEps))), c.scale);
}

// A thread a row: six of 256 logits matter.
__global__ void __launch_bounds__(128)
    backward_kernel(const float* d_weight, const int* row_of_slot, const float* logits, const int* expert, Sizes s,
                    float scale, float* d_logit) {
  const int row = blockIdx.x * 128 + threadIdx.x;
  if (row >= s.rows) return;
  const size_t at = static_cast<size_t>(row) * s.slots;
  logits += static_cast<size_t>(row) * s.experts;
  const auto gradient = [&](size_t pair) -> double { return d_weight[row_of_slot ? row_of_slot[pair] : pair]; };
  double total = kEps, dot = 0;  // dot: sum of d * weight / scale * total
  for (int j = 0; j < s.slots; ++j) {
    const int e = expert[at + j];
    if (e < 0) continue;
    const double score = sqrt_softplus(logits[e]);
    total += score, dot += gradient(at + j) * score;
  }
  for (int j = 0; j < s.slots; ++j) {
    const int e = expert[at + j];
    d_logit[at + j] =
        e < 0 ? 0.0f : static_cast<float>(scale * (gradient(at + j) - dot / total) / total * slope(logits[e]));
  }
}

// A block a row, a thread eight columns at a time.
__global__ void __launch_bounds__(128) backward_input_kernel(const float* d_logit, const int* expert, Sizes s,
                                                             const uint16_t* gate, int k, bool add, float* dx) {
  __shared__ int order[kMostSlots];
  const size_t row = blockIdx.x;
  expert += row * s.slots, d_logit += row * s.slots;
  if (static_cast<int>(threadIdx.x) < s.slots) {  // slots by expert
    const int e = expert[threadIdx.x];
    int place = 0;
    for (int j = 0; j < s.slots; ++j) place += expert[j] < e || (expert[j] == e && j < static_cast<int>(threadIdx.x));
    order[place] = threadIdx.x;
  }
  __syncthreads();
  for (int column = threadIdx.x * 8; column < k; column += 128 * 8) {
    float sum[8] = {};
    for (int j = 0; j < s.slots; ++j) {
      const int slot = order[j], e = expert[slot];
      if (e < 0) continue;
      const uint4 v = *reinterpret_cast<const uint4*>(gate + static_cast<size_t>(e) * k + column);
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 8; ++i)
        sum[i] = fmaf(d_logit[slot], __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16), sum[i]);
    }
    float4* to = reinterpret_cast<float4*>(dx + row * k + column);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* v = sum + 4 * half;
      const float4 old = add ? to[half] : make_float4(0, 0, 0, 0);
      to[half] = make_float4(old.x + v[0], old.y + v[1], old.z + v[2], old.w + v[3]);
    }
  }
}

// A thread eight columns of an expert, its pairs in order. Grid: (columns / 1024, experts).
__global__ void __launch_bounds__(128)
    backward_gate_kernel(const float* d_logit, SortedPairs pairs, int slots, const uint16_t* x, int k, float* d_gate) {
  __shared__ int token_of[128];
  __shared__ float factor_of[128];
  const int first = pairs.first_row[blockIdx.y], last = pairs.first_row[blockIdx.y + 1];
  const int column = (blockIdx.x * 128 + threadIdx.x) * 8;
  float sum[8] = {};
  for (int start = first; start < last; start += 128) {
    const int count = min(128, last - start), mine = start + static_cast<int>(threadIdx.x);
    __syncthreads();
    if (mine < last) {
      const int token = pairs.source_row[mine];
      float factor = 0;
      for (int j = 0; j < slots; ++j)
        if (pairs.row_of_slot[token * slots + j] == mine) factor = d_logit[token * slots + j];
      token_of[threadIdx.x] = token, factor_of[threadIdx.x] = factor;
    }
    __syncthreads();
    if (column >= k) continue;
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      float v[8];
      unpack(*reinterpret_cast<const uint4*>(x + static_cast<size_t>(token_of[i]) * k + column), v);
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] = fmaf(factor_of[i], v[c], sum[c]);
    }
  }
  if (column >= k || first == last) return;
  float* to = d_gate + static_cast<size_t>(blockIdx.y) * k + column;
#pragma unroll
  for (int c = 0; c < 8; ++c) to[c] = __fadd_rn(to[c], sum[c]);
}

void check(const char* where, const Sizes& s) {
  require(s.rows > 0 && s.experts > 0 && s.experts <= kMostExperts && s.slots > 0 && s.slots <= kMostSlots &&
              s.slots <= s.experts,
          where,
          "rows = " + std::to_string(s.rows) + " must be positive, experts = " + std::to_string(s.experts) +
              " between 1 and " + std::to_string(kMostExperts) + ", slots = " + std::to_string(s.slots) +
              " between 1 and " + std::to_string(kMostSlots) + " and at most the experts");
}

__global__ void __launch_bounds__(256)
    all_logits_kernel(const float* d_logit, const float* d_score, const float* logits, const int* expert, Sizes s,
                      float* d_logits) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i >= static_cast<int64_t>(s.rows) * s.experts) return;
  const int64_t row = i / s.experts;
  float d = static_cast<float>(d_score[i] * slope(logits[i]));
  for (int j = 0; j < s.slots; ++j)
    if (expert[row * s.slots + j] == i % s.experts) d += d_logit[row * s.slots + j];
  d_logits[i] = d;
}

}  // namespace

void route(const float* logits, const Sizes& s, const Choice& choice, int* expert, float* weight, float* score,
           cudaStream_t stream) {
  check("router: route", s);
  require((choice.token == nullptr) == (choice.table == nullptr), "router: route",
          "a hash layer needs both the tokens and the table");
  if (s.rows <= kWarps * multiprocessors())
    route_kernel<true><<<s.rows, 32 * kWarps, 0, stream>>>(logits, s, choice, expert, weight, score);
  else
    route_kernel<false>
        <<<(s.rows + kWarps - 1) / kWarps, 32 * kWarps, 0, stream>>>(logits, s, choice, expert, weight, score);
  check_cuda(cudaGetLastError(), "router: route");
}

void route_backward(const float* d_weight, const float* logits, const int* expert, const Sizes& s, float scale,
                    float* d_logit, cudaStream_t stream, const int* row_of_slot) {
  check("router: route_backward", s);
  backward_kernel<<<(s.rows + 127) / 128, 128, 0, stream>>>(d_weight, row_of_slot, logits, expert, s, scale, d_logit);
  check_cuda(cudaGetLastError(), "router: route_backward");
}

void all_logits_backward(const float* d_logit, const float* d_score, const float* logits, const int* expert,
                         const Sizes& s, float* d_logits, cudaStream_t stream) {
  check("router: all_logits_backward", s);
  const int64_t count = static_cast<int64_t>(s.rows) * s.experts;
  all_logits_kernel<<<static_cast<unsigned>((count + 255) / 256), 256, 0, stream>>>(d_logit, d_score, logits, expert, s,
                                                                                    d_logits);
  check_cuda(cudaGetLastError(), "router: all_logits_backward");
}

void route_backward_input(const float* d_logit, const int* expert, const Sizes& s, const uint16_t* gate, int k,
                          bool add, float* dx, cudaStream_t stream) {
  check("router: route_backward_input", s);
  require(k > 0 && k % 8 == 0 && aligned(gate, 16) && aligned(dx, 16), "router: route_backward_input",
          "k = " + std::to_string(k) + " must be a positive multiple of 8, gate and dx aligned to 16 bytes");
  backward_input_kernel<<<s.rows, 128, 0, stream>>>(d_logit, expert, s, gate, k, add, dx);
  check_cuda(cudaGetLastError(), "router: route_backward_input");
}

void route_backward_gate(const float* d_logit, const SortedPairs& pairs, const Sizes& s, const uint16_t* x, int k,
                         float* d_gate, cudaStream_t stream) {
  check("router: route_backward_gate", s);
  require(k > 0 && k % 8 == 0 && aligned(x, 16) && aligned(d_gate, 16), "router: route_backward_gate",
          "k = " + std::to_string(k) + " must be a positive multiple of 8, x and d_gate aligned to 16 bytes");
  backward_gate_kernel<<<dim3((k + 1023) / 1024, s.experts), 128, 0, stream>>>(d_logit, pairs, s.slots, x, k, d_gate);
  check_cuda(cudaGetLastError(), "router: route_backward_gate");
}

}  // namespace plumb::kernels::router
