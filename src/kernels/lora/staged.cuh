// The sums of add_to_rows for a tile of two slabs of 64 rows x 128 outputs, where T and the factor are in shared memory
// when its products end: one adapter for all rows, up to kStagedRank (can_stage). A warpgroup multiplies (wgmma) as if
// this were one more block of K: both operands come from shared memory, the chain has the accumulators of the base's
// products. Those of mma.sync would wait for every word of the factor. The products and their order are the same, so
// are the bits.
//
// A warp copies into a corner of its own, so nobody waits before the end. A corner is four slots of kSlotBytes. Slot i:
//   outputs 8 i .. of the warp's 32: [high, low][8 outputs][8 of the rank] in bf16
//   T of eight rows, 8 (i / 2) .. of the 16 that the warp has in slab i % 2: FP32, later bf16 as those of the outputs
// These are core matrices of operands without swizzle; "high high" is one core matrix used twice.
#pragma once
#include "kernels/hopper/barrier.cuh"
#include "kernels/hopper/wgmma_bf16.cuh"
#include "kernels/hopper/wgmma_fp8.cuh"
#include "kernels/lora/low_rank.cuh"

namespace plumb::kernels::lora {

struct Staged {
  uint32_t corners;  // shared-memory address of the first; those of the four warps lie behind each other

  static constexpr int kSlotBytes = 512, kCornerBytes = 4 * kSlotBytes, kCoreBytes = 128;
  static_assert(kStagedRank == 8 && kSlotBytes == 4 * kCoreBytes);
  // Of row `row` of the 16 of a warp's slab, 32 bytes; converted, its high parts are at core 0, the low ones at core 1.
  __device__ __forceinline__ uint32_t t(int warp, int slab, int row) const {
    return corners + warp * kCornerBytes + (row / 8 * 2 + slab) * kSlotBytes + 2 * kCoreBytes + row % 8 * 32;
  }
  __device__ __forceinline__ uint32_t t_core(int warp, int slab, int row, int core) const {
    return t(warp, slab, row) - row % 8 * 16 + core * kCoreBytes;
  }
  // Outputs 8 i .. of the tile.
  __device__ __forceinline__ uint32_t factor(int i) const { return corners + i * kSlotBytes; }
};

// A warp's corner; T with zeros beyond the rank. all_factors: l.factor[0], whose load nothing would hide here.
// row: of lane 16 s + r, the one that its slab s has in place r.
__device__ __forceinline__ void stage(const LowRank& l, const uint32_t* all_factors, const Outputs& o,
                                      const Staged& staged, int row, int warp, int lane) {
  const float* t = l.t + static_cast<size_t>(row) * l.t_stride;
  const uint32_t to = staged.t(warp, lane / 16, lane % 16);
  hopper::copy16(to, t, 16), hopper::copy16(to + 16, t + l.rank - 4, l.rank > 4 ? 16 : 0);
  const uint32_t* factor = factor_of(all_factors, l.rank, o, 0) + warp * 32 * kFactorWords + lane * 4;
#pragma unroll
  for (int i = 0; i < 8; ++i)  // a lane's words of 16 outputs: high and low parts of two eights
    hopper::copy4(staged.factor(4 * warp + i / 2) + i % 2 * Staged::kCoreBytes + lane * 4,
                  factor + i / 4 * 128 + i % 4);
  hopper::copy_commit();
}

// By all four warps; group: their barrier. Afterwards the corners are free. sum: the accumulators of the base's
// products.
__device__ __forceinline__ void add_staged(float (&d)[2][64], float (&sum)[64], const Staged& staged, int group,
                                           int warp, int lane) {
  hopper::copy_wait<0>();
  const uint32_t own = staged.t(warp, lane / 16, lane % 16);
  const float4 v = hopper::load_shared_floats(own), w = hopper::load_shared_floats(own + 16);
  const Split parts[4] = {split({v.x, v.y}), split({v.z, v.w}), split({w.x, w.y}), split({w.z, w.w})};
  __syncwarp();  // all have read what is now overwritten
  hopper::store_shared_16(staged.t_core(warp, lane / 16, lane % 16, 0),
                          make_uint4(parts[0].high, parts[1].high, parts[2].high, parts[3].high));
  hopper::store_shared_16(staged.t_core(warp, lane / 16, lane % 16, 1),
                          make_uint4(parts[0].low, parts[1].low, parts[2].low, parts[3].low));
  hopper::async_proxy_fence();  // for the tensor cores, of these stores and of the copies
  hopper::group_barrier(group, 128);
  const uint64_t factor = hopper::plain_operand(staged.factor(0), Staged::kCoreBytes, Staged::kSlotBytes);
  // Both slabs, whether they exist or not (T repeats the last row), the second first: with a branch, or in the other
  // order, the compiler runs out of registers.
#pragma unroll
  for (int s = 1; s >= 0; --s) {
    hopper::product_fence();
#pragma unroll
    for (int core = 0; core < 2; ++core)
      hopper::wgmma<hopper::kColumnsContracted, hopper::kColumnsContracted>(
          sum, hopper::plain_operand(staged.t_core(0, s, 0, core), 0, 2 * Staged::kSlotBytes), factor, core > 0);
    hopper::product_commit();
    hopper::product_wait<0>();
#pragma unroll
    for (int i = 0; i < 64; ++i) d[s][i] += sum[i];
  }
  hopper::group_barrier(group, 128);
}

}  // namespace plumb::kernels::lora
