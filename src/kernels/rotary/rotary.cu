// Bound by memory. A vector of 512 belongs to a warp, one of 128 to half a warp: eight neighbouring channels a lane, so
// that norms, Hadamard transform and scales are shuffles. A warp has several vectors in flight. Index vectors, forward,
// are in index_vectors.cu.
#include "kernels/rotary/rotary.h"

#include <climits>

#include "kernels/hopper/launch_order.cuh"
#include "kernels/hopper/vectors.cuh"
#include "kernels/launch.cuh"
#include "kernels/norm/partial_sums.cuh"
#include "kernels/rotary/index_vectors.h"
#include "kernels/rotary/pairs.cuh"
#include "kernels/rotary/rotate.cuh"

namespace plumb::kernels {
namespace rotary {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kPairs = kRotaryChannels / 2;

// kTogether: vectors that a group of lanes has in flight; 1 where there are too few to fill the GPU.
template <int kWidth, int kTogether>
struct Layout {
  static constexpr int kLanes = kWidth == 512 ? 32 : 16;  // of a vector
  static constexpr int kPieces = kWidth / 8 / kLanes;     // of eight channels; piece i of lane l: 8 (i kLanes + l)
  static constexpr int kGroups = kThreads / kLanes;       // of a block
  static constexpr int kBlockVectors = kGroups * kTogether;
};

// ---- arithmetic on a lane's channels ----
template <int kLanes>
__device__ __forceinline__ float group_sum(float x) {
#pragma unroll
  for (int step = kLanes / 2; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// The last eight of a vector's kLanes lanes have its tail, in their last piece.
template <int kLanes>
__device__ __forceinline__ bool has_tail(int lane) {
  return lane >= kLanes - kRotaryChannels / 8;
}
template <int kLanes>
__device__ __forceinline__ Angles tail_angles(const void* table, int row, int lane) {
  const int piece = lane - (kLanes - kRotaryChannels / 8);
  return load_angles(static_cast<const float2*>(table) + static_cast<size_t>(row) * kPairs + piece * 4);
}

// Sylvester order, times 128^-1/2, over 16 lanes.
__device__ __forceinline__ void hadamard_128(float (&v)[8]) {
#pragma unroll
  for (int half = 1; half < 8; half *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (!(i & half)) {
        const float a = v[i], b = v[i + half];
        v[i] = a + b, v[i + half] = a - b;
      }
#pragma unroll
  for (int step = 1; step < 16; step *= 2) {
    const float sign = threadIdx.x & step ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = fmaf(v[i], sign, __shfl_xor_sync(~0u, v[i], step));  // other +- own
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] *= 0.08838834764831845f;
}

// The smallest power of two at or above x; x is normal.
__device__ __forceinline__ float power_above(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x007fffffu) & 0x7f800000u);
}

// The nearest values that e4m3 with a power-of-two scale can hold of eight lanes' channels, 64. A block whose largest
// magnitude is infinite becomes NaN. Channels stay packed: the numbers of e4m3 and their sum with 192 steps of their
// grid are bf16 numbers, so that this addition rounds to the grid, to nearest even.
__device__ __forceinline__ uint4 nearest_fp8(const uint4& x) {
  const uint32_t pair[4] = {x.x, x.y, x.z, x.w};
  uint32_t size[4], top = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) size[i] = pair[i] & 0x7fff7fffu, top = __vmaxu2(top, size[i]);
  top = max(top & 0xffffu, top >> 16);  // magnitudes order like their bits, NaN last
#pragma unroll
  for (int step = 4; step; step /= 2) top = max(top, __shfl_xor_sync(~0u, top, step));
  if (top >= 0x7f80) return make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);
  // No channel is above 448 scales.
  const float scale = power_above(__fmul_rn(fmaxf(__uint_as_float(top << 16), 1e-4f), 1.0f / 448.0f));
  const uint32_t exponent = __float_as_uint(scale) >> 16;
  const Pair back = as_pair(exponent * 0x10001u), inverse = as_pair((0x7f00 - exponent) * 0x10001u);
  const uint32_t smallest = (exponent - (6 << 7)) * 0x10001u;  // binade: its grid goes on below
  // From a channel's binade to 192 steps, an eighth of a binade each, of the channel over the scale.
  const uint32_t steps = ((127 << 7) - exponent + (4 << 7) + 0x40) * 0x10001u;
  uint32_t result[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Pair anchor = as_pair((__vmaxu2(size[i], smallest) & 0x7f807f80u) + steps);
    const uint32_t nearest = bits_of(__hmul2_rn(__hsub2_rn(__hfma2(as_pair(pair[i]), inverse, anchor), anchor), back));
    result[i] = (nearest & 0x7fff7fffu) | (pair[i] & 0x80008000u);  // zeros keep their signs
  }
  return make_uint4(result[0], result[1], result[2], result[3]);
}

// ---- kernels ----
__global__ void __launch_bounds__(kThreads)
    table_kernel(const int* position, const float* frequency, int count, float2* table) {
  hopper::take_turn();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count) return;
  const double angle = __fmul_rn(static_cast<float>(position[i / kPairs]), frequency[i % kPairs]);
  double sine, cosine;
  sincos(angle, &sine, &cosine);
  table[i] = make_float2(static_cast<float>(cosine), static_cast<float>(sine));
}

