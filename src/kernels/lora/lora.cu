// Gradients of A and B: tall and thin products, bound by reading y. A thread keeps four columns x eight of the rank in
// registers and walks the rows in order.
#include "kernels/grouped_linear/activation.cuh"
#include "kernels/grouped_linear/weight_format.h"
#include "kernels/launch.cuh"
#include "kernels/lora/low_rank.cuh"

namespace plumb::kernels::lora {
namespace {

constexpr int kThreads = 128, kColumns = 4, kBlockColumns = kThreads * kColumns;
constexpr int kRankStep = 8, kSegment = 256;  // rows of a block where one group has all rows
constexpr int kTile = 64;                     // rows whose t is staged at a time

struct Rows {
  int first, last;
};
__device__ __forceinline__ Rows rows_of_block(const Gradient& g) {
  if (g.first_row) return {g.first_row[blockIdx.y], g.first_row[blockIdx.y + 1]};
  const int first = blockIdx.y * kSegment;
  return {first, min(first + kSegment, g.rows)};
}

// Where column c, rank j of a group lies in out.
__device__ __forceinline__ size_t place_of(const Gradient& g, int column, int j) {
  if (g.gate_up) column = grouped_linear::natural_row(column, g.columns);
  return g.transposed ? static_cast<size_t>(j) * g.columns + column : static_cast<size_t>(column) * g.rank + j;
}

// Grid: (columns, groups or segments, rank / kRankStep). parts: [segments][columns][rank], or null: add to out.
__global__ void __launch_bounds__(kThreads) gradient_kernel(const Gradient g, float* parts) {
  __shared__ float4 t[kTile][kRankStep / 4];
  const Rows rows = rows_of_block(g);
  const int column = blockIdx.x * kBlockColumns + threadIdx.x * kColumns, first_rank = blockIdx.z * kRankStep;
  const bool inside = column < g.columns;
  float sum[kColumns][kRankStep] = {};
  for (int first = rows.first; first < rows.last; first += kTile) {
    const int count = min(kTile, rows.last - first);
    __syncthreads();
    for (int i = threadIdx.x; i < kTile * (kRankStep / 4); i += kThreads) {
      const int row = first + i / (kRankStep / 4), j = first_rank + i % (kRankStep / 4) * 4;
      const bool counts = i / (kRankStep / 4) < count && j < g.rank && (!g.adapter || g.adapter[row] == g.which);
      t[i / (kRankStep / 4)][i % (kRankStep / 4)] =
          counts ? *reinterpret_cast<const float4*>(g.t + static_cast<size_t>(row) * g.t_stride + j)
                 : make_float4(0, 0, 0, 0);
    }
    __syncthreads();
    if (!inside) continue;
    constexpr int kAhead = 8;
    for (int base = 0; base < count; base += kAhead) {
      uint2 y[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int row = first + min(base + i, count - 1);  // beyond the last: t is 0 there
        y[i] = *reinterpret_cast<const uint2*>(
            g.y + static_cast<size_t>(g.source_row ? g.source_row[row] : row) * g.columns + column);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const float v[kColumns] = {low_bf16(y[i].x), high_bf16(y[i].x), low_bf16(y[i].y), high_bf16(y[i].y)};
#pragma unroll
        for (int k = 0; k < kRankStep / 4; ++k) {
          const float4 u = t[base + i][k];
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            sum[c][4 * k] = fmaf(v[c], u.x, sum[c][4 * k]), sum[c][4 * k + 1] = fmaf(v[c], u.y, sum[c][4 * k + 1]);
            sum[c][4 * k + 2] = fmaf(v[c], u.z, sum[c][4 * k + 2]);
            sum[c][4 * k + 3] = fmaf(v[c], u.w, sum[c][4 * k + 3]);
          }
        }
      }
    }
  }
  if (!inside) return;
  const size_t size = static_cast<size_t>(g.columns) * g.rank;
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
#pragma unroll
    for (int j = 0; j < kRankStep; ++j) {
      if (first_rank + j >= g.rank) break;
      const size_t at = place_of(g, column + c, first_rank + j);
      if (parts)
        parts[blockIdx.y * size + at] = sum[c][j];
      else
        g.out[blockIdx.y * size + at] = __fadd_rn(g.out[blockIdx.y * size + at], sum[c][j]);
    }
}

__global__ void __launch_bounds__(256) add_segments_kernel(const float* parts, int segments, int size, float* out) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= size) return;
  float sum = 0;
