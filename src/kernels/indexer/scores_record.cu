// Index scores of records, whose products are FP8. Layout as in scores_bf16.cu: entries are the 64 rows of a product,
// the heads of queries its columns; a block has a group of rows, whose queries stay in shared memory and whose head
// weights stay in registers, while one thread streams tiles of keys through a ring. A warpgroup has four queries of a
// group of eight as two products of 128 columns: it reduces one while the tensor cores have the other.
//
// Hopper's FP8 products keep 13 bits behind the leading one of a sum, and that is enough here: every product of two
// channels is a multiple of one step, and no partial sum exceeds, in such steps, the product of the lengths of query
// head and key. Up to 2^14 of them nothing is lost. Vectors that are longer (or whose exponents are too far apart for
// e4m3) are rare: for their keys the spare warps compute the scores anew, 32 channels at a time (4,608 steps at most:
// exact) with FP32 sums in between. A pair of vectors that both ways could multiply gets the same bits from both, so a
// score is a function of its row and entry alone.
//
// A query's power of two is part of its head's weight, a key's multiplies the sum.
#include <algorithm>

#include "kernels/hopper/barrier.cuh"
#include "kernels/hopper/mma.cuh"
#include "kernels/hopper/tma.cuh"
#include "kernels/hopper/wgmma_fp8.cuh"
#include "kernels/indexer/record.cuh"
#include "kernels/indexer/scores.h"

namespace plumb::kernels {
namespace indexer {
namespace {

using namespace hopper;

constexpr int kThreads = 384, kStages = 8;
constexpr int kSpareWarps = 3;           // of the loader's warpgroup; they take the tiles in turns
constexpr float kExactSquare = 0x1p28f;  // of the product of two lengths
constexpr int kKeyBytes = kIndexTile * kIndexDim, kKeyTailBytes = kIndexTile * sizeof(IndexTail);

template <int kQueries>  // of a warpgroup: 4 or 1
struct Shared {
  static constexpr int kColumns = kQueries * kIndexHeads;
  static constexpr int kCopies = kQueries == 4 ? 2 : 1;  // one each, or one query for both
  alignas(1024) uint8_t q[kCopies][kColumns * kIndexDim];
  uint8_t keys[kStages][kKeyBytes];
  IndexTail q_tail[kCopies][kColumns];
  IndexTail key_tail[kStages][kIndexTile];
  alignas(8) uint64_t q_full[kCopies], keys_full[kStages], keys_empty[kStages];
};

// The queries of a warpgroup.
template <int kQueries>
struct Share {
  static constexpr int kGroupRows = kQueries == 4 ? 8 : 1;
  int first_query, copy;
  float longest;  // square of a head's length; NaN counts as longest
  __device__ __forceinline__ Share(const Shared<kQueries>& s, int group, int half)
      : first_query(group * kGroupRows + (kQueries == 4 ? half * 4 : 0)), copy(kQueries == 4 ? half : 0) {
    uint32_t top = 0;  // lengths order like their bits, NaN last
    for (int i = threadIdx.x % 32; i < Shared<kQueries>::kColumns; i += 32)
      top = max(top, __float_as_uint(s.q_tail[copy][i].length));
    longest = __uint_as_float(__reduce_max_sync(~0u, top));
  }
  __device__ __forceinline__ bool exact(float key_length) const { return key_length * longest <= kExactSquare; }
  // Where a query's scores go.
  __device__ __forceinline__ float* out(const Arguments& p, int query) const {
    return p.scores + static_cast<size_t>(first_query - p.first_group * kGroupRows + query) * p.columns;
  }
};

// w (max(0, d) + max(0, d)): two instructions of the FMA pipe, and a NaN stays.
__device__ __forceinline__ float weighed(float w, float d, float sum) { return fmaf(w, d + fabsf(d), sum); }
// Half the weight of a head, for that.
__device__ __forceinline__ float half_weight(float w, const IndexTail& q) { return 0.5f * w * q.power; }

// Sum over a lane's heads of one query, rows r and r + 8 of the product; 16 accumulators a row, in order.
__device__ __forceinline__ void weigh(const float* d, const float (&w)[16], float& upper, float& lower) {
  upper = lower = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      upper = weighed(w[2 * i + b], d[4 * i + b], upper);
      lower = weighed(w[2 * i + b], d[4 * i + 2 + b], lower);
    }
}
// The sums of two queries; all of them exist before anything that follows, or else the next product would need
// registers of its own.
__device__ __forceinline__ void weigh_two(const float (&d)[64], const float (&w)[4][16], int first, float (&upper)[4],
                                          float (&lower)[4]) {
  weigh(d, w[first], upper[first], lower[first]);
  weigh(d + 32, w[first + 1], upper[first + 1], lower[first + 1]);
#pragma unroll
  for (int j = 0; j < 2; ++j) asm volatile("" : "+f"(upper[first + j]), "+f"(lower[first + j])::"memory");
}
// Over the four lanes of a row, in the order in which the others do it.
__device__ __forceinline__ float over_quad(float x) {
  x += __shfl_xor_sync(~0u, x, 2);
  return x + __shfl_xor_sync(~0u, x, 1);
}

template <int kColumns>
__device__ __forceinline__ void multiply(float (&d)[kColumns / 2], uint32_t keys, uint32_t q) {
  product_fence();
#pragma unroll
  for (int step = 0; step < kIndexDim / 32; ++step)
    Fp8Product<kColumns>::rows_from_shared(d, swizzled_operand(swizzled_low(keys) + step * 2),
                                           swizzled_operand(swizzled_low(q) + step * 2), step > 0);
  product_commit();
}

template <int kQueries>
__device__ __forceinline__ void load_weights(float (&w)[kQueries][16], const Share<kQueries>& share, const Arguments& p,
                                             const IndexTail* tail) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kQueries; ++j)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int query = min(share.first_query + j, p.rows - 1), head = 8 * i + 2 * quad;
      const float2 pair = __ldg(reinterpret_cast<const float2*>(p.w + static_cast<size_t>(query) * kIndexHeads + head));
      w[j][2 * i] = half_weight(pair.x, tail[j * kIndexHeads + head]);
      w[j][2 * i + 1] = half_weight(pair.y, tail[j * kIndexHeads + head + 1]);
    }
}

