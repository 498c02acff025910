// The wide bf16 product: C = A B over K, FP32 accumulators, one chain over K in order. C never leaves registers here:
// an epilogue gets the 64 x 256 accumulators of a warpgroup and decides what becomes of them (row_linear.cu, head.cu).
//
// Persistent and warp-specialised, clusters of two blocks. A block computes 128 rows x 256 columns: warpgroup 0 feeds
// four stages of 64 of K, warpgroups 1 and 2 own 64 rows each. The two blocks of a cluster lie below each other and
// share the columns: each loads half of B's stage and sends it to both, so that a block reads 32 KB instead of 48 KB
// per stage; L2 could not deliver 48 KB at the tensor cores' pace.
//
// Operands lie in memory either with K along the row (kColumnsContracted) or with K down the column (kRowsContracted):
// bf16 tensor-core operands can be read both ways. Rows, columns and K may end anywhere: the copy engine fills with
// zeros what lies outside.
//
// Bits: a result depends on its row of A, its column of B and the order of K alone.
#pragma once
#include <algorithm>

#include "kernels/hopper/barrier.cuh"
#include "kernels/hopper/cluster.cuh"
#include "kernels/hopper/code.cuh"
#include "kernels/hopper/shared_memory.cuh"
#include "kernels/hopper/tma.cuh"
#include "kernels/hopper/wgmma_bf16.cuh"
#include "kernels/launch.cuh"