#pragma unroll 8
  for (int s = 0; s < segments; ++s) sum = __fadd_rn(sum, parts[static_cast<size_t>(s) * size + i]);
  out[i] = __fadd_rn(out[i], sum);
}

// A thread a word.
__global__ void __launch_bounds__(256)
    pack_kernel(const float* from, int n, int rank, bool transposed, bool gate_up, uint32_t* packed) {
  const size_t group = blockIdx.y, fours = (rank + 3) / 4, i = blockIdx.x * size_t{256} + threadIdx.x;
  if (i >= fours * n * 4) return;
  const int row = static_cast<int>(i / 4 % n), q = static_cast<int>(i % 4),
            first = static_cast<int>(i / (4 * n)) * 4 + q % 2 * 2;
  const int output = gate_up ? grouped_linear::natural_row(row, n) : row;
  const auto value = [&](int j) {
    return j >= rank    ? 0.0f
           : transposed ? from[(group * rank + j) * n + output]
                        : from[(group * n + output) * rank + j];
  };
  const Split parts = split(make_float2(value(first), value(first + 1)));
  packed[(group * fours + first / 4) * n * 4 + factor_word(row, q)] = q < 2 ? parts.high : parts.low;
}

int segments_of(const Gradient& g) { return (g.rows + kSegment - 1) / kSegment; }

}  // namespace

size_t factor_bytes(int groups, int n, int rank) {
  return static_cast<size_t>(groups) * ((rank + 3) / 4) * n * 4 * sizeof(uint32_t);
}

void pack_factor(const float* from, int groups, int n, int rank, bool transposed, bool gate_up, uint32_t* packed,
                 cudaStream_t stream) {
  require(groups > 0 && n > 0 && n % 32 == 0 && rank > 0 && (!gate_up || n % grouped_linear::kRecordRows == 0) &&
              aligned(packed, 16),
          "lora: pack_factor", "groups, n and rank must be positive, n a multiple of 32 (gate and up: of 256)");
  const size_t count = factor_bytes(1, n, rank) / sizeof(uint32_t);
  pack_kernel<<<dim3(static_cast<unsigned>((count + 255) / 256), groups), 256, 0, stream>>>(from, n, rank, transposed,
                                                                                            gate_up, packed);
  check_cuda(cudaGetLastError(), "lora: pack_factor");
}

size_t gradient_bytes(const Gradient& g) {
  return g.first_row ? 0 : static_cast<size_t>(segments_of(g)) * g.columns * g.rank * sizeof(float);
}

void add_gradient(const Gradient& g, void* workspace, cudaStream_t stream) {
  const char* where = "lora: add_gradient";
  require(g.rows > 0 && g.groups > 0 && (g.first_row || g.groups == 1), where,
          "rows = " + std::to_string(g.rows) + " must be positive, and several groups need first_row");
  require(g.columns > 0 && g.columns % 8 == 0 && (!g.gate_up || g.columns % grouped_linear::kRecordRows == 0), where,
          "columns = " + std::to_string(g.columns) + " must be a positive multiple of 8 (gate and up: of 256)");
  require(g.rank > 0 && g.rank % 4 == 0 && g.rank <= kMostRank && g.t_stride % 4 == 0 && g.t_stride >= g.rank, where,
          "rank = " + std::to_string(g.rank) + " must be a multiple of 4 up to " + std::to_string(kMostRank) +
              ", and t's rows at least as long");
  require(aligned(g.y, 16) && aligned(g.t, 16) && aligned(g.out, 4), where, "y and t must be aligned to 16 bytes");
  auto* parts = g.first_row ? nullptr : static_cast<float*>(workspace);
  const dim3 grid((g.columns + kBlockColumns - 1) / kBlockColumns, g.first_row ? g.groups : segments_of(g),
                  (g.rank + kRankStep - 1) / kRankStep);
  gradient_kernel<<<grid, kThreads, 0, stream>>>(g, parts);
  if (parts) {
    const int size = g.columns * g.rank;
    add_segments_kernel<<<(size + 255) / 256, 256, 0, stream>>>(parts, segments_of(g), size, g.out);
  }
  check_cuda(cudaGetLastError(), where);
}

}  // namespace plumb::kernels::lora
