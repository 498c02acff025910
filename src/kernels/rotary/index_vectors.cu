// Index vectors: norm, rotation, Hadamard transform, FP4, record. Four lanes have a vector, each one block of 32
// channels: its scale needs no other lane, and what the instructions of a warp do once for a vector they do for eight
// vectors. Instructions are what limits this kernel, so pairs of channels stay packed as bf16 from the transform on:
// bf16 holds all that happens to them exactly, and its rounding is the one to FP4 as well.
#include <cuda_fp8.h>

#include <climits>

#include "kernels/hopper/vectors.cuh"
#include "kernels/indexer/indexer.h"
#include "kernels/rotary/index_vectors.h"
#include "kernels/rotary/rotate.cuh"

namespace plumb::kernels {
namespace rotary {
namespace {

constexpr int kLanes = 4, kThreads = 256, kBlockVectors = kThreads / kLanes;
constexpr int kPieces = kIndexDim / kLanes / 8;  // of a lane, eight channels each

using Lane = float[kPieces][8];

template <class T, class Combine>
__device__ __forceinline__ T over_lanes(T x, const Combine& combine) {
  x = combine(x, __shfl_xor_sync(~0u, x, 1));
  return combine(x, __shfl_xor_sync(~0u, x, 2));
}

// In the order in which sixteen lanes with a piece each would add (rotary.cu): bits of the channel from the top.
__device__ __forceinline__ void weighted_norm(Lane& v, const float* weight, float eps) {
  float square[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    square[i] = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) square[i] = fmaf(v[i][k], v[i][k], square[i]);
    square[i] += __shfl_xor_sync(~0u, square[i], 2);
    square[i] += __shfl_xor_sync(~0u, square[i], 1);
  }
  const float rho = inverse_rms((square[0] + square[2]) + (square[1] + square[3]), kIndexDim, eps);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    float w[8];
    load_eight(weight + (threadIdx.x % kLanes * kPieces + i) * 8, w);
#pragma unroll
    for (int k = 0; k < 8; ++k) v[i][k] = v[i][k] * rho * w[k];
    unpack(pack(v[i]), v[i]);
  }
}

// Sylvester order, times 128^-1/2; bits of the channel from the bottom.
__device__ __forceinline__ void hadamard(Lane& v) {
  float(&all)[kPieces * 8] = reinterpret_cast<float(&)[kPieces * 8]>(v);
#pragma unroll
  for (int half = 1; half < kPieces * 8; half *= 2)
#pragma unroll
    for (int i = 0; i < kPieces * 8; ++i)
      if (!(i & half)) {
        const float a = all[i], b = all[i + half];
        all[i] = a + b, all[i + half] = a - b;
      }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const float sign = threadIdx.x & step ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < kPieces * 8; ++i) all[i] = fmaf(all[i], sign, __shfl_xor_sync(~0u, all[i], step));
  }
#pragma unroll
  for (int i = 0; i < kPieces * 8; ++i) all[i] *= 0.08838834764831845f;
}

using Pair = __nv_bfloat162;
__device__ __forceinline__ Pair as_pair(uint32_t bits) { return *reinterpret_cast<const Pair*>(&bits); }
__device__ __forceinline__ uint32_t bits_of(Pair pair) { return *reinterpret_cast<const uint32_t*>(&pair); }
// A power of two, twice. NaN stays.
__device__ __forceinline__ Pair pair_of(float power) { return as_pair(__byte_perm(__float_as_uint(power), 0, 0x3232)); }

// Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to even, with x's signs: adding 1.5 * 2^7 grid steps leaves no bits below
// the step, rounded by the addition itself.
__device__ __forceinline__ Pair round_to_e2m1(Pair x) {
  const Pair size = __hmin2(__habs2(x), as_pair(0x40c040c0));                         // 6
  const uint32_t binade = bits_of(__hmax2(size, as_pair(0x3f803f80))) & 0x7f807f80u;  // 1, 2 or 4
  const Pair steps = as_pair(binade + 0x03400340u);
  return as_pair(bits_of(__hsub2_rn(__hadd2_rn(size, steps), steps)) | (bits_of(x) & 0x80008000u));
}

// The smallest power of two at or above top / 6.
__device__ __forceinline__ float fp4_scale(float top) {
  return __uint_as_float((__float_as_uint(__fmul_rn(fmaxf(top, 6 * 0x1p-126f), 1.0f / 6.0f)) + 0x007fffffu) &
                         0x7f800000u);
}

