// Bound by memory: every projected number is read once forward (a row's two halves belong to different entries) and
// once backward, where the softmax is worked out again from what is read anyway. A thread has four channels of eight
// slots, all its loads in flight at once.
#include "kernels/compressor/compressor.h"

#include "kernels/hopper/launch_order.cuh"
#include "kernels/hopper/vectors.cuh"
#include "kernels/launch.cuh"

namespace plumb::kernels {
namespace compressor {
namespace {

constexpr int kThreads = 256;
constexpr int kPoolThreads = 128;  // small blocks: registers hold five of them, or four
template <int kSlots>
constexpr int kPoolBlocks = kSlots == 8 ? 5 : 4;  // at least, of a multiprocessor
constexpr int kBackwardBlocks = 4;
constexpr int kThreadSlots = 8;  // of a thread; ratio 128 shares an entry's slots among 16 threads

struct Four {
  float v[4];
};
__device__ __forceinline__ Four four_of(const float4& x) { return {{x.x, x.y, x.z, x.w}}; }
__device__ __forceinline__ float4 as_float4(const Four& x) { return make_float4(x.v[0], x.v[1], x.v[2], x.v[3]); }
__device__ __forceinline__ Four load_four(const float* from) {
  return four_of(__ldg(reinterpret_cast<const float4*>(from)));
}
__device__ __forceinline__ void store_four(const Four& x, float* to) { *reinterpret_cast<float4*>(to) = as_float4(x); }
// Projected rows and their gradients pass once: what the L2 cache should give up first.
__device__ __forceinline__ Four stream_four(const float* from) {
  return four_of(__ldcs(reinterpret_cast<const float4*>(from)));
}
__device__ __forceinline__ void stream_four(const Four& x, float* to) {
  __stcs(reinterpret_cast<float4*>(to), as_float4(x));
}
__device__ __forceinline__ void load_eight_numbers(const int* from, int (&to)[kThreadSlots]) {
  const int4 a = __ldg(reinterpret_cast<const int4*>(from)), b = __ldg(reinterpret_cast<const int4*>(from) + 1);
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// How the threads of a block share entries: a group of threads has eight slots, a quad is four channels.
template <int kSlots>
struct Shape {
  static constexpr int kRatio = kSlots == 8 ? 4 : 128, kHalves = kSlots / kRatio;
  static constexpr int kGroups = kSlots / kThreadSlots;
};

// Slot s of an entry: where its row's channels start.
template <int kSlots>
__device__ __forceinline__ size_t slot_offset(const CompressedPooling& p, int row, int slot, int channel) {
  using S = Shape<kSlots>;
  return (static_cast<size_t>(row) * S::kHalves + slot / S::kRatio) * p.width + channel;
}
template <int kSlots>
__device__ __forceinline__ size_t ape_offset(const CompressedPooling& p, int slot, int channel) {
  return slot_offset<kSlots>(p, slot % Shape<kSlots>::kRatio, slot, channel);
}

// What a thread has of an entry.
struct Share {
  Four v[kThreadSlots], score[kThreadSlots];
};
// -> the largest score of each channel.
template <int kSlots>
__device__ __forceinline__ Four load_share(const CompressedPooling& p, int entry, int group, int channel,
                                           Share& share) {
  constexpr Four kNone{{-INFINITY, -INFINITY, -INFINITY, -INFINITY}};  // the score of an absent row: no weight
  int source[kThreadSlots];
  load_eight_numbers(p.source + static_cast<size_t>(entry) * kSlots + group * kThreadSlots, source);
#pragma unroll
  for (int i = 0; i < kThreadSlots; ++i) {
    share.v[i] = {}, share.score[i] = kNone;
    if (source[i] < 0) continue;
    const bool pending = source[i] >= p.rows;
    const size_t at =
        slot_offset<kSlots>(p, pending ? source[i] - p.rows : source[i], group * kThreadSlots + i, channel);
    share.v[i] = stream_four((pending ? p.pending_kv : p.kv) + at);
    share.score[i] = stream_four((pending ? p.pending_gate : p.gate) + at);
  }
  Four top = kNone;
#pragma unroll
  for (int i = 0; i < kThreadSlots; ++i) {
    const Four bias = load_four(p.ape + ape_offset<kSlots>(p, group * kThreadSlots + i, channel));
#pragma unroll
    for (int c = 0; c < 4; ++c) share.score[i].v[c] += bias.v[c], top.v[c] = fmaxf(top.v[c], share.score[i].v[c]);
  }
  return top;
}
// Scores become weights, whose sum and sum of products are added up in order of the slots.
__device__ __forceinline__ void weigh(Share& share, const Four& top, Four& sum, Four& pooled) {
#pragma unroll
  for (int i = 0; i < kThreadSlots; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float& weight = share.score[i].v[c];
      weight = expf(weight - top.v[c]);
      sum.v[c] += weight, pooled.v[c] = fmaf(weight, share.v[i].v[c], pooled.v[c]);
    }
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
    pool_kernel(const __grid_constant__ CompressedPooling p, uint16_t* entries) {
  constexpr int kGroups = Shape<kSlots>::kGroups, kQuads = kPoolThreads / kGroups;
  hopper::take_turn();
  const int group = threadIdx.x / kQuads, quads = p.width / 4;
  const int item = blockIdx.x * kQuads + threadIdx.x % kQuads;  // (entry, four channels)
  const bool exists = item < p.entries * quads;
  const int entry = exists ? item / quads : 0, channel = exists ? item % quads * 4 : 0;
  Share share;
  Four top = load_share<kSlots>(p, entry, group, channel, share);
  if constexpr (kGroups > 1) top = largest_of_groups<kQuads>(top);
  Four sum{}, pooled{};
  weigh(share, top, sum, pooled);
  if constexpr (kGroups == 1) {
    if (!exists) return;
#pragma unroll
    for (int c = 0; c < 4; ++c) pooled.v[c] /= sum.v[c];
    reinterpret_cast<uint2*>(entries)[item] =
        make_uint2(hopper::pack_bf16(pooled.v[0], pooled.v[1]), hopper::pack_bf16(pooled.v[2], pooled.v[3]));
  } else {
    // From here on a thread has one channel, and adds what the groups have of it in order. All exist: a block has
    // channels of one entry.
    constexpr int kChannels = kQuads * 4;
    __shared__ float sums[2][kGroups][kChannels];
    const int quad = threadIdx.x % kQuads;
    store_four(sum, &sums[0][group][quad * 4]), store_four(pooled, &sums[1][group][quad * 4]);
    __syncthreads();
    if (threadIdx.x >= kChannels) return;
    float all[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      all[i] = sums[i][0][threadIdx.x];
#pragma unroll
      for (int g = 1; g < kGroups; ++g) all[i] += sums[i][g][threadIdx.x];
    }
    entries[static_cast<size_t>(blockIdx.x) * kChannels + threadIdx.x] =
        __bfloat16_as_ushort(__float2bfloat16_rn(all[1] / all[0]));
  }
}

// ---- backward ----
// A block has kQuads quads of channels of kTeams entries at a time.
template <int kSlots>
struct BackwardShape : Shape<kSlots> {
  static constexpr int kQuads = kSlots == 8 ? 32 : kPoolThreads / Shape<kSlots>::kGroups;
  static constexpr int kTeams = kPoolThreads / (kQuads * Shape<kSlots>::kGroups), kChannels = kQuads * 4;
};

// The sums of all groups, added in order by a thread for each.
template <int kGroups, int kQuads>
__device__ __forceinline__ void add_groups(Four& sum, Four& pooled) {
  constexpr int kChannels = kQuads * 4;
  __shared__ float sums[kGroups][2 * kChannels], totals[2 * kChannels];
  const int group = threadIdx.x / kQuads, quad = threadIdx.x % kQuads;
  store_four(sum, &sums[group][quad * 4]), store_four(pooled, &sums[group][kChannels + quad * 4]);
  __syncthreads();
  if (threadIdx.x < 2 * kChannels) {
    float all = sums[0][threadIdx.x];
#pragma unroll
    for (int g = 1; g < kGroups; ++g) all += sums[g][threadIdx.x];
    totals[threadIdx.x] = all;
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < 4; ++c) sum.v[c] = totals[quad * 4 + c], pooled.v[c] = totals[kChannels + quad * 4 + c];
}

// dv = w de, dscore = w (v - entry) de. A slot that is the only one to read its row's half writes the row's gradient,
// others write parts of it. With kApe also the sums of dscore over the block's entries, [chunks][slots][width].
template <int kSlots, bool kApe>
__global__ void __launch_bounds__(kPoolThreads, kBackwardBlocks)
    backward_kernel(const __grid_constant__ CompressedPoolingBackward b, int chunk_entries, float* parts,
                    float* d_ape) {
  using S = BackwardShape<kSlots>;
  hopper::take_turn();
  const CompressedPooling& p = b.pooling;
  const int blocks = p.width / S::kChannels, chunk = blockIdx.x / blocks;  // blocks of a chunk
  const int quad = threadIdx.x % S::kQuads, team = S::kTeams > 1 ? threadIdx.x / S::kQuads : 0,
            group = S::kTeams > 1 ? 0 : threadIdx.x / S::kQuads;
  const int channel = (blockIdx.x % blocks * S::kQuads + quad) * 4;
  const int last = min(p.entries, (chunk + 1) * chunk_entries);
  // A thread's sums of dscore; in shared memory, because its registers are full.
  __shared__ float4 ape_sum[kApe ? kThreadSlots : 1][kPoolThreads];
  if constexpr (kApe)
#pragma unroll
    for (int i = 0; i < kThreadSlots; ++i) ape_sum[i][threadIdx.x] = make_float4(0, 0, 0, 0);
  for (int entry = chunk * chunk_entries + team; entry < last; entry += S::kTeams) {
    const uint2 packed = __ldg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(b.d_entries) +
                                                              static_cast<size_t>(entry) * p.width + channel));
    Share share;
    Four top = load_share<kSlots>(p, entry, group, channel, share), sum{}, pooled{};
    if constexpr (S::kGroups > 1) top = largest_of_groups<S::kQuads>(top);
    weigh(share, top, sum, pooled);
    if constexpr (S::kGroups > 1) add_groups<S::kGroups, S::kQuads>(sum, pooled);
    const float de[4] = {low_bf16(packed.x), high_bf16(packed.x), low_bf16(packed.y), high_bf16(packed.y)};
    float scale[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) pooled.v[c] /= sum.v[c], scale[c] = de[c] / sum.v[c];
    int target[kThreadSlots];
    load_eight_numbers(b.targets.target + static_cast<size_t>(entry) * kSlots + group * kThreadSlots, target);
#pragma unroll
    for (int i = 0; i < kThreadSlots; ++i) {
      if (target[i] < 0) continue;
      Four d_v, d_score;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        d_v.v[c] = share.score[i].v[c] * scale[c];
        d_score.v[c] = d_v.v[c] * (share.v[i].v[c] - pooled.v[c]);
      }
      if constexpr (kApe) {
        float4& sum = ape_sum[i][threadIdx.x];
        sum = make_float4(sum.x + d_score.v[0], sum.y + d_score.v[1], sum.z + d_score.v[2], sum.w + d_score.v[3]);
      }
      const bool only = target[i] < p.rows;
      const size_t at = only ? slot_offset<kSlots>(p, target[i], group * kThreadSlots + i, channel)
                             : static_cast<size_t>(target[i] - p.rows) * 2 * p.width + channel;
      stream_four(d_v, (only ? b.d_kv : parts) + at);
      stream_four(d_score, (only ? b.d_gate : parts + p.width) + at);
    }
    if constexpr (!kApe) break;
  }
  if constexpr (kApe) {  // the teams' sums, in order
    float* out = d_ape + (static_cast<size_t>(chunk) * kSlots + group * kThreadSlots) * p.width + channel;
    if constexpr (S::kTeams > 1) __syncthreads();
#pragma unroll
    for (int i = team; i < kThreadSlots; i += S::kTeams) {
      float4 sum = ape_sum[i][S::kTeams > 1 ? quad : threadIdx.x];
#pragma unroll
      for (int t = 1; t < S::kTeams; ++t) {
        const float4 x = ape_sum[i][t * S::kQuads + quad];
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
      }
      *reinterpret_cast<float4*>(out + static_cast<size_t>(i) * p.width) = sum;
    }
  }
}

// Halves of rows that several slots read, or none: their parts in order. A thread has four channels.
__global__ void __launch_bounds__(kThreads)
    join_kernel(const float* parts, SlotTargets targets, int width, float* d_kv, float* d_gate) {
  hopper::take_turn();
  const int quads = width / 4;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= static_cast<int64_t>(targets.joined) * quads) return;
  const int joined = static_cast<int>(item / quads), channel = static_cast<int>(item % quads) * 4;
  const int last = __ldg(targets.begin + joined + 1);
  Four sums[2] = {};
#pragma unroll 4
  for (int i = __ldg(targets.begin + joined); i < last; ++i)
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const Four x = load_four(parts + (static_cast<size_t>(i) * 2 + k) * width + channel);
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[k].v[c] += x.v[c];
    }
  const size_t at = static_cast<size_t>(__ldg(targets.key + joined)) * width + channel;
  store_four(sums[0], d_kv + at), store_four(sums[1], d_gate + at);
}

