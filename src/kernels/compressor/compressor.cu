// Bound by memory: every projected number is read once forward (a row's two halves belong to different entries) and
// once backward. A thread has four channels.
#include "kernels/compressor/compressor.h"

#include "kernels/hopper/vectors.cuh"

namespace plumb::kernels {
namespace compressor {
namespace {

constexpr int kThreads = 256;
constexpr int kPoolThreads = 128;  // small blocks: registers hold five of them, or four
template <int kSlots>
constexpr int kPoolBlocks = kSlots == 8 ? 5 : 4;  // at least, of a multiprocessor
constexpr int kThreadSlots = 8;                   // of a thread; ratio 128 shares an entry's slots among 16 threads

struct Four {
  float v[4];
};
__device__ __forceinline__ Four load_four(const float* from) {
  const float4 x = __ldg(reinterpret_cast<const float4*>(from));
  return {{x.x, x.y, x.z, x.w}};
}
__device__ __forceinline__ void store_four(const Four& x, float* to) {
  *reinterpret_cast<float4*>(to) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
}

// Slot s of an entry: where its row's channels start. -1: absent.
struct SlotRow {
  const float *kv, *gate;
};
template <int kSlots>
struct Shape {
  static constexpr int kRatio = kSlots == 8 ? 4 : 128, kHalves = kSlots / kRatio;
};
template <int kSlots>
__device__ __forceinline__ SlotRow slot_row(const CompressedPooling& p, int source, int slot, int channel) {
  using S = Shape<kSlots>;
  const bool pending = source >= p.rows;
  const size_t row_width = static_cast<size_t>(S::kHalves) * p.width;
  const size_t at = (pending ? source - p.rows : source) * row_width + slot / S::kRatio * p.width + channel;
  return {(pending ? p.pending_kv : p.kv) + at, (pending ? p.pending_gate : p.gate) + at};
}
template <int kSlots>
__device__ __forceinline__ const float* ape_of(const CompressedPooling& p, int slot, int channel) {
  using S = Shape<kSlots>;
  return p.ape + (static_cast<size_t>(slot % S::kRatio) * S::kHalves + slot / S::kRatio) * p.width + channel;
}

// The entry's channels and what the backward pass needs of them, from the sum of the slots' weights and of their
// products.
__device__ __forceinline__ float pooled_entry(float top, float& sum, float pooled) {
  const float value = pooled / sum;
  sum = top + logf(sum);
  return value;
}

// Of the threads with the same quad of channels; all get it.
template <int kQuads>
__device__ __forceinline__ Four largest_of_groups(Four x) {
  constexpr int kWarps = kPoolThreads / 32;
  __shared__ float4 shared[kWarps][kQuads];
  const int quad = threadIdx.x % kQuads;
#pragma unroll
  for (int step = kQuads; step < 32; step *= 2)
#pragma unroll
    for (int c = 0; c < 4; ++c) x.v[c] = fmaxf(x.v[c], __shfl_xor_sync(~0u, x.v[c], step));
  if (threadIdx.x % 32 < kQuads) shared[threadIdx.x / 32][quad] = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float4 other = shared[w][quad];
    x = {{fmaxf(x.v[0], other.x), fmaxf(x.v[1], other.y), fmaxf(x.v[2], other.z), fmaxf(x.v[3], other.w)}};
  }
  return x;
}

template <int kSlots>
__global__ void __launch_bounds__(kPoolThreads, kPoolBlocks<kSlots>)
    pool_kernel(const __grid_constant__ CompressedPooling p, uint16_t* entries, float* total, float* value) {
  constexpr int kGroups = kSlots / kThreadSlots, kQuads = kPoolThreads / kGroups;
  const int group = threadIdx.x / kQuads, quads = p.width / 4;
  const int item = blockIdx.x * kQuads + threadIdx.x % kQuads;  // (entry, four channels)
  const bool exists = item < p.entries * quads;
  const int entry = exists ? item / quads : 0, channel = exists ? item % quads * 4 : 0;
  Four v[kThreadSlots], score[kThreadSlots];
  const Four none{{-INFINITY, -INFINITY, -INFINITY, -INFINITY}};  // the score of an absent row: no weight
  Four top = none;
#pragma unroll
  for (int i = 0; i < kThreadSlots; ++i) {
    const int slot = group * kThreadSlots + i, source = __ldg(p.source + static_cast<size_t>(entry) * kSlots + slot);
    v[i] = {}, score[i] = none;
    if (source < 0) continue;
    const SlotRow row = slot_row<kSlots>(p, source, slot, channel);
    v[i] = load_four(row.kv), score[i] = load_four(row.gate);
  }
#pragma unroll
  for (int i = 0; i < kThreadSlots; ++i) {
    const Four bias = load_four(ape_of<kSlots>(p, group * kThreadSlots + i, channel));
#pragma unroll
    for (int c = 0; c < 4; ++c) score[i].v[c] += bias.v[c], top.v[c] = fmaxf(top.v[c], score[i].v[c]);
  }
  if constexpr (kGroups > 1) top = largest_of_groups<kQuads>(top);
  Four sum{}, pooled{};
#pragma unroll
  for (int i = 0; i < kThreadSlots; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float weight = expf(score[i].v[c] - top.v[c]);
      sum.v[c] += weight, pooled.v[c] = fmaf(weight, v[i].v[c], pooled.v[c]);
    }
  if constexpr (kGroups == 1) {
    if (!exists) return;
#pragma unroll
    for (int c = 0; c < 4; ++c) pooled.v[c] = pooled_entry(top.v[c], sum.v[c], pooled.v[c]);
    reinterpret_cast<uint2*>(entries)[item] =
        make_uint2(hopper::pack_bf16(pooled.v[0], pooled.v[1]), hopper::pack_bf16(pooled.v[2], pooled.v[3]));
    if (total)
      store_four(sum, total + static_cast<size_t>(item) * 4), store_four(pooled, value + static_cast<size_t>(item) * 4);
  } else {
    // From here on a thread has one channel, and adds what the groups have of it in order. All exist: a block has
    // channels of one entry.
    constexpr int kChannels = kQuads * 4;
    __shared__ float sums[2][kGroups][kChannels], tops[kChannels];
    const int quad = threadIdx.x % kQuads;
    store_four(sum, &sums[0][group][quad * 4]), store_four(pooled, &sums[1][group][quad * 4]);
    if (group == 0) store_four(top, &tops[quad * 4]);
    __syncthreads();
    if (threadIdx.x >= kChannels) return;
    float all[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      all[i] = sums[i][0][threadIdx.x];
#pragma unroll
      for (int g = 1; g < kGroups; ++g) all[i] += sums[i][g][threadIdx.x];
    }
    const float result = pooled_entry(tops[threadIdx.x], all[0], all[1]);
    const size_t at = static_cast<size_t>(blockIdx.x) * kChannels + threadIdx.x;
    entries[at] = __bfloat16_as_ushort(__float2bfloat16_rn(result));
    if (total) total[at] = all[0], value[at] = result;
  }
}

// Gradients of one slot: dv = w de, dscore = w (v - entry) de, w = exp(score - total).
template <int kSlots>
__device__ __forceinline__ void slot_gradient(const CompressedPoolingBackward& b, int entry, int slot, int channel,
                                              const Four& v, const Four& gate, Four& d_v, Four& d_score) {
  const CompressedPooling& p = b.pooling;
  const size_t at = static_cast<size_t>(entry) * p.width + channel;
  const Four bias = load_four(ape_of<kSlots>(p, slot, channel)), total = load_four(b.total + at),
             value = load_four(b.value + at);
  const uint2 packed = __ldg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(b.d_entries) + at));
  const float de[4] = {low_bf16(packed.x), high_bf16(packed.x), low_bf16(packed.y), high_bf16(packed.y)};
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float weight = expf(gate.v[c] + bias.v[c] - total.v[c]);
    d_v.v[c] = weight * de[c];
    d_score.v[c] = d_v.v[c] * (v.v[c] - value.v[c]);
  }
}