// A vector's record from its transformed channels; null for a vector that does not exist. All lanes take part.
__device__ __forceinline__ void store_record(const Lane& v, uint8_t* record) {
  constexpr int kPairs = kPieces * 4;
  const int lane = threadIdx.x % kLanes;
  uint32_t pair[kPairs], magnitude = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    pair[i] = hopper::pack_bf16(v[i / 4][i % 4 * 2], v[i / 4][i % 4 * 2 + 1]);
    magnitude = __vmaxu2(magnitude, pair[i] & 0x7fff7fffu);  // magnitudes order like their bits, NaN last
  }
  const float top = __uint_as_float(min(max(magnitude << 16, magnitude & 0xffff0000u), 0x7f800000u));
  const bool finite = top < INFINITY;  // or else the block becomes NaN
  const float scale = finite ? fp4_scale(top) : 1.f, inverse = inverse_of_power(scale);
  const bool empty = top * inverse <= 0.25f;  // all of it rounds to zero; its exponent does not count
  const int exponent = static_cast<int>(__float_as_uint(scale) >> 23);
  uint32_t exponents = over_lanes(empty ? 0u : static_cast<uint32_t>(exponent) << 8 * lane,
                                  [](uint32_t a, uint32_t b) { return a | b; });
  int high = 0, low = 255;
#pragma unroll
  for (int b = 0; b < kLanes; ++b) {
    const int other = static_cast<int>(exponents >> 8 * b & 255);
    high = max(high, other), low = min(low, other == 0 ? 255 : other);
  }
  const bool folds = high - low <= kFoldedSpan;
  const int span = max(high - low, 0);
  if (high == 0) high = 127;
  const int down = empty || !folds ? 0 : high - exponent;
  const Pair units = pair_of(inverse), fold = pair_of(finite ? __uint_as_float((127u - down) << 23) : NAN);
  uint32_t code[kPairs / 2];
  float square = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const uint32_t folded = bits_of(__hmul2_rn(round_to_e2m1(__hmul2_rn(as_pair(pair[i]), units)), fold));
    const float2 two = make_float2(low_bf16(folded), high_bf16(folded));
    square = fmaf(two.x, two.x, fmaf(two.y, two.y, square));
    const uint32_t codes = __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3);
    code[i / 2] = i % 2 ? __byte_perm(code[i / 2], codes, 0x5410) : codes;
  }
  square = over_lanes(square, [](float a, float b) { return a + b; });
  if (!record) return;
#pragma unroll
  for (int i = 0; i < kPairs / 2; i += 4)
    reinterpret_cast<uint4*>(record)[lane * 2 + i / 4] = make_uint4(code[i], code[i + 1], code[i + 2], code[i + 3]);
  if (lane != 0) return;
  if (folds) exponents = static_cast<uint32_t>(high) * 0x01010101u;
#pragma unroll
  for (int b = 0; b < kLanes; ++b)
    if ((exponents >> 8 * b & 255) == 0) exponents |= static_cast<uint32_t>(high) << 8 * b;
  // In steps of half the smallest power; a vector that cannot be folded counts as longer than all others.
  const float length = folds ? square * __uint_as_float(static_cast<uint32_t>(129 + 2 * span) << 23) : INFINITY;
  *reinterpret_cast<uint4*>(record + kIndexDim) =
      make_uint4(static_cast<uint32_t>(high) << 23, __float_as_uint(length), exponents, 0);
}

template <bool kNormed>
__global__ void __launch_bounds__(kThreads) index_vectors_kernel(const __grid_constant__ FinishVectors p) {
  const int lane = threadIdx.x % kLanes;
  const unsigned vector = blockIdx.x * kBlockVectors + threadIdx.x / kLanes, vectors = p.vectors;
  const bool exists = vector < static_cast<unsigned>(p.rows) * vectors;
  const unsigned row = exists ? vector / vectors : 0;
  const uint4* x = static_cast<const uint4*>(p.x) + static_cast<size_t>(exists ? vector : 0) * (kIndexDim / 8);
  Lane v;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) unpack(__ldg(x + lane * kPieces + i), v[i]);
  if constexpr (kNormed) weighted_norm(v, p.weight, p.eps);
  constexpr int kFirst = kLanes / 2;  // lanes from here on have the rotated channels
  if (lane >= kFirst) {
    const float2* angle = static_cast<const float2*>(p.table) + row * (kRotaryChannels / 2) + (lane - kFirst) * 16;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      rotate_eight(v[i], angle + 4 * i, 1);
      unpack(pack(v[i]), v[i]);
    }
  }
  hadamard(v);
  const size_t to = p.slot ? static_cast<size_t>(__ldg(p.slot + row)) * vectors + vector % vectors : vector;
  store_record(v, exists ? static_cast<uint8_t*>(p.y) + to * kIndexRecordBytes : nullptr);
}

}  // namespace

cudaError_t finish_index_vectors(const FinishVectors& p, cudaStream_t stream) {
  if (p.width != kIndexDim || p.norm == VectorNorm::plain || p.rows > INT_MAX / p.vectors) return cudaErrorInvalidValue;
  const unsigned blocks = (static_cast<unsigned>(p.rows) * p.vectors + kBlockVectors - 1) / kBlockVectors;
  if (p.norm == VectorNorm::none)
    index_vectors_kernel<false><<<blocks, kThreads, 0, stream>>>(p);
  else
    index_vectors_kernel<true><<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace rotary
}  // namespace plumb::kernels
