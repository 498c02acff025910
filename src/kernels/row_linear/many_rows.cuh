// few_outputs for many rows, at the rate at which memory delivers x. A cluster of eight blocks takes some rows, each
// block one of the eight parts of K: its weights lie in shared memory for all of the rows. Every warp has a ring of
// tiles of 32 rows x 64 of K that only it fills and reads. In the end the blocks read each other's sums and add them
// in the order of the parts: the bits of few_outputs_kernel.
#pragma once
#include <algorithm>

#include "kernels/hopper/cluster.cuh"
#include "kernels/hopper/code.cuh"
#include "kernels/hopper/copy.cuh"
#include "kernels/hopper/shared_memory.cuh"
#include "kernels/row_linear/few_outputs.cuh"

namespace plumb::kernels::row_linear {

constexpr int kManyRows = 4096;  // from here on there are enough clusters

template <int kTiles>
struct ManyRows {
  // Many outputs: reading weights would cost as much as reading x. So a multiprocessor has one block, whose warps have
  // one set of rows each and keep their sums in registers; its memory has room for all weights of 4,096 / kParts of K.
  static constexpr bool kOneSet = kTiles > 2;
  static constexpr int kWarps = kOneSet ? 16 : 4, kRound = 32 * kWarps;  // rows of all warps together
  static constexpr int kSteps = kTiles == 2 ? 8 : 16;                    // of 32, whose weights are in memory at once
  static constexpr int kStages = 2, kBlocks = kOneSet ? 1 : 3;           // of a ring; of a multiprocessor
  static constexpr int kStageBytes = 32 * 128, kStepBytes = kTiles * kPlanes * 512, kWidth = kTiles * 8;
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes, kWeightBytes = kSteps * kStepBytes;
  static constexpr int kSumsAt = kOneSet ? 0 : kRingBytes + kWeightBytes;  // over the rings, when these are done
  static constexpr int bytes(int rows) {
    return kRingBytes + kWeightBytes + (kOneSet ? 0 : rows * kWidth * static_cast<int>(sizeof(float)));
  }
};

// Weights of steps first .. first + count, in the order in which lanes use them.
template <int kTiles>
__device__ __forceinline__ void copy_weights(const Problem& p, int group, int adapter, int first, int count,
                                             uint32_t to) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const OutputTile& tile = p.tile[t];
    const uint16_t* w = weights_of(tile, group, adapter) + first * 32;
    for (int i = threadIdx.x; i < count * kPlanes * 32; i += blockDim.x) {
      const int lane = i % 32, plane = i / 32 % kPlanes, step = i / (32 * kPlanes);
      hopper::copy16(to + step * ManyRows<kTiles>::kStepBytes + ((t * kPlanes + plane) * 32 + lane) * 16,
                     w + plane * tile.plane + lane / 4 * static_cast<size_t>(p.k) + step * 32 + lane % 4 * 8, 16);
    }
  }
  hopper::copy_commit();
}

// 16 bytes of a row of a tile; two rows that are read together lie in different banks.
__device__ __forceinline__ uint32_t place_in_tile(uint32_t tile, int row, int chunk) {
  return tile + row * 128 + (chunk ^ row % 2 * 4) * 16;
}

// Chunk `lane % 8` of the 64 of K from `from` on, of all 32 rows; source: lane l's is that of row l.
__device__ __forceinline__ void copy_tile(const uint16_t* from, int k, int left, int source, uint32_t tile, int lane) {
  const int chunk = lane % 8;
  const bool inside = chunk * 8 < left;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = 4 * i + lane / 8;
    hopper::copy16(place_in_tile(tile, row, chunk),
                   from + static_cast<size_t>(__shfl_sync(~0u, source, row)) * k + (inside ? chunk * 8 : 0),
                   inside ? 16 : 0);
  }
}

// d += a tile's `steps` steps of 32 (one or two), each as few_outputs_kernel walks it.
template <int kTiles>
__device__ __forceinline__ void multiply_tile(uint32_t tile, uint32_t weights, int steps, int lane,
                                              float (&d)[kTiles][2][4]) {
  const int r = lane / 4, q = lane % 4;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    if (s >= steps) break;
    uint4 a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = hopper::load_shared_16(place_in_tile(tile, r + 8 * i, 4 * s + q));
    const uint32_t of_step = weights + s * ManyRows<kTiles>::kStepBytes + lane * 16;
#pragma unroll
    for (int i = kPlanes - 1; i >= 0; --i) {
      uint4 w[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) w[t] = hopper::load_shared_16(of_step + (t * kPlanes + i) * 512);
      multiply_step(d, a, w);
    }
  }
}

