// The wide kernel: prefill and training, many rows a group. Persistent and warp-specialised; the activations ("tokens")
// are the 64-row operand of the tensor cores, the weights the 128 columns. Same bits as narrow.cu: the tensor cores do
// not care which operand is which.
//
// Why the tokens are rows here: a thread then needs two scales per product instead of a quarter of the columns, and
// converter warps expand each FP4 code once for up to 256 tokens, on issue slots that the two consumers leave free.
//
// A block of four warpgroups takes tiles of up to 256 tokens x 128 weight rows from a queue; with the SwiGLU epilogue a
// tile is a whole record row, and the block computes the 128 gates and then the 128 ups.
//   0: warp 0 takes tiles and feeds the rings of tokens and scales, warp 1 the ring of codes (copy engine)
//   0, 1: warps 2 to 7 convert: codes -> e4m3 in the 128-byte swizzle (FP8 weights go straight to the weight ring)
//   2, 3: consumers; number i owns the 64-token slabs i and i + 2, so that a half-filled tile stays balanced
// A slab's four products over 128 of K go to `partial`, which is then scaled and added to the slab's FP32 `total`.
// While one consumer does that, the other one's products keep the tensor cores busy.
#include <algorithm>

#include "kernels/grouped_linear/activation.cuh"
#include "kernels/grouped_linear/problem.cuh"
#include "kernels/grouped_linear/wide_parts.cuh"
#include "kernels/hopper/barrier.cuh"
#include "kernels/hopper/copy.cuh"
#include "kernels/hopper/tma.cuh"
#include "kernels/hopper/wgmma_fp8.cuh"
#include "kernels/launch.cuh"
#include "kernels/lora/staged.cuh"

namespace plumb::kernels::grouped_linear {
namespace {

using namespace hopper;

constexpr int kBlockRows = kRecordRows / 2;  // weight rows computed at a time
constexpr int kScaleChunk = kWideScaleBox;   // K blocks whose scales arrive together
constexpr int kStages = kQueueSlots;         // of codes and of weights

// What a tile's end adds: nothing; one adapter of a small rank, which is what training has and which waits in shared
// memory (lora/staged.cuh); adapters as rows name them, of any rank, read from memory.
enum class Adapter { none, staged, any };

// Shared memory by 32-bit addresses. Each consumer has its own ring of token slabs: it releases a slab as soon as its
// products are done and does not wait for the other consumer, and a tile of 128 tokens prefetches twice as far as one
// of 256. Two weight buffers would be too few for consumers that run half a block apart.
template <WeightFormat kFormat, Epilogue kEpilogue>
struct Memory {
  static constexpr bool kPacked = kFormat == WeightFormat::fp4;
  static constexpr int kParts = kEpilogue == Epilogue::swiglu ? 2 : 1;  // weight blocks of a tile
  static constexpr int kSlabSlots = kPacked ? 6 : 8;
  static constexpr int kSlabBytes = kSlabRows * kBlock;
  static constexpr int kCodeBytes = kPacked ? 2 * (kSlabCodeBytes + kSlabOffsetBytes) : 0;
  static constexpr int kWeightBytes = kBlockRows * kBlock;
  static constexpr int kTokenScaleBytes = kScaleChunk * kWideRows * 4;
  static constexpr int kScaleBytes = kTokenScaleBytes + 128;  // and the bases of the weight blocks
  static constexpr int kWarpOutputBytes = 16 * 128;           // 16 tokens x 64 weights in bf16
  static constexpr int kWeightStart = 2 * kSlabSlots * kSlabBytes;
  static constexpr int kCodeStart = kWeightStart + kStages * kWeightBytes;
  static constexpr int kScaleStart = kCodeStart + kStages * kCodeBytes;
  static constexpr int kOutputStart = kScaleStart + 2 * kScaleBytes;
  static constexpr int kTileStart = kOutputStart + 8 * kWarpOutputBytes;
  static constexpr int kBarrierStart = kTileStart + kStages * static_cast<int>(sizeof(Tile));
  static constexpr int kBarriers = 4 * kSlabSlots + 6 * kStages + 4;
  static constexpr int kFactorStart = kBarrierStart + 8 * kBarriers;  // the address of a staged adapter's factor
  static constexpr int kBytes = kFactorStart + 8;

