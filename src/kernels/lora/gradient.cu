// Gradients of A and B, and on the same way over dy the rows U = scale * dy B: tall and thin products, bound by reading
// y. A block takes some columns of y and walks the rows; each warp has its own columns and its own ring of tiles in
// shared memory, so warps wait for memory alone. A tile of 16 x 16 meets the tensor cores twice: transposed, with t, it
// adds to the gradient, which stays in registers; as it is, with W, it gives a part of u, which the block's warps add
// up every 32 rows. FP32 factors are three bf16 numbers each: products are exact, sums FP32.
#include <cuda_bf16.h>

#include <algorithm>

#include "kernels/grouped_linear/weight_format.h"
#include "kernels/hopper/copy.cuh"
#include "kernels/hopper/mma.cuh"
#include "kernels/hopper/shared_memory.cuh"
#include "kernels/launch.cuh"
#include "kernels/lora/lora.h"

namespace plumb::kernels::lora {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps, kPlanes = 3;
constexpr int kTileRows = 16, kTurnRows = 32;  // rows of a tile; rows after which the warps' parts of u are added
constexpr int kWantedBlocks = 512;             // about two rounds of three blocks a multiprocessor

// kTiles: of eight numbers of the rank.
template <int kTiles>
struct Sizes {
  static constexpr int kColumns = kTiles == 1 ? 128 : kTiles == 2 ? 64 : 32;  // of a warp
  static constexpr int kBlockColumns = kWarps * kColumns, kChunks = kColumns / 8;
  static constexpr int kTPitch = 32 * kTiles + 16;  // bytes; so that a warp's loads of t meet all banks
  static constexpr int kTileBytes = kTileRows * kColumns * 2, kStageBytes = kTileBytes + kTileRows * kTPitch;
  static constexpr int kStages = kTiles == 1 ? 3 : 4;                             // three blocks a multiprocessor
  static constexpr int kWidth = 8 * kTiles, kSums = kWarps * kTurnRows * kWidth;  // floats of a turn
  static constexpr int bytes(bool down) {
    return kWarps * kStages * kStageBytes + (down ? 2 * kSums * static_cast<int>(sizeof(float)) : 0);
  }
};

int tiles_of(const Gradient& g) { return (g.rank + 7) / 8; }
int block_columns(const Gradient& g) {
  const int tiles = tiles_of(g);
  return tiles == 1 ? Sizes<1>::kBlockColumns : tiles == 2 ? Sizes<2>::kBlockColumns : Sizes<3>::kBlockColumns;
}
// How the work is cut: columns of a part, rows. Both are functions of the problem's sizes alone.
struct Cut {
  int chunks, segments, segment_rows;  // segments: 1 for groups, whose rows one block walks
};
Cut cut_of(const Gradient& g) {
  const int each = block_columns(g), chunks = (g.columns / g.parts + each - 1) / each;
  if (g.first_row) return {chunks, 1, g.rows};
  const int most = (g.rows + kTurnRows - 1) / kTurnRows, blocks = chunks * g.parts;
  const int wanted = std::min(std::max(kWantedBlocks / blocks, 1), most);
  const int rows = ((g.rows + wanted - 1) / wanted + kTurnRows - 1) / kTurnRows * kTurnRows;
  return {chunks, (g.rows + rows - 1) / rows, rows};
}

// Where sums go that are not final.
struct Parts {
  int segment_rows;
  float* out;  // [segments][size of Gradient::out], or null: add to that
  float* u;    // [chunks][rows][parts * rank], or null: final
};

// Where column c, number j of a group's gradient lies in out.
__device__ __forceinline__ size_t place_of(const Gradient& g, int column, int j) {
  if (g.gate_up) column = grouped_linear::natural_row(column, g.columns);
  return g.transposed ? static_cast<size_t>(j) * g.columns + column : static_cast<size_t>(column) * g.rank + j;
}

// What a warp copies and multiplies. Rows count from the block's first.
struct Walk {
  const uint16_t* y;  // the warp's first column
  const float* t;     // the part's first number
  int first, count;   // rows
  int width;          // columns that exist; up to the warp's own
};

// A pair of floats as three pairs of bf16 numbers that add up to it.
__device__ __forceinline__ void split_pair(float a, float b, uint32_t (&planes)[kPlanes]) {
#pragma unroll
  for (int i = 0; i < kPlanes; ++i) {
    const __nv_bfloat162 part = __floats2bfloat162_rn(a, b);
    planes[i] = *reinterpret_cast<const uint32_t*>(&part);
    a = __fsub_rn(a, __low2float(part)), b = __fsub_rn(b, __high2float(part));
  }
}

template <int kTiles>
struct Ring {
  using S = Sizes<kTiles>;
  uint32_t base;  // of the warp
  // 16 bytes of a row of y, where the eight rows of a matrix lie in different banks.
  __device__ __forceinline__ uint32_t y(int stage, int row, int chunk) const {
    const int turned = chunk ^ (S::kChunks == 4 ? row / 2 % 4 : row % 8);
    return base + stage * S::kStageBytes + row * S::kColumns * 2 + turned * 16;
  }
  __device__ __forceinline__ uint32_t t(int stage, int row, int j) const {
    return base + stage * S::kStageBytes + S::kTileBytes + row * S::kTPitch + j * 4;
  }
  // source: lane l's is that of the tile's row l % 16. Rows beyond the last repeat it, with t = 0.
  __device__ __forceinline__ void copy(const Gradient& g, const Walk& walk, int tile, int stage, int source,
                                       int lane) const {
    constexpr int kRowsAtOnce = 32 / S::kChunks;
    const int chunk = lane % S::kChunks;
    const bool inside = chunk * 8 < walk.width;
    const uint16_t* from = walk.y + (inside ? chunk * 8 : 0);
#pragma unroll
    for (int i = 0; i < kTileRows / kRowsAtOnce; ++i) {
      const int row = i * kRowsAtOnce + lane / S::kChunks;
      hopper::copy16(y(stage, row, chunk), from + static_cast<size_t>(__shfl_sync(~0u, source, row)) * g.columns,
                     inside ? 16 : 0);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int place = i * 32 + lane, in_tile = place / (2 * kTiles), j = place % (2 * kTiles) * 4;
      const int row = walk.first + min(tile * kTileRows + in_tile, walk.count - 1);
      const bool counts = g.out && tile * kTileRows + in_tile < walk.count && j < g.rank &&
                          (!g.adapter || __ldg(g.adapter + row) == g.which);
      hopper::copy16(t(stage, in_tile, j), walk.t + static_cast<size_t>(row) * g.t_stride + (counts ? j : 0),
                     counts ? 16 : 0);
    }
  }
};

__device__ __forceinline__ int source_of(const Gradient& g, const Walk& walk, int tile, int lane) {
  const int row = walk.first + min(tile * kTileRows + lane % kTileRows, walk.count - 1);
  return g.source_row ? __ldg(g.source_row + row) : row;
}

// W's three planes as operands: columns 16 s + 2 q, + 1 and + 8 of number r of each eight.
template <int kTiles>
using Planes = uint32_t[Sizes<kTiles>::kColumns / 16][kPlanes][kTiles][2];
template <int kTiles>
__device__ __forceinline__ void load_planes(const uint16_t* planes, int part_columns, int column, int width, int lane,
                                            Planes<kTiles>& w) {
  const size_t plane = static_cast<size_t>(8 * kTiles) * part_columns;
#pragma unroll
  for (int s = 0; s < Sizes<kTiles>::kColumns / 16; ++s)
#pragma unroll
    for (int i = 0; i < kPlanes; ++i)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int c = 16 * s + 8 * h + lane % 4 * 2;
          w[s][i][tile][h] = c >= width
                                 ? 0
                                 : __ldg(reinterpret_cast<const uint32_t*>(
                                       planes + i * plane + (8 * tile + lane / 4) * size_t(part_columns) + column + c));
        }
}

