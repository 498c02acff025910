// What the wide kernels share: the queue of tiles inside a block, and the way of results into memory. M is a kernel's
// map of its shared memory: start, kTileStart, queue_full(i), queue_empty(i), kOutputStart, kWarpOutputBytes.
#pragma once
#include "kernels/grouped_linear/problem.cuh"
#include "kernels/hopper/barrier.cuh"
#include "kernels/hopper/shared_memory.cuh"

namespace plumb::kernels::grouped_linear {

using namespace hopper;

constexpr int kQueueSlots = 4;
constexpr int kHelperRegisters = 48, kConsumerRegisters = 208;  // (2 * 48 + 2 * 208) * 128 = 64 K
constexpr int kConverters = 6;  // warps; each takes 16 rows of a slab (or of two) at a time

// ---- The queue of tiles. Entry `item` of this block; rows = 0 marks the end ----------------------------------------
template <typename M>
__device__ __forceinline__ Tile queue_read(const M& m, uint32_t item) {
  barrier_wait(m.queue_full(ring_slot<kQueueSlots>(item)), ring_parity<kQueueSlots>(item));
  const uint4 v = load_shared_16(m.start + M::kTileStart + ring_slot<kQueueSlots>(item) * sizeof(Tile));
  return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), static_cast<int>(v.w)};
}
template <typename M>
__device__ __forceinline__ void queue_release(const M& m, uint32_t item, bool speaker) {
  barrier_arrive_if(speaker, m.queue_empty(ring_slot<kQueueSlots>(item)));
}
template <typename M>
__device__ __forceinline__ void queue_publish(const M& m, uint32_t item, const Tile& tile) {
  barrier_wait(m.queue_empty(ring_slot<kQueueSlots>(item)), ring_parity<kQueueSlots>(item) ^ 1);
  store_shared_16(m.start + M::kTileStart + ring_slot<kQueueSlots>(item) * sizeof(Tile),
                  *reinterpret_cast<const uint4*>(&tile));
  barrier_arrive(m.queue_full(ring_slot<kQueueSlots>(item)));
}

struct Place {  // of a consumer thread
  int owner, warp, lane;
  __device__ __forceinline__ int first_row(int slab) const { return (owner + 2 * slab) * kSlabRows + warp * 16; }
};

// Of this thread; made anew for each epilogue, because registers are short in between.
__device__ __forceinline__ Place fresh_place() {
  const int thread = fresh_thread_index();
  return {thread / 128 - 2, thread / 32 % 4, thread % 32};
}

// A warp owns 16 rows of a slab: it turns 16 x 64 results into rows of 128 bytes in its own corner of shared memory.
// out: [rows, width]; the tile's 128 columns.
template <typename M>
__device__ __forceinline__ void write_bf16(const M& m, const float (&total)[2][64], const Tile& tile,
                                           const Place& place, uint16_t* out, int width) {
  const int lane = place.lane;
  const uint32_t staging = m.start + M::kOutputStart + (place.owner * 4 + place.warp) * M::kWarpOutputBytes;
  const uint32_t row_at = staging + (((lane / 8) & 1) * 8 + lane % 8) * 128;
#pragma unroll
  for (int slab = 0; slab < 2; ++slab) {
#pragma unroll
    for (int columns = 0; columns < 128; columns += 64) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {  // 16 weights
        const float* v = &total[slab][columns / 2 + pair * 8];
        store_matrices(row_at + (((pair * 2 + lane / 16) ^ (lane % 8)) << 4), pack_bf16(v[0], v[1]),
                       pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i * 4 + lane / 8, chunk = lane % 8, token = place.first_row(slab) + row;
        if (token < tile.rows)
          *reinterpret_cast<uint4*>(out + static_cast<size_t>(tile.first_row + token) * width +
                                    tile.weight_tile * kBlock + columns + chunk * 8) =
              load_shared_16(staging + row * 128 + ((chunk ^ (row & 7)) << 4));
      }
      __syncwarp();
    }
  }
}

template <bool kOwnChain>  // of lora::add_to_rows
__device__ __forceinline__ void add_low_rank(float (&total)[2][64], int slabs, const lora::LowRank& l,
                                             const lora::Outputs& outputs, const Tile& tile, const Place& place) {
  int row[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    row[i / 2][i % 2] = tile.first_row + min(place.first_row(i / 2) + place.lane / 4 + i % 2 * 8, tile.rows - 1);
  lora::add_to_rows<kOwnChain>(total, slabs, l, outputs, row, place.lane);
}

}  // namespace plumb::kernels::grouped_linear
