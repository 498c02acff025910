// Input gradients: dx = dy W with W packed. The contraction runs over the rows of W, where scales vary, so weights are
// widened to bf16 (exact) and multiplied on bf16 tensor cores, FP32 accumulators, one chain over all rows of W.
//
// A block of four warpgroups takes tiles of up to 256 rows x 128 columns of dx from a queue and walks the rows of W in
// slabs of 64 (a quarter of a record).
//   0: warp 0 takes tiles and feeds the ring of dy, warp 1 the ring of codes (copy engine)
//   0, 1: warps 2 to 7 widen: codes -> bf16 in two panels of 64 columns, 128-byte swizzle, read with rows contracted
//   2, 3: consumers; number i owns the 64-row slabs i and i + 2 of the tile
#include <cuda_bf16.h>

#include <algorithm>

#include "kernels/grouped_linear/wide_parts.cuh"
#include "kernels/hopper/tma.cuh"
#include "kernels/hopper/wgmma_bf16.cuh"
#include "kernels/launch.cuh"

namespace plumb::kernels::grouped_linear {
namespace {

constexpr int kStages = kQueueSlots;  // of dy and of widened weights
constexpr int kPanelBytes = 64 * 128;
constexpr int kWidenRegisters = 56, kProductRegisters = 200;  // (2 * 56 + 2 * 200) * 128 = 64 K

template <WeightFormat kFormat>
struct Memory {
  static constexpr bool kPacked = kFormat == WeightFormat::fp4;
  static constexpr int kCodeStages = kPacked ? 4 : 2;
  static constexpr int kRecordBytes = record_bytes(kFormat);
  static constexpr int kCodeBytes = kPacked ? kSlabCodeBytes + kSlabOffsetBytes : kSlabRows * kBlock;
  static constexpr int kRowBytes = 4 * kPanelBytes, kWeightBytes = 2 * kPanelBytes, kWarpOutputBytes = 16 * 128;
  static constexpr int kWeightStart = kStages * kRowBytes;
  static constexpr int kCodeStart = kWeightStart + kStages * kWeightBytes;
  static constexpr int kOutputStart = kCodeStart + kCodeStages * kCodeBytes;
  static constexpr int kTileStart = kOutputStart + 8 * kWarpOutputBytes;
  static constexpr int kBarrierStart = kTileStart + kQueueSlots * static_cast<int>(sizeof(Tile));
  static constexpr int kBytes = kBarrierStart + 8 * (3 * kStages + 2 * kQueueSlots + 2 * kCodeStages);

  uint32_t start;
  __device__ __forceinline__ uint32_t barrier(int i) const { return start + kBarrierStart + 8 * i; }
  __device__ __forceinline__ uint32_t rows_full(uint32_t i) const { return barrier(i); }
  __device__ __forceinline__ uint32_t weights_full(uint32_t i) const { return barrier(kStages + i); }
  __device__ __forceinline__ uint32_t stage_empty(uint32_t i) const { return barrier(2 * kStages + i); }
  __device__ __forceinline__ uint32_t queue_full(uint32_t i) const { return barrier(3 * kStages + i); }
  __device__ __forceinline__ uint32_t queue_empty(uint32_t i) const { return queue_full(kQueueSlots + i); }
  __device__ __forceinline__ uint32_t codes_full(uint32_t i) const { return queue_full(2 * kQueueSlots + i); }
  __device__ __forceinline__ uint32_t codes_empty(uint32_t i) const { return codes_full(kCodeStages + i); }

