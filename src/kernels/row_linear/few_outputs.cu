// Few outputs, FP32 weights: bound by reading x where rows are many (many_rows.cuh), by the time until the weights have
// arrived where they are few (few_rows.cuh). The kernel of this file has the same bits, for rows in between and for
// GPUs that have no clusters: a block takes eight outputs of 32 rows, each of its eight warps an eighth of K for all of
// them; the warps' sums meet in shared memory and are added in order.
//
// Operands go from memory to registers of mma.sync without shared memory. The order of K inside 32 is free as long as
// both operands agree: lane (r, q) loads the 16 bytes k = 8 q .. 8 q + 7 of row r, and uses the first and second half
// as its part of two products of 16.
#include "kernels/row_linear/few_outputs.cuh"

#include <algorithm>

#include "kernels/device.h"
#include "kernels/hopper/launch_order.cuh"
#include "kernels/row_linear/few_rows.cuh"
#include "kernels/row_linear/many_rows.cuh"

namespace plumb::kernels::row_linear {
namespace {

constexpr int kWarps = kParts, kRowTiles = 2;  // of sixteen rows

__global__ void __launch_bounds__(256) split_kernel(const Split p) {
  hopper::take_turn();
  const size_t i = blockIdx.x * size_t{256} + threadIdx.x;
  if (i < items_of(p)) split_item(p, i);
}

// Grid: (blocks of rows, adapters, tiles of outputs).
__global__ void __launch_bounds__(32 * kWarps) few_outputs_kernel(const Problem p) {
  constexpr int kBlockRows = 16 * kRowTiles, kAhead = 3;  // steps whose loads are in flight together
  __shared__ float sums[kWarps][kBlockRows][8];
  hopper::take_turn();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
  const Rows mine = rows_of_block(p, blockIdx.x, kBlockRows, lane);
  const int adapter = blockIdx.y;
  if (mine.count <= 0 || !uses_adapter(p, mine, adapter, lane)) return;

  const uint16_t* x[2 * kRowTiles];  // rows r, r + 8, ...; those that do not exist repeat the last one
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int row = mine.first + min(r + 8 * i, mine.count - 1);
    x[i] = p.x + static_cast<size_t>(p.source_row ? p.source_row[row] : row) * p.k + 8 * q;
  }
  const OutputTile& tile = p.tile[blockIdx.z];
  const uint16_t* w = weights_of(tile, mine.group, adapter) + static_cast<size_t>(r) * p.k + 8 * q;
  const int steps = p.k / 32, part = (steps + kWarps - 1) / kWarps, last = min((warp + 1) * part, steps);

  float d[1][kRowTiles][4] = {};
  for (int first = warp * part; first < last; first += kAhead) {
    uint4 a[kAhead][2 * kRowTiles], b[kAhead][kPlanes][1];
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      const int at = min(first + s, last - 1) * 32;
#pragma unroll
      for (int i = 0; i < kPlanes; ++i) b[s][i][0] = __ldg(reinterpret_cast<const uint4*>(w + i * tile.plane + at));
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) a[s][i] = __ldg(reinterpret_cast<const uint4*>(x[i] + at));
    }
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (first + s >= last) break;
#pragma unroll
      for (int i = kPlanes - 1; i >= 0; --i) multiply_step(d, a[s], b[s][i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4 * kRowTiles; ++i) sums[warp][i / 2 * 8 + r][2 * q + i % 2] = d[0][i / 4][i % 4];
  __syncthreads();
  const int row = threadIdx.x / 8, column = threadIdx.x % 8;
  if (row >= mine.count || column >= tile.columns || (p.adapter && p.adapter[mine.first + row] != adapter)) return;
  float total = sums[0][row][column];
#pragma unroll
  for (int other = 1; other < kWarps; ++other) total = __fadd_rn(total, sums[other][row][column]);
  tile.out[static_cast<size_t>(mine.first + row) * tile.stride + column] = total;
}

void launch(const Problem& p, cudaStream_t stream) {
  if (!is_hopper() || (p.rows < kManyRows && !are_few(p))) {
    const dim3 blocks(row_blocks(p, 16 * kRowTiles), p.adapter ? p.adapters : 1, p.tiles);
    return launch_dependent(few_outputs_kernel, {blocks, 32 * kWarps}, stream, p);
  }
  (p.rows < kManyRows ? launch_few_rows
   : p.tiles == 1     ? launch_many_rows<1>
   : p.tiles == 2     ? launch_many_rows<2>
   : p.tiles == 3     ? launch_many_rows<3>
                      : launch_many_rows<4>)(p, stream);
}

}  // namespace

size_t split_bytes(int groups, int n, int k) { return static_cast<size_t>(groups) * kPlanes * padded(n) * k * 2; }

void split_weight(const float* weight, int groups, int n, int k, float scale, uint16_t* planes, cudaStream_t stream,
                  const Source& source) {
  const Split p{weight, groups, n, k, scale, source, planes};
  check_planes(p);
  launch_dependent(split_kernel, {static_cast<unsigned>((items_of(p) + 255) / 256), 256}, stream, p);
}

void few_outputs(const uint16_t* x, const int* source_row, const int* first_row, int rows, int groups, int k,
                 const std::vector<Down>& downs, cudaStream_t stream, const int* adapter_of_row, int adapters) {
  const char* where = "row_linear: few_outputs";
  require(rows > 0 && groups > 0 && (first_row || groups == 1), where,
          "rows = " + std::to_string(rows) + " must be positive, and several groups need first_row");
  require(k > 0 && k % 32 == 0 && aligned(x, 16), where,
          "k = " + std::to_string(k) + " must be a positive multiple of 32, rows aligned to 16 bytes");
  require(!adapter_of_row || adapters > 0, where, "rows that name their adapters need the number of adapters");
  Problem p{x, source_row, first_row, rows, groups, k, adapter_of_row, adapters, 0, {}};
  for (const Down& d : downs) {
    require(d.n > 0 && (adapter_of_row ? d.of_adapter != nullptr : d.planes && aligned(d.planes, 16)), where,
            "n = " + std::to_string(d.n) + " must be positive, planes aligned to 16 bytes; adapters need theirs");
    for (int first = 0; first < d.n; first += 8) {
      const size_t begin = static_cast<size_t>(first) * k;
      p.tile[p.tiles++] = {d.planes + begin,
                           adapter_of_row ? d.of_adapter : nullptr,
                           begin,
                           static_cast<size_t>(padded(d.n)) * k,
                           d.out + first,
                           std::min(d.n - first, 8),
                           d.n};
      if (p.tiles == kMostTiles) launch(p, stream), p.tiles = 0;
    }
  }
  if (p.tiles > 0) launch(p, stream);
}

void few_outputs(const uint16_t* x, const int* source_row, const int* first_row, int rows, const SplitWeight& w,
                 float* out, cudaStream_t stream, const Adapters& adapters) {
  require(w.n <= kMostFewOutputs, "row_linear: few_outputs",
          "n = " + std::to_string(w.n) + " is more than " + std::to_string(kMostFewOutputs));
  few_outputs(x, source_row, first_row, rows, w.groups, w.k, {{w.planes, adapters.planes, w.n, out}}, stream,
              adapters.of_row, adapters.count);
}

}  // namespace plumb::kernels::row_linear
