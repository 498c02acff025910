// The narrow kernel: decoding, 8 to 64 rows a tile. Persistent and warp-specialised. The weights are the 64-row operand
// of the tensor cores and the activations ("tokens") the n columns: FP4 codes are then expanded straight into operand
// registers, and a tile may be 8, 16 or 64 tokens wide with the same records and the same bits as wide.cu.
//
// A block computes 256 weight rows (one record row) x kTokens. Warpgroup 0: warp 0 feeds the stages through the copy
// engine, warp 1 prepares scales. Warpgroups 1 and 2 own 128 rows each, as two slabs of 64: the four products of a slab
// with 128 of K go to `partial`, are scaled and added to the FP32 `total`. Codes are expanded while the warpgroup's own
// products run: slab 1's during slab 0's, the next K block's slab 0 during slab 1's. Up to 16 tokens, two blocks share
// a multiprocessor: one's chain from a stage's arrival to its release is filled with the other's work.
#include <algorithm>

#include "kernels/grouped_linear/narrow_parts.cuh"
#include "kernels/launch.cuh"

namespace plumb::kernels::grouped_linear {
namespace {

constexpr int kThreads = 384, kConsumers = 256;
constexpr int kScaleChunk = 8;  // K blocks whose scales are prepared together

// kAlone: a multiprocessor has one block.
template <int kTokens, WeightFormat kFormat, bool kAlone>
struct Memory {
  static constexpr int kBlocks = kAlone ? 1 : 2;  // on a multiprocessor
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = kBlocks == 2 ? 96 : 232;
  static constexpr bool kPacked = kFormat == WeightFormat::fp4;
  // FP4, alone: no more than two blocks have each. What the slowest consumer waits for is the first stage of a launch,
  // and all stages of all blocks are asked for at the same time.
  static constexpr int kStages = kTokens > 16 ? (kPacked ? 6 : 4) : kPacked ? 5 : kAlone ? 6 : 3;
  static constexpr int kRecordBytes = record_bytes(kFormat);
  static constexpr int kTokenBytes = kTokens * kBlock;
  static constexpr int kStageBytes = kTokenBytes + kRecordBytes;  // multiples of 1,024, which the swizzle needs
  static constexpr int kScaleRow = kTokens < 16 ? 16 : kTokens;   // floats, of one 128-row half
  static constexpr int kScaleBytes = kScaleChunk * 2 * kScaleRow * 4;
  static constexpr int kSlabOutputBytes = kTokens * 128;  // 64 rows in bf16
  static constexpr int kScaleStart = kStages * kStageBytes;
  static constexpr int kOutputStart = kScaleStart + 2 * kScaleBytes;
  static constexpr int kBarrierStart = kOutputStart + 4 * kSlabOutputBytes;
  static constexpr int kUsedBytes = kBarrierStart + 8 * (2 * kStages + 4);
  // Alone also while the launch before this one still fills multiprocessors: more than half of the memory.
  static constexpr int kBytes = kAlone ? std::max(kUsedBytes, 115 * 1024) : kUsedBytes;
  static_assert((kBytes + 1024) * kBlocks <= 228 * 1024);  // a block costs 1 KB of its own

  uint32_t start;
  __device__ __forceinline__ uint32_t stage(uint32_t i) const { return start + i * kStageBytes; }
  __device__ __forceinline__ uint32_t full(uint32_t i) const { return start + kBarrierStart + 8 * i; }
  __device__ __forceinline__ uint32_t empty(uint32_t i) const { return full(kStages + i); }
  __device__ __forceinline__ uint32_t scales_full(uint32_t i) const { return full(2 * kStages + i); }
  __device__ __forceinline__ uint32_t scales_empty(uint32_t i) const { return full(2 * kStages + 2 + i); }
  // Output staging: [slab][token] rows of 128 bytes, 16-byte chunks swizzled by the token.
  __device__ __forceinline__ uint32_t output(int slab, int token, int chunk) const {
    return start + kOutputStart + slab * kSlabOutputBytes + token * 128 + ((chunk ^ (token & 7)) << 4);
  }