template <int kWidth, VectorNorm kNorm, VectorStorage kStorage, int kTogether>
__global__ void __launch_bounds__(kThreads, kTogether == 1 ? 5 : 1)
    finish_kernel(const __grid_constant__ FinishVectors p) {
  hopper::take_turn();
  using L = Layout<kWidth, kTogether>;
  const int group = threadIdx.x / L::kLanes, lane = threadIdx.x % L::kLanes;
  const unsigned count = static_cast<unsigned>(p.rows) * p.vectors, first = blockIdx.x * L::kBlockVectors + group;
  const bool tail = has_tail<L::kLanes>(lane);
  constexpr bool kEarly = kTogether == 1;  // the angles are on their way together with the one vector
  constexpr int kLast = L::kPieces - 1;
  Angles angles;
  uint4 in[kTogether][L::kPieces];
#pragma unroll
  for (int t = 0; t < kTogether; ++t) {
    const unsigned vector = first + t * L::kGroups;
#pragma unroll
    for (int i = 0; i < L::kPieces; ++i) {
      in[t][i] = make_uint4(0, 0, 0, 0);
      if (vector < count)
        in[t][i] = static_cast<const uint4*>(p.x)[size_t{vector} * (kWidth / 8) + i * L::kLanes + lane];
    }
  }
  if (kEarly && tail && first < count)
    angles = tail_angles<L::kLanes>(p.table, first / static_cast<unsigned>(p.vectors), lane);
#pragma unroll
  for (int t = 0; t < kTogether; ++t) {
    const unsigned vector = first + t * L::kGroups;
    if (__all_sync(~0u, vector >= count)) return;
    const bool exists = vector < count;
    const unsigned row = exists ? vector / static_cast<unsigned>(p.vectors) : 0;
    if constexpr (kNorm != VectorNorm::none) {
      float v[L::kPieces][8], weight[L::kPieces][8], square = 0;
#pragma unroll
      for (int i = 0; i < L::kPieces; ++i) {
        unpack(in[t][i], v[i]);
#pragma unroll
        for (int k = 0; k < 8; ++k) square = fmaf(v[i][k], v[i][k], square);
      }
      if constexpr (kNorm == VectorNorm::weighted)  // on their way while the sum is made
#pragma unroll
        for (int i = 0; i < L::kPieces; ++i) load_eight(p.weight + 8 * (i * L::kLanes + lane), weight[i]);
      const float rho = inverse_rms(group_sum<L::kLanes>(square), kWidth, p.eps);
#pragma unroll
      for (int i = 0; i < L::kPieces; ++i) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          v[i][k] *= rho;
          if constexpr (kNorm == VectorNorm::weighted) v[i][k] *= weight[i][k];
        }
        in[t][i] = pack(v[i]);
      }
    }
    if (tail) {
      if constexpr (!kEarly) angles = tail_angles<L::kLanes>(p.table, row, lane);
      float v[8];
      unpack(in[t][kLast], v);
      rotate_eight(v, angles, 1);
      in[t][kLast] = pack(v);
    }
    if constexpr (kStorage == VectorStorage::fp8) {
#pragma unroll
      for (int i = 0; i < L::kPieces; ++i) {
        const uint4 stored = nearest_fp8(in[t][i]);
        if (i < kLast || !tail) in[t][i] = stored;
      }
    }
    if (!exists) continue;
    const size_t to =
        p.slot ? static_cast<size_t>(__ldg(p.slot + row)) * p.vectors + vector % static_cast<unsigned>(p.vectors)
               : vector;