  uint32_t start;
  __device__ __forceinline__ uint32_t barrier(int i) const { return start + kBarrierStart + 8 * i; }
  __device__ __forceinline__ uint32_t tokens_full(int owner, uint32_t i) const {
    return barrier(owner * kSlabSlots + i);
  }
  __device__ __forceinline__ uint32_t tokens_empty(int owner, uint32_t i) const {
    return barrier((2 + owner) * kSlabSlots + i);
  }
  __device__ __forceinline__ uint32_t codes_full(uint32_t i) const { return barrier(4 * kSlabSlots + i); }
  __device__ __forceinline__ uint32_t codes_empty(uint32_t i) const { return codes_full(kStages + i); }
  __device__ __forceinline__ uint32_t weights_full(uint32_t i) const { return codes_full(2 * kStages + i); }
  __device__ __forceinline__ uint32_t weights_empty(uint32_t i) const { return codes_full(3 * kStages + i); }
  __device__ __forceinline__ uint32_t queue_full(uint32_t i) const { return codes_full(4 * kStages + i); }
  __device__ __forceinline__ uint32_t queue_empty(uint32_t i) const { return codes_full(5 * kStages + i); }
  __device__ __forceinline__ uint32_t scales_full(uint32_t i) const { return codes_full(6 * kStages + i); }
  __device__ __forceinline__ uint32_t scales_empty(uint32_t i) const { return codes_full(6 * kStages + 2 + i); }

  // The chunk's token scales, [kWideRows][kScaleChunk], then the bases, [kScaleChunk].
  __device__ __forceinline__ uint32_t scales(uint32_t chunk) const {
    return start + kScaleStart + ring_slot<2>(chunk) * kScaleBytes;
  }