// A thread has four channels of one half of a row and adds up its uses in order.
template <int kSlots>
__global__ void __launch_bounds__(kThreads) rows_backward_kernel(const __grid_constant__ CompressedPoolingBackward b) {
  const CompressedPooling& p = b.pooling;
  const int quads = p.width / 4;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= static_cast<int64_t>(p.rows) * Shape<kSlots>::kHalves * quads) return;
  const int key = static_cast<int>(item / quads), channel = static_cast<int>(item % quads) * 4;
  const Four v = load_four(p.kv + item * 4), gate = load_four(p.gate + item * 4);
  const int first = __ldg(b.uses.begin + key), last = __ldg(b.uses.begin + key + 1);
  Four d_kv{}, d_gate{};
  for (int i = first; i < last; ++i) {
    const int use = __ldg(b.uses.use + i);
    Four d_v, d_score;
    slot_gradient<kSlots>(b, use / kSlots, use % kSlots, channel, v, gate, d_v, d_score);
#pragma unroll
    for (int c = 0; c < 4; ++c) d_kv.v[c] += d_v.v[c], d_gate.v[c] += d_score.v[c];
  }
  store_four(d_kv, b.d_kv + item * 4);
  store_four(d_gate, b.d_gate + item * 4);
}

constexpr int kApeEntries = 16;  // whose gradients one thread adds up