namespace plumb::kernels::wide_product {

using namespace hopper;

constexpr int kRows = 128, kColumns = 256, kDepth = 64;  // of a block's tile and stage
constexpr int kCluster = 2, kClusterRows = kCluster * kRows;
constexpr uint16_t kAll = (1 << kCluster) - 1;  // blocks of a cluster that a copy goes to
constexpr int kStages = 4, kThreads = 384;
constexpr int kPanelBytes = 64 * 128;  // 64 rows of 64 bf16, 128-byte swizzle
constexpr int kRowBytes = 2 * kPanelBytes, kColumnBytes = 4 * kPanelBytes, kStageBytes = kRowBytes + kColumnBytes;
constexpr int kRowStagingBytes = 16 * 128, kWarpStagingBytes = kRowStagingBytes + 512;
constexpr int kStagingStart = kStages * kStageBytes;
constexpr int kBarrierStart = kStagingStart + 8 * kWarpStagingBytes;
constexpr int kSharedBytes = kBarrierStart + 2 * kStages * 8;
constexpr int kBand = 8;  // row tiles that meet all columns before the next ones do: their rows stay in L2

struct Shape {
  int rows, columns, k;
  // Several groups, of columns (wo_a: group g's columns meet K g * k .. of A. Its input gradient: B has the columns of
  // one group, and K g * k .. down) or of rows (its weight gradient: group g's rows meet columns g * columns .. of B).
  // Multiples of a tile; 0: one group.
  int group_columns = 0, group_rows = 0;
  // Several products of this shape (without groups): the matrices of A lie behind each other, those of B too. Where K
  // is down it is a multiple of 64 then. symmetric: C is, only tiles on and below the diagonal are computed.
  int batch = 1;
  bool symmetric = false;
  __host__ __device__ int column_groups() const { return group_columns ? columns / group_columns : 1; }
  __host__ __device__ int row_groups() const { return group_rows ? rows / group_rows : 1; }
  __host__ __device__ int row_tiles() const { return (rows + kClusterRows - 1) / kClusterRows; }
  __host__ __device__ int column_tiles() const { return (columns + kColumns - 1) / kColumns; }
  __host__ __device__ int tiles_of_one() const {
    return symmetric ? row_tiles() * (row_tiles() + 1) / 2 : row_tiles() * column_tiles();
  }
  __host__ __device__ int tiles() const { return batch * tiles_of_one(); }
  __device__ int steps() const { return (k + kDepth - 1) / kDepth; }
};

struct Tile {
  int row, column;  // of the cluster's first
  int matrix;
};
__device__ __forceinline__ Tile tile_at(const Shape& s, int index) {
  const int matrix = index / s.tiles_of_one();
  index -= matrix * s.tiles_of_one();
  if (s.symmetric) {  // tiles are square
    int row = 0;
    for (; index > row; ++row) index -= row + 1;
    return {row * kClusterRows, index * kColumns, matrix};
  }
  const int per_band = kBand * s.column_tiles(), band = index / per_band, inside = index % per_band;
  const int height = min(kBand, s.row_tiles() - band * kBand);
  return {(band * kBand + inside % height) * kClusterRows, inside / height * kColumns, matrix};
}

// Where a consumer thread's results lie: d[4 i + 2 h + b] is row `row` + 8 h, column `column` + 8 i + b.
struct Place {
  int row, column;       // of d[0]
  int matrix, tile_row;  // of the batch; the cluster's first row
  int owner, warp, lane;
  uint32_t start;
  // kRowStagingBytes for rows on their way out, and what is left of kWarpStagingBytes; of a warp of this warpgroup.
  __device__ __forceinline__ uint32_t staging(int of_warp) const {
    return start + kStagingStart + (owner * 4 + of_warp) * kWarpStagingBytes;
  }
  __device__ __forceinline__ uint32_t staging() const { return staging(warp); }
  __device__ __forceinline__ int first_row() const { return row - lane / 4; }              // of the warp
  __device__ __forceinline__ int first_column() const { return column - 2 * (lane % 4); }  // of the tile
};

__device__ __forceinline__ uint32_t full_barrier(uint32_t start, uint32_t slot) {
  return start + kBarrierStart + 8 * slot;
}
__device__ __forceinline__ uint32_t empty_barrier(uint32_t start, uint32_t slot) {
  return full_barrier(start, kStages + slot);
}

// One thread of each block. Both blocks of a cluster walk the same tiles: each sends its half of B to both.
template <int kMajorA, int kMajorB>
__device__ __forceinline__ void feed(uint32_t start, const CUtensorMap* a, const CUtensorMap* b, const Shape& s) {
  const int rank = cluster_rank(), clusters = gridDim.x / kCluster;
  uint32_t step = 0;
  for (int index = blockIdx.x / kCluster; index < s.tiles(); index += clusters) {
    const Tile tile = tile_at(s, index);
    const int column_group = s.group_columns ? tile.column / s.group_columns : 0;
    const int row_group = s.group_rows ? tile.row / s.group_rows : 0;
    constexpr bool kDownA = kMajorA == kRowsContracted, kDownB = kMajorB == kRowsContracted;
    const int first_k = column_group * s.k, k_of_a = kDownA ? tile.matrix * s.k : first_k;
    const int k_of_b = kDownB ? tile.matrix * s.k + first_k : 0;
    const int row = tile.row + rank * kRows + (kDownA ? 0 : tile.matrix * s.rows);
    const int column = tile.column + rank * (kColumns / kCluster) + row_group * s.columns +
                       (kDownB ? -column_group * s.group_columns : tile.matrix * s.columns);
    for (int i = 0; i < s.steps(); ++i, ++step) {
      const uint32_t slot = ring_slot<kStages>(step), full = full_barrier(start, slot);
      const uint32_t rows_at = start + slot * kStageBytes,
                     columns_at = rows_at + kRowBytes + rank * (kColumnBytes / kCluster);
      barrier_wait(empty_barrier(start, slot), ring_parity<kStages>(step) ^ 1);
      barrier_arrive_expect(full, kStageBytes);
      if constexpr (kMajorA == kColumnsContracted) {
        copy_tensor_2d(rows_at, a, k_of_a + i * kDepth, row, full);
      } else {
        copy_tensor_2d(rows_at, a, row, k_of_a + i * kDepth, full);
        copy_tensor_2d(rows_at + kPanelBytes, a, row + 64, k_of_a + i * kDepth, full);
      }
      if constexpr (kMajorB == kColumnsContracted) {
        copy_tensor_2d_to_all(columns_at, b, k_of_b + i * kDepth, column, full, kAll);
      } else {
#pragma unroll
        for (int panel = 0; panel < kColumns / kCluster / 64; ++panel)
          copy_tensor_2d_to_all(columns_at + panel * kPanelBytes, b, column + panel * 64, k_of_b + i * kDepth, full,
                                kAll);
      }
    }
  }
}

template <int kMajorA, int kMajorB, typename Epilogue>
__device__ __forceinline__ void consume(uint32_t start, const Shape& s, int owner, int thread,
                                        const Epilogue& epilogue) {
  const int lane = thread % 32, warp = uniform(thread / 32), rank = cluster_rank(), clusters = gridDim.x / kCluster;
  const auto release = [&](uint32_t step) {
    if (lane < kCluster) barrier_arrive_at(empty_barrier(start, ring_slot<kStages>(step)), lane);
  };
  uint32_t step = 0;
  float d[128];
  for (int index = blockIdx.x / kCluster; index < s.tiles(); index += clusters) {
    const Tile tile = tile_at(s, index);
    const int first_row = tile.row + rank * kRows + owner * 64;
    const uint32_t end = step + s.steps();
    if (first_row >= s.rows) {  // nothing to compute, but the other block waits for the stages to be free
      for (; step != end; ++step) {
        barrier_wait(full_barrier(start, ring_slot<kStages>(step)), ring_parity<kStages>(step));
        release(step);
      }
      continue;
    }
    const Place place{first_row + warp * 16 + lane / 4,
                      tile.column + 2 * (lane % 4),
                      tile.matrix,
                      tile.row,
                      owner,
                      warp,
                      lane,
                      start};
    if constexpr (requires { epilogue.begin(s, place); }) epilogue.begin(s, place);
    for (const uint32_t first = step; step != end; ++step) {
      const uint32_t slot = ring_slot<kStages>(step), at = start + slot * kStageBytes;
      barrier_wait(full_barrier(start, slot), ring_parity<kStages>(step));
      const uint64_t a = tile_descriptor(at + owner * kPanelBytes), b = tile_descriptor(at + kRowBytes, kPanelBytes);
      constexpr int kStepA = kMajorA == kColumnsContracted ? 2 : 128, kStepB = kMajorB == kColumnsContracted ? 2 : 128;
      product_fence();
#pragma unroll
      for (int i = 0; i < kDepth / 16; ++i)
        wgmma<kMajorA, kMajorB>(d, a + i * kStepA, b + i * kStepB, step != first || i > 0);
      product_commit();
      product_wait<1>();
      if (step != first) release(step - 1);
    }
    product_wait<0>();
    pin(d);
    release(step - 1);
    epilogue(d, s, place);
  }
}

template <int kMajorA, int kMajorB, typename Epilogue>
__global__ void PLUMB_CLUSTER(kCluster) __launch_bounds__(kThreads, 1)
    wide_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const Shape shape,
                const Epilogue epilogue) {
  if constexpr (!kHasCode) return __trap();
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t start = uniform(shared_address(shared));
  const int group = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    prefetch_map(&a), prefetch_map(&b);
    for (int i = 0; i < kStages; ++i)
      barrier_init(full_barrier(start, i), 1), barrier_init(empty_barrier(start, i), 8 * kCluster);
    barrier_init_fence();
  }
  cluster_sync();
  if (group == 0) {
    give_registers<40>();
    if (threadIdx.x == 0) feed<kMajorA, kMajorB>(start, &a, &b, shape);
  } else {
    take_registers<232>();
    consume<kMajorA, kMajorB>(start, shape, group - 1, threadIdx.x % 128, epilogue);
  }
  __syncwarp();
  cluster_sync();
}

