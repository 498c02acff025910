// Sparse attention backward, the main kernel: dq, and dkv summed in 32-bit fixed point by bulk integer reductions into
// memory, whose order cannot matter. backward_parts.cuh has the small kernels around it (choice of the scale, d_sink).
//
// One persistent CTA an SM takes every gridDim.x-th item; four warpgroups. A block of 64 keys:
//   1. Warpgroup 0 makes S = Q K^T, warpgroup 1 dP = dO K^T (64 heads x 64 keys each). Warpgroup 0 leaves
//      P = exp(S - lse) in shared memory as two bf16 (value and rest), warpgroup 1 makes dS = P (dP - D) scale of them.
//      Both lie there as bf16 [key][head] in the end.
//   2. Twice, for the left and the right half of the columns: dkv = P^T dO + dS^T Q (64 keys x 128 columns a
//      warpgroup), converted to fixed point, staged in shared memory, added to memory row by row.
//   3. dq += dS K, 256 columns a warpgroup, in registers for the whole item, while the left half of dkv is converted.
// Warpgroup 2 gathers the next keys as soon as dq is made, and the next item's q and d_o by halves. Warpgroup 3 adds.
//
// The additions take longest, so the rest is arranged around keeping them going. A half of dkv is staged in two parts
// of eight rows by each of four pairs of warps (one of each group), and each pair has an adding warp (issuing an
// addition blocks while the unit is busy). Shared memory is full, so parts lie where something has been read for the
// last time:
//            pairs 0, 1                                pairs 2, 3
//   left     slots, beside dq; the right half of the   the right half of the keys; slots, after pairs 0, 1
//            keys, after dq
//   right    P and dS, both parts                      slots, both parts
// A part waits for the one before it in its place, and for nothing that comes after the next product: all four warps of
// a group must be there for it.
#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "kernels/device.h"
#include "kernels/hopper/code.cuh"
#include "kernels/hopper/mma.cuh"
#include "kernels/portable/attention.h"
#include "kernels/sparse_attention/backward_parts.cuh"

namespace plumb::kernels {
namespace attention {
namespace {

using namespace hopper;

constexpr int kThreads = 512, kConsumers = 256, kGatherers = 128;
constexpr int kPartRow = kDim / 2 * 4;             // half of a dkv row
constexpr int kPartStride = kPartRow + 32;         // rows start at different banks
constexpr int kSlot = 7 * kPartStride + kPartRow;  // eight half rows

struct Shared {
  alignas(1024) uint8_t q[2][kHalfBytes];  // [column half]
  uint8_t d_o[2][kHalfBytes];
  uint8_t keys[2][kHalfBytes];                // [column half]; the right one has four slots too, which are
  uint8_t more_keys[4 * kSlot - kHalfBytes];  // a little more
  uint64_t inputs_empty[2];                   // [column half] q and d_o; they come with the item's first keys
  uint64_t keys_full[2], keys_empty[2];       // [column half]
  uint64_t weights_empty, slots_empty;        // P and dS, and `slots`, after the block's last part
  uint64_t slot_empty[4];                     // [pair of warps] the place of its right upper part; before that, in
                                              // pairs 2 and 3, of their left lower one
  uint64_t lent_empty;                        // `slots`, after the left upper part of pairs 0 and 1
  uint16_t present[4];                        // bit k of word w: entry 16 w + k of the block is a key
  int index[2];                               // [block parity] the block's item; its complement in the last block
  float fixed_scale;                          // power of two
  alignas(1024) uint8_t p[kPanelBytes];       // [key][head], bf16
  uint8_t ds[kPanelBytes];                    // the two together have two slots, which are
  uint8_t more_weights[2 * kSlot - 2 * kPanelBytes];  // a little more
  uint8_t slots[2][kSlot];
  float delta[kTileHeads], lse2[kTileHeads];  // D of the item, and lse in log2 units
  uint32_t largest[2][kBlock];                // [block parity] of each key's terms, bits; NaN if one is NaN
  uint64_t part_full[4][4];                   // [pair of warps][column half, upper or lower rows] these are staged
};
static_assert(offsetof(Shared, p) == 6 * kHalfBytes + 1024 && sizeof(Shared) <= 232448);

// Where a part of dkv is staged: eight half rows of a pair of warps.
__device__ __forceinline__ uint32_t slot_of(const Shared& s, int half, int lower, int pair) {
  if (half == 0 && (lower == 0) == (pair >= 2)) return shared_address(s.keys[1]) + pair * kSlot;
  if (half == 1 && pair < 2) return shared_address(s.p) + pair * kSlot;
  return shared_address(s.slots[pair & 1]);
}

// Which items a CTA takes; passed to the kernel, where a parameter takes no register.
struct Items {
  int count, tiles, stride;  // every stride-th of `count` items, `tiles` a query
};

// The blocks of a CTA's items, one after the other. An item without keys has one block without keys.
struct Walk {
  int index, position, end;  // the item, where the block begins in `lists.row`, where the item's list ends