  __device__ void init_barriers() const {
    for (int i = 0; i < kStages; ++i)
      barrier_init(rows_full(i), 1), barrier_init(weights_full(i), 128), barrier_init(stage_empty(i), 8);
    for (int i = 0; i < kQueueSlots; ++i) barrier_init(queue_full(i), 1), barrier_init(queue_empty(i), 9 + kConverters);
    for (int i = 0; i < kCodeStages; ++i) barrier_init(codes_full(i), 1), barrier_init(codes_empty(i), 128);
    barrier_init_fence();
  }
};

__device__ __forceinline__ int steps_of(const Problem& p) { return p.n / kSlabRows; }

// ---- One thread: takes tiles and feeds dy --------------------------------------------------------------------------
template <typename M>
__device__ __forceinline__ void feed_rows(const M& m, const CUtensorMap* map, const Problem& p) {
  const int tile_count = *p.tile_count;
  const auto load_tile = [&](int i) { return i < tile_count ? p.tiles[i] : Tile{0, 0, 0, 0}; };
  uint32_t step = 0;
  Tile tile = load_tile(blockIdx.x);
  queue_publish(m, 0, tile);
  for (uint32_t item = 1; tile.rows > 0; ++item) {
    const int next_index = gridDim.x + atomicAdd(p.queue, 1);
    const int slabs = (tile.rows + kSlabRows - 1) / kSlabRows;
    Tile next{};
    for (int i = 0; i < steps_of(p); ++i, ++step) {
      const uint32_t slot = ring_slot<kStages>(step), full = m.rows_full(slot);
      barrier_wait(m.stage_empty(slot), ring_parity<kStages>(step) ^ 1);
      barrier_arrive_expect(full, slabs * kPanelBytes);
      for (int slab = 0; slab < slabs; ++slab)
        copy_tensor_2d(m.start + slot * M::kRowBytes + slab * kPanelBytes, map, i * kSlabRows,
                       tile.first_row + slab * kSlabRows, full);
      if (i == 0) queue_publish(m, item, next = load_tile(next_index));
    }
    tile = next;
  }
}

// ---- One thread: feeds the codes -----------------------------------------------------------------------------------
template <typename M>
__device__ __forceinline__ void feed_codes(const M& m, const Problem& p) {
  uint32_t step = 0;
  for (uint32_t item = 0;; ++item) {
    const Tile tile = queue_read(m, item);
    queue_release(m, item, true);
    if (tile.rows == 0) return;
    for (int i = 0; i < steps_of(p); ++i, ++step) {
      const uint8_t* record =
          p.records +
          ((static_cast<size_t>(tile.group) * (p.n / kRecordRows) + i / 4) * p.k_blocks + tile.weight_tile) *
              M::kRecordBytes;
      const uint32_t slot = ring_slot<M::kCodeStages>(step), full = m.codes_full(slot), slab = i % 4;
      const uint32_t place = m.start + M::kCodeStart + slot * M::kCodeBytes;
      barrier_wait(m.codes_empty(slot), ring_parity<M::kCodeStages>(step) ^ 1);
      barrier_arrive_expect(full, M::kCodeBytes);
      if constexpr (M::kPacked) {
        copy_bulk(place, record + slab * kSlabCodeBytes, kSlabCodeBytes, full);
        copy_bulk(place + kSlabCodeBytes, record + 4 * kSlabCodeBytes + slab * kSlabOffsetBytes, kSlabOffsetBytes,
                  full);
      } else {
        copy_bulk(place, record + slab * M::kCodeBytes, M::kCodeBytes, full);
      }
    }
  }
}

// ---- Six warps: codes -> bf16. The warps' instructions are what limits a tile of few rows
// ------------------------------
__device__ __forceinline__ uint32_t times(uint32_t pair, uint32_t factor) {  // pairs of bf16, exact powers of two
  const __nv_bfloat162 r =
      __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair), *reinterpret_cast<const __nv_bfloat162*>(&factor));
  return *reinterpret_cast<const uint32_t*>(&r);
}
__device__ __forceinline__ uint32_t power_pair(float power) { return permute_bytes(__float_as_uint(power), 0, 0x3232); }