// A thread has four channels of one slot. Partial sums [chunks][slots][width].
template <int kSlots>
__global__ void __launch_bounds__(kThreads) ape_kernel(const __grid_constant__ CompressedPoolingBackward b) {
  const CompressedPooling& p = b.pooling;
  const int quads = p.width / 4, item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= kSlots * quads) return;
  const int slot = item / quads, channel = item % quads * 4, first = blockIdx.y * kApeEntries;
  Four sum{};
#pragma unroll 4
  for (int entry = first; entry < min(p.entries, first + kApeEntries); ++entry) {
    const int source = __ldg(p.source + static_cast<size_t>(entry) * kSlots + slot);
    if (source < 0 || source >= p.rows) continue;
    const SlotRow row = slot_row<kSlots>(p, source, slot, channel);
    Four d_v, d_score;
    slot_gradient<kSlots>(b, entry, slot, channel, load_four(row.kv), load_four(row.gate), d_v, d_score);
#pragma unroll
    for (int c = 0; c < 4; ++c) sum.v[c] += d_score.v[c];
  }
  store_four(sum, static_cast<float*>(b.workspace) + (static_cast<size_t>(blockIdx.y) * kSlots * p.width) + item * 4);
}
// A warp has an eighth of the chunks of 32 numbers (slot, channel).
template <int kSlots>
__global__ void __launch_bounds__(kThreads) add_ape_kernel(const float* partial, int chunks, int width, float* d_ape) {
  using S = Shape<kSlots>;
  constexpr int kParts = kThreads / 32;
  __shared__ float sums[kParts][32];
  const int part = threadIdx.x / 32, lane = threadIdx.x % 32, item = blockIdx.x * 32 + lane;
  float sum = 0;
#pragma unroll 16
  for (int c = chunks * part / kParts; c < chunks * (part + 1) / kParts; ++c)
    sum += partial[static_cast<size_t>(c) * kSlots * width + item];
  sums[part][lane] = sum;
  __syncthreads();
  if (part != 0) return;
#pragma unroll
  for (int i = 1; i < kParts; ++i) sum += sums[i][lane];
  const int slot = item / width;
  d_ape[(static_cast<size_t>(slot % S::kRatio) * S::kHalves + slot / S::kRatio) * width + item % width] += sum;
}