#pragma unroll
    for (int i = 0; i < L::kPieces; ++i) static_cast<uint4*>(p.y)[to * (kWidth / 8) + i * L::kLanes + lane] = in[t][i];
  }
}

// Of a block: vectors whose d_weight it sums up, in units of Layout::kBlockVectors.
template <int kWidth>
constexpr int kBackwardRounds = kWidth == 512 ? 4 : 1;

template <int kWidth, VectorNorm kNorm, VectorStorage kStorage, bool kWeight, int kBlockTogether>
__global__ void __launch_bounds__(kThreads) finish_backward_kernel(const __grid_constant__ FinishVectorsBackward p) {
  if constexpr (kWeight)  // as in norm.cu
    hopper::wait_for_earlier_launches();
  else
    hopper::take_turn();
  using L = Layout<kWidth, kBlockTogether>;
  constexpr int kLast = L::kPieces - 1;
  const int group = threadIdx.x / L::kLanes, lane = threadIdx.x % L::kLanes;
  const unsigned count = static_cast<unsigned>(p.rows) * p.vectors;
  float d_weight[L::kPieces][8] = {};
#pragma unroll 1
  for (int round = 0; round < (kWeight ? kBackwardRounds<kWidth> : 1); ++round) {
    const unsigned first = (blockIdx.x * (kWeight ? kBackwardRounds<kWidth> : 1) + round) * L::kBlockVectors + group;
    // At a time; with a norm two inputs are in flight.
    constexpr int kTogether = kNorm == VectorNorm::none || kBlockTogether == 1 ? kBlockTogether : kBlockTogether / 2;
#pragma unroll 1
    for (int part = 0; part < kBlockTogether; part += kTogether) {
      uint4 ds[kTogether][L::kPieces], xs[kTogether][L::kPieces];
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        const unsigned vector = first + (part + t) * L::kGroups;
#pragma unroll
        for (int i = 0; i < L::kPieces; ++i) {
          ds[t][i] = xs[t][i] = make_uint4(0, 0, 0, 0);
          if (vector >= count) continue;
          const size_t at = size_t{vector} * (kWidth / 8) + i * L::kLanes + lane;
          ds[t][i] = static_cast<const uint4*>(p.d_y)[at];
          if constexpr (kNorm != VectorNorm::none) xs[t][i] = static_cast<const uint4*>(p.x)[at];
        }
      }
      // One vector: what is needed later is on its way together with it.
      constexpr bool kEarly = kTogether == 1;
      float w[L::kPieces][8];
      Angles angles;
      const auto load_weight = [&] {
        if constexpr (kNorm == VectorNorm::weighted)
#pragma unroll
          for (int i = 0; i < L::kPieces; ++i) load_eight(p.weight + 8 * (i * L::kLanes + lane), w[i]);
      };
      const auto load_tail_angles = [&](int t) {
        const unsigned vector = first + (part + t) * L::kGroups;
        if (has_tail<L::kLanes>(lane))
          angles =
              tail_angles<L::kLanes>(p.table, vector < count ? vector / static_cast<unsigned>(p.vectors) : 0, lane);
      };
      if constexpr (kEarly) load_weight(), load_tail_angles(0);
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        const unsigned vector = first + (part + t) * L::kGroups;
        float d[L::kPieces][8], x[L::kPieces][8];
#pragma unroll
        for (int i = 0; i < L::kPieces; ++i) unpack(ds[t][i], d[i]), unpack(xs[t][i], x[i]);
        if constexpr (kStorage == VectorStorage::fp4_record) hadamard_128(d[0]);  // its own transpose
        if constexpr (!kEarly) load_tail_angles(t);
        if (has_tail<L::kLanes>(lane)) rotate_eight(d[kLast], angles, -1);
        if constexpr (kNorm != VectorNorm::none) {
          float square = 0, along = 0;
          if constexpr (!kEarly) load_weight();
#pragma unroll
          for (int i = 0; i < L::kPieces; ++i) {
#pragma unroll
            for (int k = 0; k < 8; ++k) {
              square = fmaf(x[i][k], x[i][k], square);
              const float g = kNorm == VectorNorm::weighted ? __fmul_rn(w[i][k], d[i][k]) : d[i][k];
              along = fmaf(g, x[i][k], along);
            }
          }
          const float rho = inverse_rms(group_sum<L::kLanes>(square), kWidth, p.eps);
          const float slope = group_sum<L::kLanes>(along) * rho * rho / static_cast<float>(kWidth);
#pragma unroll
          for (int i = 0; i < L::kPieces; ++i) {
#pragma unroll
            for (int k = 0; k < 8; ++k) {
              if constexpr (kWeight) d_weight[i][k] = fmaf(d[i][k], x[i][k] * rho, d_weight[i][k]);
              const float g = kNorm == VectorNorm::weighted ? __fmul_rn(w[i][k], d[i][k]) : d[i][k];
              d[i][k] = rho * fmaf(-x[i][k], slope, g);
            }
          }
        }
        if (vector >= count) continue;
#pragma unroll
        for (int i = 0; i < L::kPieces; ++i)
          static_cast<uint4*>(p.d_x)[size_t{vector} * (kWidth / 8) + i * L::kLanes + lane] = pack(d[i]);
      }
    }
  }
  if constexpr (kWeight) {  // groups of lanes in order
    __shared__ float sum[L::kGroups][kWidth];
#pragma unroll
    for (int i = 0; i < L::kPieces; ++i)
#pragma unroll
      for (int k = 0; k < 8; ++k) sum[group][8 * (i * L::kLanes + lane) + k] = d_weight[i][k];
    __syncthreads();
    for (int channel = threadIdx.x; channel < kWidth; channel += kThreads) {
      float total = sum[0][channel];
#pragma unroll
      for (int g = 1; g < L::kGroups; ++g) total += sum[g][channel];
      static_cast<float*>(p.workspace)[static_cast<size_t>(blockIdx.x) * kWidth + channel] = total;
    }
  }
}

