// Products with bf16 weights: the thin kernel, and the host side of the narrow and the wide one.
//
// Thin: a block computes 128 rows x 128 outputs. Warpgroup 0 feeds six stages of 64 of K, warpgroups 1 and 2 own 64
// rows each. Where K is cut into parts, the tensor cores' sum is added to an FP32 total every 512 of it. With few rows
// there are more multiprocessors than tiles: then each part of K is a block of its own, which leaves its sum in a
// workspace, and a second kernel adds the parts in the same order.
#include "kernels/row_linear/row_linear.h"

#include "kernels/device.h"
#include "kernels/hopper/launch_order.cuh"
#include "kernels/lora/low_rank.cuh"
#include "kernels/portable/product.cuh"
#include "kernels/row_linear/narrow_product.cuh"
#include "kernels/row_linear/wide_product.cuh"

namespace plumb::kernels::row_linear {
namespace {

using namespace hopper;
using wide_product::kPanelBytes;

constexpr int kTile = 128, kDepth = 64;
constexpr int kPartSteps = 8;  // steps of kDepth in a part
constexpr int kStages = 6, kThreads = 384;
constexpr int kOperandBytes = 2 * kPanelBytes, kStageBytes = 2 * kOperandBytes;
constexpr int kBarrierStart = kStages * kStageBytes, kSharedBytes = kBarrierStart + 2 * kStages * 8;

struct Thin {
  int rows, n, k;            // n: outputs of all groups
  int group_n;               // outputs of a group
  float* out_f32 = nullptr;  // one of the two
  uint16_t* out_bf16 = nullptr;
  float* parts = nullptr;  // [parts][rows][n], or null: this block walks all parts
  lora::LowRank low_rank = {};
  bool settled = true;  // the launch directly before has not written the weight (launch_dependent)
  __host__ __device__ int steps() const { return (k + kDepth - 1) / kDepth; }
  __host__ __device__ int part_count() const { return (steps() - 1) / kPartSteps + 1; }
};

// The first and last step of this block.
struct Range {
  int first, last;
};
__device__ __forceinline__ Range steps_of(const Thin& p) {
  if (!p.parts) return {0, p.steps()};
  const int first = blockIdx.z * kPartSteps;
  return {first, min(first + kPartSteps, p.steps())};
}

__device__ __forceinline__ lora::LowRank low_rank_of(const Thin& p, int column) {
  lora::LowRank l = p.low_rank;
  l.t += column / p.group_n * l.rank;
  return l;
}

__device__ __forceinline__ void store(const Thin& p, const float (&total)[64], int row, int column) {
  float* to_f32 = p.parts ? p.parts + static_cast<size_t>(blockIdx.z) * p.rows * p.n : p.out_f32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= p.rows) break;
    const size_t at = static_cast<size_t>(row + 8 * half) * p.n + column;
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i) {
      if (column + 8 * i >= p.n) break;
      const float a = total[4 * i + 2 * half], b = total[4 * i + 2 * half + 1];
      if (to_f32)
        *reinterpret_cast<float2*>(to_f32 + at + 8 * i) = make_float2(a, b);
      else
        *reinterpret_cast<uint32_t*>(p.out_bf16 + at + 8 * i) = pack_bf16(a, b);
    }
  }
}

// Of a thread's 64 sums of all parts: the low rank, and out. row, column: of the first row, of the tile.
__device__ __forceinline__ void finish(const Thin& p, float (&total)[1][64], int row, int column, int lane) {
  if (p.low_rank.rank > 0 && !p.parts) {
    const int rows[1][2] = {{min(row, p.rows - 1), min(row + 8, p.rows - 1)}};
    lora::add_to_rows(total, 1, low_rank_of(p, column), {0, p.n, column}, rows, lane);
  }
  store(p, total[0], row, column + 2 * (lane % 4));
}

