// Index vectors: norm, rotation, Hadamard transform, FP4, record. Instructions are what limits this kernel. Two lanes
// have a vector: each has 16 neighbouring channels of every block of 32, so that both have as many rotated ones, one of
// the seven steps of the transform crosses lanes, and what is done once a vector is done for sixteen vectors by a warp.
// Pairs of channels stay packed as bf16 from the transform on.
#include <cuda_fp8.h>

#include "kernels/hopper/code.cuh"
#include "kernels/hopper/launch_order.cuh"
#include "kernels/hopper/vectors.cuh"
#include "kernels/indexer/indexer.h"
#include "kernels/launch.cuh"
#include "kernels/rotary/index_vectors.h"
#include "kernels/rotary/pairs.cuh"
#include "kernels/rotary/rotate.cuh"

namespace plumb::kernels {
namespace rotary {
namespace {
// Rounded to bf16, as floats.
__device__ __forceinline__ void round_eight(float (&v)[8]) {
#pragma unroll
  for (int k = 0; k < 8; ++k) v[k] = __uint_as_float(hopper::pack_bf16(0, v[k]));
}

constexpr int kLanes = 2, kThreads = 128, kBlockVectors = kThreads / kLanes;
constexpr int kScaleBlocks = kIndexDim / 32, kChannels = kIndexDim / kLanes, kPieces = kChannels / 8;

// Piece 2 b + h: channels 32 b + 16 lane + 8 h .. + 7.
using Lane = float[kPieces][8];

__device__ __forceinline__ int lane_of_vector() { return threadIdx.x % kLanes; }
template <class T>
__device__ __forceinline__ T other_lane(T x) {
  return __shfl_xor_sync(~0u, x, 1);
}

// In the order in which sixteen lanes with a piece each would add (rotary.cu): bits of the channel from the top.
__device__ __forceinline__ void weighted_norm(Lane& v, const float* weight, float eps) {
  float square[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    square[i] = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) square[i] = fmaf(v[i][k], v[i][k], square[i]);
  }
  float half[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    half[h] = (square[h] + square[4 + h]) + (square[2 + h] + square[6 + h]);
    half[h] += other_lane(half[h]);
  }
  const float rho = inverse_rms(half[0] + half[1], kIndexDim, eps);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    float w[8];
    load_eight(weight + i / 2 * 32 + lane_of_vector() * 16 + i % 2 * 8, w);
#pragma unroll
    for (int k = 0; k < 8; ++k) v[i][k] = v[i][k] * rho * w[k];
    round_eight(v[i]);
  }
}

// Sylvester order, times 128^-1/2; bits of the channel from the bottom.
__device__ __forceinline__ void hadamard(Lane& v) {
  float(&all)[kChannels] = reinterpret_cast<float(&)[kChannels]>(v);
#pragma unroll
  for (int half = 1; half < kChannels; half *= 2) {
    if (half == 16) {  // between the lanes
      const float sign = lane_of_vector() ? -1.f : 1.f;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) all[i] = fmaf(all[i], sign, other_lane(all[i]));
    }
#pragma unroll
    for (int i = 0; i < kChannels; ++i)
      if (!(i & half)) {
        const float a = all[i], b = all[i + half];
        all[i] = a + b, all[i + half] = a - b;
      }
  }
#pragma unroll
  for (int i = 0; i < kChannels; ++i) all[i] *= 0.08838834764831845f;
}

// A power of two, twice.
__device__ __forceinline__ uint32_t pair_of(float power) { return __byte_perm(__float_as_uint(power), 0, 0x3232); }

// The smallest power of two at or above top / 6.
__device__ __forceinline__ float fp4_scale(float top) {
  return __uint_as_float((__float_as_uint(__fmul_rn(fmaxf(top, 6 * 0x1p-126f), 1.0f / 6.0f)) + 0x007fffffu) &
                         0x7f800000u);
}

// Number of the e2m1 magnitude (0, 0.5, 1, 1.5, 2, 3, 4, 6) nearest to |x| / scale, in the low bits of each half. It is
// min(2 v, v + 2, v / 2 + 4) rounded to nearest even; adding 128 in the same operation rounds it, once.
struct Grid {
  Pair twice, once, half;  // of the scale's inverse
};
__device__ __forceinline__ Grid grid_of(uint32_t inverse) {
  const Pair u = as_pair(inverse);
  return {__hmul2_rn(u, as_pair(0x40004000u)), u, __hmul2_rn(u, as_pair(0x3f003f00u))};
}
__device__ __forceinline__ uint32_t e2m1_number(uint32_t pair, const Grid& grid) {
  const Pair size = as_pair(pair & 0x7fff7fffu);
  const uint32_t a = bits_of(__hfma2(size, grid.twice, as_pair(0x43004300u))),  // 128
      b = bits_of(__hfma2(size, grid.once, as_pair(0x43024302u))),              // 130
      c = bits_of(__hfma2(size, grid.half, as_pair(0x43044304u)));              // 132
  return __vimin3_u16x2(a, b, c);
}