  __device__ void init_barriers() const {
    for (int i = 0; i < kStages; ++i) barrier_init(full(i), 1), barrier_init(empty(i), kConsumers);
    for (int i = 0; i < 2; ++i) barrier_init(scales_full(i), 32), barrier_init(scales_empty(i), kConsumers);
    barrier_init_fence();
  }
};

// Static schedule: in round i, worker w of W takes tile i * W + (w + i) % W. Neighbouring tiles run at the same time
// and share weights in L2; the rotation keeps a regular pattern of large and small tiles from always giving the large
// ones to the same worker. Calls body(tile) for each tile of this block.
template <typename Body>
__device__ __forceinline__ void for_each_tile(const Problem& p, Body body) {
  const int workers = gridDim.x;
  const Tile first = p.tiles[blockIdx.x];  // before the count is known: the list has room for as many tiles as blocks
  const int tile_count = *p.tile_count;
  for (int round = 0; round * workers < tile_count; ++round) {
    const int t = round * workers + (blockIdx.x + round) % workers;
    if (t >= tile_count) continue;
    Tile tile = first;
    if (round > 0) tile = p.tiles[t];
    body(tile);
  }
}

// Fills the stages. The weights of the first ones are on their way before the tokens exist: see launch_dependent.
template <typename M>
__device__ __forceinline__ void feed(const M& m, const CUtensorMap* map, const Problem& p) {
  const auto record_of = [&](const Tile& tile) {
    return p.records +
           (static_cast<size_t>(tile.group) * (p.n / kRecordRows) + tile.weight_tile) * p.k_blocks * M::kRecordBytes;
  };
  const auto send_weights = [&](const uint8_t* record, uint32_t slot) {
    barrier_arrive_expect(m.full(slot), M::kStageBytes);
    copy_bulk(m.stage(slot) + M::kTokenBytes, record, M::kRecordBytes, m.full(slot));
  };
  int ahead = 0;  // K blocks of the first tile whose weights have been sent for
  if (p.settled && static_cast<int>(blockIdx.x) < *p.tile_count) {
    const uint8_t* record = record_of(p.tiles[blockIdx.x]);
    for (; ahead < min(M::kStages, p.k_blocks); ++ahead) send_weights(record + ahead * M::kRecordBytes, ahead);
  }
  wait_for_earlier_launches();
  let_next_launch_begin();

  RingPosition<M::kStages> here;
  for_each_tile(p, [&](const Tile& tile) {
    const uint8_t* record = record_of(tile);
    for (int kb = 0; kb < p.k_blocks; ++kb, record += M::kRecordBytes, here = here.after(1)) {
      if (ahead > 0) {
        --ahead;
      } else {
        barrier_wait(m.empty(here.slot), here.parity ^ 1);
        send_weights(record, here.slot);
      }
      copy_tensor_2d(m.stage(here.slot), map, kb * kBlock, tile.first_row, m.full(here.slot));
    }
  });
}

// Token scale * weight base, in the order in which the consumers read.
template <int kTokens, typename M>
__device__ __forceinline__ void prepare_scales(const M& m, const Problem& p, int lane) {
  uint32_t chunk = 0;
  for_each_tile(p, [&](const Tile& tile) {
    const float* bases =
        p.bases + (static_cast<size_t>(tile.group) * (p.n / kBlock) + tile.weight_tile * 2) * p.block_stride;
    for (int first = 0; first < p.k_blocks; first += kScaleChunk, ++chunk) {
      const uint32_t place = m.start + M::kScaleStart + ring_slot<2>(chunk) * M::kScaleBytes;
      barrier_wait(m.scales_empty(ring_slot<2>(chunk)), ring_parity<2>(chunk) ^ 1);
#pragma unroll 2
      for (int i = lane; i < kScaleChunk * kTokens; i += 32) {
        const int kb = i % kScaleChunk, token = i / kScaleChunk, row = tile.first_row + min(token, tile.rows - 1);
        if (first + kb >= p.k_blocks) continue;
        const float scale = p.token_scales[static_cast<size_t>(row) * p.block_stride + first + kb];
        const uint32_t at = place + (kb * 2 * M::kScaleRow + scale_place(token)) * 4;
        store_shared_float(at, scale * bases[first + kb]);
        store_shared_float(at + M::kScaleRow * 4, scale * bases[p.block_stride + first + kb]);
      }
      barrier_arrive(m.scales_full(ring_slot<2>(chunk)));
    }
  });
}

template <typename M>
__device__ __forceinline__ void write_bf16(const M& m, const Problem& p, const Tile& tile, int thread) {
  for (int i = thread; i < tile.rows * 32; i += kConsumers) {
    const int token = i / 32, chunk = i % 32;
    *reinterpret_cast<uint4*>(p.out + static_cast<size_t>(tile.first_row + token) * p.n +
                              tile.weight_tile * kRecordRows + chunk * 8) =
        load_shared_16(m.output(chunk / 8, token, chunk % 8));
  }
}

template <int kTokens, Epilogue kEpilogue, typename M>
__device__ __forceinline__ void consume(const M& m, const Problem& p, int owner, int thread) {
  const int lane = thread % 32;
  // Offsets of this thread's codes and exponents inside a stage, for this warpgroup's first slab.
  const uint32_t codes_at = M::kTokenBytes + owner * 2 * kSlabCodeBytes + thread * 16;
  const uint32_t offsets_at = M::kTokenBytes + 4 * kSlabCodeBytes + owner * 2 * kSlabOffsetBytes + thread * 2;
  RingPosition<M::kStages> here;
  uint32_t chunk = 0;
  float total[2][kTokens / 2], partial[2][kTokens / 2];
  uint32_t operand[2][16];

  const auto multiply = [&](int slab, uint32_t place) {  // four products over 128 of K; `place` is the stage
    product_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint64_t tokens = swizzled_operand(swizzled_low(place) + 2 * step);
      if constexpr (M::kPacked)
        Fp8Product<kTokens>::rows_from_registers(partial[slab], &operand[slab][4 * step], tokens, step > 0);
      else
        Fp8Product<kTokens>::rows_from_shared(
            partial[slab],
            swizzled_operand(swizzled_low(place + M::kTokenBytes) + (owner * 2 + slab) * (kSlabRows * kBlock / 16) +
                             2 * step),
            tokens, step > 0);
    }
    product_commit();
  };
  const auto expand = [&](int slab, uint32_t place) {
    if constexpr (M::kPacked)
      expand_slab(operand[slab],
                  load_slab(place + codes_at + slab * kSlabCodeBytes, place + offsets_at + slab * kSlabOffsetBytes));
  };

