// The slab kernel: decoding with so few tiles that the narrow kernel would leave multiprocessors idle (fc2 of one
// token's six experts, a dense linear of few rows). A block has one tile's slab of 64 weight rows instead of all four,
// so the same work lies in four times as many pieces; up to three blocks share a multiprocessor. Same bits: a slab's
// products, their promotion and the epilogue are those of narrow.cu.
//
// With SwiGLU the four blocks of a tile are a cluster: each sends its results, gates or ups, into the first one's
// shared memory; that one has the 128 hidden units that share a scale and finishes them.
// Warp 0 feeds the stages, warps 1 to 3 multiply all scales of the tile; warps 4 to 7 compute: while the products of
// one K block run, the sums of the block before are promoted and the codes of the next one expanded.
#include <algorithm>

#include "kernels/device.h"
#include "kernels/grouped_linear/narrow_parts.cuh"
#include "kernels/hopper/cluster.cuh"
#include "kernels/launch.cuh"

namespace plumb::kernels::grouped_linear {
namespace {

constexpr int kThreads = 256, kConsumers = 128, kScalers = 96;
constexpr int kSlabs = 4;                    // of a tile
constexpr int kBlocksPerMultiprocessor = 3;  // 384 slabs of six experts are then as even as they can be
constexpr int kLeastBytes = 57 * 1024;       // more than a quarter of a multiprocessor's
constexpr int kMostKBlocks = 64;

template <int kTokens, WeightFormat kFormat>
struct Memory {
  static constexpr bool kPacked = kFormat == WeightFormat::fp4;
  // K blocks of a stage. FP4: two, since a copy costs its engine some 60 cycles, whatever its size.
  static constexpr int kTogether = kPacked ? 2 : 1;
  static constexpr int kStages = kPacked ? 4 : kTokens <= 8 ? 7 : 6;
  // Of a K block.
  static constexpr int kTokenBytes = kTokens * kBlock;
  static constexpr int kCodeBytes = kPacked ? kSlabCodeBytes : kSlabRows * kBlock;
  static constexpr int kOffsetBytes = kPacked ? kSlabOffsetBytes : 0;
  // Of a stage: the tokens of its K blocks, their codes, their exponent offsets.
  static constexpr int kCodeStart = kTogether * kTokenBytes, kOffsetStart = kCodeStart + kTogether * kCodeBytes;
  static constexpr int kStageBytes = kOffsetStart + kTogether * kOffsetBytes;
  static constexpr int kStageStep = (kStageBytes + 1023) / 1024 * 1024;  // which the swizzle needs
  static constexpr int kScaleRow = 16;                                   // floats of a K block
  static constexpr int kOutputBytes = kTokens * 128;                     // of a slab: 64 rows in bf16
  static constexpr int kScaleStart = kStages * kStageStep;
  static constexpr int kOutputStart = kScaleStart + kMostKBlocks * kScaleRow * 4;
  static constexpr int kBarrierStart = kOutputStart + kSlabs * kOutputBytes;
  static constexpr int kBytes = kBarrierStart + 8 * (2 * kStages + 2);
  static_assert((kBytes + 1024) * kBlocksPerMultiprocessor <= 228 * 1024);

  uint32_t start;
  __device__ __forceinline__ uint32_t stage(uint32_t i) const { return start + i * kStageStep; }
  __device__ __forceinline__ uint32_t full(uint32_t i) const { return start + kBarrierStart + 8 * i; }
  __device__ __forceinline__ uint32_t empty(uint32_t i) const { return full(kStages + i); }
  __device__ __forceinline__ uint32_t scales_full() const { return full(2 * kStages); }
  __device__ __forceinline__ uint32_t slabs_met() const { return full(2 * kStages + 1); }
  // As in narrow.cu: [slab][token] rows of 128 bytes, 16-byte chunks swizzled by the token.
  __device__ __forceinline__ uint32_t output(int slab, int token, int chunk) const {
    return start + kOutputStart + slab * kOutputBytes + token * 128 + ((chunk ^ (token & 7)) << 4);
  }

