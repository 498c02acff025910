// Sparse attention forward for few queries (decoding): a cluster of two CTAs an item, so that one query is not the work
// of one multiprocessor. The two share the columns of the keys: CTA 0 gathers columns 0 to 255 of every key, CTA 1 the
// others, and no byte is read twice.
//   1. CTA 0 contracts its columns and sends the accumulators, FP32, to CTA 1, which continues the sums over its own
//      columns and so has the scores.
//   2. CTA 1 makes the weights of the softmax and sends them to CTA 0, as operand fragments, with the references.
//   3. Both add the values of the block to their own half of the output's columns, which is the half of the keys that
//      they have.
// The bits are those of forward.cu. A score is one chain of products over the columns in their order, which is only
// interrupted where the accumulators move to the other multiprocessor; an output element meets the same blocks in the
// same order; the softmax is the same instructions on the same numbers (forward_parts.cuh), and sums of even and odd
// blocks are kept apart, as the two warpgroups there do.
//
// What passes between the CTAs is sent by st.async and so completes on the receiver's barriers, together with its
// bytes. Waiting there with a CTA's scope is enough; a cluster's, which would order ordinary stores of the other CTA
// too, takes several hundred cycles each time.
//
// The warpgroups of a CTA are stages of a pipeline that runs through both:
//   warpgroups 0, 1   scores of even, of odd blocks
//   warpgroup 2       values
//   warpgroups 3, 4   gather the keys into a ring of buffers
#include "kernels/hopper/cluster.cuh"
#include "kernels/sparse_attention/forward_parts.cuh"

namespace plumb::kernels {
namespace attention {
namespace {

using namespace hopper;

constexpr int kCluster = 2, kThreads = 640, kGroup = 128;
constexpr int kColumns = kDim / kCluster;
static_assert(kColumns == 256);

// Of 16 heads, those of one warp of a warpgroup. What a lane of the sender writes, the same lane of the receiver reads.
struct PartialScores {
  uint4 scores[8][32];  // [four accumulators][lane] FP32
};
struct Weights {
  uint4 fragments[4][32];  // [16 keys][lane] bf16
  float reference[16];     // after the block
};

// Half of a CTA's columns of a block of keys. CTA 1 receives scores where CTA 0 has two more of them.
using Unit = uint8_t[2 * kPanelBytes];
constexpr int kUnits = 11, kFewerUnits = 9;
static_assert(sizeof(PartialScores[4]) == sizeof(Unit));

struct Shared {
  alignas(1024) uint8_t q[kHalfBytes];  // four panels of 64 heads x 64 columns
  Unit keys[kUnits];
  Weights weights[2][4];             // [block parity][warp]
  float reference[2][kTileHeads];    // CTA 1: [block parity] from one block's scores to the next one's
  float sums[kTileHeads];            // CTA 1: of the weights that the warpgroup without the last block has made
  float factor[kTileHeads];          // what sums of values are multiplied by in the end
  alignas(8) uint8_t present[8][8];  // [block % 8] bit k of byte w: entry 8 w + k of the block is a key
  uint64_t keys_full[kUnits], keys_empty[kUnits];
  uint64_t partial_full[2], partial_empty[2];  // [block parity] in CTA 1, in CTA 0
  uint64_t weights_full[2], weights_empty[2];  // [block parity] empty: in CTA 1, for both
  uint64_t reference_full[2], sums_full, factor_full;