template <bool kOneChain>
__device__ __forceinline__ void consume(uint32_t start, const Thin& p, Range range, int owner, int thread) {
  const int lane = thread % 32, first_row = blockIdx.y * kTile + owner * 64;
  float total[1][64] = {}, partial[64];
  for (int step = range.first; step < range.last; ++step) {
    const uint32_t count = step - range.first, slot = count % kStages, at = start + slot * kStageBytes;
    barrier_wait(start + kBarrierStart + 8 * slot, count / kStages & 1);
    const uint64_t a = tile_descriptor(at + owner * kPanelBytes), b = tile_descriptor(at + kOperandBytes);
    const bool begins = kOneChain ? step == 0 : step % kPartSteps == 0;
    product_fence();
#pragma unroll
    for (int i = 0; i < kDepth / 16; ++i)
      wgmma<kColumnsContracted, kColumnsContracted>(partial, a + 2 * i, b + 2 * i, !begins || i > 0);
    product_commit();
    product_wait<0>();
    pin(partial);
    barrier_arrive_if(lane == 0, start + kBarrierStart + 8 * (kStages + slot));
    if (!kOneChain && (step % kPartSteps == kPartSteps - 1 || step + 1 == range.last)) {
#pragma unroll
      for (int i = 0; i < 64; ++i) total[0][i] = __fadd_rn(total[0][i], partial[i]);
    }
  }
  if constexpr (kOneChain) {
#pragma unroll
    for (int i = 0; i < 64; ++i) total[0][i] = partial[i];
  }
  finish(p, total, first_row + thread / 32 * 16 + lane / 4, blockIdx.x * kTile, lane);
}

// Fills the stages; the first weights are on their way before the rows exist.
__device__ __forceinline__ void feed(uint32_t start, const CUtensorMap* x, const CUtensorMap* w, const Thin& p,
                                     Range range) {
  const auto send_weights = [&](int step, uint32_t slot) {
    const uint32_t full = start + kBarrierStart + 8 * slot;
    barrier_arrive_expect(full, kStageBytes);
    copy_tensor_2d(start + slot * kStageBytes + kOperandBytes, w, step * kDepth, blockIdx.x * kTile, full);
  };
  const int ahead = p.settled ? min(range.first + kStages, range.last) : range.first;
  for (int step = range.first; step < ahead; ++step) send_weights(step, step - range.first);
  wait_for_earlier_launches();
  let_next_launch_begin();
  const int first_input = blockIdx.x * kTile / p.group_n * p.k;
  for (int step = range.first; step < range.last; ++step) {
    const uint32_t count = step - range.first, slot = count % kStages, full = start + kBarrierStart + 8 * slot;
    if (step >= ahead) {
      barrier_wait(full + 8 * kStages, (count / kStages & 1) ^ 1);
      send_weights(step, slot);
    }
    copy_tensor_2d(start + slot * kStageBytes, x, first_input + step * kDepth, blockIdx.y * kTile, full);
  }
}

// Grid: (tiles of n, tiles of rows, parts or 1).
template <bool kOneChain>
__global__ void __launch_bounds__(kThreads, 1)
    thin_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w, const Thin p) {
  if constexpr (!kHasCode) return __trap();
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t start = uniform(shared_address(shared));
  const int group = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    prefetch_map(&x), prefetch_map(&w);
    for (int i = 0; i < kStages; ++i)
      barrier_init(start + kBarrierStart + 8 * i, 1), barrier_init(start + kBarrierStart + 8 * (kStages + i), 8);
    barrier_init_fence();
  }
  __syncthreads();
  const Range range = steps_of(p);
  if (group == 0) {
    give_registers<40>();
    if (threadIdx.x == 0) feed(start, &x, &w, p, range);
    wait_for_earlier_launches();
  } else {
    take_registers<232>();
    wait_for_earlier_launches();
    consume<kOneChain>(start, p, range, group - 1, threadIdx.x % 128);
  }
}

