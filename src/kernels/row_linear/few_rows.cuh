// few_outputs for few rows: bound by the time until the weights have come from memory. A cluster of eight blocks takes
// eight outputs of sixteen rows, each block one of the eight parts of K: so eight multiprocessors ask for everything at
// once, and one warp of each multiplies. In the end the blocks read each other's sums and add them in the order of the
// parts: the bits of few_outputs_kernel.
#pragma once
#include <algorithm>

#include "kernels/hopper/cluster.cuh"
#include "kernels/hopper/code.cuh"
#include "kernels/hopper/copy.cuh"
#include "kernels/hopper/launch_order.cuh"
#include "kernels/hopper/shared_memory.cuh"
#include "kernels/row_linear/few_outputs.cuh"

namespace plumb::kernels::row_linear {

struct FewRows {
  static constexpr int kThreads = 128, kRows = 16, kMostSteps = 32;  // of 32 of K, in memory at once
  static constexpr int kWeightStepBytes = kPlanes * 512;
  static int steps(int k) { return std::min((k / 32 + kParts - 1) / kParts, kMostSteps); }
  static int bytes(int k) { return steps(k) * (kWeightStepBytes + kRows * 64) + kRows * 32; }
};

// Steps first .. first + count of the weights and of the rows, in the order in which lanes use them.
__device__ __forceinline__ void copy_steps(const Problem& p, const Rows& mine, const uint16_t* w, size_t plane,
                                           int first, int count, uint32_t weights, uint32_t rows) {
  for (int i = threadIdx.x; i < count * kPlanes * 32; i += FewRows::kThreads) {
    const int row = i / (4 * count) % 8, part = i / (32 * count), place = i % (4 * count);
    hopper::copy16(weights + (place / 4 * kPlanes + part) * 512 + (row * 4 + place % 4) * 16,
                   w + part * plane + row * static_cast<size_t>(p.k) + first * 32 + place * 8, 16);
  }
  for (int i = threadIdx.x; i < count * mine.count * 4; i += FewRows::kThreads) {
    const int row = i / (4 * count), place = i % (4 * count);
    const int source = p.source_row ? __ldg(p.source_row + mine.first + row) : mine.first + row;
    hopper::copy16(rows + (place / 4 * FewRows::kRows + row) * 64 + place % 4 * 16,
                   p.x + static_cast<size_t>(source) * p.k + first * 32 + place * 8, 16);
  }
  hopper::copy_commit();
}

// Grid: (blocks of rows * parts, adapters, tiles of outputs).
__global__ void PLUMB_CLUSTER(kParts) __launch_bounds__(FewRows::kThreads) few_rows_kernel(const Problem p, int most) {
  if constexpr (!hopper::kHasCode) return __trap();
  hopper::take_turn();
  constexpr int kRows = FewRows::kRows;
  extern __shared__ __align__(16) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = static_cast<int>(hopper::cluster_rank()), adapter = blockIdx.y;
  const Rows mine = rows_of_block(p, blockIdx.x / kParts, kRows, lane);
  if (mine.count <= 0 || !uses_adapter(p, mine, adapter, lane)) return;  // so do the others of the cluster
  const uint32_t weights = hopper::shared_address(shared), rows = weights + most * FewRows::kWeightStepBytes;
  float* sums = reinterpret_cast<float*>(shared + most * (FewRows::kWeightStepBytes + kRows * 64));  // [kRows][8]
  const OutputTile& tile = p.tile[blockIdx.z];
  const uint16_t* w = weights_of(tile, mine.group, adapter);

  const int steps = p.k / 32, each = (steps + kParts - 1) / kParts, end = min((part + 1) * each, steps);
  float d[1][1][4] = {};
  for (int first = part * each; first < end; first += most) {
    const int count = min(most, end - first);
    if (first > part * each) __syncthreads();  // everyone has used what lies there
    copy_steps(p, mine, w, tile.plane, first, count, weights, rows);
    hopper::copy_wait<0>();
    __syncthreads();
    if (warp > 0) continue;
    for (int step = 0; step < count; ++step) {
      const uint32_t at = rows + step * kRows * 64 + lane * 16;
      const uint4 a[2] = {hopper::load_shared_16(at), hopper::load_shared_16(at + 8 * 64)};
#pragma unroll
      for (int i = kPlanes - 1; i >= 0; --i) {
        const uint4 b[1] = {hopper::load_shared_16(weights + (step * kPlanes + i) * 512 + lane * 16)};
        multiply_step(d, a, b);
      }
    }
  }
  if (warp == 0)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[(i / 2 * 8 + lane / 4) * 8 + lane % 4 * 2 + i % 2] = d[0][0][i];

  hopper::cluster_sync();
  const int row = part * (kRows / kParts) + threadIdx.x / 8, column = threadIdx.x % 8;
  if (threadIdx.x < kRows && row < mine.count && column < tile.columns &&
      (!p.adapter || p.adapter[mine.first + row] == adapter)) {
    const uint32_t at = hopper::shared_address(sums + row * 8 + column);
    float of_part[kParts];
#pragma unroll
    for (int other = 0; other < kParts; ++other) of_part[other] = hopper::load_float_at(at, other);
    float total = of_part[0];
#pragma unroll
    for (int other = 1; other < kParts; ++other) total = __fadd_rn(total, of_part[other]);
    tile.out[static_cast<size_t>(mine.first + row) * tile.stride + column] = total;
  }
  hopper::cluster_sync();  // nobody leaves while others read its sums
}

// Few enough that weights, which are read again for every sixteen rows, do not decide.
inline bool are_few(const Problem& p) { return p.rows <= (p.first_row ? FewRows::kRows * p.groups : 512); }

inline void launch_few_rows(const Problem& p, cudaStream_t stream) {
  const dim3 blocks(row_blocks(p, FewRows::kRows) * kParts, p.adapter ? p.adapters : 1, p.tiles);
  launch_dependent(few_rows_kernel, {blocks, FewRows::kThreads, FewRows::bytes(p.k)}, stream, p, FewRows::steps(p.k));
}

}  // namespace plumb::kernels::row_linear