  __device__ void init_barriers() const {
    for (int i = 0; i < kSlabSlots; ++i)
      for (int owner = 0; owner < 2; ++owner)
        barrier_init(tokens_full(owner, i), 1), barrier_init(tokens_empty(owner, i), 4);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(codes_full(i), 1), barrier_init(codes_empty(i), 128);
      barrier_init(weights_full(i), kPacked ? 128 : 1), barrier_init(weights_empty(i), 8);
      barrier_init(queue_full(i), 1), barrier_init(queue_empty(i), 9 + (kPacked ? kConverters : 0));
    }
    for (int i = 0; i < 2; ++i) barrier_init(scales_full(i), 1), barrier_init(scales_empty(i), kWideConsumers);
    barrier_init_fence();
  }
};

// ---- One thread: takes tiles, and feeds both token rings and the scales --------------------------------------------
template <typename M>
__device__ __forceinline__ void feed_tokens(const M& m, const CUtensorMap* token_map, const CUtensorMap* scale_map,
                                            const Problem& p) {
  const int tile_count = *p.tile_count;
  const auto load_tile = [&](int i) { return i < tile_count ? p.tiles[i] : Tile{0, 0, 0, 0}; };
  RingPosition<M::kSlabSlots> position[2];
  uint32_t chunk = 0;
  Tile tile = load_tile(blockIdx.x);
  queue_publish(m, 0, tile);
  for (uint32_t item = 1; tile.rows > 0; ++item) {
    const int next_index = gridDim.x + atomicAdd(p.queue, 1);  // used a K block later: nobody waits for it
    Tile next;
    const int slabs = (tile.rows + kSlabRows - 1) / kSlabRows;
    for (int part = 0; part < M::kParts; ++part) {
      const float* bases =
          p.bases +
          (static_cast<size_t>(tile.group) * (p.n / kBlock) + tile.weight_tile * M::kParts + part) * p.block_stride;
      for (int kb = 0; kb < p.k_blocks; ++kb) {
        if (kb % kScaleChunk == 0) {
          const uint32_t full = m.scales_full(ring_slot<2>(chunk)), place = m.scales(chunk);
          const uint32_t base_bytes = min(kScaleChunk, p.block_stride - kb) * 4;
          barrier_wait(m.scales_empty(ring_slot<2>(chunk)), ring_parity<2>(chunk) ^ 1);
          barrier_arrive_expect(full, M::kTokenScaleBytes + base_bytes);
          copy_tensor_2d(place, scale_map, kb, tile.first_row, full);
          copy_bulk(place + M::kTokenScaleBytes, bases + kb, base_bytes, full);
          ++chunk;
        }
#pragma unroll
        for (int slab = 0; slab < kWideRows / kSlabRows; ++slab) {
          if (slab >= slabs) break;
          RingPosition<M::kSlabSlots>& here = position[slab & 1];
          const uint32_t full = m.tokens_full(slab & 1, here.slot);
          barrier_wait(m.tokens_empty(slab & 1, here.slot), here.parity ^ 1);
          barrier_arrive_expect(full, M::kSlabBytes);
          copy_tensor_2d(m.start + ((slab & 1) * M::kSlabSlots + here.slot) * M::kSlabBytes, token_map, kb * kBlock,
                         tile.first_row + slab * kSlabRows, full);
          here = here.after(1);
        }
        if (part == 0 && kb == 0) queue_publish(m, item, next = load_tile(next_index));
      }
    }
    tile = next;
  }
}

// ---- One thread: feeds the code ring (or, FP8, the weight ring), as far ahead as it can ----------------------------
template <typename M>
__device__ __forceinline__ void feed_weights(const M& m, const Problem& p) {
  constexpr int kRecord = M::kPacked ? kFp4RecordBytes : kFp8RecordBytes;
  uint32_t step = 0;
  for (uint32_t item = 0;; ++item) {
    const Tile tile = queue_read(m, item);
    queue_release(m, item, true);
    if (tile.rows == 0) return;
    for (int part = 0; part < M::kParts; ++part) {
      const int block = tile.weight_tile * M::kParts + part, half = block % 2;
      const uint8_t* record =
          p.records + (static_cast<size_t>(tile.group) * (p.n / kRecordRows) + block / 2) * p.k_blocks * kRecord;
      for (int kb = 0; kb < p.k_blocks; ++kb, ++step, record += kRecord) {
        const uint32_t slot = ring_slot<kStages>(step), free = ring_parity<kStages>(step) ^ 1;
        if constexpr (M::kPacked) {
          const uint32_t place = m.start + M::kCodeStart + slot * M::kCodeBytes, full = m.codes_full(slot);
          barrier_wait(m.codes_empty(slot), free);
          barrier_arrive_expect(full, M::kCodeBytes);
          copy_bulk(place, record + half * 2 * kSlabCodeBytes, 2 * kSlabCodeBytes, full);
          copy_bulk(place + 2 * kSlabCodeBytes, record + 4 * kSlabCodeBytes + half * 2 * kSlabOffsetBytes,
                    2 * kSlabOffsetBytes, full);
        } else {
          const uint32_t full = m.weights_full(slot);
          barrier_wait(m.weights_empty(slot), free);
          barrier_arrive_expect(full, M::kWeightBytes);
          copy_bulk(m.start + M::kWeightStart + slot * M::kWeightBytes, record + half * M::kWeightBytes,
                    M::kWeightBytes, full);
        }
      }
    }
  }
}

// ---- Six warps: codes -> e4m3. Unit u is strip u % 4 (16 rows of each slab) of K block u / 4 -----------------------
template <typename M>
__device__ __forceinline__ void convert(const M& m, const Problem& p, int converter, int lane) {
  const uint32_t codes_at = m.start + M::kCodeStart + kept(lane * 16);
  const uint32_t offsets_at = m.start + M::kCodeStart + 2 * kSlabCodeBytes + kept(lane * 2);
  // An operand register quadruple is four 8 x 16-byte matrices: rows 0-7 and 8-15 of the strip, bytes 0-15 and 16-31 of
  // 32 of K. This lane names row lane % 8 of matrix lane / 8.
  const uint32_t row_at =
      m.start + M::kWeightStart + kept((((lane / 8) & 1) * 8 + lane % 8) * 128 + (((lane / 16) ^ (lane % 8)) << 4));
  RawSlab raw[2];
  const auto fetch = [&](uint32_t unit) {  // a unit's codes to registers
    const uint32_t step = unit / 4, slot = ring_slot<kStages>(step), at = slot * M::kCodeBytes, strip = unit % 4;
    // A converter passes over a K block now and then. Codes may arrive out of order, so it must not take the slot's
    // previous, still empty use for this one: the four strips of that use have been read first.
    barrier_wait(m.codes_empty(slot), ring_parity<kStages>(step) ^ 1);
    barrier_wait(m.codes_full(slot), ring_parity<kStages>(step));
    raw[0] = load_slab(codes_at + at + strip * 512, offsets_at + at + strip * 64);
    raw[1] = load_slab(codes_at + at + strip * 512 + kSlabCodeBytes, offsets_at + at + strip * 64 + kSlabOffsetBytes);
  };
  uint32_t unit = converter, units = 0;  // both counted over all tiles
  for (uint32_t item = 0;; ++item) {
    const bool end = uniform(queue_read(m, item).rows) == 0;
    __syncwarp();
    queue_release(m, item, lane == 0);
    if (end) return;
    units += p.k_blocks * 4 * M::kParts;
    if (unit < units) fetch(unit);
    for (; unit < units; unit += kConverters) {
      const uint32_t step = unit / 4, slot = ring_slot<kStages>(step);
      const uint32_t place = row_at + slot * M::kWeightBytes + (unit % 4) * 16 * 128;
#pragma unroll
      for (int slab = 0; slab < 2; ++slab) {
        uint32_t operand[16];
        expand_slab(operand, raw[slab]);
        if (slab == 0) barrier_wait(m.weights_empty(slot), ring_parity<kStages>(step) ^ 1);
#pragma unroll
        for (int k_step = 0; k_step < 4; ++k_step)  // the swizzle is a XOR: a K step moves the offset by one
          store_matrices((place + slab * kSlabRows * 128) ^ (k_step << 5), operand[4 * k_step], operand[4 * k_step + 1],
                         operand[4 * k_step + 2], operand[4 * k_step + 3]);
      }
      barrier_arrive(m.codes_empty(slot));
      // Before the fence, which waits until the stores have drained: that hides the loads' latency.
      if (unit + kConverters < units) fetch(unit + kConverters);
      async_proxy_fence();
      barrier_arrive(m.weights_full(slot));
    }
  }
}

// ---- Epilogues of a consumer thread --------------------------------------------------------------------------------
// Of each of its four rows a thread holds 32 results, at places 32 q .. 32 q + 31 of the hidden units (place_of_row).
// The gates wait in `stash` (global memory that stays in L2) for the ups of the second part.
__device__ __forceinline__ void stash_gates(const float (&total)[2][64], int slabs, uint4* stash) {
#pragma unroll
  for (int slab = 0; slab < 2; ++slab) {
    if (slab >= slabs) break;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // row i / 4, places 8 (i % 4) ...
      const float* v = &total[slab][(i % 4) * 16 + (i / 4) * 2];
      stash[(slab * 8 + i) * kWideConsumers] =
          make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[4], v[5]), pack_bf16(v[8], v[9]), pack_bf16(v[12], v[13]));
    }
  }
}