  // Those of CTA 1, where CTA 0 has keys. [warp]
  __device__ PartialScores* partial(int parity) { return reinterpret_cast<PartialScores*>(keys[kFewerUnits + parity]); }
};
static_assert(sizeof(Shared) <= 232448);

// Place in the ring of units, which is shorter in CTA 1.
struct Place {
  int units, unit = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ explicit Place(int rank) : units(rank == 0 ? kUnits : kFewerUnits) {}
  __device__ __forceinline__ void advance(int count) {
    unit += count;
    if (unit >= units) unit -= units, parity ^= 1;
  }
  __device__ __forceinline__ Place next() const {
    Place p = *this;
    p.advance(1);
    return p;
  }
};

// For descriptors, which the compiler then computes once a warp.
__device__ __forceinline__ uint32_t uniform_address(const void* shared) {
  return static_cast<uint32_t>(uniform(shared_address(shared)));
}

// ---- warpgroups 3 and 4 ----
// Eight rows of a unit by one warp, two with one instruction. Lanes first_lane to first_lane + 7 have the entries.
__device__ __forceinline__ void gather_unit(uint8_t* unit, int first_row, const uint8_t* kv, int entries,
                                            int first_lane) {
  const int lane = threadIdx.x & 31, below = lane >> 4, column = lane & 15;
  const uint8_t* from = kv + column * 16;
  const uint32_t to =
      shared_address(unit) + (column >> 3) * kPanelBytes + first_row * 128 + swizzled(below, column & 7);
  int row[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) row[r] = __shfl_sync(~0u, entries, first_lane + 2 * r + below);
#pragma unroll
  for (int r = 0; r < 4; ++r) copy16_of_row(place_in_row(to, 2 * r), from, row[r]);
}

// Eight rows of both units, widened on the way, all in flight together.
__device__ __forceinline__ void gather_fp8(uint8_t* left, uint8_t* right, int first_row, int rank, const uint8_t* kv,
                                           int entries, int first_lane) {
  const int lane = threadIdx.x & 31, panel = lane >> 3;
  const uint32_t to =
      shared_address(panel < 2 ? left : right) + (panel & 1) * kPanelBytes + first_row * 128 + swizzled(0, lane & 7);
  const bool rotated = rank == 1 && panel == 3;  // these channels are bf16
  uint2 codes[8];
  uint32_t exponent[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int row = __shfl_sync(~0u, entries, first_lane + r);
    const uint8_t* key = kv + static_cast<size_t>(max(row, 0)) * kFp8KeyBytes;
    codes[r] = make_uint2(0, 0), exponent[r] = 0;
    if (rotated) {
      copy16(place_in_row(to, r), key + kFp8KeyCodes + (lane - 24) * 16, row >= 0 ? 16 : 0);
    } else if (row >= 0) {
      codes[r] = __ldg(reinterpret_cast<const uint2*>(key + rank * kColumns) + lane);
      exponent[r] = __ldg(key + kFp8KeyScales + rank * 4 + panel);
    }
  }
#pragma unroll
  for (int r = 0; r < 8; ++r)
    if (!rotated) store_shared_16(place_in_row(to, r), widen_eight(codes[r], exponent[r]));
}

template <bool kFp8>
__device__ __forceinline__ void gather(Shared& s, const SparseAttentionForward& p, int index, int rank) {
  const int warp = (threadIdx.x - 3 * kGroup) >> 5, lane = threadIdx.x & 31, first_row = warp * 8;
  const uint8_t* kv = static_cast<const uint8_t*>(p.kv);
  const Item item = item_at(p.lists, p.heads / kTileHeads, index);
  const int blocks = block_count(item);
  // A register has the warp's entries of four blocks. Those of twelve are asked for before Q and any key: behind keys
  // on their way they would take as long as these.
  const int my_entry = (lane >> 3) * kBlock + first_row + (lane & 7);
  int entries = list_entry(p.lists, item, my_entry), next_entries = list_entry(p.lists, item, 4 * kBlock + my_entry),
      later_entries = list_entry(p.lists, item, 8 * kBlock + my_entry);
  copy_rows<8>(s.q, first_row,
               static_cast<const uint8_t*>(p.q) + static_cast<size_t>(index) * kTileBytes + first_row * kRowBytes +
                   rank * kColumns * 2,
               lane);  // arrives with the first keys
  cluster_wait();      // barriers are there
  Place at(rank);
  for (int b = 0; b < blocks; ++b, at.advance(2)) {
    const Place second = at.next();
    const int first_lane = b % 4 * 8;
    const uint32_t present = __ballot_sync(~0u, entries >= 0) >> first_lane;
    barrier_wait(&s.keys_empty[at.unit], at.parity ^ 1);
    if (lane == 0) {
      s.present[b % 8][warp] = static_cast<uint8_t>(present);
      barrier_arrive(&s.keys_full[at.unit]);
    }
    if constexpr (kFp8) {
      barrier_wait(&s.keys_empty[second.unit], second.parity ^ 1);
      if (lane == 0) barrier_arrive(&s.keys_full[second.unit]);
      gather_fp8(s.keys[at.unit], s.keys[second.unit], first_row, rank, kv, entries, first_lane);
      copy_commit();
      copy_wait<0>();
      async_proxy_fence();
      barrier_arrive(&s.keys_full[at.unit]);
      barrier_arrive(&s.keys_full[second.unit]);
    } else {
      gather_unit(s.keys[at.unit], first_row, kv + rank * kColumns * 2, entries, first_lane);
      copy_arrive(shared_address(&s.keys_full[at.unit]));
      barrier_wait(&s.keys_empty[second.unit], second.parity ^ 1);
      if (lane == 0) barrier_arrive(&s.keys_full[second.unit]);
      gather_unit(s.keys[second.unit], first_row, kv + rank * kColumns * 2 + kColumns, entries, first_lane);
      copy_arrive(shared_address(&s.keys_full[second.unit]));
    }
    if (b % 4 == 3) {
      entries = next_entries, next_entries = later_entries;
      later_entries = list_entry(p.lists, item, (b + 9) * kBlock + my_entry);
    }
  }
  cluster_arrive_relaxed();
}

// ---- warpgroups 0 and 1 ----
// CTA 1: the sums over the columns of CTA 0.
__device__ __forceinline__ void receive_scores(Shared& s, float (&scores)[32], int block) {
  const int warp = (threadIdx.x % kGroup) >> 5, lane = threadIdx.x & 31, parity = block & 1;
  barrier_wait(shared_address(&s.partial_full[parity]), (block >> 1) & 1);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4 four = s.partial(parity)[warp].scores[i][lane];
    scores[4 * i] = __uint_as_float(four.x), scores[4 * i + 1] = __uint_as_float(four.y);
    scores[4 * i + 2] = __uint_as_float(four.z), scores[4 * i + 3] = __uint_as_float(four.w);
  }
  if (threadIdx.x % kGroup == 0) barrier_arrive_expect(shared_address(&s.partial_full[parity]), sizeof(Unit));
  __syncwarp();
  if (lane == 0) barrier_arrive_at(shared_address(&s.partial_empty[parity]), 0);
}

// CTA 0: to CTA 1.
__device__ __forceinline__ void send_scores(Shared& s, const float (&scores)[32], int block) {
  const int warp = (threadIdx.x % kGroup) >> 5, lane = threadIdx.x & 31, parity = block & 1;
  barrier_wait(shared_address(&s.partial_empty[parity]), ((block >> 1) & 1) ^ 1);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    send_16(shared_address(&s.partial(parity)[warp].scores[i][lane]), 1,
            make_uint4(__float_as_uint(scores[4 * i]), __float_as_uint(scores[4 * i + 1]),
                       __float_as_uint(scores[4 * i + 2]), __float_as_uint(scores[4 * i + 3])),
            shared_address(&s.partial_full[parity]));
}

// CTA 1: to the values of both.
__device__ __forceinline__ void send_weights(Shared& s, const uint32_t (&weights)[4][4], const float (&to)[2],
                                             int block) {
  const int warp = (threadIdx.x % kGroup) >> 5, lane = threadIdx.x & 31, parity = block & 1;
  const uint32_t full = shared_address(&s.weights_full[parity]);
  barrier_wait(shared_address(&s.weights_empty[parity]), ((block >> 1) & 1) ^ 1);
  Weights& out = s.weights[parity][warp];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 four = make_uint4(weights[i][0], weights[i][1], weights[i][2], weights[i][3]);
    send_16(shared_address(&out.fragments[i][lane]), 0, four, full);
    out.fragments[i][lane] = four;
  }
  if (lane % 4 == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      send_float(shared_address(&out.reference[8 * half + (lane >> 2)]), 0, to[half], full);
      out.reference[8 * half + (lane >> 2)] = to[half];
    }
  }
  barrier_arrive(full);
}