// What a block of 32 channels is stored with.
struct Scaling {
  uint32_t inverse;    // of the scale, as a pair; 0: all of the block rounds to zero
  uint32_t low, high;  // e4m3 of the eight magnitudes, folded; NaN for a block with one
  __device__ uint32_t signs() const { return ((low & 1) - 1) & 0x80808080u; }  // NaN has none
};
__device__ __forceinline__ Scaling from_lane(const Scaling& own, int lane) {
  return {__shfl_sync(~0u, own.inverse, lane, kLanes), __shfl_sync(~0u, own.low, lane, kLanes),
          __shfl_sync(~0u, own.high, lane, kLanes)};
}
__device__ __forceinline__ void set_magnitudes(Scaling& s, float fold) {
  const auto two = [&](float a, float b) {
    return static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(make_float2(a * fold, b * fold), __NV_SATFINITE, __NV_E4M3));
  };
  s.low = two(0, 0.5f) | two(1, 1.5f) << 16, s.high = two(2, 3) | two(4, 6) << 16;
}

// A vector's record from its transformed channels; null for a vector that does not exist. All lanes take part.
__device__ __forceinline__ void store_record(const Lane& v, uint8_t* record) {
  constexpr int kPairs = kPieces * 4, kBlockPairs = kPairs / kScaleBlocks;
  const int lane = lane_of_vector();
  uint32_t pair[kPairs], magnitude[kScaleBlocks] = {};
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    pair[i] = hopper::pack_bf16(v[i / 4][i % 4 * 2], v[i / 4][i % 4 * 2 + 1]);
    uint32_t& top = magnitude[i / kBlockPairs];
    top = __vmaxu2(top, pair[i] & 0x7fff7fffu);  // magnitudes order like their bits, NaN last
  }
  // Lane l sees to the scales of blocks 2 l and 2 l + 1.
  uint32_t tops[2];
#pragma unroll
  for (int l = 0; l < 2; ++l) {
    tops[l] = __vmaxu2(__byte_perm(magnitude[2 * l], magnitude[2 * l + 1], 0x5410),
                       __byte_perm(magnitude[2 * l], magnitude[2 * l + 1], 0x7632));
    tops[l] = __vmaxu2(tops[l], other_lane(tops[l]));
  }
  const uint32_t own_tops = lane ? tops[1] : tops[0];
  bool finite[2], empty[2];
  int exponent[2];
  float inverse[2];
  uint32_t exponents = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float top = __uint_as_float(min(i ? own_tops & 0xffff0000u : own_tops << 16, 0x7f800000u));
    finite[i] = top < INFINITY;  // or else the block becomes NaN
    const float scale = finite[i] ? fp4_scale(top) : 1.f;
    inverse[i] = inverse_of_power(scale);
    empty[i] = top * inverse[i] <= 0.25f;  // all of it rounds to zero; its exponent does not count
    exponent[i] = static_cast<int>(__float_as_uint(scale) >> 23);
    if (!empty[i]) exponents |= static_cast<uint32_t>(exponent[i]) << (16 * lane + 8 * i);
  }
  exponents |= other_lane(exponents);
  int high = 0, low = 255;
#pragma unroll
  for (int b = 0; b < kScaleBlocks; ++b) {
    const int other = static_cast<int>(exponents >> 8 * b & 255);
    high = max(high, other), low = min(low, other == 0 ? 255 : other);
  }
  const bool folds = high - low <= kFoldedSpan;
  const int span = max(high - low, 0);
  if (high == 0) high = 127;
  Scaling own[2];
  float unit[2];  // of a sum of squares: a quarter of the folded scale's square
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int down = empty[i] || !folds ? 0 : high - exponent[i];
    own[i].inverse = empty[i] ? 0 : pair_of(inverse[i]);
    set_magnitudes(own[i], finite[i] ? __uint_as_float((127u - down) << 23) : NAN);
    unit[i] = finite[i] ? __uint_as_float((125u - 2 * down) << 23) : NAN;
  }

  uint32_t squares[kScaleBlocks];