__device__ __forceinline__ void write_hidden(const float (&total)[2][64], int slabs, const uint4* stash,
                                             const Problem& p, const Tile& tile, const Place& place) {
  const int quad = place.lane % 4;
#pragma unroll
  for (int slab = 0; slab < 2; ++slab) {
    if (slab >= slabs) break;
    uint4 gates[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) gates[i] = stash[(slab * 8 + i) * kWideConsumers];
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int token = place.first_row(slab) + place.lane / 4 + 8 * lower;
      const size_t row = tile.first_row + min(token, tile.rows - 1);
      const float weight = p.route_weight ? p.route_weight[row] : 1.0f;
      uint32_t hidden[16], largest = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const uint4& g = gates[lower * 4 + i / 4];
        const uint32_t gate = i % 4 == 0 ? g.x : i % 4 == 1 ? g.y : i % 4 == 2 ? g.z : g.w;
        const float* v = &total[slab][i * 4 + lower * 2];
        hidden[i] = swiglu_pair(gate, pack_bf16(v[0], v[1]), p.limit, weight);
        largest = max_magnitude(largest, hidden[i]);
      }
      float amax = largest_of_pair(largest);
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
      const float scale = fp8_scale(amax), inverse = inverse_of_power(scale);
      uint4* out = reinterpret_cast<uint4*>(p.hidden + row * (p.n / 2) + tile.weight_tile * kBlock + quad * 32);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t* h = &hidden[8 * i];
        const uint4 v = make_uint4(quantise_four(h[0], h[1], inverse), quantise_four(h[2], h[3], inverse),
                                   quantise_four(h[4], h[5], inverse), quantise_four(h[6], h[7], inverse));
        if (token < tile.rows) out[i] = v;
      }
      if (token < tile.rows && quad == 0) p.hidden_scales[row * p.hidden_stride + tile.weight_tile] = scale;
    }
  }
}

