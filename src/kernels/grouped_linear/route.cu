#include "kernels/grouped_linear/route.h"

#include <algorithm>

#include "kernels/grouped_linear/activation.cuh"
#include "kernels/grouped_linear/plan.cuh"
#include "kernels/hopper/launch_order.cuh"
#include "kernels/launch.cuh"

namespace plumb::kernels::grouped_linear {
namespace {

// ---- Sorting: a stable counting sort. A block takes 1,024 pairs; up to so many pairs, one launch does all ----------
constexpr int kPairs = 1024, kWarps = kPairs / 32;

// What a block knows of its pairs: counts[warp][expert], first the warp's own, then those of the warps before it.
struct Shared {
  uint16_t counts[kWarps][kLargestExperts];
  int first[kLargestExperts + 1];
  int tiles[kLargestExperts];  // of the work list, before an expert's
  int sums[kWarps];
};

// For this thread's pair: how many pairs of the block before it have the same expert. totals[e] = pairs of expert e in
// the block; valid after the next barrier.
__device__ __forceinline__ int rank_in_block(Shared& shared, int expert, int experts, int* totals) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, threads = blockDim.x, warps = threads / 32;
  for (int i = threadIdx.x; i < warps * experts; i += threads) shared.counts[i / experts][i % experts] = 0;
  __syncthreads();
  const unsigned same = __match_any_sync(~0u, expert);
  const int before = __popc(same & ((1u << lane) - 1));
  if (expert >= 0 && before == 0) shared.counts[warp][expert] = static_cast<uint16_t>(__popc(same));
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += threads) {
    int sum = 0;
    for (int w = 0; w < warps; ++w) {
      const int count = shared.counts[w][e];
      shared.counts[w][e] = static_cast<uint16_t>(sum), sum += count;
    }
    totals[e] = sum;
  }
  __syncthreads();
  return expert < 0 ? 0 : shared.counts[warp][expert] + before;
}

// The sum of the values of the block's threads before this one.
__device__ __forceinline__ int sum_before(Shared& shared, int value) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();  // what an earlier call left has been read
  if (lane == 31) shared.sums[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += shared.sums[w];
  return sum - value;
}

// Turns shared.first, the experts' totals, into their first rows, and publishes these. A thread an expert.
__device__ __forceinline__ void scan_experts(Shared& shared, int experts, int* first_row) {
  static_assert(kLargestExperts <= kPairs);
  const int e = threadIdx.x, total = e < experts ? shared.first[e] : 0, before = sum_before(shared, total);
  if (e < experts) shared.first[e] = before, first_row[e] = before;
  if (e == experts - 1) shared.first[experts] = before + total, first_row[experts] = before + total;
  __syncthreads();
}

// A work list for products over the sorted rows. width 0: none is wanted.
struct List {
  int width, record_rows;
  Workspace space;
};
// A thread an expert counts, then a warp an expert lists.
__device__ __forceinline__ void list_experts(Shared& shared, int experts, const List& list) {
  const int e = threadIdx.x, rows = e < experts ? shared.first[e + 1] - shared.first[e] : 0;
  const int tiles = (rows + list.width - 1) / list.width * list.record_rows, before = sum_before(shared, tiles);
  if (e < experts) shared.tiles[e] = before;
  if (e == experts - 1) list.space.counters[0] = before + tiles;
  __syncthreads();
  for (int g = threadIdx.x / 32; g < experts; g += blockDim.x / 32)
    list_tiles({g, shared.first[g], shared.first[g + 1] - shared.first[g], list.width, list.record_rows},
               threadIdx.x % 32, 32, list.space.record_tiles + shared.tiles[g]);
}

__device__ __forceinline__ int expert_of(const Choices& c, int pair) {
  return pair < c.tokens * c.top_k ? c.expert[pair] : -1;
}

// Rows from `end` on, as many as there are pairs without an expert, belong to nobody: token 0, weight 0.
__device__ __forceinline__ void place(const Choices& c, const Routing& out, int pair, int expert, int row, int end) {
  if (pair >= c.tokens * c.top_k) return;
  if (pair >= end) out.source_row[pair] = 0, out.route_weight[pair] = 0;
  out.row_of_slot[pair] = expert < 0 ? -1 : row;
  if (expert >= 0) out.source_row[row] = pair / c.top_k, out.route_weight[row] = c.weight[pair];
}

__global__ void __launch_bounds__(kPairs) sort_small_kernel(Choices c, Routing out, List list) {
  __shared__ Shared shared;
  hopper::take_turn();
  const int pair = threadIdx.x, expert = expert_of(c, pair);
  const int rank = rank_in_block(shared, expert, c.experts, shared.first);
  scan_experts(shared, c.experts, out.first_row);
  place(c, out, pair, expert, expert < 0 ? 0 : shared.first[expert] + rank, shared.first[c.experts]);
  if (list.width > 0) list_experts(shared, c.experts, list);
}