__device__ __forceinline__ void score(Shared& s, const SparseAttentionForward& p, int index, int rank) {
  const int tiles = p.heads / kTileHeads, group = threadIdx.x / kGroup;
  const int quad = threadIdx.x & 3, row = ((threadIdx.x % kGroup) >> 5) * 16 + ((threadIdx.x & 31) >> 2);
  const int blocks = block_count(item_at(p.lists, tiles, index));
  float sink[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) sink[half] = __ldg(p.sink + (index & (tiles - 1)) * kTileHeads + row + 8 * half);
  Softmax softmax{p.scale * kLog2e};
  softmax.clear();
  // The reference after a block of the other warpgroup.
  const auto follow = [&](int block) {
    barrier_wait(&s.reference_full[block & 1], (block >> 1) & 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) softmax.reference[half] = s.reference[block & 1][row + 8 * half];
  };
  cluster_wait();
  const uint32_t q = uniform_address(s.q);
  Place at(rank);
  at.advance(2 * group);
  for (int b = group; b < blocks; b += 2, at.advance(4)) {
    const Place units[2] = {at, at.next()};
    float scores[32];
#pragma unroll
    for (float& x : scores) x = 0.f;
    if (rank == 1) receive_scores(s, scores, b);
#pragma unroll
    for (const Place& unit : units) barrier_wait(&s.keys_full[unit.unit], unit.parity);
    async_proxy_fence();
    product_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t keys = uniform_address(s.keys[units[half].unit]);
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        const uint32_t offset = (step / 4) * kPanelBytes + (step % 4) * 32;
        wgmma<kColumnsContracted, kColumnsContracted>(scores, tile_descriptor(q + half * 2 * kPanelBytes + offset),
                                                      tile_descriptor(keys + offset), rank == 1 || half + step > 0);
      }
    }
    product_commit();
    product_wait<0>();
    pin(scores);
    if (rank == 0) {
      send_scores(s, scores, b);
#pragma unroll
      for (const Place& unit : units) barrier_arrive(&s.keys_empty[unit.unit]);
      continue;
    }
    hide_absent(scores, s.present[b % 8]);