// Both bytes of the bf16 of the eight magnitudes of e2m1, to be looked up; half of the table stays in registers, where
// the compiler would otherwise make it anew for each use.
struct Fp4Table {
  uint32_t high = kept(0x3f3f3f00), low = kept(static_cast<int>(0xc0800000u));
  // Four magnitudes (nibbles) with signs (top bits of bytes), times a power of two.
  __device__ __forceinline__ uint2 widen(uint32_t selectors, uint32_t signs, uint32_t factor) const {
    const uint32_t h = permute_bytes(high, 0x40404040u, selectors) | signs;
    const uint32_t l = permute_bytes(low, 0xc0804000u, selectors);
    return {times(permute_bytes(l, h, 0x5140), factor), times(permute_bytes(l, h, 0x7362), factor)};
  }
};
// Four e4m3 times 2^-120 times a power of two: the bits of an e4m3, moved to bf16's fields, are its value times 2^-120,
// also if it is subnormal.
__device__ __forceinline__ uint2 widen_fp8(uint32_t four, uint32_t factor) {
  const auto pair = [&](uint32_t x) {  // values in bits 8-15 and 24-31
    return times((x >> 4 & 0x07f007f0u) | (x & 0x80008000u), factor);
  };
  return {pair(permute_bytes(four, 0, 0x1404)), pair(permute_bytes(four, 0, 0x3424))};
}

// A strip of 16 rows x 128 k, one of a slab's four, on its way. A lane takes two rows, `row` and 8 below, and of each
// 32 codes: with FP4 those of one group of scales, k = 32 part .., with FP8 k = 32 q + 8 part .. + 7 for q = 0 .. 3.
template <typename M>
struct Strip;

template <>
struct Strip<Memory<WeightFormat::fp4>> {
  Fp4Table table;
  uint4 first, second;
  uint32_t offsets;
  // Lanes of the right panel take their words in another order: no bank conflicts.
  static __device__ __forceinline__ uint32_t swap(int lane) { return lane & 2; }
  __device__ __forceinline__ void load(uint32_t codes, uint32_t strip, int lane) {
    const uint32_t at = codes + (strip * 32 + lane) * 16, half = kSlabCodeBytes / 2;
    first = load_shared_16(swap(lane) ? at + half : at), second = load_shared_16(swap(lane) ? at : at + half);
    offsets = load_shared_2(codes + kSlabCodeBytes + (strip * 32 + lane) * 2);
  }
  static __device__ __forceinline__ uint32_t place(int lane) {
    const int row = lane / 4, part = lane % 4;
    return part / 2 * kPanelBytes + row * 128 + (((part % 2 * 4 + swap(lane)) ^ row) << 4);
  }
  __device__ __forceinline__ void store(uint32_t at, float base) const {
    const uint32_t words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    const auto factor = [&](uint32_t offset) {  // base 2^(offset - 5)
      return power_pair(__fmul_rn(base, __uint_as_float((offset + 122) << 23)));
    };
    const uint32_t factors[2] = {factor(offsets & 255), factor(offsets >> 8)};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t selectors = words[i] & 0x77777777u;
      const uint2 a = table.widen(selectors, words[i] & 0x80808080u, factors[i & 1]);
      const uint2 b = table.widen(selectors >> 16, words[i] << 4 & 0x80808080u, factors[i & 1]);
      store_shared_16((at ^ (i / 2 << 4)) + i % 2 * 1024, make_uint4(a.x, a.y, b.x, b.y));
    }
  }
};

template <>
struct Strip<Memory<WeightFormat::fp8>> {
  uint4 codes[4];  // row, half of the 32 places
  __device__ __forceinline__ void load(uint32_t from, uint32_t strip, int lane) {
    const int row = lane % 8, part = lane / 8;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      codes[i] = load_shared_16(from + (strip * 16 + i / 2 * 8 + row) * 128 + (((2 * part + i % 2) ^ row) << 4));
  }
  static __device__ __forceinline__ uint32_t place(int lane) { return lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4); }
  __device__ __forceinline__ void store(uint32_t at, float base) const {
    // One factor, unless it would be infinite.
    if (base <= 128)
      store_times(at, power_pair(__fmul_rn(base, 0x1p120f)), [](uint2 v) { return v; });
    else
      store_times(at, power_pair(0x1p120f),
                  [rest = power_pair(base)](uint2 v) { return make_uint2(times(v.x, rest), times(v.y, rest)); });
  }
  template <typename Then>
  __device__ __forceinline__ void store_times(uint32_t at, uint32_t factor, const Then& then) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // row, q
      const uint4 &left = codes[i / 4 * 2], &right = codes[i / 4 * 2 + 1];
      const uint32_t lefts[4] = {left.x, left.y, left.z, left.w}, rights[4] = {right.x, right.y, right.z, right.w};
      const uint2 a = then(widen_fp8(lefts[i % 4], factor)), b = then(widen_fp8(rights[i % 4], factor));
      store_shared_16((at ^ (i % 2 << 6)) + i / 2 % 2 * kPanelBytes + i / 4 * 1024, make_uint4(a.x, a.y, b.x, b.y));
    }
  }
};