// ---- A consumer warpgroup ------------------------------------------------------------------------------------------
template <Epilogue kEpilogue, Adapter kAdapter, typename M>
__device__ __forceinline__ void consume(const M& m, const Problem& p, int owner, int thread) {
  const int warp = uniform(thread / 32), lane = thread % 32;
  // uniform() keeps these in registers; the compiler would derive them anew before each product.
  const uint32_t tokens_low = uniform(swizzled_low(m.start + owner * M::kSlabSlots * M::kSlabBytes));
  const uint32_t weights_low = uniform(swizzled_low(m.start + M::kWeightStart));
  const uint32_t my_tokens_full = uniform(m.tokens_full(owner, 0)), my_tokens_empty = uniform(m.tokens_empty(owner, 0));
  const uint32_t scales_at = kept((owner * kSlabRows + warp * 16 + lane / 4) * (kScaleChunk * 4));
  const bool speaker = kept(lane) == 0;
  // K blocks passed, over all tiles; `scale_step` skips to the next chunk at the end of a part, `step` does not.
  uint32_t step = 0, scale_step = 0;
  RingPosition<M::kSlabSlots> tokens;
  float total[2][64], partial[64];

  // Issues the products of one slab with one K block and fetches the scales of this thread's rows and of the weight
  // block.
  float upper, lower, base;
  const auto multiply = [&](int slab, RingPosition<M::kSlabSlots> at) {
    const uint32_t token_place = tokens_low + at.slot * (M::kSlabBytes / 16);
    const uint32_t weight_place = weights_low + ring_slot<kStages>(step) * (M::kWeightBytes / 16);
    const uint32_t chunk_place = m.scales(scale_step / kScaleChunk);
    const uint32_t scale_place =
        scales_at + chunk_place + (slab * 2 * kSlabRows * kScaleChunk + scale_step % kScaleChunk) * 4;
    product_fence();
#pragma unroll
    for (int k_step = 0; k_step < 4; ++k_step)
      Fp8Product<128>::rows_from_shared(partial, swizzled_operand(token_place + 2 * k_step),
                                        swizzled_operand(weight_place + 2 * k_step), k_step > 0);
    product_commit();
    base = load_shared_float(chunk_place + M::kTokenScaleBytes + scale_step % kScaleChunk * 4);
    upper = load_shared_float(scale_place) * base;
    lower = load_shared_float(scale_place + 8 * kScaleChunk * 4) * base;
  };
  const auto promote = [&](float(&sum)[64]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] = fmaf(partial[i], i & 2 ? lower : upper, sum[i]);
  };
  const auto wait_for_scales = [&](uint32_t next) {
    if (next % kScaleChunk == 0)
      barrier_wait(m.scales_full(ring_slot<2>(next / kScaleChunk)), ring_parity<2>(next / kScaleChunk));
  };
  const auto wait_for_weights = [&](uint32_t next) {
    barrier_wait(m.weights_full(ring_slot<kStages>(next)), ring_parity<kStages>(next));
  };
  const auto wait_for = [&](uint32_t next, uint32_t next_scale, RingPosition<M::kSlabSlots> next_tokens) {
    wait_for_scales(next_scale);
    barrier_wait(my_tokens_full + 8 * next_tokens.slot, next_tokens.parity);
    wait_for_weights(next);
  };
  const auto release_tokens = [&](RingPosition<M::kSlabSlots> at) {
    barrier_arrive_if(speaker, my_tokens_empty + 8 * at.slot);
  };
  const auto release_step = [&] {
    barrier_arrive_if(speaker, m.weights_empty(ring_slot<kStages>(step)));
    barrier_arrive_if(scale_step % kScaleChunk == kScaleChunk - 1,
                      m.scales_empty(ring_slot<2>(scale_step / kScaleChunk)));
  };

  // The corners in which results are staged serve low-rank factors until then.
  static_assert(lora::Staged::kCornerBytes == M::kWarpOutputBytes);
  const lora::Staged staged{m.start + M::kOutputStart + owner * 4 * M::kWarpOutputBytes};
  const auto outputs_of = [&](const Tile& tile, int part) {
    return lora::Outputs{tile.group, p.n, (tile.weight_tile * M::kParts + part) * kBlock};
  };

  for (uint32_t item = 0;; ++item) {
    const int rows = uniform(queue_read(m, item).rows);
    if (rows == 0) return;
    const int slabs = (rows > owner * kSlabRows) + (rows > (owner + 2) * kSlabRows);
    for (int part = 0; part < M::kParts; ++part) {
      if constexpr (kAdapter == Adapter::staged) {
        const Tile tile = queue_read(m, item);
        const Place place = fresh_place();
        const int row = place.first_row(place.lane / 16) + place.lane % 16;
        const uint64_t factor = static_cast<uint64_t>(load_shared_4(m.start + M::kFactorStart + 4)) << 32 |
                                load_shared_4(m.start + M::kFactorStart);
        lora::stage(p.low_rank, reinterpret_cast<const uint32_t*>(factor), outputs_of(tile, part), staged,
                    tile.first_row + min(row, tile.rows - 1), place.warp, place.lane);
      }
#pragma unroll
      for (int i = 0; i < 64; ++i) total[0][i] = total[1][i] = partial[i] = 0.0f;  // partial: dead in the epilogue
      if (slabs > 0) wait_for(step, scale_step, tokens);
      // The waits for the next K block and the releases of this one stand in the shadow of the last slab's products:
      // between the products of two slabs there is little more than the 64 additions. From issue to use, products must
      // stay inside one branch, or the compiler serialises them.
      for (const uint32_t end = step + p.k_blocks; step != end; ++step, ++scale_step) {
        const bool more = step + 1 != end;
        if (slabs == 2) {
          multiply(0, tokens);
          const RingPosition<M::kSlabSlots> second = tokens.after(1);
          barrier_wait(my_tokens_full + 8 * second.slot, second.parity);
          product_wait<0>();
          promote(total[0]);
          multiply(1, second);
          release_tokens(tokens);
          if (more) wait_for(step + 1, scale_step + 1, tokens.after(2));
          product_wait<0>();
          release_tokens(second);
          release_step();
          promote(total[1]);
        } else if (slabs == 1) {
          multiply(0, tokens);
          if (more) wait_for(step + 1, scale_step + 1, tokens.after(1));
          product_wait<0>();
          release_tokens(tokens);
          release_step();
          promote(total[0]);
        } else {  // nothing to do here, but the rings of weights and scales wait for both consumers
          wait_for_weights(step);
          wait_for_scales(scale_step);
          release_step();
        }
        tokens = tokens.after(slabs);
      }
      if (scale_step % kScaleChunk != 0) {  // a chunk that K ended early
        barrier_arrive(m.scales_empty(ring_slot<2>(scale_step / kScaleChunk)));
        scale_step += kScaleChunk - scale_step % kScaleChunk;
      }

      const Place place = fresh_place();
      if constexpr (kAdapter == Adapter::staged)
        lora::add_staged(total, partial, staged, 1 + owner, place.warp, place.lane);
      const Tile tile = queue_read(m, item);
      if constexpr (kAdapter == Adapter::any)
        add_low_rank<true>(total, slabs, p.low_rank, outputs_of(tile, part), tile, place);
      if constexpr (kEpilogue == Epilogue::bf16) {
        write_bf16(m, total, tile, place, p.out, p.n);
      } else {
        uint4* stash = p.stash + blockIdx.x * kStashVectors + owner * 128 + thread;
        if (part == 0)
          stash_gates(total, slabs, stash);
        else
          write_hidden(total, slabs, stash, p, tile, place);
      }
    }
    __syncwarp();
    queue_release(m, item, speaker);
  }
}