  for_each_tile(p, [&](const Tile& tile) {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) total[0][i] = total[1][i] = 0.0f;
    barrier_wait(m.full(here.slot), here.parity);
    expand(0, m.stage(here.slot));

    for (int kb = 0; kb < p.k_blocks; ++kb) {
      const uint32_t slot = here.slot;
      const bool last = kb + 1 == p.k_blocks;
      const uint32_t scales = m.start + M::kScaleStart + ring_slot<2>(chunk) * M::kScaleBytes +
                              ((kb % kScaleChunk) * 2 + owner) * M::kScaleRow * 4 + (lane % 4) * 16;
      here = here.after(1);
      multiply(0, m.stage(slot));
      expand(1, m.stage(slot));
      multiply(1, m.stage(slot));
      if (kb % kScaleChunk == 0) barrier_wait(m.scales_full(ring_slot<2>(chunk)), ring_parity<2>(chunk));
      if (!last) {
        barrier_wait(m.full(here.slot), here.parity);
        product_wait<1>();  // slab 0's operand registers are free
        expand(0, m.stage(here.slot));
      }
      product_wait<0>();
      barrier_arrive(m.empty(slot));
      promote<kTokens>(total, partial, scales);
      if (kb % kScaleChunk == kScaleChunk - 1 || last) {
        barrier_arrive(m.scales_empty(ring_slot<2>(chunk)));
        ++chunk;
      }
    }
    if (p.low_rank.rank > 0)
      lora::add_to_columns<kTokens>(total, p.low_rank,
                                    {tile.group, p.n, tile.weight_tile * kRecordRows + owner * 2 * kSlabRows},
                                    tile.first_row, tile.rows, thread / 32, lane);
#pragma unroll
    for (int slab = 0; slab < 2; ++slab) stage_slab<kTokens>(m, total[slab], owner * 2 + slab, thread / 32, lane);
    group_barrier(1, kConsumers);
    if constexpr (kEpilogue == Epilogue::bf16)
      write_bf16(m, p, tile, owner * 128 + thread);
    else
      write_hidden<kConsumers>(m, p, tile, owner * 128 + thread);
    group_barrier(1, kConsumers);  // the staging area is free for the next tile
  });
}