// A lane's two rows of a tile of keys: what their sums are multiplied by, and whether the sums are exact.
struct KeyRows {
  float power[2];
  bool exact[2];
  template <int kQueries>
  __device__ __forceinline__ KeyRows(const IndexTail* tail, int row, const Share<kQueries>& share) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 t = *reinterpret_cast<const float2*>(tail + row + 8 * half);
      power[half] = t.x, exact[half] = share.exact(t.y);
    }
  }
};

// ---- Groups of eight rows: a warpgroup has four of them and every tile.
__device__ __forceinline__ void consume(Shared<4>& s, const Arguments& p, int group, int first_tile, int tiles) {
  constexpr int kColumns = 128;  // of a product: two queries
  const int warpgroup = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, quad = lane % 4;
  const int row = warp * 16 + lane / 4;
  barrier_wait(&s.q_full[warpgroup], 0);
  const Share<4> share(s, group, warpgroup);
  float w[4][16];
  load_weights(w, share, p, s.q_tail[warpgroup]);
  const uint32_t q = shared_address(s.q[warpgroup]);
  float* out = share.out(p, quad) + row;  // this lane writes the scores of query `quad`
  const bool writes = share.first_query + quad < p.rows;
  const int stride = gridDim.y;

  float a[kColumns / 2], b[kColumns / 2];
  float upper[4], lower[4];
  const auto finish = [&](int n, const KeyRows& rows) {
    // The lanes share the queries out among them: lane `quad` ends with query `quad`.
    const bool high = quad & 2, odd = quad & 1;
    float* to = out + (first_tile + n * stride) * kIndexTile;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* v = half ? lower : upper;
      const float x = (high ? v[2] : v[0]) + __shfl_xor_sync(~0u, high ? v[0] : v[2], 2);
      const float y = (high ? v[3] : v[1]) + __shfl_xor_sync(~0u, high ? v[1] : v[3], 2);
      const float sum = (odd ? y : x) + __shfl_xor_sync(~0u, odd ? x : y, 1);
      if (writes && rows.exact[half]) to[8 * half] = sum * rows.power[half];
    }
  };
  for (int n = 0; n < tiles; ++n) {
    const int stage = ring_slot<kStages>(n);
    const uint32_t keys = shared_address(s.keys[stage]);
    barrier_wait(&s.keys_full[stage], ring_parity<kStages>(n));
    if (warpgroup == 1 || n > 0) group_barrier(1 + warpgroup, 256);  // in turns, or both would reduce at a time
    multiply<kColumns>(a, keys, q);
    multiply<kColumns>(b, keys, q + kColumns * kIndexDim);
    product_wait<1>();
    if (warpgroup == 0 || n + 1 < tiles) group_arrive(2 - warpgroup, 256);
    pin(a);
    const KeyRows rows(s.key_tail[stage], row, share);
    weigh_two(a, w, 0, upper, lower);
    product_wait<0>();
    pin(b);
    barrier_arrive_if(lane == 0, shared_address(&s.keys_empty[stage]));
    weigh_two(b, w, 2, upper, lower);
    finish(n, rows);
  }
}