// The parts of 64 rows x 128 outputs: added by all threads, so that one row is not the work of four lanes, then taken
// to the places of a consumer warpgroup. p.parts is null: this finishes the product.
__global__ void __launch_bounds__(128) add_parts_kernel(const Thin p, const float* parts) {
  constexpr int kRows = 64;
  __shared__ float sums[kRows][kTile + 8];
  take_turn();
  const int first_row = blockIdx.y * kRows, column = blockIdx.x * kTile;
  const int rows = min(kRows, p.rows - first_row), columns = min(kTile, p.n - column), quads = columns / 4;
  for (int item = threadIdx.x; item < rows * quads; item += 128) {
    const int r = item / quads, n = item % quads * 4;
    const float* from = parts + static_cast<size_t>(first_row + r) * p.n + column + n;
    float4 total = {};
#pragma unroll 8
    for (int part = 0; part < p.part_count(); ++part) {
      const float4 v = __ldg(reinterpret_cast<const float4*>(from + static_cast<size_t>(part) * p.rows * p.n));
      total.x = __fadd_rn(total.x, v.x), total.y = __fadd_rn(total.y, v.y);
      total.z = __fadd_rn(total.z, v.z), total.w = __fadd_rn(total.w, v.w);
    }
    *reinterpret_cast<float4*>(&sums[r][n]) = total;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  float total[1][64] = {};
#pragma unroll
  for (int i = 0; i < 32; ++i) {  // pairs of outputs
    const int r = row + i % 2 * 8, n = i / 2 * 8 + 2 * (lane % 4);
    if (r < rows && n < columns) total[0][2 * i] = sums[r][n], total[0][2 * i + 1] = sums[r][n + 1];
  }
  finish(p, total, first_row + row, column, lane);
}

int tiles(int count) { return (count + kTile - 1) / kTile; }
// Whether parts of K become blocks of their own: speed only.
bool by_parts(const Thin& p) { return p.part_count() > 1 && tiles(p.rows) * tiles(p.n) * 2 <= multiprocessors(); }

void check(const char* where, const uint16_t* x, int rows, int n, int k, const void* w) {
  require(rows > 0, where,
          "rows = " + std::to_string(rows) + " must be positive (skip the product when there are none)");
  require(n > 0 && n % 8 == 0 && k > 0 && k % 8 == 0, where,
          "n = " + std::to_string(n) + " and k = " + std::to_string(k) + " must be positive multiples of 8");
  require(aligned(x, 16) && aligned(w, 16), where, "rows and weight must be aligned to 16 bytes");
}

template <bool kOneChain = false>
void launch_thin(const uint16_t* x, const uint16_t* w, const Thin& p, cudaStream_t stream) {
  const int groups = p.n / p.group_n;
  launch_dependent(
      thin_kernel<kOneChain>, {dim3(tiles(p.n), tiles(p.rows), p.parts ? p.part_count() : 1), kThreads, kSharedBytes},
      stream, wide_product::bf16_map(x, p.rows, groups * p.k, kTile), wide_product::bf16_map(w, p.n, p.k, kTile), p);
}

Thin thin_of(int rows, const Weight& w) { return {rows, w.n * w.groups, w.k, w.n}; }

// ---- One chain over K: adding the low rank before a result is stored ------------------------------------------------
// In the wide product. A tile's columns belong to one group. One adapter of a small rank, which is what training has:
// T and the factor arrive in shared memory while the products run.
template <typename Store>
struct AddLowRank {
  Store store;
  lora::LowRank low_rank;
  int group_columns;
  bool own_factor;  // each group has its own rows of the factor; otherwise all groups share them
  __device__ __forceinline__ int group(const wide_product::Place& place) const {
    return place.first_column() / group_columns;
  }
  __device__ __forceinline__ lora::Outputs outputs(const wide_product::Shape& s,
                                                   const wide_product::Place& place) const {
    if (own_factor) return {0, s.columns, place.first_column()};
    return {0, group_columns, place.first_column() - group(place) * group_columns};
  }
  // A warp's corner: the factor of 64 outputs, its share of the tile; T of its own 16 rows, zeros beyond the rank.
  static constexpr int kRankBytes = lora::kStagedRank * 4;
  static_assert(64 * lora::kFactorWords * 4 <= wide_product::kRowStagingBytes);
  __device__ __forceinline__ void begin(const wide_product::Shape& s, const wide_product::Place& place) const {
    if (!lora::can_stage(low_rank)) return;
    const int lane = place.lane, row = min(place.first_row() + lane % 16, s.rows - 1);
    const uint32_t* from =
        lora::factor_of(low_rank, 0, outputs(s, place), 0) + place.warp * 64 * lora::kFactorWords + lane * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) copy16(place.staging() + i * 512 + lane * 16, from + i * 128, 16);
    const float* t = low_rank.t + static_cast<size_t>(row) * low_rank.t_stride + group(place) * low_rank.rank;
    const int j = lane / 16 * 4;
    copy16(place.staging() + wide_product::kRowStagingBytes + lane % 16 * kRankBytes + j * 4,
           t + min(j, low_rank.rank - 4), j < low_rank.rank ? 16 : 0);
    copy_commit();
  }
  __device__ __forceinline__ void add_staged(float (&d)[128], const wide_product::Place& place) const {
    const int lane = place.lane;
    const uint32_t t = place.staging() + wide_product::kRowStagingBytes + lane / 4 * kRankBytes + lane % 4 * 8;
    const lora::Split upper = lora::split(load_shared_float2(t)),
                      lower = lora::split(load_shared_float2(t + 8 * kRankBytes));
#pragma unroll
    for (int i = 0; i < 16; ++i) {  // 16 columns
      const uint4 v = load_shared_16(place.staging(i / 4) + i % 4 * 512 + lane * 16);
      float sum[2][4] = {};
      lora::multiply_rows(sum[0], upper, lower, v.x, v.y), lora::multiply_rows(sum[1], upper, lower, v.z, v.w);
#pragma unroll
      for (int k = 0; k < 8; ++k) d[8 * i + k] += sum[k / 4][k % 4];
    }
  }
  __device__ __forceinline__ void operator()(float (&d)[128], const wide_product::Shape& s,
                                             const wide_product::Place& place) const {
    if (lora::can_stage(low_rank)) {
      copy_wait<0>();
      group_barrier(1 + place.owner, 128);
      add_staged(d, place);
      group_barrier(1 + place.owner, 128);  // the corners are free for rows
    } else {
      const int rows[1][2] = {{min(place.row, s.rows - 1), min(place.row + 8, s.rows - 1)}};
      lora::LowRank l = low_rank;
      l.t += group(place) * l.rank;
      lora::Outputs o = outputs(s, place);
#pragma unroll
      for (int half = 0; half < 2; ++half, o.first += 128)
        lora::add_to_rows(*reinterpret_cast<float(*)[1][64]>(&d[64 * half]), 1, l, o, rows, place.lane);
    }
    store(d, s, place);
  }
};