template <int kTokens, WeightFormat kFormat, Epilogue kEpilogue, bool kAlone>
__global__ void __launch_bounds__(kThreads, Memory<kTokens, kFormat, kAlone>::kBlocks)
    narrow_kernel(const __grid_constant__ CUtensorMap tokens, const Problem p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using M = Memory<kTokens, kFormat, kAlone>;
  const M m{static_cast<uint32_t>(uniform(shared_address(shared)))};
  const int group = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) prefetch_map(&tokens), m.init_barriers();
  __syncthreads();

  if (group == 0) {
    give_registers<M::kProducerRegisters>();
    if (threadIdx.x == 0) feed(m, &tokens, p);
    wait_for_earlier_launches();
    if (threadIdx.x >= 32 && threadIdx.x < 64) prepare_scales<kTokens>(m, p, threadIdx.x % 32);
  } else {
    take_registers<M::kConsumerRegisters>();
    wait_for_earlier_launches();
    consume<kTokens, kEpilogue>(m, p, group - 1, threadIdx.x % 128);
  }
}

template <int kTokens, WeightFormat kFormat, bool kAlone>
void launch(Epilogue epilogue, int64_t tiles, const CUtensorMap& tokens, const Problem& p, cudaStream_t stream) {
  using M = Memory<kTokens, kFormat, kAlone>;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(M::kBlocks * multiprocessors(), tiles));
  launch_dependent(epilogue == Epilogue::bf16 ? narrow_kernel<kTokens, kFormat, Epilogue::bf16, kAlone>
                                              : narrow_kernel<kTokens, kFormat, Epilogue::swiglu, kAlone>,
                   {blocks, kThreads, M::kBytes}, stream, tokens, p);
}

template <int kTokens, bool kAlone>
void launch(WeightFormat format, Epilogue epilogue, int64_t tiles, const CUtensorMap& tokens, const Problem& p,
            cudaStream_t stream) {
  (format == WeightFormat::fp4 ? launch<kTokens, WeightFormat::fp4, kAlone>
                               : launch<kTokens, WeightFormat::fp8, kAlone>)(epilogue, tiles, tokens, p, stream);
}

}  // namespace

void launch_narrow(int width, const Weights& w, const Activations& a, Epilogue epilogue, int64_t tiles,
                   const Problem& p, cudaStream_t stream) {
  if (few_tiles(width, epilogue, tiles, p.k_blocks)) return launch_slabs(width, w, a, epilogue, tiles, p, stream);
  const CUtensorMap tokens = byte_matrix_map(a.values, a.rows, w.k, width);
  const bool alone = tiles <= multiprocessors();
  (width == 8    ? (alone ? launch<8, true> : launch<8, false>)
   : width == 16 ? (alone ? launch<16, true> : launch<16, false>)
                 : launch<64, true>)(w.format, epilogue, tiles, tokens, p, stream);
}

}  // namespace plumb::kernels::grouped_linear