  __device__ void start(const KeyLists& lists, const Items& items, int first) {
    index = first;
    const Item item = item_at(lists, items.tiles, first);
    position = item.first;
    end = item.first + item.length;
  }
  __device__ bool last() const { return position + kBlock >= end; }  // of its item
  // False after the last of all.
  __device__ bool advance(const KeyLists& lists, const Items& items) {
    if (!last()) {
      position += kBlock;
      return true;
    }
    const int next = index + static_cast<int>(gridDim.x) * items.stride;
    if (next >= items.count) return false;
    start(lists, items, next);
    return true;
  }
  __device__ int entry(const KeyLists& lists, int at) const {
    return position + at < end ? __ldg(lists.row + position + at) : -1;
  }
};

// ---- warpgroup 2 ----

// Keys, and q and d_o; a quarter of the rows a warp. 32 registers: values are made again where they are used.
struct Gatherer {
  Shared& s;
  const SparseAttentionBackward& p;

  static __device__ int lane() { return fresh_thread_index() & 31; }
  static __device__ int warp() { return fresh_thread_index() >> 5 & 3; }
  static __device__ int mine() {  // the row of the block whose list entry this lane has
    const int thread = fresh_thread_index();
    return (thread >> 5 & 3) * 16 + (thread & 15);
  }

  __device__ void load_inputs(int index, int half) {
#pragma unroll 1
    for (int which = 0; which < 2; ++which)
      copy_rows<16>(which ? s.d_o[half] : s.q[half], warp() * 16,
                    static_cast<const uint8_t*>(which ? p.d_o : p.q) + static_cast<size_t>(index) * kTileBytes +
                        half * (kRowBytes / 2) + warp() * 16 * kRowBytes,
                    lane());
  }
  __device__ void gather_keys(int entry, int half) {  // entry: of row mine()
    gather_rows<16>(s.keys[half], warp() * 16, static_cast<const uint8_t*>(p.kv) + half * (kRowBytes / 2), entry,
                    lane());
  }

  __device__ void run(const Items& items) {
    uint32_t parity = 0, item_parity = 0;
    bool first = true;
    Walk walk;
    walk.start(p.lists, items, blockIdx.x * items.stride);
    do {
      const int entry = walk.entry(p.lists, mine());
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        barrier_wait(&s.keys_empty[half], parity ^ 1);
        gather_keys(entry, half);
        if (half == 1) {
          const uint32_t present = __ballot_sync(~0u, entry >= 0);
          if (lane() == 0) {
            s.present[warp()] = static_cast<uint16_t>(present);
            s.index[parity] = walk.last() ? ~walk.index : walk.index;
          }
          publish<0>(&s.keys_full[0]);  // all that is committed: the left half
        }
        if (first) {
          barrier_wait(&s.inputs_empty[half], item_parity ^ 1);
          load_inputs(walk.index, half);
        }
        copy_commit();
      }
      publish<0>(&s.keys_full[1]);
      parity ^= 1;
      item_parity ^= first;
      first = walk.last();
    } while (walk.advance(p.lists, items));
  }
};

// ---- warpgroup 3 ----

// Adds staged rows to memory, one warp for each pair of consumer warps. Its parts of a block, in order: column half,
// upper or lower eight rows.
struct Adder {
  Shared& s;
  const SparseAttentionBackward& p;
  const Workspace& w;
  int pair, lane;

