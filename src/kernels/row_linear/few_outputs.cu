// Few outputs, FP32 weights: bound by reading x. A block takes 32 rows, each of its eight warps an eighth of K for all
// of them; the warps' sums meet in shared memory and are added in order. Many rows: many_rows.cuh.
//
// Operands go from memory to registers of mma.sync without shared memory. The order of K inside 32 is free as long as
// both operands agree: lane (r, q) loads the 16 bytes k = 8 q .. 8 q + 7 of row r, and uses the first and second half
// as its part of two products of 16.
#include "kernels/row_linear/few_outputs.cuh"

#include "kernels/device.h"
#include "kernels/hopper/launch_order.cuh"
#include "kernels/row_linear/many_rows.cuh"

namespace plumb::kernels::row_linear {
namespace {

constexpr int kWarps = kParts, kRowTiles = 2;  // of sixteen rows

__global__ void __launch_bounds__(256) split_kernel(const Split p) {
  hopper::take_turn();
  const size_t i = blockIdx.x * size_t{256} + threadIdx.x;
  if (i < items_of(p)) split_item(p, i);
}

// kTiles: of eight outputs. Grid: (blocks of rows, adapters).
template <int kTiles>
__global__ void __launch_bounds__(32 * kWarps) few_outputs_kernel(const Problem p) {
  constexpr int kBlockRows = 16 * kRowTiles, kAhead = kTiles == 1 ? 2 : 1;  // steps whose loads are in flight together
  extern __shared__ float sums[];                                           // [kWarps][kBlockRows][kTiles * 8]
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
  const size_t plane = static_cast<size_t>(padded(p.n)) * p.k;
  const uint16_t* w = weights_of(p, mine, adapter) + static_cast<size_t>(r) * p.k + 8 * q;
  const int steps = p.k / 32, part = (steps + kWarps - 1) / kWarps, last = min((warp + 1) * part, steps);

  float d[kRowTiles][kTiles][4] = {};
  for (int first = warp * part; first < last; first += kAhead) {
    uint4 a[kAhead][2 * kRowTiles], b[kAhead][kTiles][kPlanes];
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      const int at = min(first + s, last - 1) * 32;
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) a[s][i] = __ldg(reinterpret_cast<const uint4*>(x[i] + at));
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < kPlanes; ++i)
          b[s][t][i] = __ldg(reinterpret_cast<const uint4*>(w + i * plane + static_cast<size_t>(t) * 8 * p.k + at));
    }
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (first + s >= last) break;
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = kPlanes - 1; i >= 0; --i) multiply_step(d, t, a[s], b[s][t][i]);
    }
  }
  constexpr int kWidth = kTiles * 8;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[(warp * kBlockRows + m * 16 + i / 2 * 8 + r) * kWidth + t * 8 + 2 * q + i % 2] = d[m][t][i];
  __syncthreads();
  for (int i = threadIdx.x; i < mine.count * p.n; i += 32 * kWarps) {
    const int row = i / p.n, column = i % p.n;
    if (p.adapters.of_row && p.adapters.of_row[mine.first + row] != adapter) continue;
    float total = sums[row * kWidth + column];
    for (int other = 1; other < kWarps; ++other)
      total = __fadd_rn(total, sums[(other * kBlockRows + row) * kWidth + column]);
    p.out[static_cast<size_t>(mine.first + row) * p.n + column] = total;
  }
}

template <int kTiles>
void launch(const Problem& p, cudaStream_t stream) {
  if (p.rows >= kManyRows && is_hopper()) return launch_many_rows<kTiles>(p, stream);
  constexpr int kBlockRows = 16 * kRowTiles;
  const dim3 blocks((p.rows + kBlockRows - 1) / kBlockRows + (p.first_row ? p.groups : 0),
                    p.adapters.of_row ? p.adapters.count : 1);
  launch_dependent(few_outputs_kernel<kTiles>,
                   {blocks, 32 * kWarps, kWarps * kBlockRows * kTiles * 8 * static_cast<int>(sizeof(float))}, stream,
                   p);
}

}  // namespace

size_t split_bytes(int groups, int n, int k) { return static_cast<size_t>(groups) * kPlanes * padded(n) * k * 2; }

void split_weight(const float* weight, int groups, int n, int k, float scale, uint16_t* planes, cudaStream_t stream,
                  const Source& source) {
  const Split p{weight, groups, n, k, scale, source, planes};
  check_planes(p);
  launch_dependent(split_kernel, {static_cast<unsigned>((items_of(p) + 255) / 256), 256}, stream, p);
}

void few_outputs(const uint16_t* x, const int* source_row, const int* first_row, int rows, const SplitWeight& w,
                 float* out, cudaStream_t stream, const Adapters& adapters) {
  require(rows > 0 && w.groups > 0 && (first_row || w.groups == 1), "row_linear: few_outputs",
          "rows = " + std::to_string(rows) + " must be positive, and several groups need first_row");
  require(w.n > 0 && w.n <= kMostFewOutputs && w.k > 0 && w.k % 32 == 0, "row_linear: few_outputs",
          "n = " + std::to_string(w.n) + " must be between 1 and " + std::to_string(kMostFewOutputs) +
              ", k = " + std::to_string(w.k) + " a positive multiple of 32");
  require(aligned(x, 16) && (adapters.of_row ? adapters.planes && adapters.count > 0 : aligned(w.planes, 16)),
          "row_linear: few_outputs", "rows and planes must be aligned to 16 bytes; adapters need planes and a count");
  const Problem p{x, source_row, first_row, rows, w.groups, w.n, w.k, w.planes, adapters, out};
  const int tiles = padded(w.n) / 8;
  (tiles == 1 ? launch<1> : tiles == 2 ? launch<2> : tiles == 3 ? launch<3> : launch<4>)(p, stream);
}

}  // namespace plumb::kernels::row_linear