// ---- Epilogues that several products use ---------------------------------------------------------------------------
// Rounds and writes rows of bf16, 128 bytes of a row at a time; `columns` is a multiple of 8.
__device__ __forceinline__ void write_bf16_rows(const float (&d)[128], const Shape& s, const Place& place,
                                                uint16_t* out) {
  const int lane = place.lane, first_row = place.first_row(), first_column = place.first_column();
  const uint32_t staging = place.staging(), row_at = staging + (((lane / 8) & 1) * 8 + lane % 8) * 128;
#pragma unroll
  for (int columns = 0; columns < kColumns; columns += 64) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float* v = &d[columns / 2 + pair * 8];
      store_matrices(row_at + (((pair * 2 + lane / 16) ^ (lane % 8)) << 4), pack_bf16(v[0], v[1]),
                     pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8, chunk = lane % 8, column = first_column + columns + chunk * 8;
      if (first_row + row < s.rows && column < s.columns)
        *reinterpret_cast<uint4*>(out + static_cast<size_t>(first_row + row) * s.columns + column) =
            load_shared_16(staging + row * 128 + ((chunk ^ (row & 7)) << 4));
    }
    __syncwarp();
  }
}

// The same with rows and columns exchanged: out is [columns, rows], `rows` a multiple of 8.
__device__ __forceinline__ void write_bf16_columns(const float (&d)[128], const Shape& s, const Place& place,
                                                   uint16_t* out) {
  const int lane = place.lane, first_row = place.first_row(), first_column = place.first_column();
  const uint32_t staging = place.staging();  // 64 columns of 16 rows
#pragma unroll
  for (int columns = 0; columns < kColumns; columns += 64) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float* v = &d[columns / 2 + pair * 8];
      store_matrices_transposed(staging + (pair * 16 + lane / 16 * 8 + lane % 8) * 32 + (lane / 8 & 1) * 16,
                                pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                                pack_bf16(v[6], v[7]));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int unit = i * 32 + lane, row = first_row + unit % 2 * 8, column = first_column + columns + unit / 2;
      if (row < s.rows && column < s.columns)
        *reinterpret_cast<uint4*>(out + static_cast<size_t>(column) * s.rows + row) =
            load_shared_16(staging + unit * 16);
    }
    __syncwarp();
  }
}