// Grid: (blocks of rows * parts, adapters).
template <int kTiles>
__global__ void PLUMB_CLUSTER(kParts) __launch_bounds__(ManyRows<kTiles>::kRound, ManyRows<kTiles>::kBlocks)
    many_rows_kernel(const Problem p, int block_rows) {
  if constexpr (!hopper::kHasCode) return __trap();
  using S = ManyRows<kTiles>;
  extern __shared__ __align__(16) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
  const int part = static_cast<int>(hopper::cluster_rank()), adapter = blockIdx.y;
  const Rows mine = rows_of_block(p, blockIdx.x / kParts, block_rows, lane);
  if (mine.count <= 0 || !uses_adapter(p, mine, adapter, lane)) return;  // so do the others of the cluster
  const uint32_t ring = hopper::shared_address(shared) + warp * S::kStages * S::kStageBytes;
  const uint32_t weights = hopper::shared_address(shared) + S::kRingBytes;
  float* sums = reinterpret_cast<float*>(shared + S::kSumsAt);  // [block_rows][kWidth]
  if (!S::kOneSet)
    for (int i = threadIdx.x; i < block_rows * S::kWidth; i += S::kRound) sums[i] = 0;
  float d[kTiles][2][4] = {};

  // Rows 32 warp .. of every round are a set of this warp.
  const int sets = mine.count > warp * 32 ? (mine.count - warp * 32 + S::kRound - 1) / S::kRound : 0;
  const int steps = p.k / 32, each = (steps + kParts - 1) / kParts, end = min((part + 1) * each, steps);
  for (int first = part * each; first < end; first += S::kSteps) {
    const int count = min(S::kSteps, end - first), pairs = (count + 1) / 2;
    __syncthreads();  // everyone has used the weights before
    copy_weights<kTiles>(p, mine.group, adapter, first, count, weights);

    int load_set = 0, load_pair = 0, load_stage = 0, source = 0;
    const auto load = [&] {
      if (load_set < sets) {
        if (load_pair == 0) {
          const int row = mine.first + min((load_set * S::kWarps + warp) * 32 + lane, mine.count - 1);
          source = p.source_row ? __ldg(p.source_row + row) : row;
        }
        copy_tile(p.x + first * 32 + load_pair * 64, p.k, (count - 2 * load_pair) * 32, source,
                  ring + load_stage * S::kStageBytes, lane);
        if (++load_pair == pairs) load_pair = 0, ++load_set;
      }
      hopper::copy_commit();
      load_stage = load_stage + 1 == S::kStages ? 0 : load_stage + 1;
    };
    for (int i = 0; i < S::kStages - 1; ++i) load();
    hopper::copy_wait<S::kStages - 1>();  // the weights
    __syncthreads();

    int stage = 0;
    for (int set = 0; set < sets; ++set) {
      float* own = sums + ((set * S::kWarps + warp) * 32 + r) * S::kWidth + 2 * q;
      if (!S::kOneSet)  // chains go on from chunk to chunk
#pragma unroll
        for (int i = 0; i < 8 * kTiles; ++i)
          d[i / 8][i / 4 % 2][i % 4] = own[i / 2 % 4 * 8 * S::kWidth + i / 8 * 8 + i % 2];
      for (int pair = 0; pair < pairs; ++pair) {
        hopper::copy_wait<S::kStages - 2>();
        __syncwarp();  // the tile has arrived for all lanes, and all have read the one before
        load();
        multiply_tile<kTiles>(ring + stage * S::kStageBytes, weights + 2 * pair * S::kStepBytes, count - 2 * pair, lane,
                              d);
        stage = stage + 1 == S::kStages ? 0 : stage + 1;
      }
      if (!S::kOneSet)
#pragma unroll
        for (int i = 0; i < 8 * kTiles; ++i)
          own[i / 2 % 4 * 8 * S::kWidth + i / 8 * 8 + i % 2] = d[i / 8][i / 4 % 2][i % 4];
    }
    hopper::copy_wait<0>();
  }
  if (S::kOneSet) {
    __syncthreads();  // everyone has used its ring
#pragma unroll
    for (int i = 0; i < 8 * kTiles; ++i)
      sums[(warp * 32 + r + i / 2 % 4 * 8) * S::kWidth + i / 8 * 8 + 2 * q + i % 2] = d[i / 8][i / 4 % 2][i % 4];
  }

  hopper::cluster_sync();
  const int own_rows = block_rows / kParts;
  for (int i = threadIdx.x; i < own_rows * S::kWidth; i += S::kRound) {
    const int row = part * own_rows + i / S::kWidth, column = i % S::kWidth;
    const OutputTile& tile = p.tile[column / 8];
    if (row >= mine.count || column % 8 >= tile.columns || (p.adapter && p.adapter[mine.first + row] != adapter))
      continue;
    const uint32_t at = hopper::shared_address(sums + row * S::kWidth + column);
    float of_part[kParts];
#pragma unroll
    for (int other = 0; other < kParts; ++other) of_part[other] = hopper::load_float_at(at, other);
    float total = of_part[0];
#pragma unroll
    for (int other = 1; other < kParts; ++other) total = __fadd_rn(total, of_part[other]);
    tile.out[static_cast<size_t>(mine.first + row) * tile.stride + column % 8] = total;
  }
  hopper::cluster_sync();  // nobody leaves while others read its sums
}

template <int kTiles>
void launch_many_rows(const Problem& p, cudaStream_t stream) {
  using S = ManyRows<kTiles>;
  // Experts have a few hundred rows, which one cluster takes if it can; other rows are spread over all clusters.
  const int block_rows = S::kRound * (S::kOneSet ? 1 : std::max((p.first_row ? 4 : 3) / kTiles, 1));
  const int blocks = row_blocks(p, block_rows);
  launch_with_shared(many_rows_kernel<kTiles>, dim3(blocks * kParts, p.adapter ? p.adapters : 1), S::kRound,
                     S::bytes(block_rows), stream, p, block_rows);
}

}  // namespace plumb::kernels::row_linear