  __device__ void init_barriers() const {
    for (int i = 0; i < kStages; ++i) barrier_init(full(i), 1), barrier_init(empty(i), kConsumers);
    barrier_init(scales_full(), kScalers), barrier_init(slabs_met(), 1);
    barrier_init_fence();
  }
};

// What the copies see. A box: kTogether K blocks of a tile's rows; the same K blocks of a slab's codes, or FP8 values,
// in pieces of kPieceBytes; of a slab's exponent offsets.
constexpr int kPieceBytes = 2048;
struct Maps {
  CUtensorMap tokens, codes, offsets;
};
template <int kTogether>
Maps maps_of(const Weights& w, const Activations& a, int width) {
  const bool packed = w.format == WeightFormat::fp4;
  const auto k_blocks = static_cast<cuuint64_t>(w.k / kBlock), record = static_cast<cuuint64_t>(record_bytes(w.format));
  const cuuint64_t records = k_blocks * (w.n / kRecordRows) * w.groups;
  const cuuint32_t together = kTogether, slab_bytes = packed ? kSlabCodeBytes : kSlabRows * kBlock;
  Maps maps;
  maps.tokens = tensor_map(a.values, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                           {3,
                            {kBlock, static_cast<cuuint64_t>(a.rows), k_blocks},
                            {static_cast<cuuint64_t>(w.k), kBlock},
                            {kBlock, static_cast<cuuint32_t>(width), together}},
                           CU_TENSOR_MAP_SWIZZLE_128B);
  const auto weights = [&](const uint8_t* first, cuuint32_t piece, cuuint32_t pieces) {  // of a slab
    return tensor_map(
        first, CU_TENSOR_MAP_DATA_TYPE_UINT64,
        {3, {piece / 8, cuuint64_t{kSlabs} * pieces, records}, {piece, record}, {piece / 8, pieces, together}},
        CU_TENSOR_MAP_SWIZZLE_NONE);
  };
  maps.codes = weights(w.records, kPieceBytes, slab_bytes / kPieceBytes);
  maps.offsets = packed ? weights(w.records + kSlabs * kSlabCodeBytes, kSlabOffsetBytes, 1) : maps.codes;
  return maps;
}

// Fills the stages. The weights of the first ones are on their way before the tokens exist: see launch_dependent. A
// last stage may hold a K block that is not the tile's, and is not used.
template <typename M>
__device__ __forceinline__ void feed(const M& m, const Maps& maps, const Problem& p, const Tile& tile, int slab) {
  const int record = (tile.group * (p.n / kRecordRows) + tile.weight_tile) * p.k_blocks;
  const int stages = (p.k_blocks + M::kTogether - 1) / M::kTogether;
  const auto send_weights = [&](int number, uint32_t slot) {
    const uint32_t full = m.full(slot), place = m.stage(slot);
    constexpr int kPieces = M::kCodeBytes / kPieceBytes;
    barrier_arrive_expect(full, M::kStageBytes);
    copy_tensor_3d(place + M::kCodeStart, &maps.codes, 0, slab * kPieces, record + number * M::kTogether, full);
    if constexpr (M::kPacked)
      copy_tensor_3d(place + M::kOffsetStart, &maps.offsets, 0, slab, record + number * M::kTogether, full);
  };
  const int ahead = p.settled ? min(M::kStages, stages) : 0;
  for (int i = 0; i < ahead; ++i) send_weights(i, i);
  wait_for_earlier_launches();
  let_next_launch_begin();

  RingPosition<M::kStages> here;
  for (int i = 0; i < stages; ++i, here = here.after(1)) {
    if (i >= ahead) {
      barrier_wait(m.empty(here.slot), here.parity ^ 1);
      send_weights(i, here.slot);
    }
    copy_tensor_3d(m.stage(here.slot), &maps.tokens, 0, tile.first_row, i * M::kTogether, m.full(here.slot));
  }
}

// Token scale * weight base of all K blocks, in the order in which the consumers read.
template <int kTokens, typename M>
__device__ __forceinline__ void prepare_scales(const M& m, const Problem& p, const Tile& tile, int slab, int thread) {
  const float* bases =
      p.bases + (static_cast<size_t>(tile.group) * (p.n / kBlock) + tile.weight_tile * 2 + slab / 2) * p.block_stride;
#pragma unroll 4
  for (int i = thread; i < p.k_blocks * kTokens; i += kScalers) {
    const int kb = i % p.k_blocks, token = i / p.k_blocks, row = tile.first_row + min(token, tile.rows - 1);
    store_shared_float(m.start + M::kScaleStart + (kb * M::kScaleRow + scale_place(token)) * 4,
                       p.token_scales[static_cast<size_t>(row) * p.block_stride + kb] * bases[kb]);
  }
  barrier_arrive(m.scales_full());
}

// The slab's products; results as bf16 in the output area. While those of one K block run, the sums of the block before
// are promoted and the codes of the next one expanded.
template <int kTokens, typename M>
__device__ __forceinline__ void consume(const M& m, const Problem& p, const Tile& tile, int slab, int thread) {
  const int lane = thread % 32;
  RingPosition<M::kStages> here;                            // of the K block that is multiplied next
  uint32_t done = 0;                                        // the slot whose stage is given back next
  float total[1][kTokens / 2], partial[2][1][kTokens / 2];  // of an even K block, of an odd one
  uint32_t operand[2][16];
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) total[0][i] = partial[0][0][i] = partial[1][0][i] = 0.0f;