template <WeightFormat kFormat, Epilogue kEpilogue, Adapter kAdapter>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_kernel(const __grid_constant__ CUtensorMap tokens, const __grid_constant__ CUtensorMap scales,
                const Problem p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using M = Memory<kFormat, kEpilogue>;
  const M m{static_cast<uint32_t>(uniform(shared_address(shared)))};
  const int group = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) prefetch_map(&tokens), prefetch_map(&scales), m.init_barriers();
  if (kAdapter == Adapter::staged && threadIdx.x == 32) {
    const uint64_t factor = reinterpret_cast<uint64_t>(p.low_rank.factor[0]);
    store_shared_8(m.start + M::kFactorStart, static_cast<uint32_t>(factor), static_cast<uint32_t>(factor >> 32));
  }
  __syncthreads();

  if (group < 2) {
    give_registers<kHelperRegisters>();
    const int role = uniform(threadIdx.x / 32);
    if (threadIdx.x == 0)
      feed_tokens(m, &tokens, &scales, p);
    else if (threadIdx.x == 32)
      feed_weights(m, p);
    else if (M::kPacked && role >= 2)
      convert(m, p, role - 2, threadIdx.x % 32);
  } else {
    take_registers<kConsumerRegisters>();
    consume<kEpilogue, kAdapter>(m, p, group - 2, threadIdx.x % 128);
  }
}