// ---- Rows alone: the warpgroups take alternate tiles.
__device__ __forceinline__ void consume(Shared<1>& s, const Arguments& p, int group, int first_tile, int tiles) {
  const int warpgroup = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int row = warp * 16 + lane / 4;
  barrier_wait(&s.q_full[0], 0);
  const Share<1> share(s, group, 0);
  float w[1][16];
  load_weights(w, share, p, s.q_tail[0]);
  for (int n = warpgroup; n < tiles; n += 2) {
    const int stage = ring_slot<kStages>(n);
    barrier_wait(&s.keys_full[stage], ring_parity<kStages>(n));
    float d[32], sum[2];
    multiply<kIndexHeads>(d, shared_address(s.keys[stage]), shared_address(s.q[0]));
    const KeyRows rows(s.key_tail[stage], row, share);
    product_wait<0>();
    pin(d);
    barrier_arrive_if(lane == 0, shared_address(&s.keys_empty[stage]));
    weigh(d, w[0], sum[0], sum[1]);
    float* to = share.out(p, 0) + (first_tile + n * static_cast<int>(gridDim.y)) * kIndexTile + row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = over_quad(sum[half]);
      if (lane % 4 == 0 && rows.exact[half]) to[8 * half] = total * rows.power[half];
    }
  }
}

// ---- The spare warps: keys that are too long for some query of a share.
// A query's scores with the 16 keys from `strip` on. q_tail: of its heads.
template <int kQueries>
__device__ __forceinline__ void score_slowly(const Share<kQueries>& share, const float* w, const IndexTail* q_tail,
                                             uint32_t q_codes, const IndexTail* key_tail, uint32_t key_codes, int strip,
                                             float* to) {
  const int lane = threadIdx.x % 32, quad = lane % 4, row = strip + lane / 4;
  // Matrix loads: 16 rows of 16 bytes, twice; in the swizzle of the copies.
  const int loaded = strip + lane % 16;
  float sum[2] = {0, 0};
#pragma unroll 1
  for (int first = 0; first < kIndexHeads; first += 8) {
    const int head = first + lane / 4, own = first + 2 * quad;  // whose codes this lane brings; its two columns
    float d[4] = {};
#pragma unroll 1
    for (int block = 0; block < kIndexDim / 32; ++block) {
      uint32_t a[4];
      load_matrices(a, key_codes + loaded * kIndexDim + (((2 * block + lane / 16) ^ (loaded & 7)) << 4));
      const uint32_t from = q_codes + head * kIndexDim + 4 * quad;
      float part[4] = {};
      multiply_16x8_fp8(part, a, load_shared_4(from + (((2 * block) ^ (head & 7)) << 4)),
                        load_shared_4(from + (((2 * block + 1) ^ (head & 7)) << 4)));
#pragma unroll
      for (int k = 0; k < 4; ++k)
        d[k] =
            fmaf(part[k], relative_power(key_tail[row + k / 2 * 8], block) * relative_power(q_tail[own + k % 2], block),
                 d[k]);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      sum[k / 2] = weighed(half_weight(__ldg(w + own + k % 2), q_tail[own + k % 2]), d[k], sum[k / 2]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const IndexTail& key = key_tail[row + 8 * half];
    const float total = over_quad(sum[half]);
    if (quad == 0 && !share.exact(key.length)) to[row + 8 * half] = total * key.power;
  }
}

template <int kQueries>
__device__ __forceinline__ void watch(Shared<kQueries>& s, const Arguments& p, const Walk& walk) {
  using S = Shared<kQueries>;
  const int spare = threadIdx.x / 32 - 1, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < S::kCopies; ++i) barrier_wait(&s.q_full[i], 0);
  const Share<kQueries> shares[2] = {{s, walk.group, 0}, {s, walk.group, 1}};
  for (int n = spare; n < walk.tiles; n += kSpareWarps) {
    const int stage = ring_slot<kStages>(n);
    barrier_wait(&s.keys_full[stage], ring_parity<kStages>(n));
    const IndexTail* key_tail = s.key_tail[stage];
#pragma unroll 1
    for (int i = 0; i < S::kCopies; ++i) {
      const Share<kQueries> share = i == 0 ? shares[0] : shares[1];
      const uint64_t low = __ballot_sync(~0u, !share.exact(key_tail[lane].length)),
                     high = __ballot_sync(~0u, !share.exact(key_tail[32 + lane].length)), far = low | high << 32;
      if (far == 0) continue;
#pragma unroll 1
      for (int strip = 0; strip < kIndexTile; strip += 16)
#pragma unroll 1
        for (int query = 0; query < kQueries && share.first_query + query < p.rows; ++query)
          if (far >> strip & 0xffff)
            score_slowly(share, p.w + static_cast<size_t>(share.first_query + query) * kIndexHeads,
                         s.q_tail[share.copy] + query * kIndexHeads,
                         shared_address(s.q[share.copy]) + query * kIndexHeads * kIndexDim, key_tail,
                         shared_address(s.keys[stage]), strip,
                         share.out(p, query) + (walk.first_tile + n * static_cast<int>(gridDim.y)) * kIndexTile);
    }
    barrier_arrive_if(lane == 0, shared_address(&s.keys_empty[stage]));
  }
}

struct Maps {
  CUtensorMap q, q_tail, keys, key_tail;
};

template <int kQueries>
__global__ void __launch_bounds__(kThreads, 1)
    scores_kernel(const __grid_constant__ Arguments p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) uint8_t raw[];
  using S = Shared<kQueries>;
  S& s = *reinterpret_cast<S*>(raw);
  constexpr int kGroupRows = kQueries == 4 ? 8 : 1;
  const Walk walk = walk_of(p, kGroupRows);
  if (walk.tiles <= 0) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kCopies; ++i) barrier_init(&s.q_full[i], 1);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.keys_full[i], 1);
      barrier_init(&s.keys_empty[i], (kQueries == 4 ? 8 : 4) + 1);  // warps; one of them spare
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    take_registers<216>();
    consume(s, p, walk.group, walk.first_tile, walk.tiles);
    return;
  }
  give_registers<72>();
  if (threadIdx.x >= 32) {
    watch(s, p, walk);
  } else if (threadIdx.x == 0) {
    const auto load_queries = [&](int copy) {
      const uint32_t full = shared_address(&s.q_full[copy]);
      const int first = (walk.group * kGroupRows + copy * kQueries) * kIndexHeads;
      barrier_arrive_expect(full, sizeof(s.q[copy]) + sizeof(s.q_tail[copy]));
      copy_tensor_2d(shared_address(s.q[copy]), &maps.q, 0, first, full);
      copy_tensor_2d(shared_address(s.q_tail[copy]), &maps.q_tail, kIndexDim, first, full);
    };
    const auto load_keys = [&](int n) {
      const int stage = ring_slot<kStages>(n);
      const int entry =
          __ldg(p.groups.tile_first + walk.tile_begin + walk.first_tile + n * static_cast<int>(gridDim.y));
      barrier_wait(&s.keys_empty[stage], ring_parity<kStages>(n) ^ 1);
      const uint32_t full = shared_address(&s.keys_full[stage]);
      barrier_arrive_expect(full, kKeyBytes + kKeyTailBytes);
      copy_tensor_2d(shared_address(s.keys[stage]), &maps.keys, 0, entry, full);
      copy_tensor_2d(shared_address(s.key_tail[stage]), &maps.key_tail, kIndexDim, entry, full);
    };
    load_keys(0);
    for (int copy = 0; copy < S::kCopies; ++copy) load_queries(copy);
    for (int n = 1; n < walk.tiles; ++n) load_keys(n);
  }
}

