// Sparse attention for any GPU. A warp has a head: each lane sixteen channels of its vectors, products are summed over
// the lanes in a fixed tree, keys are met one after the other in the order of the list.
#include "kernels/portable/attention.h"

#include "kernels/hopper/vectors.cuh"
#include "kernels/sparse_attention/forward_parts.cuh"

namespace plumb::kernels::attention {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kOwn = kDim / 32;

// Channels 8 lane .. + 7 of the left and of the right half of a row.
using Channels = float[kOwn];
__device__ __forceinline__ void unpack_halves(const uint4& left, const uint4& right, Channels& v) {
  unpack(left, *reinterpret_cast<float(*)[8]>(v));
  unpack(right, *reinterpret_cast<float(*)[8]>(v + 8));
}
__device__ __forceinline__ void load_row(const void* rows, size_t row, int lane, Channels& v) {
  const uint4* from = static_cast<const uint4*>(rows) + row * (kDim / 8) + lane;
  unpack_halves(__ldg(from), __ldg(from + 32), v);
}
template <bool kFp8>
__device__ __forceinline__ void load_key(const void* kv, int row, int lane, Channels& v) {
  if constexpr (!kFp8) return load_row(kv, row, lane, v);
  const uint8_t* key = static_cast<const uint8_t*>(kv) + static_cast<size_t>(row) * kFp8KeyBytes;
  uint4 half[2];
#pragma unroll
  for (int h = 0; h < 2; ++h)
    half[h] = h == 1 && lane >= 24 ? __ldg(reinterpret_cast<const uint4*>(key + kFp8KeyCodes) + lane - 24)
                                   : widen_eight(__ldg(reinterpret_cast<const uint2*>(key + h * (kDim / 2)) + lane),
                                                 __ldg(key + kFp8KeyScales + h * 4 + lane / 8));
  unpack_halves(half[0], half[1], v);
}
__device__ __forceinline__ void store_row(void* rows, size_t row, int lane, const Channels& v) {
  uint4* to = static_cast<uint4*>(rows) + row * (kDim / 8) + lane;
  to[0] = pack(*reinterpret_cast<const float(*)[8]>(v)), to[32] = pack(*reinterpret_cast<const float(*)[8]>(v + 8));
}
// The same in all lanes.
__device__ __forceinline__ float dot(const Channels& a, const Channels& b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum = fmaf(a[i], b[i], sum);
  return warp_sum(sum);
}
__device__ __forceinline__ void add_scaled(Channels& sum, float factor, const Channels& v) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum[i] = fmaf(factor, v[i], sum[i]);
}
__device__ __forceinline__ float warp_max(float x) {
  for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
// Calls f(entry, key row) for the entries of a block of a list that are keys.
template <typename F>
__device__ __forceinline__ void each_key(const KeyLists& lists, int first, int count, const F& f) {
  for (int k = 0; k < count; ++k)
    if (const int row = __ldg(lists.row + first + k); row >= 0) f(k, row);
}

// As forward_parts.cuh's rotate_back does it: the last 64 channels are those of lanes 24 to 31's right halves.
__device__ __forceinline__ void rotate_tail(Channels& o, const void* table, int query, int lane) {
  const float2* angle = static_cast<const float2*>(table) + static_cast<size_t>(query) * 32 + (lane - 24) * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 turn = __ldg(angle + i);
    const float even = round_bf16(o[8 + 2 * i]), odd = round_bf16(o[9 + 2 * i]);
    o[8 + 2 * i] = __fmul_rn(even, turn.x) + __fmul_rn(odd, turn.y);
    o[9 + 2 * i] = __fmul_rn(odd, turn.x) - __fmul_rn(even, turn.y);
  }
}