  __device__ void run(const Items& items) {
    const int mine = pair * 16 + (lane & 15);
    Walk walk;
    walk.start(p.lists, items, blockIdx.x * items.stride);
    int entry = walk.entry(p.lists, mine);
    uint32_t parity = 0, largest_term = 0;  // the latter as bits
    for (bool more = true; more; parity ^= 1) {
      const int current = entry;
      more = walk.advance(p.lists, items);
      if (more) entry = walk.entry(p.lists, mine);
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int half = part >> 1, lower = part & 1;
        const int row = __shfl_sync(~0u, current, lower * 8 + (lane & 7));
        int* to = w.sums + static_cast<size_t>(row) * kDim + half * (kDim / 2);
        const uint32_t from = slot_of(s, half, lower, pair) + lane * kPartStride;
        barrier_wait(&s.part_full[pair][part], parity);
        async_proxy_fence();  // here: in the consumers it would cost 300 cycles
        if (lane < 8 && row >= 0) bulk_add_s32(to, from, kPartRow);
        bulk_commit();
        if (part == 3 && lane < 16) largest_term = max(largest_term, take_largest(current, parity));
        bulk_wait_read<0>();
        if (part == (pair < 2 ? 1 : 0)) barrier_arrive(&s.keys_empty[1]);
        if (part == 0 && pair < 2) barrier_arrive(&s.lent_empty);
        if (part == 2 || (part == 1 && pair >= 2)) barrier_arrive(&s.slot_empty[pair]);
        if (part == 3) barrier_arrive(pair < 2 ? &s.weights_empty : &s.slots_empty);
      }
    }
    bulk_wait<0>();
    largest_term = __reduce_max_sync(~0u, largest_term);
    if (lane == 0) atomicMax(&w.control->largest_term, largest_term);
  }
  // Adds the largest term of a block's row, the lane's, to the bound of its key.
  __device__ uint32_t take_largest(int key, uint32_t parity) {
    uint32_t& place = s.largest[parity][pair * 16 + lane];
    const uint32_t largest = place;
    place = 0;
    if (key < 0) return 0;
    atomicAdd(w.bound + key, bound_units(__uint_as_float(largest), s.fixed_scale));
    return largest;
  }
};

// ---- warpgroups 0 and 1 ----

// A fragment of 64 heads x 64 keys as bf16 [key][head], 128-byte rows, swizzled: the layout that serves dq with its
// rows (keys) contracted and dkv with its columns (heads) contracted. A warp's sixteen heads are its own columns.
__device__ __forceinline__ uint32_t weights_address(uint32_t tile, int pair) {  // of two groups of eight keys
  const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5, matrix = lane >> 3;
  return tile + swizzled((2 * pair + (matrix >> 1)) * 8 + (lane & 7), warp * 2 + (matrix & 1));
}
__device__ __forceinline__ void store_weights(uint32_t tile, const uint32_t (&x)[16]) {
#pragma unroll
  for (int pair = 0; pair < 4; ++pair)
    store_matrices_transposed(weights_address(tile, pair), x[4 * pair], x[4 * pair + 1], x[4 * pair + 2],
                              x[4 * pair + 3]);
}
__device__ __forceinline__ void load_weights(uint32_t tile, uint32_t (&x)[16]) {
#pragma unroll
  for (int pair = 0; pair < 4; ++pair)
    load_matrices_transposed(*reinterpret_cast<uint32_t(*)[4]>(x + 4 * pair), weights_address(tile, pair));
}

// Where a consumer is. Made where it is used: kept all the way through, it would take registers that are not there.
struct Place {
  int group, lane, warp, quad;  // warp: of its group
  __device__ Place() {
    const int thread = fresh_thread_index();
    group = thread >> 7, lane = thread & 31, warp = (thread & 127) >> 5, quad = thread & 3;
  }
  __device__ int row() const { return warp * 16 + (lane >> 2); }  // the upper of its two rows of a fragment
};

struct Consumer {
  Shared& s;
  const SparseAttentionBackward& p;
  const Workspace& w;
  uint32_t parity = 0;  // of the block

  // A warp's eight heads of o, and lse of the lane's head in make_delta.
  __device__ void load_outputs(uint4 (&o)[16], float& lse, int index) {
    const Place at;
    const size_t first = static_cast<size_t>(index) * kTileHeads + at.group * 32 + at.warp * 8;
    const uint4* rows = static_cast<const uint4*>(p.o) + first * (kRowBytes / 16);
#pragma unroll
    for (int i = 0; i < 16; ++i) o[i] = __ldcs(rows + i * 32 + at.lane);
    lse = __ldg(p.lse + first + head_of(at.lane));
  }
  static __device__ int head_of(int lane) { return (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1); }

