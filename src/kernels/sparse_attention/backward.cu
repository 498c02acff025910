// Sparse attention backward, the main kernel: dq, and dkv summed in 32-bit fixed point by bulk integer reductions into
// memory, whose order cannot matter. backward_parts.cuh has the small kernels around it (D, choice of the scale,
// d_sink).
//
// One persistent CTA an SM takes every gridDim.x-th item. A block of 64 keys:
//   1. Warpgroup 0 makes S = Q K^T, warpgroup 1 dP = dO K^T (64 heads x 64 keys each). P = exp(S - lse) is handed in
//   FP32
//      from 0 to 1, which makes dS = P (dP - D) scale. Both go to shared memory as bf16 [key][head].
//   2. dq += dS K, 256 columns a warpgroup, in registers for the whole item.
//   3. Twice, for the left and the right half of the columns: dkv = P^T dO + dS^T Q (64 keys x 128 columns a
//      warpgroup), converted to fixed point, staged in shared memory, added to memory row by row.
// Warpgroup 2 gathers the next block's keys and issues the additions (issuing one blocks while the unit is busy), so
// both run beside the products. Shared memory is full: the left half is staged where the right half of the keys was,
// the right half where P, dS and the exchange of P were.
#include <algorithm>
#include <type_traits>

#include "kernels/sparse_attention/backward_parts.cuh"

namespace plumb::kernels {
namespace attention {
namespace {

using namespace hopper;

constexpr int kThreads = 384, kConsumers = 256;
constexpr int kStageRow = 256 * 4;                 // half of a dkv row
constexpr int kStageStride = kStageRow + 32;       // rows start at different banks
constexpr int kStageBytes = 4 * 8 * kStageStride;  // four pairs of warps (one of each group), eight rows each
static_assert(kStageBytes == kHalfBytes + 1024);

struct Weights {
  uint8_t p[kPanelBytes], ds[kPanelBytes];  // [key][head], bf16
  float4 exchange[8][128];                  // P in FP32, from warpgroup 0 to 1
};
static_assert(sizeof(Weights) == kHalfBytes);

struct Shared {
  alignas(1024) uint8_t q[2][kHalfBytes];  // [column half]
  uint8_t d_o[2][kHalfBytes];
  uint8_t keys[2][kHalfBytes];  // [column half]; the right half is also where left halves of dkv are staged
  uint8_t more_keys[1024];      // staged rows are a little more than the keys
  union {
    Weights weights;
    uint8_t stage[kStageBytes];  // right halves of dkv
  };
  uint16_t present[4];                     // bit k of word w: entry 16 w + k of the block is a key
  int row[2][kBlock];                      // [block parity] the block's list entries
  float fixed_scale;                       // power of two
  uint64_t inputs_full, inputs_empty;      // q and d_o
  uint64_t keys_full[2], left_empty;       // the right half is empty when its staged rows are read
  uint64_t stage_full[4], stage_empty[4];  // [pair of warps]
  uint64_t weights_empty;                  // the right halves staged there are read
};

// The blocks of a CTA's items, one after the other. An item without keys has one block without keys.
struct Walk {
  int index, block, blocks;
  Item item;

  __device__ void start(const KeyLists& lists, int tiles, int first) {
    index = first;
    block = 0;
    item = item_at(lists, tiles, first);
    blocks = max(1, (item.length + kBlock - 1) / kBlock);
  }
  // False after the last.
  __device__ bool advance(const KeyLists& lists, int tiles, int items, int stride) {
    if (++block < blocks) return true;
    if (index + stride >= items) return false;
    start(lists, tiles, index + stride);
    return true;
  }
};

// ---- warpgroup 2 ----

struct Producer {
  Shared& s;
  const SparseAttentionBackward& p;
  const Workspace& w;
  int warp, lane;
  uint32_t blocks = 0, items = 0, parts = 0;  // so far

