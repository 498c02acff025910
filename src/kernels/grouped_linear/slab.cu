// The slab kernel: decoding with so few tiles that the narrow kernel would leave multiprocessors idle (one token's six
// experts, a dense linear of few rows). A block has one tile's slab of 64 weight rows instead of all four, so the same
// work lies in four times as many pieces; three or four blocks share a multiprocessor. Same bits: a slab's products,
// their promotion and the epilogue are those of narrow.cu.
//
// The four blocks of a tile are a cluster. With SwiGLU each hands its results, gates or ups, to the first one through
// distributed shared memory; that one has the 128 hidden units that share a scale and finishes them.
// Warp 0 feeds the stages, warps 1 to 3 multiply all scales of the tile; warps 4 to 7 expand and compute: the codes of
// the next K block while the products of this one run.
#include "kernels/grouped_linear/narrow_parts.cuh"
#include "kernels/hopper/cluster.cuh"
#include "kernels/launch.cuh"

namespace plumb::kernels::grouped_linear {
namespace {

constexpr int kThreads = 256, kConsumers = 128, kScalers = 96;
constexpr int kSlabs = 4, kBlocksPerMultiprocessor = 4;  // slabs of a tile: a cluster
constexpr int kMostKBlocks = 64;

template <int kTokens, WeightFormat kFormat>
struct Memory {
  static constexpr bool kPacked = kFormat == WeightFormat::fp4;
  static constexpr int kStages = kTokens <= 8 ? (kPacked ? 7 : 5) : (kPacked ? 6 : 4);
  static constexpr int kTokenBytes = kTokens * kBlock;
  static constexpr int kSlabBytes = kPacked ? kSlabCodeBytes + kSlabOffsetBytes : kSlabRows * kBlock;
  static constexpr int kStageBytes = (kTokenBytes + kSlabBytes + 1023) / 1024 * 1024;  // which the swizzle needs
  static constexpr int kScaleRow = 16;                                                 // floats of a K block
  static constexpr int kOutputBytes = kTokens * 128;                                   // of a slab: 64 rows in bf16
  static constexpr int kScaleStart = kStages * kStageBytes;
  static constexpr int kOutputStart = kScaleStart + kMostKBlocks * kScaleRow * 4;
  static constexpr int kBarrierStart = kOutputStart + kSlabs * kOutputBytes;
  static constexpr int kBytes = kBarrierStart + 8 * (2 * kStages + 1);
  static_assert((kBytes + 1024) * kBlocksPerMultiprocessor <= 228 * 1024);

  uint32_t start;
  __device__ __forceinline__ uint32_t stage(uint32_t i) const { return start + i * kStageBytes; }
  __device__ __forceinline__ uint32_t full(uint32_t i) const { return start + kBarrierStart + 8 * i; }
  __device__ __forceinline__ uint32_t empty(uint32_t i) const { return full(kStages + i); }
  __device__ __forceinline__ uint32_t scales_full() const { return full(2 * kStages); }
  // As in narrow.cu: [slab][token] rows of 128 bytes, 16-byte chunks swizzled by the token.
  __device__ __forceinline__ uint32_t output(int slab, int token, int chunk) const {
    return start + kOutputStart + slab * kOutputBytes + token * 128 + ((chunk ^ (token & 7)) << 4);
  }

