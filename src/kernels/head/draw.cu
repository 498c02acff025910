#include "kernels/head/draw.h"

#include <algorithm>

#include "kernels/launch.cuh"

namespace plumb::kernels::head {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;  // of the search for the most likely
constexpr int kDrawThreads = 1024;                     // one row alone has one block

// ---- The most likely tokens ----------------------------------------------------------------------------------------
// Larger keys are better: by value, then by lower index. Any NaN is the worst.
__device__ __forceinline__ uint64_t key_of(float value, int index) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t order = value != value ? 0 : bits ^ (bits >> 31 ? ~0u : 0x80000000u);
  return static_cast<uint64_t>(order) << 32 | static_cast<uint32_t>(~index);
}
__device__ __forceinline__ int index_of(uint64_t key) { return ~static_cast<int>(static_cast<uint32_t>(key)); }

// The largest key of the block that is smaller than `below`; keys(i) for i in 0 .. count - 1.
template <typename Keys>
__device__ __forceinline__ uint64_t next_best(uint64_t below, int count, uint64_t* scratch, Keys keys) {
  uint64_t winner = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const uint64_t key = keys(i);
    if (key < below && key > winner) winner = key;
  }
#pragma unroll
  for (int step = 16; step; step /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, winner, step);
    winner = other > winner ? other : winner;
  }
  __syncthreads();  // the previous round's winner has been read
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = winner;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) winner = scratch[w] > winner ? scratch[w] : winner;
  return winner;
}

// A block a row. The `count` best logits lie in the `count` tiles with the largest maxima (a logit elsewhere is beaten
// by one of each of these tiles), so only those are searched.
__global__ void __launch_bounds__(kThreads)
    best_kernel(const float* logits, int vocabulary, const float2* parts, int tiles, int count, TokenLogit* result) {
  __shared__ uint64_t scratch[kWarps];
  __shared__ int chosen[kMostBest];
  extern __shared__ float searched_logits[];  // [count, kTile]
  const size_t row = blockIdx.x;
  logits += row * vocabulary, parts += row * tiles;
  const int searched = min(count, tiles);
  uint64_t last = ~uint64_t{0};
  for (int j = 0; j < searched; ++j) {
    last = next_best(last, tiles, scratch, [&](int i) { return key_of(parts[i].x, i); });
    if (threadIdx.x == 0) chosen[j] = index_of(last);
  }
  __syncthreads();
  const auto token_at = [&](int i) { return chosen[i / kTile] * kTile + i % kTile; };
  for (int i = threadIdx.x; i < searched * kTile; i += kThreads)
    if (token_at(i) < vocabulary) searched_logits[i] = logits[token_at(i)];
  __syncthreads();
  last = ~uint64_t{0};
  for (int j = 0; j < count; ++j) {
    last = next_best(last, searched * kTile, scratch,
                     [&](int i) { return token_at(i) < vocabulary ? key_of(searched_logits[i], token_at(i)) : 0; });
    if (threadIdx.x == 0) result[row * count + j] = {index_of(last), logits[index_of(last)]};
  }
}

// ---- Drawing -------------------------------------------------------------------------------------------------------
// e^x, the operations of ops/vector_math.h.
__device__ __forceinline__ float exponential(float x) {
  x = fmaxf(-105.0f, fminf(89.0f, x));
  const float n = rintf(__fmul_rn(x, 1.44269504f));
  float r = __fmaf_rn(n, -0.693145752f, x);
  r = __fmaf_rn(n, -1.42860677e-6f, r);
  float q = 1.0f / 5040;
  q = __fmaf_rn(q, r, 1.0f / 720);
  q = __fmaf_rn(q, r, 1.0f / 120);
  q = __fmaf_rn(q, r, 1.0f / 24);
  q = __fmaf_rn(q, r, 1.0f / 6);
  q = __fmaf_rn(q, r, 1.0f / 2);
  const float e = __fadd_rn(1.0f, __fmaf_rn(__fmul_rn(r, r), q, r));
  const int power = __float2int_rn(n), half = power >> 1;
  const auto two_to = [](int k) { return __int_as_float((k + 127) << 23); };
  return __fmul_rn(__fmul_rn(e, two_to(half)), two_to(power - half));
}
__device__ __forceinline__ float weight_of(float logit, const Draw& d) {
  const float below = __fsub_rn(logit, d.highest);
  const float w = exponential(d.temperature == 1 ? below : __fdiv_rn(below, d.temperature));
  return w < d.min_p ? 0.0f : w;
}