// Three launches for more: count, scan, place. block_counts: [blocks, experts], turned into the rows before each
// block's.
__global__ void __launch_bounds__(kPairs) count_kernel(Choices c, int* block_counts) {
  __shared__ Shared shared;
  rank_in_block(shared, expert_of(c, blockIdx.x * kPairs + threadIdx.x), c.experts,
                block_counts + blockIdx.x * c.experts);
}
__global__ void __launch_bounds__(kPairs) scan_kernel(int* block_counts, int blocks, int experts, int* first_row) {
  __shared__ Shared shared;
  const int e = threadIdx.x;
  if (e < experts) {
    int sum = 0;
    for (int b = 0; b < blocks; ++b) sum += block_counts[b * experts + e];
    shared.first[e] = sum;
  }
  __syncthreads();
  scan_experts(shared, experts, first_row);
  if (e < experts) {
    int sum = shared.first[e];
    for (int b = 0; b < blocks; ++b) {
      const int count = block_counts[b * experts + e];
      block_counts[b * experts + e] = sum, sum += count;
    }
  }
}
__global__ void __launch_bounds__(kPairs) place_kernel(Choices c, const int* block_first, Routing out) {
  __shared__ Shared shared;
  const int pair = blockIdx.x * kPairs + threadIdx.x, expert = expert_of(c, pair);
  const int rank = rank_in_block(shared, expert, c.experts, shared.first);  // the totals are not needed again
  place(c, out, pair, expert, expert < 0 ? 0 : block_first[blockIdx.x * c.experts + expert] + rank,
        out.first_row[c.experts]);
}

int pair_blocks(const Choices& c) { return (c.tokens * c.top_k + kPairs - 1) / kPairs; }

void check(const Choices& c) {
  if (c.tokens <= 0 || c.top_k <= 0 || c.experts <= 0 || c.experts > kLargestExperts)
    throw std::invalid_argument("sort_by_expert: tokens = " + std::to_string(c.tokens) +
                                " and top_k = " + std::to_string(c.top_k) + " must be positive and experts = " +
                                std::to_string(c.experts) + " between 1 and " + std::to_string(kLargestExperts));
}

// ---- Combining: a thread takes eight columns of a token ------------------------------------------------------------
__device__ __forceinline__ void add_eight(float (&sum)[8], const uint16_t* from) {
  const uint4 v = *reinterpret_cast<const uint4*>(from);
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[2 * i] += low_bf16(words[i]), sum[2 * i + 1] += high_bf16(words[i]);
}
__global__ void __launch_bounds__(256)
    combine_kernel(const uint16_t* rows, const int* row_of_slot, const uint16_t* shared, int tokens, int top_k, int n,
                   uint16_t* out) {
  hopper::take_turn();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const int64_t token = index / (n / 8);
  const int column = static_cast<int>(index % (n / 8)) * 8;
  if (token >= tokens) return;
  float sum[8] = {};
#pragma unroll 6
  for (int slot = 0; slot < top_k; ++slot) {
    const int64_t row = row_of_slot[token * top_k + slot];
    if (row >= 0) add_eight(sum, rows + row * n + column);
  }
  if (shared) add_eight(sum, shared + token * n + column);
  *reinterpret_cast<uint4*>(out + token * n + column) =
      make_uint4(hopper::pack_bf16(sum[0], sum[1]), hopper::pack_bf16(sum[2], sum[3]),
                 hopper::pack_bf16(sum[4], sum[5]), hopper::pack_bf16(sum[6], sum[7]));
}

}  // namespace

size_t sort_bytes(const Choices& c) {
  check(c);
  return pair_blocks(c) == 1 ? 0 : static_cast<size_t>(pair_blocks(c)) * c.experts * sizeof(int);
}

void sort_by_expert(const Choices& c, const Routing& routing, void* workspace, cudaStream_t stream, const Plan* plan) {
  check(c);
  const int blocks = pair_blocks(c);
  if (blocks == 1) {
    const bool list = plan && plan->width != kWideRows;
    const int threads = (std::max(c.tokens * c.top_k, c.experts) + 31) / 32 * 32;
    launch_dependent(sort_small_kernel, {1, threads}, stream, c, routing,
                     list ? List{plan->width, plan->n / kRecordRows, workspace_of(*plan)} : List{});
    if (list) return;
  } else {
    int* counts = static_cast<int*>(workspace);
    count_kernel<<<blocks, kPairs, 0, stream>>>(c, counts);
    scan_kernel<<<1, kPairs, 0, stream>>>(counts, blocks, c.experts, routing.first_row);
    place_kernel<<<blocks, kPairs, 0, stream>>>(c, counts, routing);
    check_cuda(cudaGetLastError(), "sort_by_expert");
  }
  if (plan) make_plan(routing.first_row, *plan, stream);
}

void combine(const uint16_t* rows, const int* row_of_slot, const uint16_t* shared, int tokens, int top_k, int n,
             uint16_t* out, cudaStream_t stream) {
  if (tokens <= 0 || top_k <= 0 || n <= 0 || n % 8 != 0)
    throw std::invalid_argument("combine: tokens = " + std::to_string(tokens) +
                                " and top_k = " + std::to_string(top_k) +
                                " must be positive and n = " + std::to_string(n) + " a positive multiple of 8");
  const int64_t threads = static_cast<int64_t>(tokens) * (n / 8);
  launch_dependent(combine_kernel, {static_cast<unsigned>((threads + 255) / 256), 256}, stream, rows, row_of_slot,
                   shared, tokens, top_k, n, out);
}

}  // namespace plumb::kernels::grouped_linear