  __device__ void load_inputs(int index) {
    barrier_wait(&s.inputs_empty, (items++ & 1) ^ 1);
#pragma unroll 1
    for (int part = 0; part < 4; ++part) {
      const uint8_t* rows = static_cast<const uint8_t*>(part < 2 ? p.q : p.d_o) +
                            static_cast<size_t>(index) * kTileBytes + (part & 1) * (kRowBytes / 2) +
                            warp * 16 * kRowBytes;
      gather_rows<16, kPanelBytes, 4>(s.q[0] + part * kHalfBytes, warp * 16,
                                      [&](int r, bool&) { return rows + r * kRowBytes; });
    }
    copy_commit();
  }
  // entry: of lane & 15, row 16 * warp + lane & 15 of the block.
  __device__ void gather_keys(int entry, int half) {
    if (half == 0) barrier_wait(&s.left_empty, (blocks & 1) ^ 1);
    const uint8_t* kv = static_cast<const uint8_t*>(p.kv) + half * (kRowBytes / 2);
    gather_rows<16, kPanelBytes, 4>(s.keys[half], warp * 16, [&](int r, bool& is_key) {
      const int row = __shfl_sync(~0u, entry, r);
      is_key = row >= 0;
      return kv + static_cast<size_t>(max(row, 0)) * kRowBytes;
    });
    copy_commit();
    const uint32_t word = __ballot_sync(~0u, entry >= 0);
    if (half == 0) {
      if (lane == 0) s.present[warp] = static_cast<uint16_t>(word);
      if (lane < 16) s.row[blocks & 1][warp * 16 + lane] = entry;
    }
    blocks += half;
  }
  // Adds the eight half rows that this warp's pair of consumer warps has staged.
  __device__ void add_rows(int entry, int part, int half) {
    const int shuffled = __shfl_sync(~0u, entry, part * 8 + (lane & 7)), row = lane < 8 ? shuffled : -1;
    barrier_wait(&s.stage_full[warp], parts++ & 1);
    async_proxy_fence();  // here: in the consumers it would cost 300 cycles
    const uint32_t stage = shared_address(half ? s.stage : s.keys[1]);
    if (row >= 0)
      bulk_add_s32(w.sums + static_cast<size_t>(row) * kDim + half * (kDim / 2),
                   stage + (warp * 8 + lane) * kStageStride, kStageRow);
    bulk_commit();
    bulk_wait_read<0>();
    barrier_arrive(&s.stage_empty[warp]);
  }