// A warp has an eighth of the chunks of 32 numbers (slot, channel).
template <int kSlots>
__global__ void __launch_bounds__(kThreads) add_ape_kernel(const float* partial, int chunks, int width, float* d_ape) {
  hopper::take_turn();
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
  hopper::take_turn();
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

// With the gradient of ape a block has a run of entries, so long that this number of blocks has them all: as many as a
// GPU of 132 multiprocessors holds at a time. The sum's tree depends on the plan's sizes alone.
constexpr int kApeBlocks = 512;
template <int kSlots>
int chunk_entries(const CompressedPooling& p) {
  using S = BackwardShape<kSlots>;
  const int64_t blocks = static_cast<int64_t>(p.entries) * (p.width / S::kChannels);
  return blocks_for(blocks, kApeBlocks * S::kTeams) * S::kTeams;
}
int chunk_entries(const CompressedPooling& p) { return p.slots == 8 ? chunk_entries<8>(p) : chunk_entries<128>(p); }
int ape_chunks(const CompressedPooling& p) { return p.entries == 0 ? 0 : blocks_for(p.entries, chunk_entries(p)); }
size_t parts_size(const CompressedPooling& p, int parts) { return static_cast<size_t>(parts) * 2 * p.width; }

template <int kSlots>
void launch_backward(const CompressedPoolingBackward& b, cudaStream_t stream) {
  using S = BackwardShape<kSlots>;
  const CompressedPooling& p = b.pooling;
  float *parts = static_cast<float*>(b.workspace), *sums = parts + parts_size(p, b.targets.parts);
  const int blocks = p.width / S::kChannels;  // of entries that a block has at a time
  if (p.entries > 0 && b.d_ape) {
    const int chunks = ape_chunks(p);
    launch_dependent(backward_kernel<kSlots, true>, {dim3(chunks * blocks), kPoolThreads}, stream, b, chunk_entries(p),
                     parts, sums);
    launch_dependent(add_ape_kernel<kSlots>, {dim3(kSlots * p.width / 32), kThreads}, stream, sums, chunks, p.width,
                     b.d_ape);
  } else if (p.entries > 0) {
    launch_dependent(backward_kernel<kSlots, false>, {dim3(blocks_for(p.entries, S::kTeams) * blocks), kPoolThreads},
                     stream, b, S::kTeams, parts, nullptr);
  }
  const int64_t items = static_cast<int64_t>(b.targets.joined) * (p.width / 4);
  if (items > 0)
    launch_dependent(join_kernel, {dim3(blocks_for(items, kThreads)), kThreads}, stream, parts, b.targets, p.width,
                     b.d_kv, b.d_gate);
}

}  // namespace
}  // namespace compressor