// Sums of the runs of a row. A warp has four runs at a time, eight lanes and eight sums each; the lanes' sums are added
// in a tree.
__device__ __forceinline__ void sum_runs(const float* logits, int vocabulary, int runs, const Draw& d, double* sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int first_run = 4 * warp; first_run < runs; first_run += kDrawThreads / 8) {
    const int run = first_run + lane / 8, end = min(vocabulary, (run + 1) * kDrawRun);
    double sum = 0;
#pragma unroll 8
    for (int v = run * kDrawRun + lane % 8; v < end; v += 8)
      sum = __dadd_rn(sum, static_cast<double>(weight_of(logits[v], d)));
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum = __dadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
    if (lane % 8 == 0 && run < runs) sums[run] = sum;
  }
}

__device__ __forceinline__ int first_of(const float* logits, int vocabulary, float wanted, int* shared) {
  int found = vocabulary;
  for (int v = threadIdx.x; v < vocabulary && found == vocabulary; v += kDrawThreads)
    if (logits[v] == wanted) found = v;
  if (threadIdx.x == 0) *shared = vocabulary;
  __syncthreads();
  if (found < vocabulary) atomicMin(shared, found);
  __syncthreads();
  return *shared;
}

// A block a token.
__global__ void __launch_bounds__(kDrawThreads)
    draw_kernel(const float* logits, int vocabulary, const Draw* draws, Drawn* result) {
  extern __shared__ double sums[];     // [runs] of a run's weights, then of all up to its end
  __shared__ float weights[kDrawRun];  // of the run that is drawn from
  __shared__ int chosen, last_run;     // runs; last_run: of those that have any weight
  const Draw d = draws[blockIdx.x];
  logits += static_cast<size_t>(d.row) * vocabulary;
  if (d.temperature == 0) {
    const int token = first_of(logits, vocabulary, d.highest, &chosen);
    if (threadIdx.x == 0) result[blockIdx.x] = {{token, d.highest}, 0};
    return;
  }
  const int runs = (vocabulary + kDrawRun - 1) / kDrawRun;
  sum_runs(logits, vocabulary, runs, d, sums);
  __syncthreads();
  if (threadIdx.x == 0) {
    double total = 0;
    last_run = 0, chosen = runs;
    for (int run = 0; run < runs; ++run) {
      if (sums[run] > 0) last_run = run;
      sums[run] = total = __dadd_rn(total, sums[run]);
    }
  }
  __syncthreads();
  const double u = __dmul_rn(d.u, sums[runs - 1]);
  for (int run = threadIdx.x; run < runs; run += kDrawThreads)
    if (sums[run] > u) {
      atomicMin(&chosen, run);
      break;
    }
  __syncthreads();
  const int run = min(chosen, last_run);  // rounding may leave u behind all of them
  const int first = run * kDrawRun, count = min(kDrawRun, vocabulary - first);
  if (threadIdx.x < count) weights[threadIdx.x] = weight_of(logits[first + threadIdx.x], d);
  __syncthreads();
  if (threadIdx.x != 0) return;
  double sum = run > 0 ? sums[run - 1] : 0;
  int token = 0;
  for (int i = 0; i < count; ++i) {
    if (weights[i] == 0) continue;
    token = i, sum = __dadd_rn(sum, static_cast<double>(weights[i]));
    if (sum > u) break;
  }
  result[blockIdx.x] = {{first + token, logits[first + token]}, sums[runs - 1]};
}

}  // namespace

void best(const float* logits, int rows, int vocabulary, int count, TokenLogit* result, const void* workspace,
          cudaStream_t stream) {
  require(rows > 0 && count > 0 && count <= kMostBest && count <= vocabulary, "head: best",
          "count = " + std::to_string(count) + " must be between 1 and " + std::to_string(kMostBest) +
              " and at most the vocabulary, " + std::to_string(vocabulary));
  const int tiles = (vocabulary + kTile - 1) / kTile;
  launch_with_shared(best_kernel, rows, kThreads, count * kTile * static_cast<int>(sizeof(float)), stream, logits,
                     vocabulary, static_cast<const float2*>(workspace), tiles, count, result);
}

void draw(const float* logits, int vocabulary, const Draw* draws, int count, Drawn* result, cudaStream_t stream) {
  require(count > 0 && vocabulary > 0 && vocabulary % 8 == 0, "head: draw",
          std::to_string(count) + " draws from " + std::to_string(vocabulary) +
              " tokens: there must be draws, and a positive multiple of 8 tokens");
  const int runs = (vocabulary + kDrawRun - 1) / kDrawRun;
  launch_with_shared(draw_kernel, count, kDrawThreads, runs * static_cast<int>(sizeof(double)), stream, logits,
                     vocabulary, draws, result);
}

}  // namespace plumb::kernels::head