CUtensorMap codes_map(const void* records, int rows, int box_rows) {
  return matrix_map(records, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, rows, kIndexRecordBytes, box_rows, kIndexDim,
                    CU_TENSOR_MAP_SWIZZLE_128B);
}
CUtensorMap tails_map(const void* records, int rows, int box_rows) {
  return matrix_map(records, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, rows, kIndexRecordBytes, box_rows, sizeof(IndexTail),
                    CU_TENSOR_MAP_SWIZZLE_NONE);
}

template <int kQueries>
cudaError_t launch(const IndexSelection& s, const Arguments& a, int splits, cudaStream_t stream) {
  using S = Shared<kQueries>;
  const cudaError_t error =
      cudaFuncSetAttribute(scores_kernel<kQueries>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(S));
  if (error != cudaSuccess) return error;
  const int heads = s.groups->rows * kIndexHeads;
  const Maps maps{codes_map(s.q, heads, S::kColumns), tails_map(s.q, heads, S::kColumns),
                  codes_map(s.keys, s.entries, kIndexTile), tails_map(s.keys, s.entries, kIndexTile)};
  scores_kernel<kQueries><<<dim3(a.last_group - a.first_group, splits), kThreads, sizeof(S), stream>>>(a, maps);
  return cudaGetLastError();
}

}  // namespace

cudaError_t scores_of_records(const IndexSelection& s, const Arguments& a, int splits, cudaStream_t stream) {
  return s.groups->group_rows == 8 ? launch<4>(s, a, splits, stream) : launch<1>(s, a, splits, stream);
}

}  // namespace indexer
}  // namespace plumb::kernels
