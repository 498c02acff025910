// All bound by memory: a lane moves 16 bytes at a time. A warp has a piece of a row with four loads in flight, so that
// one row of 32 KB, a decoded token, is spread over many warps.
#include "kernels/rows/rows.h"

#include "kernels/hopper/launch_order.cuh"
#include "kernels/hopper/vectors.cuh"
#include "kernels/launch.cuh"

namespace plumb::kernels::rows {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kFlight = 4, kPiece = 32 * kFlight;  // 16-byte units of a warp

// Grid: (rows / kWarps, pieces of a row).
dim3 grid(int rows, int units) {
  return {static_cast<unsigned>((rows + kWarps - 1) / kWarps), static_cast<unsigned>((units + kPiece - 1) / kPiece)};
}
__device__ __forceinline__ int warp_row() { return blockIdx.x * kWarps + threadIdx.x / 32; }
__device__ __forceinline__ int first_unit() { return blockIdx.y * kPiece + threadIdx.x % 32; }

__device__ __forceinline__ void load_piece(uint4 (&v)[kFlight], const uint4* row, int units) {
#pragma unroll
  for (int i = 0; i < kFlight; ++i)
    if (first_unit() + 32 * i < units) v[i] = __ldg(row + first_unit() + 32 * i);
}
__device__ __forceinline__ void store_piece(const uint4 (&v)[kFlight], uint4* row, int units) {
#pragma unroll
  for (int i = 0; i < kFlight; ++i)
    if (first_unit() + 32 * i < units) row[first_unit() + 32 * i] = v[i];
}

__global__ void __launch_bounds__(kThreads)
    embed_kernel(const uint4* table, int vocabulary, int units, const int* token, int rows, int copies, uint4* out) {
  hopper::take_turn();
  const int row = warp_row();
  if (row >= rows) return;
  const int id = token[row];
  uint4 v[kFlight];
  if (id >= 0 && id < vocabulary) {
    load_piece(v, table + static_cast<int64_t>(id) * units, units);
  } else {
#pragma unroll
    for (uint4& x : v) x = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  for (int c = 0; c < copies; ++c) store_piece(v, out + (static_cast<int64_t>(row) * copies + c) * units, units);
}

__global__ void __launch_bounds__(kThreads)
    copy_kernel(const uint4* x, const int* from, uint4* out, const int* to, int rows, int units) {
  hopper::take_turn();
  const int row = warp_row();
  if (row >= rows) return;
  const int64_t source = from ? from[row] : row, target = to ? to[row] : row;
  if (source < 0 || target < 0) return;
  uint4 v[kFlight];
  load_piece(v, x + source * units, units);
  store_piece(v, out + target * units, units);
}

__device__ __forceinline__ void load_values(const void* data, bool bf16, int64_t unit, float (&v)[8]) {
  if (bf16) {
    unpack(static_cast<const uint4*>(data)[unit], v);
  } else {
    const float4* from = static_cast<const float4*>(data) + 2 * unit;
    const float4 a = from[0], b = from[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  }
}
__device__ __forceinline__ void store_values(const float (&v)[8], void* data, bool bf16, int64_t unit) {
  if (bf16) {
    static_cast<uint4*>(data)[unit] = pack(v);
  } else {
    float4* to = static_cast<float4*>(data) + 2 * unit;
    to[0] = make_float4(v[0], v[1], v[2], v[3]), to[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
}

__device__ __forceinline__ void unpack(const uint2& from, float (&to)[4]) {
  to[0] = low_bf16(from.x), to[1] = high_bf16(from.x), to[2] = low_bf16(from.y), to[3] = high_bf16(from.y);
}
__device__ __forceinline__ void load_four(const void* data, bool bf16, int64_t quad, float (&v)[4]) {
  if (bf16) {
    unpack(static_cast<const uint2*>(data)[quad], v);
  } else {
    const float4 x = static_cast<const float4*>(data)[quad];
    v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
  }
}
__device__ __forceinline__ void store_four(const float (&v)[4], void* data, bool bf16, int64_t quad) {
  if (bf16)
    static_cast<uint2*>(data)[quad] = make_uint2(hopper::pack_bf16(v[0], v[1]), hopper::pack_bf16(v[2], v[3]));
  else
    static_cast<float4*>(data)[quad] = make_float4(v[0], v[1], v[2], v[3]);
}

// A thread has eight channels of a row.
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Sum p) {
  hopper::take_turn();
  const int64_t unit = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int units = p.width / 8;
  if (unit >= p.rows * units) return;
  float v[kMostTerms][8];
#pragma unroll
  for (int i = 0; i < kMostTerms; ++i) {  // all loads before the first use
    if (i >= p.terms) break;
    const Term& t = p.term[i];
    const int64_t own = t.shared == 1 ? unit : unit / units / t.shared * units + unit % units;
    load_values(t.data, t.bf16, own, v[i]);
  }
  float total[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) total[k] = v[0][k];
#pragma unroll
  for (int i = 1; i < kMostTerms; ++i) {
    if (i >= p.terms) break;
#pragma unroll
    for (int k = 0; k < 8; ++k) total[k] = __fadd_rn(total[k], v[i][k]);
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) total[k] = __fmul_rn(total[k], p.scale);
  store_values(total, p.out, p.out_bf16, unit);
}

// A warp has 128 channels of a meeting; of the next 32 rows it holds the numbers, one a lane, and 32 loads are in
// flight. Few channels, because the rows of a frequent token are one long chain. Grid: (meetings / kWarps, pieces of
// 128).
template <int kCopies>
__global__ void __launch_bounds__(kThreads) meeting_kernel(const __grid_constant__ MeetingSums p) {
  hopper::take_turn();
  constexpr int kRows = 32 / kCopies;  // in flight
  const int meeting = warp_row(), lane = threadIdx.x % 32, quads = p.width / 4, own = blockIdx.y * 32 + lane;
  if (meeting >= p.meetings) return;
  const int quad = min(own, quads - 1);
  const int64_t target = static_cast<int64_t>(p.to ? p.to[meeting] : meeting) * quads + quad;
  const int first = p.begin ? p.begin[meeting] : meeting, last = p.begin ? p.begin[meeting + 1] : meeting + 1;
  const uint2* x = reinterpret_cast<const uint2*>(p.x) + quad;
  float total[4] = {};
  if (p.add) load_four(p.out, p.out_bf16, target, total);
  for (int base = first; base < last; base += 32) {
    const int number = p.row && base + lane < last ? p.row[base + lane] : base + lane, rows = min(last - base, 32);
    for (int row = 0; row < rows; row += kRows) {
      uint2 v[kRows][kCopies];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint2* from = x + static_cast<int64_t>(__shfl_sync(~0u, number, row + r)) * kCopies * quads;
        if (row + r < rows)
#pragma unroll
          for (int c = 0; c < kCopies; ++c) v[r][c] = __ldg(from + c * quads);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (row + r >= rows) break;
        float streams[4];
        unpack(v[r][0], streams);
#pragma unroll
        for (int c = 1; c < kCopies; ++c) {
          float term[4];
          unpack(v[r][c], term);
#pragma unroll
          for (int k = 0; k < 4; ++k) streams[k] = __fadd_rn(streams[k], term[k]);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) total[k] = __fadd_rn(total[k], streams[k]);
      }
    }
  }
  if (own < quads) store_four(total, p.out, p.out_bf16, target);
}

// By a warp: to[i] = from[i] + offset.
__device__ __forceinline__ void copy_numbers(const int* from, int count, int offset, int* to, int lane) {
  for (int first = lane; first < count; first += 32 * kFlight) {
    int v[kFlight];
#pragma unroll
    for (int i = 0; i < kFlight; ++i)
      if (first + 32 * i < count) v[i] = __ldg(from + first + 32 * i);
#pragma unroll
    for (int i = 0; i < kFlight; ++i)
      if (first + 32 * i < count) to[first + 32 * i] = v[i] + offset;
  }
}

__global__ void __launch_bounds__(kThreads)
    merge_kernel(Lists window, Lists entries, int offset, int rows, int* begin, int* out) {
  hopper::take_turn();
  const int row = warp_row(), lane = threadIdx.x % 32;
  if (row >= rows) return;
  const int w = window.begin[row], w_end = window.begin[row + 1], e = entries.begin[row],
            e_end = entries.begin[row + 1];
  if (lane == 0) begin[row] = w + e;
  if (lane == 0 && row == rows - 1) begin[rows] = w_end + e_end;
  copy_numbers(window.row + w, w_end - w, 0, out + w + e, lane);
  copy_numbers(entries.row + e, e_end - e, offset, out + w_end + e, lane);
}

void check_width(const char* where, int rows, int width) {
  require(rows >= 0 && width > 0 && width % 8 == 0, where,
          "rows = " + std::to_string(rows) + " must not be negative and width = " + std::to_string(width) +
              " a positive multiple of 8");
}

}  // namespace

void embed(const uint16_t* table, int vocabulary, int width, const int* token, int rows, int copies, uint16_t* out,
           cudaStream_t stream) {
  const char* where = "rows: embed";
  check_width(where, rows, width);
  if (rows == 0) return;
  require(copies > 0 && aligned(table, 16) && aligned(out, 16), where,
          "copies = " + std::to_string(copies) + " must be positive, table and out aligned to 16 bytes");
  launch_dependent(embed_kernel, {grid(rows, width / 8), kThreads}, stream, reinterpret_cast<const uint4*>(table),
                   vocabulary, width / 8, token, rows, copies, reinterpret_cast<uint4*>(out));
}

void copy(const void* x, const int* from, void* out, const int* to, int rows, size_t row_bytes, cudaStream_t stream) {
  const char* where = "rows: copy";
  require(rows >= 0 && row_bytes > 0 && row_bytes % 16 == 0 && row_bytes < (size_t{1} << 24), where,
          "rows = " + std::to_string(rows) + " must not be negative and row_bytes = " + std::to_string(row_bytes) +
              " a positive multiple of 16 below 16 MB");
  if (rows == 0) return;
  require(aligned(x, 16) && aligned(out, 16), where, "rows must be aligned to 16 bytes");
  const int units = static_cast<int>(row_bytes / 16);
  launch_dependent(copy_kernel, {grid(rows, units), kThreads}, stream, static_cast<const uint4*>(x), from,
                   static_cast<uint4*>(out), to, rows, units);
}

void sum(const Sum& p, cudaStream_t stream) {
  const char* where = "rows: sum";
  require(p.terms > 0 && p.terms <= kMostTerms && p.rows >= 0 && p.width > 0 && p.width % 8 == 0, where,
          "terms = " + std::to_string(p.terms) + " must be 1 to " + std::to_string(kMostTerms) +
              ", width = " + std::to_string(p.width) + " a positive multiple of 8");
  if (p.rows == 0) return;
  for (int i = 0; i < p.terms; ++i)
    require(p.term[i].shared > 0 && p.rows % p.term[i].shared == 0 && aligned(p.term[i].data, 16), where,
            "term " + std::to_string(i) + " must be aligned to 16 bytes and serve a divisor of the rows");
  require(aligned(p.out, 16), where, "the result must be aligned to 16 bytes");
  const int64_t blocks = (p.rows * (p.width / 8) + kThreads - 1) / kThreads;
  launch_dependent(sum_kernel, {dim3(static_cast<unsigned>(blocks)), kThreads}, stream, p);
}

Meetings meetings(const std::vector<int>& to) {
  int last = -1;
  for (const int t : to) last = std::max(last, t);
  std::vector<int> count(last + 2, 0);
  for (const int t : to)
    if (t >= 0) ++count[t];
  Meetings m{{}, {0}, {}};
  std::vector<int> next(last + 1);
  for (int t = 0; t <= last; ++t) {
    next[t] = m.begin.back();
    if (count[t] == 0) continue;
    m.to.push_back(t);
    m.begin.push_back(m.begin.back() + count[t]);
  }
  m.row.resize(m.begin.back());
  for (size_t i = 0; i < to.size(); ++i)
    if (to[i] >= 0) m.row[next[to[i]]++] = static_cast<int>(i);
  return m;
}

void add_meetings(const MeetingSums& p, cudaStream_t stream) {
  const char* where = "rows: add_meetings";
  check_width(where, p.meetings, p.width);
  if (p.meetings == 0) return;
  require((p.copies == 1 || p.copies == 4) && (p.to == nullptr) == (p.begin == nullptr) &&
              (p.to == nullptr) == (p.row == nullptr),
          where, "copies = " + std::to_string(p.copies) + " must be 1 or 4, and the lists all given or all null");
  require(aligned(p.x, 16) && aligned(p.out, 16), where, "rows must be aligned to 16 bytes");
  const dim3 blocks(static_cast<unsigned>((p.meetings + kWarps - 1) / kWarps), (p.width / 4 + 31) / 32);
  launch_dependent(p.copies == 1 ? meeting_kernel<1> : meeting_kernel<4>, {blocks, kThreads}, stream, p);
}

void merge_keys(const Lists& window, const Lists& entries, int offset, int rows, int* begin, int* row,
                cudaStream_t stream) {
  require(rows >= 0, "rows: merge_keys", "rows = " + std::to_string(rows) + " must not be negative");
  if (rows == 0) return;
  launch_dependent(merge_kernel, {grid(rows, 1), kThreads}, stream, window, entries, offset, rows, begin, row);
}

}  // namespace plumb::kernels::rows