#pragma unroll
    for (const Place& unit : units) barrier_arrive(&s.keys_empty[unit.unit]);
    float top[2], to[2], factor[2];
    largest_scores(scores, top);
    if (b > 0) follow(b - 1);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      to[half] = Softmax::reference_after(softmax.reference[half], top[half], softmax.scale2);
    if (quad == 0) s.reference[b & 1][row] = to[0], s.reference[b & 1][row + 8] = to[1];
    barrier_arrive(&s.reference_full[b & 1]);
    softmax.move(to, factor);
    uint32_t weights[4][4];
    make_weights(scores, to, softmax.scale2, weights);
    send_weights(s, weights, to, b);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.rebase(half);
      softmax.sum[half] += sum_of_weights(scores, half);
    }
  }
  if (rank == 1) {
    const bool has_last = ((blocks - 1) & 1) == group;
    if (!has_last) follow(blocks - 1);
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.rebase(half);
      sum[half] = softmax.sum[half];
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
      if (!has_last && quad == 0) s.sums[row + 8 * half] = sum[half];
    }
    if (!has_last) {
      barrier_arrive(&s.sums_full);
    } else {
      barrier_wait(&s.sums_full, 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int head = row + 8 * half;
        const RowEnd end = end_of_row(softmax.reference[half], sum[half] + s.sums[head], sink[half]);
        if (quad < kCluster)
          send_float(shared_address(&s.factor[head]), quad, end.factor, shared_address(&s.factor_full));
        if (quad == 0) p.lse[static_cast<size_t>(index) * kTileHeads + head] = end.lse;
      }
    }
  }
  cluster_arrive_relaxed();
}