__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  hopper::multiply_16x8(d, a[0], a[1], a[2], a[3], b0, b1);
}

// One tile: its part of the gradient, and with W its part of u's 16 rows to `to` ([16][8 kTiles]).
template <int kTiles, bool kDown>
__device__ __forceinline__ void multiply_tile(const Ring<kTiles>& ring, int stage, int lane, const Planes<kTiles>& w,
                                              float (&sum)[Sizes<kTiles>::kColumns / 16][kTiles][4], float* to) {
  const int r = lane / 4, q = lane % 4;
  uint32_t t[kTiles][2][kPlanes];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      split_pair(hopper::load_shared_float(ring.t(stage, 2 * q + 8 * h, 8 * tile + r)),
                 hopper::load_shared_float(ring.t(stage, 2 * q + 8 * h + 1, 8 * tile + r)), t[tile][h]);
  float u[kTiles][kPlanes][4] = {};
  constexpr int kSteps = Sizes<kTiles>::kColumns / 16, kAtOnce = kSteps < 4 ? kSteps : 4;
#pragma unroll
  for (int first = 0; first < kSteps; first += kAtOnce) {
    uint32_t straight[kAtOnce][4], turned[kAtOnce][4];
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      const int chunk = 2 * (first + s);
      if (kDown) hopper::load_matrices(straight[s], ring.y(stage, lane % 16, chunk + lane / 16));
      hopper::load_matrices_transposed(turned[s], ring.y(stage, lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2));
    }
    // Products that follow each other belong to different sums, so that none waits for the one before.
#pragma unroll
    for (int i = 0; i < kAtOnce * kPlanes; ++i)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int s = i / kPlanes, p = i % kPlanes, to = i % kAtOnce, of_t = kPlanes - 1 - i / kAtOnce;
        if (kDown) multiply(u[tile][p], straight[s], w[first + s][p][tile][0], w[first + s][p][tile][1]);
        multiply(sum[first + to][tile], turned[to], t[tile][0][of_t], t[tile][1][of_t]);
      }
  }
  if constexpr (kDown) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int tile = i / 2, k = i % 2 * 2;
      float v[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) v[b] = __fadd_rn(__fadd_rn(u[tile][2][k + b], u[tile][1][k + b]), u[tile][0][k + b]);
      *reinterpret_cast<float2*>(to + (r + i % 2 * 8) * Sizes<kTiles>::kWidth + 8 * tile + 2 * q) =
          make_float2(v[0], v[1]);
    }
  }
}