  __device__ void init_barriers() const {
    for (int i = 0; i < kStages; ++i) barrier_init(full(i), 1), barrier_init(empty(i), kConsumers);
    barrier_init(scales_full(), kScalers);
    barrier_init_fence();
  }
};

template <typename M>
__device__ __forceinline__ void feed(const M& m, const CUtensorMap* map, const Problem& p, const Tile& tile, int slab) {
  constexpr int kRecord = record_bytes(M::kPacked ? WeightFormat::fp4 : WeightFormat::fp8);
  const uint8_t* record =
      p.records + (static_cast<size_t>(tile.group) * (p.n / kRecordRows) + tile.weight_tile) * p.k_blocks * kRecord;
  RingPosition<M::kStages> here;
  for (int kb = 0; kb < p.k_blocks; ++kb, record += kRecord, here = here.after(1)) {
    const uint32_t full = m.full(here.slot), place = m.stage(here.slot) + M::kTokenBytes;
    barrier_wait(m.empty(here.slot), here.parity ^ 1);
    barrier_arrive_expect(full, M::kTokenBytes + M::kSlabBytes);
    if constexpr (M::kPacked) {
      copy_bulk(place, record + slab * kSlabCodeBytes, kSlabCodeBytes, full);
      copy_bulk(place + kSlabCodeBytes, record + 4 * kSlabCodeBytes + slab * kSlabOffsetBytes, kSlabOffsetBytes, full);
    } else {
      copy_bulk(place, record + slab * M::kSlabBytes, M::kSlabBytes, full);
    }
    copy_tensor_2d(m.stage(here.slot), map, kb * kBlock, tile.first_row, full);
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

// The slab's products; results as bf16 in the output area.
template <int kTokens, typename M>
__device__ __forceinline__ void consume(const M& m, const Problem& p, const Tile& tile, int slab, int thread) {
  const int lane = thread % 32;
  const uint32_t codes_at = M::kTokenBytes + thread * 16, offsets_at = M::kTokenBytes + kSlabCodeBytes + thread * 2;
  RingPosition<M::kStages> here;
  float total[1][kTokens / 2], partial[1][kTokens / 2];
  uint32_t operand[2][16];  // of this K block, of the next
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) total[0][i] = 0.0f;

  const auto expand = [&](uint32_t(&to)[16]) {
    const uint32_t place = m.stage(here.slot);
    barrier_wait(m.full(here.slot), here.parity);
    if constexpr (M::kPacked) expand_slab(to, load_slab(place + codes_at, place + offsets_at));
  };
  expand(operand[0]);
  barrier_wait(m.scales_full(), 0);
  for (int first = 0; first < p.k_blocks; first += 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int kb = first + i;
      if (kb >= p.k_blocks) break;
      const uint32_t slot = here.slot, place = m.stage(slot);
      here = here.after(1);
      product_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint64_t tokens = swizzled_operand(swizzled_low(place) + 2 * step);
        if constexpr (M::kPacked)
          Fp8Product<kTokens>::rows_from_registers(partial[0], &operand[i][4 * step], tokens, step > 0);
        else
          Fp8Product<kTokens>::rows_from_shared(
              partial[0], swizzled_operand(swizzled_low(place + M::kTokenBytes) + 2 * step), tokens, step > 0);
      }
      product_commit();
      if (kb + 1 < p.k_blocks) expand(operand[i ^ 1]);
      product_wait<0>();
      barrier_arrive(m.empty(slot));
      promote<kTokens>(total, partial, m.start + M::kScaleStart + kb * M::kScaleRow * 4 + lane % 4 * 16);
    }
  }
  if (p.low_rank.rank > 0)
    lora::add_to_columns<kTokens>(total, p.low_rank,
                                  {tile.group, p.n, tile.weight_tile * kRecordRows + slab * kSlabRows}, tile.first_row,
                                  tile.rows, thread / 32, lane);
  stage_slab<kTokens>(m, total[0], slab, thread / 32, lane);
  group_barrier(1, kConsumers);
}

template <int kTokens, WeightFormat kFormat, Epilogue kEpilogue>
__global__ void __cluster_dims__(kSlabs, 1, 1) __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    slab_kernel(const __grid_constant__ CUtensorMap tokens, const Problem p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using M = Memory<kTokens, kFormat>;
  const M m{static_cast<uint32_t>(uniform(shared_address(shared)))};
  const int index = blockIdx.x / kSlabs, slab = static_cast<int>(cluster_rank());
  const Tile tile = p.tiles[index];  // before the count is known: the list has room for as many tiles as clusters
  if (threadIdx.x == 0) prefetch_map(&tokens), m.init_barriers();
  if (index >= *p.tile_count) return;  // the whole cluster
  __syncthreads();
  if (kEpilogue == Epilogue::swiglu) cluster_arrive_relaxed();  // this block runs: its memory may be written

  const int thread = threadIdx.x % 128;
  if (uniform(threadIdx.x / 128) == 0) {
    give_registers<40>();
    if (thread == 0)
      feed(m, &tokens, p, tile, slab);
    else if (thread >= 128 - kScalers)
      prepare_scales<kTokens>(m, p, tile, slab, thread - (128 - kScalers));
    __syncwarp();
    if (kEpilogue == Epilogue::swiglu) cluster_wait(), cluster_arrive_relaxed(), cluster_wait();
  } else {
    take_registers<88>();
    consume<kTokens>(m, p, tile, slab, thread);
    const int token = thread / 8, chunk = thread % 8;  // 16 bytes of a token's 128
    if constexpr (kEpilogue == Epilogue::bf16) {
      if (token < tile.rows)
        *reinterpret_cast<uint4*>(p.out + static_cast<size_t>(tile.first_row + token) * p.n +
                                  tile.weight_tile * kRecordRows + slab * kSlabRows + chunk * 8) =
            load_shared_16(m.output(slab, token, chunk));
    } else {
      const uint32_t at = m.output(slab, token, chunk);
      cluster_wait();
      if (slab != 0 && token < tile.rows) store_16_at(at, 0, load_shared_16(at));
      cluster_sync();
      if (slab == 0) write_hidden<kConsumers>(m, p, tile, thread);
    }
  }
}

template <int kTokens, WeightFormat kFormat>
void launch(Epilogue epilogue, int64_t tiles, const CUtensorMap& tokens, const Problem& p, cudaStream_t stream) {
  launch_with_shared(epilogue == Epilogue::bf16 ? slab_kernel<kTokens, kFormat, Epilogue::bf16>
                                                : slab_kernel<kTokens, kFormat, Epilogue::swiglu>,
                     static_cast<int>(tiles) * kSlabs, kThreads, Memory<kTokens, kFormat>::kBytes, stream, tokens, p);
}

}  // namespace

// Tiles that the narrow kernel could not give to each multiprocessor, or barely: three slabs on the fullest one instead
// of four. With SwiGLU the meeting of the slabs costs what that gains; there each slab must have a multiprocessor.
bool few_tiles(int width, Epilogue epilogue, int64_t tiles, int k_blocks, int multiprocessors) {
  const int slabs_each = epilogue == Epilogue::swiglu ? 1 : 3;
  return width <= 16 && tiles * kSlabs <= slabs_each * multiprocessors && k_blocks <= kMostKBlocks;
}

void launch_slabs(int width, WeightFormat format, Epilogue epilogue, int64_t tiles, const CUtensorMap& tokens,
                  const Problem& p, cudaStream_t stream) {
  const bool fp4 = format == WeightFormat::fp4;
  if (width == 8)
    (fp4 ? launch<8, WeightFormat::fp4> : launch<8, WeightFormat::fp8>)(epilogue, tiles, tokens, p, stream);
  else
    (fp4 ? launch<16, WeightFormat::fp4> : launch<16, WeightFormat::fp8>)(epilogue, tiles, tokens, p, stream);
}

}  // namespace plumb::kernels::grouped_linear