// ---- warpgroup 2 ----
__device__ __forceinline__ void add_values(Shared& s, const SparseAttentionForward& p, int index, int rank) {
  const int tiles = p.heads / kTileHeads, thread = threadIdx.x % kGroup, warp = thread >> 5, lane = thread & 31;
  const int row = warp * 16 + (lane >> 2);
  const int blocks = block_count(item_at(p.lists, tiles, index));
  float o[2][64];  // [columns of a unit]
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i >> 6][i & 63] = 0.f;
  Softmax softmax;
  softmax.clear();
  cluster_wait();
  Place at(rank);
  for (int b = 0; b < blocks; ++b, at.advance(2)) {
    const Place units[2] = {at, at.next()};
    const int parity = b & 1;
    // Long ago, for the weights depend on them.
#pragma unroll
    for (const Place& unit : units) barrier_wait(&s.keys_full[unit.unit], unit.parity);
    async_proxy_fence();
    barrier_wait(shared_address(&s.weights_full[parity]), (b >> 1) & 1);
    uint32_t weights[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 four = s.weights[parity][warp].fragments[i][lane];
      weights[i][0] = four.x, weights[i][1] = four.y, weights[i][2] = four.z, weights[i][3] = four.w;
    }
    const float to[2] = {s.weights[parity][warp].reference[lane >> 2],
                         s.weights[parity][warp].reference[8 + (lane >> 2)]};
    if (rank == 1) {
      barrier_arrive(&s.weights_empty[parity]);
    } else {
      if (thread == 0) barrier_arrive_expect(shared_address(&s.weights_full[parity]), sizeof(s.weights[parity]));
      __syncwarp();
      if (lane == 0) barrier_arrive_at(shared_address(&s.weights_empty[parity]), 1);
    }
    float factor[2];
    softmax.move(to, factor);
    if (!__all_sync(~0u, factor[0] == 1.f && factor[1] == 1.f)) {
#pragma unroll
      for (int i = 0; i < 128; ++i) o[i >> 6][i & 63] *= factor[(i >> 1) & 1];
    }
    product_fence();
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const uint32_t values = uniform_address(s.keys[units[part].unit]);
#pragma unroll
      for (int step = 0; step < kBlock / 16; ++step)
        wgmma<kRowsContracted>(o[part], weights[step], tile_descriptor(values + step * 2048, kPanelBytes), true);
      product_commit();
    }
    product_wait<1>();
    barrier_arrive(&s.keys_empty[units[0].unit]);
    product_wait<0>();
    pin(o[0]), pin(o[1]);
    barrier_arrive(&s.keys_empty[units[1].unit]);
  }
  cluster_arrive_relaxed();  // this CTA sends nothing more, and has received all but the factors
  barrier_wait(shared_address(&s.factor_full), 0);
  const float factor[2] = {s.factor[row], s.factor[row + 8]};
  __nv_bfloat16* out =
      static_cast<__nv_bfloat16*>(p.o) + (static_cast<size_t>(index) * kTileHeads + row) * kDim + rank * kColumns;
  const bool rotated = p.rotation != nullptr && rank == 1;
  if (rotated) rotate_back(o[1] + 32, factor, p.rotation, index >> (tiles - 1));
  store_rows_bf16<16>(o[0], factor[0], factor[1], out, 8 * kDim);
  store_rows_bf16<8>(o[1], factor[0], factor[1], out + 128, 8 * kDim);
  store_rows_bf16<8>(o[1] + 32, rotated ? 1.f : factor[0], rotated ? 1.f : factor[1], out + 192, 8 * kDim);
}

template <bool kFp8>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    pairs_kernel(const __grid_constant__ SparseAttentionForward p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const int rank = static_cast<int>(cluster_rank()), index = blockIdx.x / kCluster;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kUnits; ++i) {
      barrier_init(&s.keys_full[i], 2 * kGroup + 8);  // once more from each warp, for `present`
      barrier_init(&s.keys_empty[i], 2 * kGroup);     // scores, values
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&s.partial_full[i], 1);
      barrier_init(&s.partial_empty[i], kGroup / 32);
      barrier_init(&s.weights_full[i], rank == 1 ? kGroup : 1);
      barrier_init(&s.weights_empty[i], kGroup + kGroup / 32);  // the other CTA arrives once a warp
      barrier_init(&s.reference_full[i], kGroup);
    }
    barrier_init(&s.sums_full, kGroup);
    barrier_init(&s.factor_full, 1);
    barrier_init_fence();
    for (int i = 0; i < 2; ++i) {
      barrier_arrive_expect(shared_address(&s.partial_full[i]), sizeof(Unit));
      if (rank == 0) barrier_arrive_expect(shared_address(&s.weights_full[i]), sizeof(s.weights[i]));
    }
    barrier_arrive_expect(shared_address(&s.factor_full), sizeof(s.factor));
  }
  __syncwarp();  // initialising is an instruction of the whole warp
  cluster_arrive_relaxed();
  if (threadIdx.x < 2 * kGroup) {
    score(s, p, index, rank);
  } else if (threadIdx.x < 3 * kGroup) {
    take_registers<176>();
    add_values(s, p, index, rank);
  } else {
    give_registers<56>();
    gather<kFp8>(s, p, index, rank);
  }
  cluster_wait();  // this CTA's memory stays until the other one has sent and received
}

}  // namespace

cudaError_t launch_pairs(const SparseAttentionForward& p, cudaStream_t stream) {
  const auto kernel = p.kv_fp8 ? pairs_kernel<true> : pairs_kernel<false>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  const int items = p.queries * (p.heads / kTileHeads);
  kernel<<<items * kCluster, kThreads, sizeof(Shared), stream>>>(p);
  return cudaGetLastError();
}

}  // namespace attention
}  // namespace plumb::kernels