// Grid: (queries, heads / kWarps). Online softmax over blocks of 64 entries; a lane has the scores of two.
template <bool kFp8>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ SparseAttentionForward p) {
  const int lane = threadIdx.x % 32, query = blockIdx.x, head = blockIdx.y * kWarps + threadIdx.x / 32;
  const size_t row = static_cast<size_t>(query) * p.heads + head;
  const float scale2 = p.scale * kLog2e;
  Channels q, key, o = {};
  load_row(p.q, row, lane, q);
  float top = -INFINITY, sum = 0;
  const int begin = p.lists.begin[query], end = p.lists.begin[query + 1];
  for (int first = begin; first < end; first += kBlock) {
    const int count = min(kBlock, end - first);
    float score[2] = {-INFINITY, -INFINITY};
    each_key(p.lists, first, count, [&](int k, int at) {
      load_key<kFp8>(p.kv, at, lane, key);
      const float s = dot(q, key);
      if (lane == k % 32) score[k / 32] = __fmul_rn(s, scale2);
    });
    const float largest = fmaxf(top, warp_max(fmaxf(score[0], score[1])));
    if (largest == -INFINITY) continue;  // no key yet
    const float shrink = exp2_fast(top - largest);
    const float weight[2] = {exp2_fast(score[0] - largest), exp2_fast(score[1] - largest)};
    top = largest, sum = fmaf(sum, shrink, warp_sum(weight[0] + weight[1]));
#pragma unroll
    for (int i = 0; i < kOwn; ++i) o[i] *= shrink;
    each_key(p.lists, first, count, [&](int k, int at) {
      load_key<kFp8>(p.kv, at, lane, key);
      add_scaled(o, round_bf16(__shfl_sync(~0u, k < 32 ? weight[0] : weight[1], k % 32)), key);
    });
  }
  const RowEnd row_end = end_of_row(top, sum, __ldg(p.sink + head));
#pragma unroll
  for (int i = 0; i < kOwn; ++i) o[i] *= row_end.factor;
  if (p.rotation && lane >= 24) rotate_tail(o, p.rotation, query, lane);
  store_row(p.o, row, lane, o);
  if (lane == 0) p.lse[row] = row_end.lse;
}

// ---- Backward ------------------------------------------------------------------------------------------------------
// Of a head of q and its d_o: the weight of a key, and the gradient of its score.
struct Weighing {
  Channels q, d_o;
  float lse2, delta, scale;
  __device__ __forceinline__ Weighing(const SparseAttentionBackward& p, size_t row, int lane)
      : lse2(__ldg(p.lse + row) * kLog2e), scale(p.scale) {
    load_row(p.q, row, lane, q), load_row(p.d_o, row, lane, d_o);
    Channels o;
    load_row(p.o, row, lane, o);
    delta = dot(o, d_o);
  }
  // Rounded as they meet values.
  __device__ __forceinline__ float2 operator()(const Channels& key) const {
    const float weight = exp2_fast(fmaf(dot(q, key), scale * kLog2e, -lse2));
    return make_float2(round_bf16(weight), round_bf16(weight * (dot(d_o, key) - delta) * scale));
  }
};

// And D for d_sink. Grid: (queries, heads / kWarps).
__global__ void __launch_bounds__(kThreads)
    dq_kernel(const __grid_constant__ SparseAttentionBackward p, const __grid_constant__ Workspace w) {
  const int lane = threadIdx.x % 32, query = blockIdx.x, head = blockIdx.y * kWarps + threadIdx.x / 32;
  const size_t row = static_cast<size_t>(query) * p.heads + head;
  const Weighing weigh(p, row, lane);
  if (lane == 0) w.delta[row] = weigh.delta;
  Channels key, dq = {};
  const int first = p.lists.begin[query];
  each_key(p.lists, first, p.lists.begin[query + 1] - first, [&](int, int at) {
    load_row(p.kv, at, lane, key);
    add_scaled(dq, weigh(key).y, key);
  });
  store_row(p.dq, row, lane, dq);
}