  // D = rowsum(dO * o) of eight heads, one after the other in a fixed order.
  __device__ void make_delta(const uint4 (&o)[16], float lse, int index) {
    const Place at;
    const int first = at.group * 32 + at.warp * 8;
    float total[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      total[r] = 0.f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 y = load_shared_16(shared_address(s.d_o[half]) + (at.lane >> 3) * kPanelBytes +
                                       swizzled(first + r, at.lane & 7));
        const uint4 x = o[2 * r + half];
        const uint32_t u[4] = {x.x, x.y, x.z, x.w}, v[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          total[r] = fmaf(low_bf16(u[i]), low_bf16(v[i]), total[r]);
          total[r] = fmaf(high_bf16(u[i]), high_bf16(v[i]), total[r]);
        }
      }
    }
#pragma unroll
    for (int count = 4, step = 16; count > 0; count /= 2, step /= 2) {  // lanes share out the rows
      const bool upper = at.lane & step;
#pragma unroll
      for (int r = 0; r < count; ++r) {
        const float given = __shfl_xor_sync(~0u, upper ? total[r] : total[r + count], step);
        total[r] = (upper ? total[r + count] : total[r]) + given;
      }
    }
    total[0] += __shfl_xor_sync(~0u, total[0], 2);
    total[0] += __shfl_xor_sync(~0u, total[0], 1);
    if (at.quad != 0) return;
    const int head = first + head_of(at.lane);
    s.delta[head] = total[0];
    w.delta[static_cast<size_t>(index) * kTileHeads + head] = total[0];
    s.lse2[head] = lse * kLog2e;
  }