// Unit u is strip u % 4 of slab u / 4.
template <typename M>
__device__ __forceinline__ void convert(const M& m, const Problem& p, int converter, int lane) {
  const uint32_t own_place = m.start + M::kWeightStart + Strip<M>::place(lane);
  Strip<M> strip;
  // Bases of the tile's columns; those of 32 blocks in the warp's lanes, so that the fence below, which waits for the
  // warp's loads, rarely meets one from memory. Every converter meets every block.
  const float* bases = nullptr;
  float held = 0, base;
  const auto fetch = [&](uint32_t unit, uint32_t first_unit) {
    const uint32_t step = unit / 4, slot = ring_slot<M::kCodeStages>(step);
    const int block = (step - first_unit / 4) / 2;  // of 128 rows of W
    if (block % 32 == 0) held = __ldg(bases + min(block + lane, p.n / kBlock - 1) * p.block_stride);
    base = __shfl_sync(~0u, held, block % 32);
    // A converter passes over a slab now and then: the slot's previous use must have been read by all (see wide.cu).
    barrier_wait(m.codes_empty(slot), ring_parity<M::kCodeStages>(step) ^ 1);
    barrier_wait(m.codes_full(slot), ring_parity<M::kCodeStages>(step));
    strip.load(m.start + M::kCodeStart + slot * M::kCodeBytes, unit % 4, lane);
  };

  uint32_t unit = converter, units = 0;  // both counted over all tiles
  for (uint32_t item = 0;; ++item) {
    const Tile tile = queue_read(m, item);
    __syncwarp();
    queue_release(m, item, lane == 0);
    if (uniform(tile.rows) == 0) return;
    bases = p.bases + static_cast<size_t>(tile.group) * (p.n / kBlock) * p.block_stride + tile.weight_tile;
    const uint32_t first_unit = units;
    units += steps_of(p) * 4;
    if (unit < units) fetch(unit, first_unit);
    for (; unit < units; unit += kConverters) {
      const uint32_t step = unit / 4, slot = ring_slot<kStages>(step);
      barrier_wait(m.stage_empty(slot), ring_parity<kStages>(step) ^ 1);
      strip.store(own_place + slot * M::kWeightBytes + (unit % 4) * 16 * 128, base);
      async_proxy_fence();
      barrier_arrive(m.weights_full(slot));
      barrier_arrive(m.codes_empty(ring_slot<M::kCodeStages>(step)));
      if (unit + kConverters < units) fetch(unit + kConverters, first_unit);
    }
  }
}

// ---- A consumer warpgroup ------------------------------------------------------------------------------------------
// All products of a tile. kSlabs: of this consumer, 0 to 2.
template <int kSlabs, typename M>
__device__ __forceinline__ void multiply_tile(const M& m, float (&total)[2][64], uint32_t& step, int steps, int owner,
                                              bool speaker) {
  const auto release = [&](uint32_t at) { barrier_arrive_if(speaker, m.stage_empty(ring_slot<kStages>(at))); };
#pragma unroll
  for (int i = 0; i < 64; ++i) total[0][i] = total[1][i] = 0.0f;
  for (const uint32_t first = step, end = step + steps; step != end; ++step) {
    const uint32_t slot = ring_slot<kStages>(step);
    barrier_wait(m.weights_full(slot), ring_parity<kStages>(step));
    barrier_wait(m.rows_full(slot), ring_parity<kStages>(step));
    if constexpr (kSlabs == 0) {
      __syncwarp();
      release(step);
    } else {
      const uint64_t rows = tile_descriptor(m.start + slot * M::kRowBytes + owner * kPanelBytes);
      const uint64_t weights = tile_descriptor(m.start + M::kWeightStart + slot * M::kWeightBytes, kPanelBytes);
      product_fence();
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          wgmma<kColumnsContracted, kRowsContracted>(total[slab], rows + slab * (2 * kPanelBytes / 16) + i * 2,
                                                     weights + i * 128, true);
      product_commit();
      product_wait<1>();
      if (step != first) release(step - 1);
    }
  }
  if constexpr (kSlabs > 0) {
    product_wait<0>();
    pin(total[0]);
    if constexpr (kSlabs == 2) pin(total[1]);
    release(step - 1);
  }
}