__global__ void __launch_bounds__(kThreads)
    keep_kernel(const float4* kv, const float4* gate, float4* pending_kv, float4* pending_gate, const int* from,
                const int* slot, int row_quads) {
  const size_t source = static_cast<size_t>(from[blockIdx.x]) * row_quads,
               to = static_cast<size_t>(slot[blockIdx.x]) * row_quads;
#pragma unroll 1
  for (int i = threadIdx.x; i < row_quads; i += kThreads) {
    pending_kv[to + i] = kv[source + i];
    pending_gate[to + i] = gate[source + i];
  }
}

bool wrong(const CompressedPooling& p) {
  return p.rows < 0 || p.entries < 0 || p.width <= 0 || p.width % 128 != 0 ||
         !((p.ratio == 4 && p.slots == 8) || (p.ratio == 128 && p.slots == 128)) || !p.pending_kv != !p.pending_gate;
}
int blocks_for(int64_t items, int threads) { return static_cast<int>((items + threads - 1) / threads); }
int ape_chunks(const CompressedPooling& p) { return blocks_for(p.entries, kApeEntries); }

template <int kSlots>
void launch_backward(const CompressedPoolingBackward& b, cudaStream_t stream) {
  const CompressedPooling& p = b.pooling;
  const int64_t items = static_cast<int64_t>(p.rows) * Shape<kSlots>::kHalves * (p.width / 4);
  if (items > 0) rows_backward_kernel<kSlots><<<blocks_for(items, kThreads), kThreads, 0, stream>>>(b);
  if (b.d_ape == nullptr || p.entries == 0) return;
  ape_kernel<kSlots><<<dim3(blocks_for(kSlots * (p.width / 4), kThreads), ape_chunks(p)), kThreads, 0, stream>>>(b);
  add_ape_kernel<kSlots><<<kSlots * p.width / 32, kThreads, 0, stream>>>(static_cast<const float*>(b.workspace),
                                                                         ape_chunks(p), p.width, b.d_ape);
}

}  // namespace
}  // namespace compressor

cudaError_t pool_entries(const CompressedPooling& p, void* entries, float* total, float* value, cudaStream_t stream) {
  using namespace compressor;
  if (wrong(p) || !total != !value) return cudaErrorInvalidValue;
  if (p.entries == 0) return cudaSuccess;
  const int items = p.entries * (p.width / 4), threads = kPoolThreads;
  const int quads = threads * kThreadSlots / p.slots;
  auto* to = static_cast<uint16_t*>(entries);
  if (p.slots == 8)
    pool_kernel<8><<<blocks_for(items, quads), threads, 0, stream>>>(p, to, total, value);
  else
    pool_kernel<128><<<blocks_for(items, quads), threads, 0, stream>>>(p, to, total, value);
  return cudaGetLastError();
}

size_t pool_entries_backward_workspace(const CompressedPooling& p) {
  return sizeof(float) * compressor::ape_chunks(p) * static_cast<size_t>(p.slots) * p.width;
}

cudaError_t pool_entries_backward(const CompressedPoolingBackward& b, cudaStream_t stream) {
  using namespace compressor;
  if (wrong(b.pooling)) return cudaErrorInvalidValue;
  b.pooling.slots == 8 ? launch_backward<8>(b, stream) : launch_backward<128>(b, stream);
  return cudaGetLastError();
}

cudaError_t keep_pending(const float* kv, const float* gate, float* pending_kv, float* pending_gate, const int* from,
                         const int* slot, int count, int row_width, cudaStream_t stream) {
  using namespace compressor;
  if (count < 0 || row_width <= 0 || row_width % 4 != 0) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  keep_kernel<<<count, kThreads, 0, stream>>>(
      reinterpret_cast<const float4*>(kv), reinterpret_cast<const float4*>(gate), reinterpret_cast<float4*>(pending_kv),
      reinterpret_cast<float4*>(pending_gate), from, slot, row_width / 4);
  return cudaGetLastError();
}

}  // namespace plumb::kernels