#pragma unroll
  for (int b = 0; b < kScaleBlocks; ++b) {
    const Scaling s = from_lane(own[b % 2], b / 2);
    const Grid grid = grid_of(s.inverse);
    uint32_t code[kBlockPairs / 2];
    squares[b] = 0;
#pragma unroll
    for (int i = 0; i < kBlockPairs / 2; ++i) {
      const uint32_t first = pair[b * kBlockPairs + 2 * i], second = pair[b * kBlockPairs + 2 * i + 1];
      const uint32_t numbers = __byte_perm(e2m1_number(first, grid), e2m1_number(second, grid), 0x6240);
      const uint32_t select = (numbers | numbers >> 12) & 0x7777u;  // of four channels, in order
      code[i] = __byte_perm(s.low, s.high, select) | (__byte_perm(first, second, 0x7531) & s.signs());
      const uint32_t halves = __byte_perm(0x03020100u, 0x0c080604u, select);
      squares[b] = __dp4a(halves, halves, squares[b]);
    }
    if (record) reinterpret_cast<uint4*>(record)[b * 2 + lane] = make_uint4(code[0], code[1], code[2], code[3]);
  }
  const uint32_t packed[2] = {squares[0] | squares[1] << 16, squares[2] | squares[3] << 16};
  const uint32_t both = (lane ? packed[1] : packed[0]) + other_lane(lane ? packed[0] : packed[1]);
  float square = static_cast<float>(both & 0xffffu) * unit[0] + static_cast<float>(both >> 16) * unit[1];
  square += other_lane(square);
  if (!record || lane != 0) return;
  if (folds) exponents = static_cast<uint32_t>(high) * 0x01010101u;
#pragma unroll
  for (int b = 0; b < kScaleBlocks; ++b)
    if ((exponents >> 8 * b & 255) == 0) exponents |= static_cast<uint32_t>(high) << 8 * b;
  // In steps of half the smallest power; a vector that cannot be folded counts as longer than all others.
  const float length = folds ? square * __uint_as_float(static_cast<uint32_t>(129 + 2 * span) << 23) : INFINITY;
  *reinterpret_cast<uint4*>(record + kIndexDim) =
      make_uint4(static_cast<uint32_t>(high) << 23, __float_as_uint(length), exponents, 0);
}

// Asks for the vectors of a block that will come in place of one of those that are here now, so that it finds them in
// the L2 cache: few registers are left for loads that are under way while a block computes.
constexpr unsigned kBlocksAhead = 264;
__device__ __forceinline__ void prefetch_later_vectors(const FinishVectors& p) {
  if constexpr (hopper::kHasCode) {
    const unsigned first = (blockIdx.x + kBlocksAhead) * kBlockVectors;
    if (threadIdx.x != 0 || first + kBlockVectors > static_cast<unsigned>(p.rows) * p.vectors) return;
    constexpr int kBytes = kIndexDim * 2;
    const uint8_t* x = static_cast<const uint8_t*>(p.x) + static_cast<size_t>(first) * kBytes;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(x), "r"(kBlockVectors * kBytes));
  }
}

template <bool kNormed>
__global__ void __launch_bounds__(kThreads, kNormed ? 4 : 6)
    index_vectors_kernel(const __grid_constant__ FinishVectors p) {
  hopper::take_turn();
  prefetch_later_vectors(p);
  const int lane = lane_of_vector();
  const unsigned vector = blockIdx.x * kBlockVectors + threadIdx.x / kLanes, vectors = p.vectors;
  const bool exists = vector < static_cast<unsigned>(p.rows) * vectors;
  const unsigned row = exists ? vector / vectors : 0;
  const uint4* x = static_cast<const uint4*>(p.x) + static_cast<size_t>(exists ? vector : 0) * (kIndexDim / 8);
  uint4 in[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) in[i] = __ldg(x + i / 2 * 4 + lane * 2 + i % 2);
  Lane v;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) unpack(in[i], v[i]);
  if constexpr (kNormed) weighted_norm(v, p.weight, p.eps);
  const float2* angle = static_cast<const float2*>(p.table) + row * (kRotaryChannels / 2) + lane * 8;
#pragma unroll
  for (int i = kPieces / 2; i < kPieces; ++i) {  // the upper half is rotated
    rotate_eight(v[i], load_angles(angle + (i / 2 - kScaleBlocks / 2) * 16 + i % 2 * 4), 1);
    round_eight(v[i]);
  }
  hadamard(v);
  const size_t to = p.slot ? static_cast<size_t>(__ldg(p.slot + row)) * vectors + vector % vectors : vector;
  store_record(v, exists ? static_cast<uint8_t*>(p.y) + to * kIndexRecordBytes : nullptr);
}

}  // namespace

cudaError_t finish_index_vectors(const FinishVectors& p, cudaStream_t stream) {
  if (p.width != kIndexDim || p.norm == VectorNorm::plain) return cudaErrorInvalidValue;
  const unsigned blocks = (static_cast<unsigned>(p.rows) * p.vectors + kBlockVectors - 1) / kBlockVectors;
  if (p.norm == VectorNorm::none)
    launch_dependent(index_vectors_kernel<false>, {dim3(blocks), kThreads}, stream, p);
  else
    launch_dependent(index_vectors_kernel<true>, {dim3(blocks), kThreads}, stream, p);
  return cudaGetLastError();
}

}  // namespace rotary
}  // namespace plumb::kernels
