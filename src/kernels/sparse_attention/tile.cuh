// What the forward and the backward kernel share: the layout of tiles in shared memory, gathering rows into it, the
// walk over (query, head tile) items, and writing accumulators out as bf16 rows.
//
// The 64 heads of a tile are the 64 rows of a wgmma product; 128 heads are two tiles, two items that walk the same
// list.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/hopper/barrier.cuh"
#include "kernels/hopper/copy.cuh"
#include "kernels/hopper/wgmma_bf16.cuh"
#include "kernels/sparse_attention/sparse_attention.h"

namespace plumb::kernels::attention {

constexpr int kDim = kAttentionDim;
constexpr int kTileHeads = 64;
constexpr int kBlock = 64;             // keys
constexpr int kRowBytes = kDim * 2;    // one key, or one head of q, o, d_o
constexpr int kPanelBytes = 64 * 128;  // 64 rows of 64 columns
constexpr int kTileBytes = 8 * kPanelBytes;
constexpr int kHalfBytes = kTileBytes / 2;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// The list of an item: one (query, head tile). Items are numbered query * tiles + tile, so item i owns rows 64 i to 64
// i + 63 of q, o and lse, counted in heads.
struct Item {
  int first;   // first entry of its list
  int length;  // entries of its list
};
__device__ __forceinline__ Item item_at(const KeyLists& lists, int tiles, int index) {  // tiles: 1 or 2
  const int* begin = lists.begin + (index >> (tiles - 1));
  const int first = __ldg(begin);
  return {first, __ldg(begin + 1) - first};
}
__device__ __forceinline__ int list_entry(const KeyLists& lists, const Item& item, int at) {
  return at < item.length ? __ldg(lists.row + item.first + at) : -1;
}

// Where a lane copies its 16 bytes of row `first_row` (a multiple of 8) of panels that are aligned to 1,024 bytes, 256
// columns in four of them; row first_row + r for r < 8 is at place_in_row.
__device__ __forceinline__ uint32_t lane_place(const uint8_t* panels, int first_row, int lane) {
  return hopper::shared_address(panels) + (lane >> 3) * kPanelBytes + first_row * 128 + (lane & 7) * 16;
}
__device__ __forceinline__ uint32_t place_in_row(uint32_t place, int r) { return (place ^ (r << 4)) + r * 128; }

// One warp copies 512 bytes (256 columns) of kRows rows that follow one another in memory.
template <int kRows>
__device__ __forceinline__ void copy_rows(uint8_t* panels, int first_row, const uint8_t* rows, int lane) {
  const uint8_t* from = rows + lane * 16;
  uint32_t to = lane_place(panels, first_row, lane);
#pragma unroll 1
  for (int first = 0; first < kRows; first += 8, to += 1024, from += 8 * kRowBytes)
#pragma unroll
    for (int r = 0; r < 8; ++r) hopper::copy16(place_in_row(to, r), from + r * kRowBytes, 16);
}

// 16 bytes of row `row` of an array of which `first` is the lane's place in row 0; zeros for -1. Written out because
// the compiler makes eleven instructions of it, of which this leaves four, and a warp issues them for each row in turn.
__device__ __forceinline__ void copy16_of_row(uint32_t to, const uint8_t* first, int row) {
  asm volatile(
      "{\n .reg .pred absent;\n .reg .b64 from;\n setp.lt.s32 absent, %2, 0;\n mad.wide.s32 from, %2, %3, %1;\n"
      " cp.async.cg.shared.global [%0], [from], 16, absent;\n}" ::"r"(to),
      "l"(first), "r"(row), "n"(kRowBytes)
      : "memory");
}
// One warp copies 512 bytes of kRows rows of `kv` (which points at the columns wanted). entry: the lane's entry of the
// list, of row lane % kRows; -1 gives zeros.
template <int kRows>
__device__ __forceinline__ void gather_rows(uint8_t* panels, int first_row, const uint8_t* kv, int entry, int lane) {
  const uint8_t* from = kv + lane * 16;
  asm volatile("" : "+l"(from));  // or it is added up again for each row
  uint32_t to = lane_place(panels, first_row, lane);
#pragma unroll 1
  for (int first = 0; first < kRows; first += 8, to += 1024)
#pragma unroll
    for (int batch = 0; batch < 8; batch += 4) {
      int row[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) row[r] = __shfl_sync(~0u, entry, first + batch + r);
#pragma unroll
      for (int r = 0; r < 4; ++r) copy16_of_row(place_in_row(to, batch + r), from, row[r]);
    }
}

// Hands rows that this warp has copied to the tensor cores, all but those of the newest kPending copy groups. The proxy
// fence belongs here: in a consumer it would also wait for the products that the consumer has in flight (600 cycles a
// block).
template <int kPending>
__device__ __forceinline__ void publish(uint64_t* barrier) {
  hopper::copy_wait<kPending>();
  hopper::async_proxy_fence();
  hopper::barrier_arrive(barrier);
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Writes 64 x 8*kGroups accumulators as bf16 rows kRowStep elements apart (8 rows down). Four neighbouring lanes trade
// pieces, so that each stores 16 contiguous bytes of a 64-byte run. row: this lane's upper row at the first column.
// Packing comes first as a whole, which frees half the registers.
template <int kGroups>
__device__ __forceinline__ void store_rows_bf16(const float* d, float factor_low, float factor_high, __nv_bfloat16* row,
                                                size_t row_step) {
  uint32_t packed[kGroups * 2];
#pragma unroll
  for (int i = 0; i < kGroups * 2; ++i) {
    const float factor = (i & 1) ? factor_high : factor_low;
    packed[i] = hopper::pack_bf16(d[2 * i] * factor, d[2 * i + 1] * factor);
    asm volatile("" : "+r"(packed[i])::"memory");
  }
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  row += 8 * (threadIdx.x & 3);
#pragma unroll
  for (int block = 0; block < kGroups / 4; ++block)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t* mine = packed + 8 * block + half;  // groups 0..3 at 0, 2, 4, 6: this lane's word of each
      // 4x4 transpose over four lanes in two butterfly steps: lane q ends with words 0..3 of group q.
      const uint32_t a = __shfl_xor_sync(~0u, odd ? mine[0] : mine[2], 1);
      const uint32_t b = __shfl_xor_sync(~0u, odd ? mine[4] : mine[6], 1);
      const uint32_t t0 = odd ? a : mine[0], t1 = odd ? mine[2] : a;  // words (q & ~1, q | 1) of group q & 1
      const uint32_t t2 = odd ? b : mine[4], t3 = odd ? mine[6] : b;  // the same of group 2 + (q & 1)
      const uint32_t c = __shfl_xor_sync(~0u, upper ? t0 : t2, 2);
      const uint32_t e = __shfl_xor_sync(~0u, upper ? t1 : t3, 2);
      __stcs(reinterpret_cast<uint4*>(row + 32 * block + half * row_step),
             make_uint4(upper ? c : t0, upper ? e : t1, upper ? t2 : c, upper ? t3 : e));
    }
}

}  // namespace plumb::kernels::attention
