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

// One warp copies 512 bytes (256 columns) of each of kRows rows into four panels of kPanel bytes. source(r, present)
// gives a readable address and clears present where zeros belong (never a null pointer: arithmetic on one lets the
// compiler drop the test). first_row is a multiple of 8. kUnroll: rows whose addresses are made beside each other.
template <int kRows, int kPanel, int kUnroll, class Source>
__device__ __forceinline__ void gather_rows(uint8_t* panels, int first_row, const Source& source) {
  const int lane = threadIdx.x & 31;
  const uint32_t base = hopper::shared_address(panels) + (lane >> 3) * kPanel + first_row * 128;
#pragma unroll kUnroll
  for (int r = 0; r < kRows; ++r) {
    bool present = true;
    const uint8_t* row = source(r, present);
    hopper::copy16(base + hopper::swizzled(r, lane & 7), row + lane * 16, present ? 16 : 0);
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

inline int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

}  // namespace plumb::kernels::attention