// Eight lanes have the tail of a vector.
__global__ void __launch_bounds__(kThreads)
    rotate_kernel(uint4* x, const float2* table, unsigned count, unsigned vectors, int width, float direction) {
  hopper::take_turn();
  const unsigned vector = blockIdx.x * (kThreads / 8) + threadIdx.x / 8, lane = threadIdx.x % 8;
  if (vector >= count) return;
  const Angles angles = load_angles(table + size_t{vector / vectors} * kPairs + lane * 4);
  uint4& at = x[size_t{vector} * (width / 8) + width / 8 - 8 + lane];
  float v[8];
  unpack(at, v);
  rotate_eight(v, angles, direction);
  at = pack(v);
}

bool too_many(int rows, int vectors) { return rows < 0 || vectors < 1 || rows > INT_MAX / vectors; }

int blocks_for(int64_t vectors, int block_vectors) {
  return static_cast<int>((vectors + block_vectors - 1) / block_vectors);
}

constexpr int64_t kManyVectors = 1 << 17;

template <int kWidth, VectorNorm kNorm, VectorStorage kStorage>
void launch_finish(const FinishVectors& p, cudaStream_t stream) {
  const int64_t vectors = static_cast<int64_t>(p.rows) * p.vectors;
  if (vectors < kManyVectors)
    launch_dependent(finish_kernel<kWidth, kNorm, kStorage, 1>,
                     {dim3(blocks_for(vectors, Layout<kWidth, 1>::kBlockVectors)), kThreads}, stream, p);
  else
    launch_dependent(finish_kernel<kWidth, kNorm, kStorage, 4>,
                     {dim3(blocks_for(vectors, Layout<kWidth, 4>::kBlockVectors)), kThreads}, stream, p);
}

// Blocks that sum up d_weight take the same vectors whatever their number: the sum has one tree.
constexpr int kWeightTogether = 2;
template <int kWidth>
constexpr int weight_block() {
  return Layout<kWidth, kWeightTogether>::kBlockVectors * kBackwardRounds<kWidth>;
}

template <int kWidth, VectorNorm kNorm, VectorStorage kStorage>
void launch_backward(const FinishVectorsBackward& p, cudaStream_t stream) {
  const int64_t vectors = static_cast<int64_t>(p.rows) * p.vectors;
  if constexpr (kNorm == VectorNorm::weighted)
    if (p.d_weight) {
      const int blocks = blocks_for(vectors, weight_block<kWidth>());
      launch_dependent(finish_backward_kernel<kWidth, kNorm, kStorage, true, kWeightTogether>, {dim3(blocks), kThreads},
                       stream, p);
      launch_dependent(add_partial_sums, {dim3(kWidth / 32), kPartialSumThreads}, stream,
                       static_cast<const float*>(p.workspace), blocks, kWidth, p.d_weight);
      return;
    }
  if (vectors < kManyVectors)
    launch_dependent(finish_backward_kernel<kWidth, kNorm, kStorage, false, 1>,
                     {dim3(blocks_for(vectors, Layout<kWidth, 1>::kBlockVectors)), kThreads}, stream, p);
  else
    launch_dependent(finish_backward_kernel<kWidth, kNorm, kStorage, false, 4>,
                     {dim3(blocks_for(vectors, Layout<kWidth, 4>::kBlockVectors)), kThreads}, stream, p);
}