// In the narrow product.
template <typename Store>
struct AddLowRankToColumns {
  Store store;
  lora::LowRank low_rank;
  template <int kCount>
  __device__ __forceinline__ void operator()(float (&d)[kCount], const narrow_product::Shape& s,
                                             const narrow_product::Place& place) const {
    lora::LowRank l = low_rank;
    l.t += place.first_output / s.group_n * l.rank;
    lora::add_to_columns<2 * kCount>(*reinterpret_cast<float(*)[1][kCount]>(&d), l, {0, s.n, place.first_output}, 0,
                                     s.rows, place.warp, place.lane);
    store(d, s, place);
  }
};

// Several groups, or more than kThinOutputs outputs.
bool one_chain(const Weight& w) { return w.groups > 1 || w.n > kThinOutputs; }

// Three kernels for the same bits: few rows are bound by reading the weight, many by the tensor cores.
void run_narrow(const uint16_t* x, const Weight& w, const Thin& p, cudaStream_t stream) {
  const narrow_product::Shape shape{p.rows, p.n, p.k, p.group_n};
  const auto store = [&](const auto& to) {
    if (p.low_rank.rank == 0)
      narrow_product::launch(x, w.data, shape, to, stream);
    else
      narrow_product::launch(x, w.data, shape, AddLowRankToColumns<std::decay_t<decltype(to)>>{to, p.low_rank}, stream);
  };
  p.out_f32 ? store(narrow_product::Store<float>{p.out_f32}) : store(narrow_product::Store<uint16_t>{p.out_bf16});
}
void run_wide(const uint16_t* x, const Weight& w, const Thin& p, cudaStream_t stream) {
  const wide_product::Shape shape{p.rows, p.n, p.k, w.groups > 1 ? w.n : 0};
  const auto store = [&](const auto& to) {
    if (p.low_rank.rank == 0)
      wide_product::launch<kColumnsContracted, kColumnsContracted>(x, w.data, shape, to, stream);
    else
      wide_product::launch<kColumnsContracted, kColumnsContracted>(
          x, w.data, shape, AddLowRank<std::decay_t<decltype(to)>>{to, p.low_rank, p.group_n, true}, stream);
  };
  p.out_f32 ? store(wide_product::StoreFloats{p.out_f32, false}) : store(wide_product::StoreBf16{p.out_bf16});
}
void run_one_chain(const uint16_t* x, const Weight& w, const Thin& p, cudaStream_t stream) {
  const wide_product::Shape wide{p.rows, p.n, p.k};
  if (p.rows <= narrow_product::kMostRows) return run_narrow(x, w, p, stream);
  const bool whole_tiles = (w.groups == 1 || w.n % wide_product::kColumns == 0) &&
                           (p.low_rank.rank == 0 || p.n % wide_product::kColumns == 0);
  if (whole_tiles && wide.tiles() * wide_product::kCluster >= multiprocessors()) return run_wide(x, w, p, stream);
  launch_thin<true>(x, w.data, p, stream);
}