// The warps' parts of u for rows `first` .. + kTurnRows of the block, added in order.
template <int kTiles>
__device__ __forceinline__ void store_u(const Gradient& g, const Walk& walk, int first, const float* sums, float* u) {
  using S = Sizes<kTiles>;
  for (int i = threadIdx.x; i < kTurnRows * S::kWidth / 2; i += kThreads) {
    const int in_turn = i / (S::kWidth / 2), j = i % (S::kWidth / 2) * 2, row = walk.first + first + in_turn;
    if (first + in_turn >= walk.count || j >= g.rank || (g.adapter && g.adapter[row] != g.which)) continue;
    float2 total = *reinterpret_cast<const float2*>(sums + in_turn * S::kWidth + j);
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      const float2 v = *reinterpret_cast<const float2*>(sums + (w * kTurnRows + in_turn) * S::kWidth + j);
      total.x = __fadd_rn(total.x, v.x), total.y = __fadd_rn(total.y, v.y);
    }
    *reinterpret_cast<float2*>(u + static_cast<size_t>(row) * g.parts * g.rank + j) = total;
  }
}

// Grid: (chunks of a part's columns, segments or groups, parts).
template <int kTiles, bool kDown>
__global__ void __launch_bounds__(kThreads, 3) gradient_kernel(const Gradient g, const Parts parts) {
  using S = Sizes<kTiles>;
  extern __shared__ __align__(16) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = blockIdx.z, part_columns = g.columns / g.parts;
  const int group = g.first_row ? blockIdx.y : 0;
  const int column = blockIdx.x * S::kBlockColumns + warp * S::kColumns, width = part_columns - column;
  const int first = g.first_row ? g.first_row[group] : blockIdx.y * parts.segment_rows;
  const int last = g.first_row ? g.first_row[group + 1] : min(first + parts.segment_rows, g.rows);
  if (first >= last) return;
  const Walk walk{g.y + static_cast<size_t>(part) * part_columns + (width > 0 ? column : 0), g.t + part * g.rank, first,
                  last - first, width};
  const Ring<kTiles> ring{hopper::shared_address(shared) + warp * S::kStages * S::kStageBytes};
  float* sums = reinterpret_cast<float*>(shared + kWarps * S::kStages * S::kStageBytes);

  bool counts = !g.adapter;
  for (int r = first + threadIdx.x; !counts && r < last; r += kThreads) counts = g.adapter[r] == g.which;
  const int tiles = __syncthreads_or(counts) ? (walk.count + kTileRows - 1) / kTileRows : 0;
  int source = source_of(g, walk, 0, lane);
  for (int i = 0; i < S::kStages - 1; ++i) {
    const int next = source_of(g, walk, i + 1, lane);
    if (i < tiles) ring.copy(g, walk, i, i, source, lane);
    hopper::copy_commit();
    source = next;
  }
  Planes<kTiles> w;
  if (kDown)
    load_planes<kTiles>(g.planes + (static_cast<size_t>(group) * g.parts + part) * kPlanes * S::kWidth * part_columns,
                        part_columns, column, width, lane, w);
  float sum[S::kColumns / 16][kTiles][4] = {};
  float* u =
      kDown ? (parts.u ? parts.u + static_cast<size_t>(blockIdx.x) * g.rows * g.parts * g.rank : g.u) + part * g.rank
            : nullptr;
  int stage = 0, free_stage = S::kStages - 1;
  for (int i = 0; i < tiles; ++i) {
    hopper::copy_wait<S::kStages - 2>();
    __syncwarp();  // the tile has arrived for all lanes, and all have read the one before
    const int ahead = i + S::kStages - 1, next = source_of(g, walk, ahead + 1, lane);
    if (ahead < tiles) ring.copy(g, walk, ahead, free_stage, source, lane);
    hopper::copy_commit();
    source = next;
    float* turn = sums + i / 2 % 2 * S::kSums;
    multiply_tile<kTiles, kDown>(ring, stage, lane, w, sum, turn + (warp * kTurnRows + i % 2 * kTileRows) * S::kWidth);
    stage = stage + 1 == S::kStages ? 0 : stage + 1, free_stage = free_stage + 1 == S::kStages ? 0 : free_stage + 1;
    if (kDown && (i % 2 == 1 || i + 1 == tiles)) {
      __syncthreads();
      store_u<kTiles>(g, walk, i / 2 * kTurnRows, turn, u);
    }
  }

  if (!g.out) return;
  const size_t size = static_cast<size_t>(g.columns) * g.rank;
  float* out = parts.out ? parts.out + blockIdx.y * size : g.out + group * size;
  const auto each = [&](auto&& visit) {
#pragma unroll
    for (int s = 0; s < S::kColumns / 16; ++s)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int c = 16 * s + lane / 4 + k / 2 * 8, j = 8 * tile + lane % 4 * 2 + k % 2;
          if (c < width && j < g.rank) visit(sum[s][tile][k], out[place_of(g, part * part_columns + column + c, j)]);
        }
  };
  if (!parts.out) each([](float& v, const float& there) { v = __fadd_rn(there, v); });  // all loads before the stores
  each([](float v, float& there) { there = v; });
}

