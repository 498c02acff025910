// Eight floats at a time, in one fixed order. Everything here gives the same bits on any machine: lanes are combined in
// one tree, whatever the width of the machine's units, and fused multiply-adds are explicit.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace plumb::ops {

constexpr int64_t kLanes = 8;
using Lanes = __m256;  // + - * / work lane by lane

inline Lanes load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Lanes v) { _mm256_storeu_ps(p, v); }
inline Lanes splat(float x) { return _mm256_set1_ps(x); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }  // a * b + c, rounded once

// The first n (0..8) floats of p; the other lanes are 0.
inline Lanes load_part(const float* p, int64_t n) {
  if (n == kLanes) return load(p);
  alignas(32) float v[kLanes] = {};
  std::memcpy(v, p, sizeof(float) * n);
  return load(v);
}
inline void store_part(float* p, Lanes x, int64_t n) {
  if (n == kLanes) return store(p, x);
  alignas(32) float v[kLanes];
  store(v, x);
  std::memcpy(p, v, sizeof(float) * n);
}

// f(i, n) for each run of lanes [i, i + n) of [0, size): n is 8, at the end perhaps less. For elementwise loops, with
// load_part and store_part.
template <class F>
inline void for_lanes(int64_t size, F f) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) f(i, kLanes);
  if (i < size) f(i, size - i);
}

// ((l0+l1)+(l2+l3)) + ((l4+l5)+(l6+l7)), of four vectors at once: lane i of the result belongs to argument i.
inline __m128 sum_lanes4(Lanes a, Lanes b, Lanes c, Lanes d) {
  const Lanes quads = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1));
}
inline float sum_lanes(Lanes a) { return _mm_cvtss_f32(sum_lanes4(a, a, a, a)); }
inline float max_lanes(Lanes a) {
  alignas(32) float v[kLanes];
  store(v, a);
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// Sum of a[i] * b[i], i < n: 32 chains of fused multiply-adds, combined in one tree. The order depends on n alone.
inline float dot(const float* a, const float* b, int64_t n) {
  Lanes s0 = splat(0), s1 = s0, s2 = s0, s3 = s0;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    s0 = fma(load(a + i), load(b + i), s0);
    s1 = fma(load(a + i + 8), load(b + i + 8), s1);
    s2 = fma(load(a + i + 16), load(b + i + 16), s2);
    s3 = fma(load(a + i + 24), load(b + i + 24), s3);
  }
  for (; i + 8 <= n; i += 8) s0 = fma(load(a + i), load(b + i), s0);
  if (i < n) s1 = fma(load_part(a + i, n - i), load_part(b + i, n - i), s1);
  return sum_lanes((s0 + s1) + (s2 + s3));
}

// e^x, error below 1.1 ulp over the whole range, subnormal results included; e^-inf = 0, overflow gives inf, NaN stays
// NaN. x = n ln 2 + r with |r| <= ln 2 / 2, then the Taylor series of e^r up to r^7 (truncated at 7e-9, a tenth of an
// ulp), then 2^n in two factors, so that results below 2^-126 are rounded once.
inline Lanes exp(Lanes x) {
  x = _mm256_max_ps(splat(-105), _mm256_min_ps(splat(89), x));  // NaN passes: it is the second operand of both
  const Lanes n = _mm256_round_ps(x * splat(1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Lanes r = fma(n, splat(-0.693145752f), x);  // ln 2 in two parts; the first has few bits: the product is exact
  r = fma(n, splat(-1.42860677e-6f), r);
  Lanes q = splat(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2}) q = fma(q, r, splat(c));
  const Lanes e = splat(1) + fma(r * r, q, r);
  const __m256i power = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(power, 1);
  const auto two_to = [](__m256i k) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(k, _mm256_set1_epi32(127)), 23));
  };
  return e * two_to(half) * two_to(_mm256_sub_epi32(power, half));
}
inline float exp1(float x) { return _mm256_cvtss_f32(exp(splat(x))); }

}  // namespace plumb::ops