template <bool kLowRank, typename M>
__device__ __forceinline__ void consume(const M& m, const Problem& p, int owner, int thread) {
  const bool speaker = thread % 32 == 0;
  uint32_t step = 0;
  float total[2][64];
  for (uint32_t item = 0;; ++item) {
    const int rows = uniform(queue_read(m, item).rows);
    if (rows == 0) return;
    const int slabs = (rows > owner * kSlabRows) + (rows > (owner + 2) * kSlabRows);
    if (slabs == 2)
      multiply_tile<2>(m, total, step, steps_of(p), owner, speaker);
    else if (slabs == 1)
      multiply_tile<1>(m, total, step, steps_of(p), owner, speaker);
    else
      multiply_tile<0>(m, total, step, steps_of(p), owner, speaker);
    if (slabs > 0) {
      const Tile tile = queue_read(m, item);
      const Place place = fresh_place();
      const int width = p.k_blocks * kBlock;
      if constexpr (kLowRank)
        add_low_rank<false>(total, slabs, p.low_rank, {tile.group, width, tile.weight_tile * kBlock}, tile, place);
      write_bf16(m, total, tile, place, p.out, width);
    }
    __syncwarp();
    queue_release(m, item, speaker);
  }
}

template <WeightFormat kFormat, bool kLowRank>
__global__ void __launch_bounds__(kWideThreads, 1)
    backward_input_kernel(const __grid_constant__ CUtensorMap dy, const Problem p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using M = Memory<kFormat>;
  const M m{static_cast<uint32_t>(uniform(shared_address(shared)))};
  const int group = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) prefetch_map(&dy), m.init_barriers();
  __syncthreads();
  if (group < 2) {
    give_registers<kWidenRegisters>();
    const int role = uniform(threadIdx.x / 32);
    if (threadIdx.x == 0)
      feed_rows(m, &dy, p);
    else if (threadIdx.x == 32)
      feed_codes(m, p);
    else if (role >= 2)
      convert(m, p, role - 2, threadIdx.x % 32);
  } else {
    take_registers<kProductRegisters>();
    consume<kLowRank>(m, p, group - 2, threadIdx.x % 128);
  }
}

}  // namespace

void launch_backward_input(WeightFormat format, int64_t tiles, int multiprocessors, const CUtensorMap& dy,
                           const Problem& p, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(p.queue, 0, sizeof(int), stream), "grouped_linear: clearing the tile queue");
  const int blocks = static_cast<int>(std::min<int64_t>(multiprocessors, tiles));
  const auto run = [&](auto kernel, int bytes) {
    launch_with_shared(kernel, blocks, kWideThreads, bytes, stream, dy, p);
  };
  const bool low_rank = p.low_rank.rank > 0;
  if (format == WeightFormat::fp4)
    run(low_rank ? backward_input_kernel<WeightFormat::fp4, true> : backward_input_kernel<WeightFormat::fp4, false>,
        Memory<WeightFormat::fp4>::kBytes);
  else
    run(low_rank ? backward_input_kernel<WeightFormat::fp8, true> : backward_input_kernel<WeightFormat::fp8, false>,
        Memory<WeightFormat::fp8>::kBytes);
}

}  // namespace plumb::kernels::grouped_linear