// to = or += the sum of `count` arrays that lie one behind the other. Several threads share an element's terms if there
// are many.
constexpr int kAddThreads = 256;
struct Addition {
  const float* parts;
  int count, size;
  float* to;
  bool add;
  const int* adapter;  // of each `row_size` elements, or null
  int which, row_size;
  __host__ __device__ int shares() const { return count > 16 ? 4 : 1; }
  __host__ __device__ int elements() const { return kAddThreads / shares(); }  // of a block
  __host__ __device__ int blocks() const { return (size + elements() - 1) / elements(); }
};
__global__ void __launch_bounds__(kAddThreads) add_parts_kernel(const Addition first, const Addition second) {
  __shared__ float partial[kAddThreads];
  const bool is_first = static_cast<int>(blockIdx.x) < first.blocks();
  const Addition a = is_first ? first : second;
  const int elements = a.elements(), place = threadIdx.x % elements, share = threadIdx.x / elements;
  const int i = (blockIdx.x - (is_first ? 0 : first.blocks())) * elements + place;
  const int each = (a.count + a.shares() - 1) / a.shares();
  const bool counts = i < a.size && (!a.adapter || a.adapter[i / a.row_size] == a.which);
  float sum = 0;
  if (counts)
#pragma unroll 8
    for (int s = share * each; s < min((share + 1) * each, a.count); ++s)
      sum = __fadd_rn(sum, a.parts[static_cast<size_t>(s) * a.size + i]);
  partial[threadIdx.x] = sum;
  __syncthreads();
  if (share || !counts) return;
  for (int s = 1; s < a.shares(); ++s) sum = __fadd_rn(sum, partial[s * elements + place]);
  a.to[i] = a.add ? __fadd_rn(a.to[i], sum) : sum;
}