  const auto expand = [&](int i) {
    const uint32_t place = m.stage(here.slot), within = i % M::kTogether;
    if (within == 0) barrier_wait(m.full(here.slot), here.parity);
    if constexpr (M::kPacked)
      expand_slab(operand[i], load_slab(place + M::kCodeStart + within * M::kCodeBytes + thread * 16,
                                        place + M::kOffsetStart + within * M::kOffsetBytes + thread * 2));
  };
  const auto multiply = [&](int i) {
    const uint32_t place = m.stage(here.slot), within = i % M::kTogether;
    product_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint64_t tokens = swizzled_operand(swizzled_low(place + within * M::kTokenBytes) + 2 * step);
      if constexpr (M::kPacked)
        Fp8Product<kTokens>::rows_from_registers(partial[i][0], &operand[i][4 * step], tokens, step > 0);
      else
        Fp8Product<kTokens>::rows_from_shared(
            partial[i][0], swizzled_operand(swizzled_low(place + M::kCodeStart + within * M::kCodeBytes) + 2 * step),
            tokens, step > 0);
    }
    product_commit();
  };
  const auto finish = [&](int i,
                          int kb) {  // after a wait; the sums are not read before the scales, and these not early
    if (i % M::kTogether == M::kTogether - 1) {
      barrier_arrive(m.empty(done));
      done = done + 1 == M::kStages ? 0 : done + 1;
    }
    promote<kTokens>(total, partial[i], m.start + M::kScaleStart + kb * M::kScaleRow * 4 + lane % 4 * 16);
  };

  const auto go_on = [&](int i, int kb) {  // K block kb, at i, is being multiplied: the next one's operand
    if ((i + 1) % M::kTogether == 0) here = here.after(1);
    if (kb + 1 < p.k_blocks) expand(i ^ 1);
  };
  const auto step = [&](int i, int kb) {
    multiply(i);
    product_wait<1>();
    finish(i ^ 1, kb - 1);
    go_on(i, kb);
  };
  const auto end = [&](int i) {
    product_wait<0>();
    finish(i, p.k_blocks - 1);
  };
  expand(0);
  barrier_wait(m.scales_full(), 0);
  multiply(0);
  go_on(0, 0);
  int kb = 1;
  for (; kb + 1 < p.k_blocks; kb += 2) step(1, kb), step(0, kb + 1);
  if (kb < p.k_blocks) {
    step(1, kb);
    end(1);
  } else {
    end(0);
  }
  if (p.low_rank.rank > 0)
    lora::add_to_columns<kTokens>(total, p.low_rank,
                                  {tile.group, p.n, tile.weight_tile * kRecordRows + slab * kSlabRows}, tile.first_row,
                                  tile.rows, thread / 32, lane);
  stage_slab<kTokens>(m, total[0], slab, thread / 32, lane);
  group_barrier(1, kConsumers);
}

// The first block of the cluster receives the gates and ups of the others, and finishes the hidden units.
template <typename M>
__device__ __forceinline__ void meet(const M& m, const Problem& p, const Tile& tile, int slab, int thread) {
  const int token = thread / 8, chunk = thread % 8;  // 16 bytes of a token's 128
  const uint32_t at = m.output(slab, token, chunk);
  if (slab != 0) {
    if (token < tile.rows) send_16(at, 0, load_shared_16(at), m.slabs_met());
    return;
  }
  if (thread == 0) barrier_arrive_expect(m.slabs_met(), (kSlabs - 1) * tile.rows * 128);
  barrier_wait_cluster(m.slabs_met(), 0);
  write_hidden<kConsumers>(m, p, tile, thread);
}