// A block has an item, 64 heads of a query: their weights for 64 keys go to shared memory, then a thread makes two
// columns of those keys' terms, eight keys at a time. Grid: every stride-th item.
__global__ void __launch_bounds__(kThreads)
    dkv_kernel(const __grid_constant__ SparseAttentionBackward p, const __grid_constant__ Workspace w, int stride) {
  constexpr int kKeys = 8;
  constexpr float kMagic = 12582912.f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
  __shared__ float2 weights[kTileHeads][kBlock];
  __shared__ float largest_of[kKeys][kWarps];
  if (!w.control->run) return;
  const float fixed_scale = w.control->scale;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, index = blockIdx.x * stride;
  const size_t first_head = static_cast<size_t>(index) * kTileHeads;
  const Item item = item_at(p.lists, p.heads / kTileHeads, index);
  float largest_term = 0;
  for (int done = 0; done < item.length; done += kBlock) {
    const int count = min(kBlock, item.length - done), first = item.first + done;
    __syncthreads();
    for (int head = warp; head < kTileHeads; head += kWarps) {
      const Weighing weigh(p, first_head + head, lane);
      Channels key;
      each_key(p.lists, first, count, [&](int k, int at) {
        load_row(p.kv, at, lane, key);
        const float2 both = weigh(key);
        if (lane == 0) weights[head][k] = both;
      });
    }
    __syncthreads();
    for (int keys = 0; keys < count; keys += kKeys) {
      float2 term[kKeys] = {};
      for (int head = 0; head < kTileHeads; ++head) {
        const size_t at = (first_head + head) * (kDim / 2) + threadIdx.x;
        const uint32_t q = __ldg(static_cast<const uint32_t*>(p.q) + at),
                       d_o = __ldg(static_cast<const uint32_t*>(p.d_o) + at);
#pragma unroll
        for (int k = 0; k < kKeys; ++k) {
          const float2 both = weights[head][keys + k];
          term[k].x = fmaf(both.y, low_bf16(q), fmaf(both.x, low_bf16(d_o), term[k].x));
          term[k].y = fmaf(both.y, high_bf16(q), fmaf(both.x, high_bf16(d_o), term[k].y));
        }
      }
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        const int row = keys + k < count ? __ldg(p.lists.row + first + keys + k) : -1;
        if (row < 0) continue;  // its weights are not there
        int* to = w.sums + static_cast<size_t>(row) * kDim + 2 * threadIdx.x;
        atomicAdd(to, __float_as_int(fmaf(term[k].x, fixed_scale, kMagic)) - __float_as_int(kMagic));
        atomicAdd(to + 1, __float_as_int(fmaf(term[k].y, fixed_scale, kMagic)) - __float_as_int(kMagic));
        float largest = max_nan(fabsf(term[k].x), fabsf(term[k].y));
        for (int step = 16; step; step /= 2) largest = max_nan(largest, __shfl_xor_sync(~0u, largest, step));
        if (lane == 0) largest_of[k][warp] = largest;
      }
      __syncthreads();
      const int k = threadIdx.x, row = k < kKeys && keys + k < count ? p.lists.row[first + keys + k] : -1;
      if (row >= 0) {
        float largest = 0;
        for (int i = 0; i < kWarps; ++i) largest = max_nan(largest, largest_of[k][i]);
        atomicAdd(w.bound + row, bound_units(largest, fixed_scale));
        largest_term = max_nan(largest_term, largest);
      }
      __syncthreads();
    }
  }
  if (largest_term != 0) atomicMax(&w.control->largest_term, __float_as_uint(largest_term));  // also NaN
}

}  // namespace

cudaError_t launch_portable_forward(const SparseAttentionForward& p, cudaStream_t stream) {
  const auto kernel = p.kv_fp8 ? forward_kernel<true> : forward_kernel<false>;
  kernel<<<dim3(p.queries, p.heads / kWarps), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_portable_dq(const SparseAttentionBackward& p, const Workspace& w, cudaStream_t stream) {
  dq_kernel<<<dim3(p.queries, p.heads / kWarps), kThreads, 0, stream>>>(p, w);
  return cudaGetLastError();
}

cudaError_t launch_portable_dkv(const SparseAttentionBackward& p, const Workspace& w, int stride, cudaStream_t stream) {
  dkv_kernel<<<(item_count(p) + stride - 1) / stride, kThreads, 0, stream>>>(p, w, stride);
  return cudaGetLastError();
}

}  // namespace plumb::kernels::attention