void run_portable(const uint16_t* x, const Weight& w, const Thin& p, cudaStream_t stream) {
  const int64_t n = w.n, k = w.k;
  portable::product({x, w.groups * k, 1, k}, {w.data, k, 1, n * k}, p.rows, w.n, w.k, w.groups,
                    portable::Store{p.out_f32, p.out_bf16, w.n, p.n, w.n, false, p.low_rank}, stream);
}

void run(const uint16_t* x, const Weight& w, Thin p, void* workspace, cudaStream_t stream) {
  const char* where = "row_linear: linear";
  check(where, x, p.rows, w.n, w.k, w.data);
  const void* out = p.out_f32 ? static_cast<const void*>(p.out_f32) : p.out_bf16;
  require(aligned(out, 16), where, "the output must be aligned to 16 bytes");
  require(
      w.groups == 1 || (w.groups > 1 && w.n % kTile == 0 && w.k % kDepth == 0), where,
      "with groups, n = " + std::to_string(w.n) + " must be a multiple of 128, k = " + std::to_string(w.k) + " of 64");
  require(p.low_rank.rank == 0 || (w.n % kTile == 0 && p.low_rank.rank % 4 == 0), where,
          "a low rank needs a rank and outputs of multiples of 4 and 128");
  if (!is_hopper()) return run_portable(x, w, p, stream);
  if (one_chain(w)) return run_one_chain(x, w, p, stream);
  const bool split = by_parts(p);
  require(!split || aligned(workspace, 16), where, "few rows need a workspace, see workspace_bytes");
  if (split) p.parts = static_cast<float*>(workspace);
  launch_thin(x, w.data, p, stream);
  if (split) {
    const float* parts = p.parts;
    p.parts = nullptr;
    launch_dependent(add_parts_kernel, {dim3(tiles(p.n), (p.rows + 63) / 64), 128}, stream, p, parts);
  }
}

// ---- Gradients ------------------------------------------------------------------------------------------------------
template <typename Store>
void backward_input_portable(const uint16_t* dy, int rows, const Weight& w, const Store& store,
                             const lora::LowRank& low_rank, cudaStream_t stream) {
  const int64_t n = w.n, k = w.k;
  portable::Store to{nullptr, nullptr, w.k, w.groups * k, k, false, low_rank, false};
  if constexpr (std::is_same_v<Store, wide_product::StoreBf16>)
    to.bf16 = store.out;
  else
    to.f32 = store.out;
  portable::product({dy, w.groups * n, 1, n}, {w.data, 1, k, n * k}, rows, w.k, w.n, w.groups, to, stream);
}

template <typename Store>
void backward_input(const uint16_t* dy, int rows, const Weight& w, const Store& store, const lora::LowRank& low_rank,
                    cudaStream_t stream) {
  const char* where = "row_linear: linear_backward_input";
  check(where, dy, rows, w.n, w.k, w.data);
  require(aligned(store.out, 16), where, "the result must be aligned to 16 bytes");
  require(
      w.groups == 1 || (w.groups > 1 && w.n % kDepth == 0 && w.k % wide_product::kColumns == 0), where,
      "with groups, n = " + std::to_string(w.n) + " must be a multiple of 64, k = " + std::to_string(w.k) + " of 256");
  require(low_rank.rank == 0 || (low_rank.rank % 4 == 0 && w.k % wide_product::kColumns == 0), where,
          "a low rank needs a rank and inputs of multiples of 4 and 256");
  if (!is_hopper()) return backward_input_portable(dy, rows, w, store, low_rank, stream);
  const wide_product::Shape shape{rows, w.groups * w.k, w.n, w.groups > 1 ? w.k : 0};
  if (low_rank.rank == 0)
    return wide_product::launch<kColumnsContracted, kRowsContracted>(dy, w.data, shape, store, stream);
  wide_product::launch<kColumnsContracted, kRowsContracted>(dy, w.data, shape,
                                                            AddLowRank<Store>{store, low_rank, w.k, false}, stream);
}