template <typename M>
__device__ __forceinline__ void write_bf16(const M& m, const Problem& p, const Tile& tile, int slab, int thread) {
  const int token = thread / 8, chunk = thread % 8;
  if (token < tile.rows)
    *reinterpret_cast<uint4*>(p.out + static_cast<size_t>(tile.first_row + token) * p.n +
                              tile.weight_tile * kRecordRows + slab * kSlabRows + chunk * 8) =
        load_shared_16(m.output(slab, token, chunk));
}

template <int kTokens, WeightFormat kFormat, Epilogue kEpilogue>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    slab_kernel(const __grid_constant__ Maps maps, const Problem p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using M = Memory<kTokens, kFormat>;
  const M m{static_cast<uint32_t>(uniform(shared_address(shared)))};
  const int index = blockIdx.x / kSlabs, slab = blockIdx.x % kSlabs;
  if (threadIdx.x == 0) prefetch_map(&maps.codes), prefetch_map(&maps.tokens), m.init_barriers();
  if (!p.settled) wait_for_earlier_launches();
  const Tile tile = p.tiles[index];  // before the count is known: the list has room for as many tiles as clusters
  if (index >= *p.tile_count) {      // the whole cluster
    wait_for_earlier_launches();
    return;
  }
  __syncthreads();
  if (kEpilogue == Epilogue::swiglu) cluster_arrive_relaxed();  // this block runs: its memory may be written

  const int thread = threadIdx.x % 128;
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<40>();
    if (thread == 0) feed(m, maps, p, tile, slab);
    wait_for_earlier_launches();
    if (thread >= 128 - kScalers) prepare_scales<kTokens>(m, p, tile, slab, thread - (128 - kScalers));
    __syncwarp();
    if (kEpilogue == Epilogue::swiglu) cluster_wait();
  } else {
    take_registers<120>();
    wait_for_earlier_launches();
    consume<kTokens>(m, p, tile, slab, thread);
    if constexpr (kEpilogue == Epilogue::bf16) {
      write_bf16(m, p, tile, slab, thread);
    } else {
      cluster_wait();
      meet(m, p, tile, slab, thread);
    }
  }
}

template <int kTokens, WeightFormat kFormat>
void launch(const Weights& w, const Activations& a, Epilogue epilogue, int64_t tiles, const Problem& p,
            cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(tiles) * kSlabs;
  constexpr int kBytes = std::max(Memory<kTokens, kFormat>::kBytes, kLeastBytes);
  const Maps maps = maps_of<Memory<kTokens, kFormat>::kTogether>(w, a, kTokens);
  if (epilogue == Epilogue::bf16)
    launch_dependent(slab_kernel<kTokens, kFormat, Epilogue::bf16>, {blocks, kThreads, kBytes}, stream, maps, p);
  else
    launch_dependent(slab_kernel<kTokens, kFormat, Epilogue::swiglu>, {blocks, kThreads, kBytes, kSlabs}, stream, maps,
                     p);
}

}  // namespace

// Up to three slabs for each multiprocessor: as even as tiles of 256 rows, or better.
bool few_tiles(int width, Epilogue epilogue, int64_t tiles, int k_blocks) {
  const int slabs_each = epilogue == Epilogue::swiglu ? 1 : kBlocksPerMultiprocessor;
  return width <= 16 && tiles * kSlabs <= slabs_each * multiprocessors() && k_blocks <= kMostKBlocks;
}

void launch_slabs(int width, const Weights& w, const Activations& a, Epilogue epilogue, int64_t tiles, const Problem& p,
                  cudaStream_t stream) {
  const bool fp4 = w.format == WeightFormat::fp4;
  if (width == 8)
    (fp4 ? launch<8, WeightFormat::fp4> : launch<8, WeightFormat::fp8>)(w, a, epilogue, tiles, p, stream);
  else
    (fp4 ? launch<16, WeightFormat::fp4> : launch<16, WeightFormat::fp8>)(w, a, epilogue, tiles, p, stream);
}

}  // namespace plumb::kernels::grouped_linear