  // S or dP of the block.
  __device__ void issue_scores(float (&x)[32]) {
    const int group = uniform(fresh_thread_index() >> 7);
    const uint32_t rows = shared_address(group == 0 ? s.q : s.d_o), keys = shared_address(s.keys);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      barrier_wait(&s.keys_full[half], parity);
      product_fence();
#pragma unroll
      for (int step = 0; step < 16; ++step) {
        const uint32_t offset = half * kHalfBytes + (step / 4) * kPanelBytes + (step % 4) * 32;
        wgmma<kColumnsContracted, kColumnsContracted>(x, tile_descriptor(rows + offset), tile_descriptor(keys + offset),
                                                      half > 0 || step > 0);
      }
    }
    product_commit();
  }

  // P and dS in shared memory. P passes from one warpgroup to the other as a bf16 and what is missing from it, another
  // bf16, which lies where dS will be: 16 bits of it.
  __device__ void make_weights(float (&x)[32]) {
    const Place at;
    uint32_t value[16];
    if (at.group == 0) {
      const float scale2 = p.scale * kLog2e, lse2[2] = {s.lse2[at.row()], s.lse2[at.row() + 8]};
      const uint32_t low = s.present[0] | s.present[1] << 16, high = s.present[2] | s.present[3] << 16;
      uint32_t rest[16];
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
#pragma unroll
        for (int j = i; j < i + 2; ++j) {
          const int key = (j >> 2) * 8 + at.quad * 2 + (j & 1);
          x[j] = exp2_fast(fmaf(x[j], scale2, -lse2[(j >> 1) & 1]));
          if (!(((j < 16 ? low : high) >> (key & 31)) & 1)) x[j] = 0.f;
        }
        value[i / 2] = pack_bf16(x[i], x[i + 1]);
        rest[i / 2] = pack_bf16(x[i] - low_bf16(value[i / 2]), x[i + 1] - high_bf16(value[i / 2]));
      }
      barrier_wait(&s.weights_empty, parity ^ 1);
      store_weights(shared_address(s.p), value);
      store_weights(shared_address(s.ds), rest);
      async_proxy_fence();
      group_arrive(1, kConsumers);
    } else {
      group_barrier(1, kConsumers);
      uint32_t rest[16];
      load_weights(shared_address(s.p), value);
      load_weights(shared_address(s.ds), rest);
      const float delta[2] = {s.delta[at.row()], s.delta[at.row() + 8]};
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float first = low_bf16(value[i]) + low_bf16(rest[i]), second = high_bf16(value[i]) + high_bf16(rest[i]);
        value[i] =
            pack_bf16(first * (x[2 * i] - delta[i & 1]) * p.scale, second * (x[2 * i + 1] - delta[i & 1]) * p.scale);
      }
      __syncwarp();  // the rests are this warp's own
      store_weights(shared_address(s.ds), value);
      async_proxy_fence();
    }
    group_barrier(3, kConsumers);
  }

  // dkv of 64 keys, 128 columns: this warpgroup's quarter.
  __device__ void issue_dkv(float (&x)[64], int half) {
    const int group = uniform(fresh_thread_index() >> 7);
#pragma unroll
    for (int product = 0; product < 2; ++product) {
      const uint32_t weights = uniform(shared_address(product == 0 ? s.p : s.ds));  // no register
      const uint32_t values = shared_address(product == 0 ? s.d_o[half] : s.q[half]) + group * 2 * kPanelBytes;
#pragma unroll
      for (int k = 0; k < kTileHeads / 16; ++k)
        wgmma<kColumnsContracted, kRowsContracted>(x, tile_descriptor(weights + k * 32),
                                                   tile_descriptor(values + k * 2048, kPanelBytes),
                                                   product > 0 || k > 0);
    }
    product_commit();
  }
  __device__ void issue_dq(float (&dq)[2][64]) {
    const int group = uniform(fresh_thread_index() >> 7);
#pragma unroll
    for (int k = 0; k < kBlock / 16; ++k)
#pragma unroll
      for (int part = 0; part < 2; ++part)
        wgmma<kRowsContracted, kRowsContracted>(
            dq[part], tile_descriptor(shared_address(s.ds) + k * 2048),
            tile_descriptor(shared_address(s.keys[group]) + part * 2 * kPanelBytes + k * 2048, kPanelBytes), true);
    product_commit();
  }

  // Converts in place the accumulators of one of a lane's two rows; returns the largest |value|, NaN if there is one.
  // Adding 1.5 * 2^23 leaves the rounded integer in the low bits; a conversion instruction runs at an eighth of the
  // rate.
  __device__ float to_fixed(float (&x)[64], int row, float fixed_scale) const {
    constexpr float kMagic = 12582912.f;
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float& value = x[4 * (i >> 1) + 2 * row + (i & 1)];
      largest = max_nan(largest, fabsf(value));
      value = __int_as_float(__float_as_int(fmaf(value, fixed_scale, kMagic)) - __float_as_int(kMagic));
    }
    largest = max_nan(largest, __shfl_xor_sync(~0u, largest, 1));
    return max_nan(largest, __shfl_xor_sync(~0u, largest, 2));
  }

  // Hands eight half rows of a pair of warps (one of each group) to the adding warp. row: which of a lane's two;
  // largest: of what they were before they became integers.
  __device__ void stage_rows(const float (&x)[64], float largest, int half, int row) {
    const Place at;
    const uint32_t mine =
        slot_of(s, half, row, at.warp) + (at.lane >> 2) * kPartStride + at.group * (kPartRow / 2) + at.quad * 8;
#pragma unroll
    for (int i = 0; i < 16; ++i)
      store_shared_8(mine + i * 32, __float_as_uint(x[4 * i + 2 * row]), __float_as_uint(x[4 * i + 2 * row + 1]));
    if (at.quad == 0) atomicMax(&s.largest[parity][at.row() + 8 * row], __float_as_uint(largest));
    barrier_arrive(&s.part_full[at.warp][2 * half + row]);  // the proxy fence is the adding warp's
  }

  __device__ void run(const Items& items) {
    for (int index = blockIdx.x * items.stride; index < items.count;) {
      {
        uint4 o[16];
        float lse;
        load_outputs(o, lse, index);
        barrier_wait(&s.keys_full[0], parity);
        barrier_wait(&s.keys_full[1], parity);
        make_delta(o, lse, index);
        group_barrier(3, kConsumers);
      }
      float dq[2][64];
#pragma unroll
      for (int i = 0; i < 128; ++i) dq[i >> 6][i & 63] = 0.f;
      bool more = true;
#pragma unroll 1
      while (more) {
        {
          float x[32];
          issue_scores(x);
          product_wait<0>();
          pin(x);
          make_weights(x);
        }
        float y[64];
        product_fence();
        issue_dkv(y, 0);
        issue_dq(dq);
        product_wait<1>();
        pin(y);
        float largest = to_fixed(y, 0, s.fixed_scale);
        if (Place().warp < 2) {
          barrier_wait(&s.slots_empty, parity ^ 1);
          stage_rows(y, largest, 0, 0);
          barrier_arrive(&s.lent_empty);
        }
        product_wait<0>();
        pin(dq[0]), pin(dq[1]);
        if (Place().group == 0) barrier_arrive(&s.keys_empty[0]);
        if (s.index[parity] < 0) barrier_arrive(&s.inputs_empty[0]);
        group_barrier(2, kConsumers);  // the right half of the keys is read
        if (Place().warp >= 2) {
          stage_rows(y, largest, 0, 0);
          barrier_wait(&s.lent_empty, parity);
        }
        largest = to_fixed(y, 1, s.fixed_scale);
        stage_rows(y, largest, 0, 1);
        barrier_arrive(&s.keys_empty[1]);
        product_fence();
        issue_dkv(y, 1);
        product_wait<0>();
        pin(y);
        if (s.index[parity] < 0) barrier_arrive(&s.inputs_empty[1]);
        group_barrier(3, kConsumers);  // P and dS are read
        largest = to_fixed(y, 0, s.fixed_scale);
        if (Place().warp >= 2) barrier_wait(&s.slot_empty[Place().warp], 0);
        stage_rows(y, largest, 1, 0);
        largest = to_fixed(y, 1, s.fixed_scale);
        barrier_wait(&s.slot_empty[Place().warp], Place().warp < 2 ? parity : 1);
        stage_rows(y, largest, 1, 1);
        barrier_arrive(Place().warp < 2 ? &s.weights_empty : &s.slots_empty);
        more = s.index[parity] >= 0;
        parity ^= 1;
      }
      index = ~s.index[parity ^ 1];  // the same, not kept all the time
      const Place at;
      __nv_bfloat16* rows = static_cast<__nv_bfloat16*>(p.dq) +
                            (static_cast<size_t>(index) * kTileHeads + at.row()) * kDim + at.group * (kDim / 2);
      store_rows_bf16<16>(dq[0], 1.f, 1.f, rows, 8 * kDim);
      store_rows_bf16<16>(dq[1], 1.f, 1.f, rows + 128, 8 * kDim);
      index += gridDim.x * items.stride;
    }
  }
};