template <WeightFormat kFormat, Epilogue kEpilogue>
void launch(int blocks, const CUtensorMap& tokens, const CUtensorMap& scales, const Problem& p, cudaStream_t stream) {
  const auto run = [&](auto kernel) {
    launch_with_shared(kernel, blocks, kWideThreads, Memory<kFormat, kEpilogue>::kBytes, stream, tokens, scales, p);
  };
  if (p.low_rank.rank == 0)
    run(wide_kernel<kFormat, kEpilogue, Adapter::none>);
  else if (lora::can_stage(p.low_rank))
    run(wide_kernel<kFormat, kEpilogue, Adapter::staged>);
  else
    run(wide_kernel<kFormat, kEpilogue, Adapter::any>);
}

}  // namespace

void launch_wide(WeightFormat format, Epilogue epilogue, int64_t tiles, int multiprocessors, const CUtensorMap& tokens,
                 const CUtensorMap& scales, const Problem& p, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(p.queue, 0, sizeof(int), stream), "grouped_linear: clearing the tile queue");
  const int blocks = static_cast<int>(std::min<int64_t>(multiprocessors, tiles));
  const bool fp4 = format == WeightFormat::fp4;
  if (epilogue == Epilogue::bf16)
    (fp4 ? launch<WeightFormat::fp4, Epilogue::bf16> : launch<WeightFormat::fp8, Epilogue::bf16>)(blocks, tokens,
                                                                                                  scales, p, stream);
  else
    (fp4 ? launch<WeightFormat::fp4, Epilogue::swiglu>
         : launch<WeightFormat::fp8, Epilogue::swiglu>)(blocks, tokens, scales, p, stream);
}

}  // namespace plumb::kernels::grouped_linear