cudaError_t pool_entries(const CompressedPooling& p, void* entries, cudaStream_t stream) {
  using namespace compressor;
  if (wrong(p)) return cudaErrorInvalidValue;
  if (p.entries == 0) return cudaSuccess;
  const int items = p.entries * (p.width / 4), quads = kPoolThreads * kThreadSlots / p.slots;
  launch_dependent(p.slots == 8 ? pool_kernel<8> : pool_kernel<128>, {dim3(blocks_for(items, quads)), kPoolThreads},
                   stream, p, static_cast<uint16_t*>(entries));
  return cudaGetLastError();
}

size_t pool_entries_backward_workspace(const CompressedPooling& p, int parts, bool with_ape) {
  using namespace compressor;
  return sizeof(float) *
         (parts_size(p, parts) + (with_ape ? ape_chunks(p) * static_cast<size_t>(p.slots) * p.width : 0));
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
  launch_dependent(keep_kernel, {dim3(count), kThreads}, stream, reinterpret_cast<const float4*>(kv),
                   reinterpret_cast<const float4*>(gate), reinterpret_cast<float4*>(pending_kv),
                   reinterpret_cast<float4*>(pending_gate), from, slot, row_width / 4);
  return cudaGetLastError();
}

}  // namespace plumb::kernels