// ---- FP32 weights: three planes are three times the outputs, added at the end ---------------------------------------
constexpr int kPlanes = 3;
__global__ void __launch_bounds__(256)
    add_planes_kernel(const float* parts, int part_count, int rows, int n, int stride, float* out) {
  take_turn();
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i >= static_cast<int64_t>(rows) * n) return;
  float total = 0;
  for (int plane = kPlanes - 1; plane >= 0; --plane) {  // the smallest first
    const float* from = parts + (i / n * kPlanes + plane) * stride + i % n;
    float sum = 0;
    for (int part = 0; part < part_count; ++part)
      sum = __fadd_rn(sum, from[static_cast<size_t>(part) * rows * kPlanes * stride]);
    total = __fadd_rn(total, sum);
  }
  out[i] = total;
}
int padded(int n) { return (n + 7) / 8 * 8; }

}  // namespace

size_t split_workspace_bytes(int rows, const SplitWeight& w) {
  const Thin p{rows, kPlanes * padded(w.n), w.k, kPlanes * padded(w.n)};
  return static_cast<size_t>(by_parts(p) ? p.part_count() : 1) * rows * p.n * sizeof(float);
}

void linear_split(const uint16_t* x, int rows, const SplitWeight& w, float* out, void* workspace, cudaStream_t stream) {
  check("row_linear: linear_split", x, rows, w.n > 0 ? padded(w.n) : 0, w.k, w.planes);
  require(w.groups == 1 && w.n <= kMostFewOutputs && aligned(workspace, 16), "row_linear: linear_split",
          "one weight of at most " + std::to_string(kMostFewOutputs) + " outputs and a workspace are needed");
  Thin p{rows, kPlanes * padded(w.n), w.k, kPlanes * padded(w.n)};
  const bool split = is_hopper() && by_parts(p);
  (split ? p.parts : p.out_f32) = static_cast<float*>(workspace);
  p.settled = false;  // planes are often made just before
  if (is_hopper())
    launch_thin(x, w.planes, p, stream);
  else
    run_portable(x, {w.planes, p.n, w.k}, p, stream);
  const int64_t count = static_cast<int64_t>(rows) * w.n;
  launch_dependent(add_planes_kernel, {static_cast<unsigned>((count + 255) / 256), 256}, stream,
                   static_cast<const float*>(workspace), split ? p.part_count() : 1, rows, w.n, padded(w.n), out);
}

size_t workspace_bytes(int rows, const Weight& w) {
  const Thin p = thin_of(rows, w);
  return !one_chain(w) && by_parts(p) ? static_cast<size_t>(p.part_count()) * rows * p.n * sizeof(float) : 0;
}

void linear(const uint16_t* x, int rows, const Weight& w, float* out, void* workspace, cudaStream_t stream,
            const lora::LowRank& low_rank) {
  Thin p = thin_of(rows, w);
  p.out_f32 = out, p.low_rank = low_rank;
  run(x, w, p, workspace, stream);
}

void linear_bf16(const uint16_t* x, int rows, const Weight& w, uint16_t* out, void* workspace, cudaStream_t stream,
                 const lora::LowRank& low_rank) {
  Thin p = thin_of(rows, w);
  p.out_bf16 = out, p.low_rank = low_rank;
  run(x, w, p, workspace, stream);
}

void linear_backward_input(const uint16_t* dy, int rows, const Weight& w, float* dx, cudaStream_t stream,
                           const lora::LowRank& low_rank) {
  backward_input(dy, rows, w, wide_product::StoreFloats{dx, false}, low_rank, stream);
}

void linear_backward_input_bf16(const uint16_t* dy, int rows, const Weight& w, uint16_t* dx, cudaStream_t stream,
                                const lora::LowRank& low_rank) {
  backward_input(dy, rows, w, wide_product::StoreBf16{dx}, low_rank, stream);
}

void linear_backward_weight(const uint16_t* dy, const uint16_t* x, int rows, int n, int k, float* dw,
                            cudaStream_t stream, int groups) {
  const char* where = "row_linear: linear_backward_weight";
  check(where, x, rows, n, k, dy);
  require(groups == 1 || (groups > 1 && n % wide_product::kClusterRows == 0), where,
          "with groups, n = " + std::to_string(n) + " must be a multiple of 256");
  if (!is_hopper()) {
    const int64_t outs = int64_t{groups} * n, ins = int64_t{groups} * k;
    return portable::product({dy, 1, outs, n}, {x, 1, ins, k}, n, k, rows, groups,
                             portable::Store{dw, nullptr, k, k, int64_t{n} * k, true}, stream);
  }
  wide_product::launch<kRowsContracted, kRowsContracted>(dy, x, {groups * n, k, rows, 0, groups > 1 ? n : 0},
                                                         wide_product::StoreFloats{dw, true}, stream);
}

}  // namespace plumb::kernels::row_linear