// Calls f.template operator()<width, norm, storage>() for the combinations that the model has; false for others.
template <class F>
bool dispatch(int width, VectorNorm norm, VectorStorage storage, const F& f) {
  using enum VectorNorm;
  using S = VectorStorage;
  if (width == 512 && norm == plain && storage == S::plain) return f.template operator()<512, plain, S::plain>(), true;
  if (width == 512 && norm == weighted && storage == S::plain)
    return f.template operator()<512, weighted, S::plain>(), true;
  if (width == 512 && norm == weighted && storage == S::fp8)
    return f.template operator()<512, weighted, S::fp8>(), true;
  if (width == 128 && norm == none && storage == S::plain) return f.template operator()<128, none, S::plain>(), true;
  if (width == 128 && norm == none && storage == S::fp4_record)
    return f.template operator()<128, none, S::fp4_record>(), true;
  if (width == 128 && norm == weighted && storage == S::plain)
    return f.template operator()<128, weighted, S::plain>(), true;
  if (width == 128 && norm == weighted && storage == S::fp4_record)
    return f.template operator()<128, weighted, S::fp4_record>(), true;
  return false;
}

}  // namespace
}  // namespace rotary

cudaError_t rotary_table(const int* position, const float* frequency, int rows, void* table, cudaStream_t stream) {
  using namespace rotary;
  if (rows < 0) return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  const int count = rows * kPairs;
  launch_dependent(table_kernel, {dim3((count + kThreads - 1) / kThreads), kThreads}, stream, position, frequency,
                   count, static_cast<float2*>(table));
  return cudaGetLastError();
}

cudaError_t finish_vectors(const FinishVectors& p, cudaStream_t stream) {
  if (rotary::too_many(p.rows, p.vectors) || (p.norm == VectorNorm::weighted) != (p.weight != nullptr))
    return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  if (p.storage == VectorStorage::fp4_record) return rotary::finish_index_vectors(p, stream);
  const bool known =
      rotary::dispatch(p.width, p.norm, p.storage, [&]<int kWidth, VectorNorm kNorm, VectorStorage kS>() {
        if constexpr (kS != VectorStorage::fp4_record) rotary::launch_finish<kWidth, kNorm, kS>(p, stream);
      });
  return known ? cudaGetLastError() : cudaErrorInvalidValue;
}

size_t finish_vectors_backward_workspace(int rows, int vectors, int width) {
  const int block = width == 512 ? rotary::weight_block<512>() : rotary::weight_block<128>();
  return sizeof(float) * width * static_cast<size_t>(rotary::blocks_for(static_cast<int64_t>(rows) * vectors, block));
}

cudaError_t finish_vectors_backward(const FinishVectorsBackward& p, cudaStream_t stream) {
  if (rotary::too_many(p.rows, p.vectors) || (p.norm == VectorNorm::weighted) != (p.weight != nullptr) ||
      (p.d_weight && p.norm != VectorNorm::weighted) || (p.norm != VectorNorm::none && p.x == nullptr))
    return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  const bool known = rotary::dispatch(
      p.width, p.norm, p.storage,
      [&]<int kWidth, VectorNorm kNorm, VectorStorage kS>() { rotary::launch_backward<kWidth, kNorm, kS>(p, stream); });
  return known ? cudaGetLastError() : cudaErrorInvalidValue;
}

cudaError_t rotate_tails(void* x, const void* table, int rows, int vectors, int width, bool inverse,
                         cudaStream_t stream) {
  using namespace rotary;
  if (too_many(rows, vectors) || width < kRotaryChannels || width % 8 != 0) return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  const int64_t count = static_cast<int64_t>(rows) * vectors;
  launch_dependent(rotate_kernel, {dim3(blocks_for(count, kThreads / 8)), kThreads}, stream, static_cast<uint4*>(x),
                   static_cast<const float2*>(table), static_cast<unsigned>(count), static_cast<unsigned>(vectors),
                   width, inverse ? -1.f : 1.f);
  return cudaGetLastError();
}

}  // namespace plumb::kernels