template <int kTiles>
void launch(const Gradient& g, const Parts& parts, dim3 blocks, cudaStream_t stream) {
  launch_with_shared(g.u ? gradient_kernel<kTiles, true> : gradient_kernel<kTiles, false>, blocks, kThreads,
                     Sizes<kTiles>::bytes(g.u), stream, g, parts);
}

size_t out_parts(const Gradient& g, const Cut& cut) {
  return !g.out || g.first_row || cut.segments == 1 ? 0 : static_cast<size_t>(cut.segments) * g.columns * g.rank;
}
size_t u_parts(const Gradient& g, const Cut& cut) {
  return g.u && cut.chunks > 1 ? static_cast<size_t>(cut.chunks) * g.rows * g.parts * g.rank : 0;
}

void check(const Gradient& g) {
  const char* where = "lora: add_gradient";
  require(g.rows > 0 && g.groups > 0 && (g.first_row || g.groups == 1), where,
          "rows = " + std::to_string(g.rows) + " must be positive, and several groups need first_row");
  require(g.parts > 0 && g.columns > 0 && g.columns % (8 * g.parts) == 0 &&
              (!g.gate_up || (g.parts == 1 && g.columns % grouped_linear::kRecordRows == 0)),
          where, "columns = " + std::to_string(g.columns) + " must be a positive multiple of 8 (gate and up: of 256)");
  require(g.rank > 0 && g.rank % 4 == 0 && g.rank <= kMostRank && g.t_stride % 4 == 0 && g.t_stride >= g.parts * g.rank,
          where,
          "rank = " + std::to_string(g.rank) + " must be a multiple of 4 up to " + std::to_string(kMostRank) +
              ", and t's rows at least as long as that of all parts");
  require(
      aligned(g.y, 16) && (!g.out || aligned(g.t, 16)) && (g.out || g.u) && (!g.u || (aligned(g.u, 16) && g.planes)),
      where, "y, t and u must be aligned to 16 bytes, out or u be wanted; u needs planes");
}

}  // namespace

size_t gradient_bytes(const Gradient& g) {
  const Cut cut = cut_of(g);
  return (out_parts(g, cut) + u_parts(g, cut)) * sizeof(float);
}

void add_gradient(const Gradient& g, void* workspace, cudaStream_t stream) {
  check(g);
  const Cut cut = cut_of(g);
  auto* space = static_cast<float*>(workspace);
  const size_t of_out = out_parts(g, cut), of_u = u_parts(g, cut);
  const Parts parts{cut.segment_rows, of_out ? space : nullptr, of_u ? space + of_out : nullptr};
  const dim3 blocks(cut.chunks, g.first_row ? g.groups : cut.segments, g.parts);
  const int tiles = tiles_of(g);
  (tiles == 1 ? launch<1> : tiles == 2 ? launch<2> : tiles == 3 ? launch<3> : launch<4>)(g, parts, blocks, stream);
  if (!of_out && !of_u) return;
  const Addition out{parts.out, cut.segments, of_out ? g.columns * g.rank : 0, g.out, true, nullptr, 0, 1};
  const Addition u{parts.u, cut.chunks,      of_u ? g.rows * g.parts * g.rank : 0, g.u, false, g.adapter,
                   g.which, g.parts * g.rank};
  add_parts_kernel<<<out.blocks() + u.blocks(), kAddThreads, 0, stream>>>(out, u);
  check_cuda(cudaGetLastError(), "lora: add_gradient");
}

}  // namespace plumb::kernels::lora