__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ SparseAttentionBackward p, const __grid_constant__ Workspace w,
                    const __grid_constant__ Items items) {
  if constexpr (!kHasCode) return __trap();
  if (!w.control->run) return;
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {  // every thread arrives: one lane for its warp costs as much, and race checkers lose track
    s.fixed_scale = w.control->scale;
    for (int half = 0; half < 2; ++half) {
      barrier_init(&s.inputs_empty[half], kConsumers);
      barrier_init(&s.keys_full[half], kGatherers);
    }
    barrier_init(&s.keys_empty[0], 128);
    barrier_init(&s.keys_empty[1], 128 + kConsumers);
    barrier_init(&s.weights_empty, 64 + 128);
    barrier_init(&s.slots_empty, 64 + 128);
    barrier_init(&s.lent_empty, 64 + 128);
    for (int pair = 0; pair < 4; ++pair) {
      for (int part = 0; part < 4; ++part) barrier_init(&s.part_full[pair][part], 64);
      barrier_init(&s.slot_empty[pair], 32);
    }
    barrier_init_fence();
  }
  if (threadIdx.x < 2 * kBlock) s.largest[0][threadIdx.x] = 0;
  __syncthreads();
  const int warp = (threadIdx.x & 127) >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x >= kConsumers) {
    give_registers<32>();  // of 128 with which 512 threads start
    if (threadIdx.x < kConsumers + kGatherers)
      Gatherer{s, p}.run(items);
    else
      Adder{s, p, w, warp, lane}.run(items);
  } else {
    take_registers<224>();
    Consumer{s, p, w}.run(items);
  }
}

