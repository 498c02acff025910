// Few outputs, FP32 weights: bound by reading x. A block takes 32 rows, each of its eight warps an eighth of K for all
// of them; the warps' sums meet in shared memory and are added in order.
//
// Operands go from memory to registers of mma.sync without shared memory. The order of K inside 32 is free as long as
// both operands agree: lane (r, q) loads the 16 bytes k = 8 q .. 8 q + 7 of row r, and uses the first and second half
// as its part of two products of 16.
#include "kernels/launch.cuh"
#include "kernels/row_linear/row_linear.h"

#include <cuda_bf16.h>

namespace plumb::kernels::row_linear {
namespace {

constexpr int kWarps = 8, kBlockRows = 32, kPlanes = 3;

__host__ __device__ constexpr int padded(int n) { return (n + 7) / 8 * 8; }

__global__ void split_kernel(const float* weight, int n, int k, float scale, uint16_t* planes) {
  const size_t group = blockIdx.y, plane = static_cast<size_t>(padded(n)) * k;
  const size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x;
  if (i >= plane) return;
  float left = i / k < n ? __fmul_rn(weight[group * n * k + i], scale) : 0.0f;
  for (int p = 0; p < kPlanes; ++p) {
    const __nv_bfloat16 part = __float2bfloat16_rn(left);
    planes[(group * kPlanes + p) * plane + i] = __bfloat16_as_ushort(part);
    left = __fsub_rn(left, __bfloat162float(part));
  }
}

// d += a b; a: 16 rows x 16 of K, b: 8 columns x 16 of K.
__device__ __forceinline__ void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

struct Problem {
  const uint16_t* x;
  const int *source_row, *first_row;
  int rows, groups, n, k;
  const uint16_t* planes;
  float* out;
};
struct Rows {
  int group, first, count;
};

// Group g's blocks of 32 rows start at block first_row[g] / 32 + g: the ranges of groups do not overlap, and a few
// blocks find no rows.
__device__ __forceinline__ Rows rows_of_block(const Problem& p, int block, int lane) {
  if (!p.first_row) return {0, block * kBlockRows, min(kBlockRows, p.rows - block * kBlockRows)};
  int group = 0;
  for (int g = lane; g < p.groups; g += 32)
    if (p.first_row[g] / kBlockRows + g <= block) group = max(group, g);
  group = __reduce_max_sync(~0u, group);
  const int begin = p.first_row[group], end = p.first_row[group + 1];
  const int first = begin + (block - begin / kBlockRows - group) * kBlockRows;
  return {group, first, min(kBlockRows, end - first)};
}

template <int kTiles>  // of eight outputs
__global__ void __launch_bounds__(32 * kWarps) few_outputs_kernel(const Problem p) {
  __shared__ float sums[kWarps][kBlockRows][kTiles * 8];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
  const Rows mine = rows_of_block(p, blockIdx.x, lane);
  if (mine.count <= 0) return;

  const uint16_t* x[4];  // rows r, r + 8, r + 16, r + 24; those that do not exist repeat the last one
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = mine.first + min(r + 8 * i, mine.count - 1);
    x[i] = p.x + static_cast<size_t>(p.source_row ? p.source_row[row] : row) * p.k + 8 * q;
  }
  const size_t plane = static_cast<size_t>(padded(p.n)) * p.k;
  const uint16_t* w = p.planes + mine.group * kPlanes * plane + static_cast<size_t>(r) * p.k + 8 * q;
  const int steps = p.k / 32, part = (steps + kWarps - 1) / kWarps;

  float d[2][kTiles][4] = {};
#pragma unroll 2
  for (int step = warp * part; step < min((warp + 1) * part, steps); ++step) {
    uint4 a[4], b[kTiles][kPlanes];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = __ldg(reinterpret_cast<const uint4*>(x[i] + step * 32));
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < kPlanes; ++i)
        b[t][i] = __ldg(reinterpret_cast<const uint4*>(w + i * plane + static_cast<size_t>(t) * 8 * p.k + step * 32));
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = kPlanes - 1; i >= 0; --i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          multiply(d[half][t], a[2 * half].x, a[2 * half + 1].x, a[2 * half].y, a[2 * half + 1].y, b[t][i].x,
                   b[t][i].y);
          multiply(d[half][t], a[2 * half].z, a[2 * half + 1].z, a[2 * half].w, a[2 * half + 1].w, b[t][i].z,
                   b[t][i].w);
        }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[warp][half * 16 + i / 2 * 8 + r][t * 8 + 2 * q + i % 2] = d[half][t][i];
  __syncthreads();
  for (int i = threadIdx.x; i < mine.count * p.n; i += 32 * kWarps) {
    const int row = i / p.n, column = i % p.n;
    float total = sums[0][row][column];
    for (int other = 1; other < kWarps; ++other) total = __fadd_rn(total, sums[other][row][column]);
    p.out[static_cast<size_t>(mine.first + row) * p.n + column] = total;
  }
}

}  // namespace

size_t split_bytes(int groups, int n, int k) { return static_cast<size_t>(groups) * kPlanes * padded(n) * k * 2; }

void split_weight(const float* weight, int groups, int n, int k, float scale, uint16_t* planes, cudaStream_t stream) {
  require(groups > 0 && n > 0 && k > 0, "row_linear: split_weight", "groups, n and k must be positive");
  const size_t plane = static_cast<size_t>(padded(n)) * k;
  split_kernel<<<dim3(static_cast<unsigned>((plane + 255) / 256), groups), 256, 0, stream>>>(weight, n, k, scale,
                                                                                             planes);
  check_cuda(cudaGetLastError(), "row_linear: splitting a weight");
}

void few_outputs(const uint16_t* x, const int* source_row, const int* first_row, int rows, const SplitWeight& w,
                 float* out, cudaStream_t stream) {
  require(rows > 0 && w.groups > 0 && (first_row || w.groups == 1), "row_linear: few_outputs",
          "rows = " + std::to_string(rows) + " must be positive, and several groups need first_row");
  require(w.n > 0 && w.n <= kMostFewOutputs && w.k > 0 && w.k % 32 == 0, "row_linear: few_outputs",
          "n = " + std::to_string(w.n) + " must be between 1 and " + std::to_string(kMostFewOutputs) +
              ", k = " + std::to_string(w.k) + " a positive multiple of 32");
  require(aligned(x, 16) && aligned(w.planes, 16), "row_linear: few_outputs",
          "rows and planes must be aligned to 16 bytes");
  const Problem p{x, source_row, first_row, rows, w.groups, w.n, w.k, w.planes, out};
  const int blocks = (rows + kBlockRows - 1) / kBlockRows + (first_row ? w.groups : 0), tiles = padded(w.n) / 8;
  const auto kernel = tiles == 1   ? few_outputs_kernel<1>
                      : tiles == 2 ? few_outputs_kernel<2>
                      : tiles == 3 ? few_outputs_kernel<3>
                                   : few_outputs_kernel<4>;
  kernel<<<blocks, 32 * kWarps, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "row_linear: few_outputs");
}

}  // namespace plumb::kernels::row_linear