// Writes FP32, or adds to what is there. `columns` is even.
struct StoreFloats {
  float* out;
  bool add;
  __device__ __forceinline__ void operator()(float (&d)[128], const Shape& s, const Place& place) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.row + 8 * half;
      if (row >= s.rows) break;
      float* to = out + static_cast<size_t>(row) * s.columns + place.column;
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        if (place.column + 8 * i >= s.columns) break;
        float2 v = make_float2(d[4 * i + 2 * half], d[4 * i + 2 * half + 1]);
        float2* at = reinterpret_cast<float2*>(to + 8 * i);
        if (add) {
          const float2 old = *at;
          v.x = __fadd_rn(old.x, v.x), v.y = __fadd_rn(old.y, v.y);
        }
        *at = v;
      }
    }
  }
};
struct StoreBf16 {
  uint16_t* out;
  __device__ __forceinline__ void operator()(float (&d)[128], const Shape& s, const Place& place) const {
    write_bf16_rows(d, s, place, out);
  }
};

// ---- Launch --------------------------------------------------------------------------------------------------------
inline CUtensorMap bf16_map(const uint16_t* matrix, int rows, int columns, int box_rows) {
  return hopper::matrix_map(matrix, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, rows, columns, box_rows, 64,
                            CU_TENSOR_MAP_SWIZZLE_128B);
}

// a: [rows, k], or [k, rows] if its rows are contracted; b: [columns, k] or [k, columns]; with groups of columns
// [rows, groups * k] and [columns, k] or [groups * k, columns of a group], with groups of rows b is [k, groups *
// columns]. Rows of both matrices are multiples of 8 elements, and aligned to 16 bytes.
template <int kMajorA, int kMajorB, typename Epilogue>
void launch(const uint16_t* a, const uint16_t* b, const Shape& s, const Epilogue& epilogue, cudaStream_t stream) {
  constexpr bool kDownA = kMajorA == hopper::kRowsContracted, kDownB = kMajorB == hopper::kRowsContracted;
  const int all_k = s.k * s.column_groups(), b_columns = s.columns / s.column_groups() * s.row_groups();
  const int n = s.batch;
  const CUtensorMap map_a = kDownA ? bf16_map(a, n * s.k, s.rows, kDepth) : bf16_map(a, n * s.rows, all_k, kRows);
  const CUtensorMap map_b =
      kDownB ? bf16_map(b, n * all_k, b_columns, kDepth) : bf16_map(b, n * s.columns, s.k, kColumns / kCluster);
  const int blocks = kCluster * std::min(s.tiles(), multiprocessors() / kCluster);
  launch_with_shared(wide_kernel<kMajorA, kMajorB, Epilogue>, blocks, kThreads, kSharedBytes, stream, map_a, map_b, s,
                     epilogue);
}

}  // namespace plumb::kernels::wide_product