// Parts of the workspace, each aligned to 256 bytes; base may be null to learn the size.
struct Layout {
  Workspace w;
  size_t bytes = 0;
};
Layout workspace_layout(const SparseAttentionBackward& p, void* base) {
  Layout layout;
  const auto take = [&](auto*& pointer, size_t count) {
    using T = std::remove_reference_t<decltype(*pointer)>;
    pointer = reinterpret_cast<T*>(static_cast<uint8_t*>(base) + layout.bytes);
    layout.bytes += (count * sizeof(T) + 255) / 256 * 256;
  };
  const size_t heads = static_cast<size_t>(p.queries) * p.heads;
  take(layout.w.control, 1);
  take(layout.w.delta, heads);
  take(layout.w.sink_partial, (p.queries + kSinkQueries - 1) / kSinkQueries * static_cast<size_t>(p.heads));
  take(layout.w.bound, p.rows);
  take(layout.w.sums, static_cast<size_t>(p.rows) * kDim);
  layout.w.end = reinterpret_cast<uint8_t*>(base) + layout.bytes;
  return layout;
}

constexpr int kSampleItems = 132, kLargestStride = 128;  // of the pilot

}  // namespace
}  // namespace attention

size_t sparse_attention_backward_workspace(const SparseAttentionBackward& p) {
  return attention::workspace_layout(p, nullptr).bytes;
}

cudaError_t sparse_attention_backward(const SparseAttentionBackward& p, cudaStream_t stream) {
  using namespace attention;
  if (p.queries < 0 || p.rows < 0 || (p.heads != 64 && p.heads != 128) || !(p.scale > 0)) return cudaErrorInvalidValue;
  const size_t dkv_count = static_cast<size_t>(p.rows) * kDim;
  if (p.queries == 0) {
    const cudaError_t error = cudaMemsetAsync(p.dkv, 0, dkv_count * (p.dkv_bf16 ? 2 : 4), stream);
    return error != cudaSuccess ? error : cudaMemsetAsync(p.d_sink, 0, p.heads * sizeof(float), stream);
  }
  const Workspace w = workspace_layout(p, p.workspace).w;
  const int processors = multiprocessors(), items = item_count(p), wide = 8 * processors;
  const bool portable = !is_hopper();
  const cudaError_t error =
      portable ? launch_portable_dq(p, w, stream)
               : cudaFuncSetAttribute(backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;

  const size_t clear_bytes = w.end - reinterpret_cast<uint8_t*>(w.bound);  // bound and sums
  const auto pass = [&](int stride) {
    const int ctas = std::min(processors, (items + stride - 1) / stride);
    if (portable)
      launch_portable_dkv(p, w, stride, stream);
    else
      backward_kernel<<<ctas, kThreads, sizeof(Shared), stream>>>(p, w, Items{items, p.heads / kTileHeads, stride});
    find_largest_bound<<<wide, 256, 0, stream>>>(w.bound, p.rows, w.control);
  };
  cudaMemsetAsync(w.control, 0, sizeof(Control), stream);
  cudaMemsetAsync(w.bound, 0, p.rows * sizeof(*w.bound), stream);  // what the pilot adds to the sums is not looked at
  const int stride = std::max(1, std::min(kLargestStride, items / kSampleItems));
  largest_gradient<<<(items + stride - 1) / stride, 256, 0, stream>>>(static_cast<const uint4*>(p.d_o), stride,
                                                                      w.control);
  start_pilot<<<1, 1, 0, stream>>>(w.control);
  pass(stride);
  choose_scale<<<1, 1, 0, stream>>>(w.control, stride);
  cudaMemsetAsync(w.bound, 0, clear_bytes, stream);
  pass(1);
  check_scale<<<1, 1, 0, stream>>>(w.control);
  clear_sums<<<wide, 256, 0, stream>>>(reinterpret_cast<int4*>(w.bound), clear_bytes / sizeof(int4), w.control);
  pass(1);
  const int sink_parts = (p.queries + kSinkQueries - 1) / kSinkQueries;
  sink_partial<<<sink_parts, 256, 0, stream>>>(p, w);
  sink_total<<<1, p.heads, 0, stream>>>(w.sink_partial, sink_parts, p.d_sink);
  convert_sums<<<wide, 256, 0, stream>>>(reinterpret_cast<const int2*>(w.sums), p.dkv, p.dkv_bf16, dkv_count / 2,
                                         w.control);
  return cudaGetLastError();
}

}  // namespace plumb::kernels