  __device__ void run(int total, int stride) {
    const int tiles = p.heads / kTileHeads, mine = warp * 16 + (lane & 15);
    Walk walk;
    walk.start(p.lists, tiles, blockIdx.x * stride);
    load_inputs(walk.index);
    int entry = list_entry(p.lists, walk.item, mine);
    gather_keys(entry, 0);
    publish<1>(&s.inputs_full);
    gather_keys(entry, 1);
    publish<1>(&s.keys_full[0]);
    publish<0>(&s.keys_full[1]);
    for (bool more = true; more;) {
      more = walk.advance(p.lists, tiles, total, gridDim.x * stride);
      const int next = more ? list_entry(p.lists, walk.item, walk.block * kBlock + mine) : -1;
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        if (more) gather_keys(next, half);
        add_rows(entry, 0, half);
        if (more) publish<0>(&s.keys_full[half]);
        add_rows(entry, 1, half);
        if (half == 0) group_barrier(2, kThreads - kConsumers);  // the rows of all four warps are read: keys may follow
      }
      barrier_arrive(&s.weights_empty);
      if (more && walk.block == 0) {
        load_inputs(walk.index);
        publish<0>(&s.inputs_full);
      }
      entry = next;
    }
    bulk_wait<0>();
  }
};

// ---- warpgroups 0 and 1 ----

// Writes a fragment of 64 heads x 64 keys as bf16 [key][head], 128-byte rows, swizzled: the layout that serves dq with
// its rows (keys) contracted and dkv with its columns (heads) contracted.
__device__ __forceinline__ void store_weights(uint32_t tile, const float (&x)[32]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5, matrix = lane >> 3;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {  // two groups of eight keys, both halves of the warp's sixteen heads
    const uint32_t key = (2 * pair + (matrix >> 1)) * 8 + (lane & 7);
    const float* v = x + 8 * pair;
    store_matrices_transposed(tile + swizzled(key, warp * 2 + (matrix & 1)), pack_bf16(v[0], v[1]),
                              pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
  }
}

struct Consumer {
  Shared& s;
  const SparseAttentionBackward& p;
  const Workspace& w;
  int group, lane, warp, quad;           // warp: of its group
  uint32_t parity = 0, item_parity = 0;  // of the block, of the item
  float largest_term = 0.f;              // NaN if one was NaN

  // S or dP of the block; then P and dS in shared memory.
  __device__ void make_weights(int index) {
    const int thread = threadIdx.x & 127;
    const float* per_row =
        (group == 0 ? p.lse : w.delta) + static_cast<size_t>(index) * kTileHeads + warp * 16 + (lane >> 2);
    const float of_row[2] = {__ldg(per_row), __ldg(per_row + 8)};  // lse or D of this lane's two heads
    const uint32_t rows = shared_address(group == 0 ? s.q : s.d_o), keys = shared_address(s.keys);
    float x[32];
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
    product_wait<0>();
    pin(x);
    barrier_wait(&s.weights_empty, parity ^ 1);
    if (group == 0) {
      const float scale2 = p.scale * kLog2e;
      const uint32_t low = s.present[0] | s.present[1] << 16, high = s.present[2] | s.present[3] << 16;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int key = (i >> 2) * 8 + quad * 2 + (i & 1);
        x[i] = exp2_fast(fmaf(x[i], scale2, -of_row[(i >> 1) & 1] * kLog2e));
        if (!(((i < 16 ? low : high) >> (key & 31)) & 1)) x[i] = 0.f;
      }
#pragma unroll
      for (int g = 0; g < 8; ++g)
        s.weights.exchange[g][thread] = make_float4(x[4 * g], x[4 * g + 1], x[4 * g + 2], x[4 * g + 3]);
    }
    group_barrier(1, kConsumers);
    if (group == 0) {
      store_weights(shared_address(s.weights.p), x);
    } else {
#pragma unroll
      for (int g = 0; g < 8; ++g) {
        const float4 weight = s.weights.exchange[g][thread];
        x[4 * g] = weight.x * (x[4 * g] - of_row[0]) * p.scale;
        x[4 * g + 1] = weight.y * (x[4 * g + 1] - of_row[0]) * p.scale;
        x[4 * g + 2] = weight.z * (x[4 * g + 2] - of_row[1]) * p.scale;
        x[4 * g + 3] = weight.w * (x[4 * g + 3] - of_row[1]) * p.scale;
      }
      store_weights(shared_address(s.weights.ds), x);
    }
    async_proxy_fence();
    group_barrier(1, kConsumers);
  }

  // dkv of 64 keys, 128 columns: this warpgroup's quarter.
  __device__ void issue_dkv(float (&x)[64], int half) {
#pragma unroll
    for (int product = 0; product < 2; ++product) {
      const uint32_t weights = shared_address(product == 0 ? s.weights.p : s.weights.ds);
      const uint32_t values = shared_address(product == 0 ? s.d_o[half] : s.q[half]) + group * 2 * kPanelBytes;
#pragma unroll
      for (int k = 0; k < kTileHeads / 16; ++k)
        wgmma<kColumnsContracted, kRowsContracted>(x, tile_descriptor(weights + k * 32),
                                                   tile_descriptor(values + k * 2048, kPanelBytes),
                                                   product > 0 || k > 0);
    }
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

  // Hands sixteen half rows of a pair of warps (one of each group) to the issuing warp, eight at a time.
  __device__ void stage_rows(float (&x)[64], int half) {
    const uint32_t mine =
        shared_address(half ? s.stage : s.keys[1]) + (warp * 8 + (lane >> 2)) * kStageStride + group * 512 + quad * 8;
    float largest[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      largest[row] = to_fixed(x, row, s.fixed_scale);
      barrier_wait(&s.stage_empty[warp], row ^ 1);  // four uses a block
#pragma unroll
      for (int i = 0; i < 16; ++i)
        store_shared_8(mine + i * 32, __float_as_uint(x[4 * i + 2 * row]), __float_as_uint(x[4 * i + 2 * row + 1]));
      barrier_arrive(&s.stage_full[warp]);  // the proxy fence is the issuer's
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {  // last: a fence would wait for these
      const int key = s.row[parity][warp * 16 + (lane >> 2) + 8 * row];
      if (quad != 0 || key < 0) continue;
      largest_term = max_nan(largest_term, largest[row]);
      atomicAdd(w.bound + static_cast<size_t>(key) * 4 + half * 2 + group, bound_units(largest[row], s.fixed_scale));
    }
  }

  __device__ void run(int total, int stride) {
    const int tiles = p.heads / kTileHeads, row = warp * 16 + (lane >> 2);
    for (int index = blockIdx.x * stride; index < total; index += gridDim.x * stride, item_parity ^= 1) {
      const int count = max(1, (item_at(p.lists, tiles, index).length + kBlock - 1) / kBlock);
      float dq[128];
#pragma unroll
      for (int i = 0; i < 128; ++i) dq[i] = 0.f;
      barrier_wait(&s.inputs_full, item_parity);
      for (int block = 0; block < count; ++block) {
        make_weights(index);
        product_fence();
#pragma unroll
        for (int k = 0; k < kBlock / 16; ++k)
          wgmma<kRowsContracted, kRowsContracted>(
              dq, tile_descriptor(shared_address(s.weights.ds) + k * 2048),
              tile_descriptor(shared_address(s.keys[group]) + k * 2048, kPanelBytes), true);
        product_commit();
        product_wait<0>();
        if (group == 0) barrier_arrive(&s.left_empty);
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          float x[64];
          product_fence();
          issue_dkv(x, half);
          product_wait<0>();
          pin(x);
          if (half == 1 && block == count - 1) barrier_arrive(&s.inputs_empty);
          group_barrier(1, kConsumers);  // all have read what lies where this half is staged
          stage_rows(x, half);
        }
        parity ^= 1;
      }
      pin(dq);
      store_rows_bf16<32>(dq, 1.f, 1.f,
                          static_cast<__nv_bfloat16*>(p.dq) + (static_cast<size_t>(index) * kTileHeads + row) * kDim +
                              group * (kDim / 2),
                          8 * kDim);
    }
    atomicMax(&w.control->largest_term, __float_as_uint(largest_term));
  }
};

__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ SparseAttentionBackward p,
                                                               const __grid_constant__ Workspace w, int stride) {
  if (!w.control->run) return;
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {  // every thread arrives: one lane for its warp costs as much, and race checkers lose track
    s.fixed_scale = w.control->scale;
    barrier_init(&s.inputs_full, 128);
    barrier_init(&s.inputs_empty, 256);
    barrier_init(&s.left_empty, 128);
    barrier_init(&s.weights_empty, 128);
    for (int i = 0; i < 2; ++i) barrier_init(&s.keys_full[i], 128);
    for (int pair = 0; pair < 4; ++pair) {
      barrier_init(&s.stage_full[pair], 64);
      barrier_init(&s.stage_empty[pair], 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int items = item_count(p), warp = (threadIdx.x & 127) >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x >= kConsumers) {
    give_registers<56>();  // 384 threads start with 168 each: 56 * 128 + 224 * 256 is exactly that
    Producer{s, p, w, warp, lane}.run(items, stride);
  } else {
    take_registers<224>();
    Consumer{s, p, w, static_cast<int>(threadIdx.x >> 7), lane, warp, lane & 3}.run(items, stride);
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
  take(layout.w.bound, static_cast<size_t>(p.rows) * 4);
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
  const cudaError_t error =
      cudaFuncSetAttribute(backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;

  const size_t bound_count = static_cast<size_t>(p.rows) * 4;
  const size_t clear_bytes = w.end - reinterpret_cast<uint8_t*>(w.bound);  // bound and sums
  const auto pass = [&](int stride) {
    const int ctas = std::min(processors, (items + stride - 1) / stride);
    backward_kernel<<<ctas, kThreads, sizeof(Shared), stream>>>(p, w, stride);
    find_largest_bound<<<wide, 256, 0, stream>>>(w.bound, bound_count, w.control);
  };
  cudaMemsetAsync(w.control, 0, sizeof(Control), stream);
  cudaMemsetAsync(w.bound, 0, clear_bytes, stream);
  row_dot<<<wide, 256, 0, stream>>>(static_cast<const uint4*>(p.o), static_cast<const uint4*>(p.d_o), w.delta,
                                    static_cast<int64_t>(p.queries) * p.heads, w.control);
  const int sink_parts = (p.queries + kSinkQueries - 1) / kSinkQueries;
  sink_partial<<<sink_parts, 256, 0, stream>>>(p, w);
  sink_total<<<1, p.heads, 0, stream>>>(w.sink_partial, sink_parts, p.d_sink);

  const int stride = std::max(1, std::min(kLargestStride, items / kSampleItems));
  start_pilot<<<1, 1, 0, stream>>>(w.control);
  pass(stride);
  choose_scale<<<1, 1, 0, stream>>>(w.control, stride);
  cudaMemsetAsync(w.bound, 0, clear_bytes, stream);
  pass(1);
  check_scale<<<1, 1, 0, stream>>>(w.control);
  clear_sums<<<wide, 256, 0, stream>>>(reinterpret_cast<int4*>(w.bound), clear_bytes / sizeof(int4), w.control);
  pass(1);
  convert_sums<<<wide, 256, 0, stream>>>(reinterpret_cast<const int2*>(w.sums), p.dkv, p.dkv_bf16, dkv_count / 2,
                                         w.control);
  return cudaGetLastError();
}

}  // namespace plumb::kernels
