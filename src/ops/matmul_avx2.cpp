#include <immintrin.h>

#include "ops/matmul_simd.h"

namespace plumb::ops {
namespace {

struct Avx2 {
  using F = __m256;
  using I = __m256i;
  static constexpr int width = 8;

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F smaller(F a, F b) { return _mm256_min_ps(a, b); }

  static I set1i(int x) { return _mm256_set1_epi32(x); }
  static F as_float(I v) { return _mm256_castsi256_ps(v); }
  static I as_int(F v) { return _mm256_castps_si256(v); }
  static I both(I a, I b) { return _mm256_and_si256(a, b); }
  static I either(I a, I b) { return _mm256_or_si256(a, b); }
  static I plus(I a, I b) { return _mm256_add_epi32(a, b); }
  template <int n>
  static I shifted(I v) {
    if constexpr (n > 0) return _mm256_slli_epi32(v, n);
    if constexpr (n < 0) return _mm256_srli_epi32(v, -n);
    return v;
  }
  static I shifted_right(I v, int64_t n) { return _mm256_srl_epi32(v, _mm_cvtsi64_si128(n)); }
  static F with_sign(F magnitude, I sign) {  // magnitude >= 0, gets the top bit of `sign`
    return as_float(either(as_int(magnitude), both(sign, set1i(static_cast<int>(0x80000000u)))));
  }
  static bool any_bit(I v, int mask) { return !_mm256_testz_si256(v, set1i(mask)); }
  static F nan_where_equal(F v, I a, I b) { return _mm256_or_ps(v, as_float(_mm256_cmpeq_epi32(a, b))); }

  static I load_int(const int* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static I load_u16(const uint8_t* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I load_u8(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static I load_nibbles(const uint8_t* p) {
    int eight;
    __builtin_memcpy(&eight, p, 4);
    return _mm256_srlv_epi32(_mm256_set1_epi32(eight), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
  }

  static F e2m1(I low) {  // the permutation looks at three bits of its index
    const F magnitude = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), low);
    return _mm256_or_ps(magnitude, _mm256_and_ps(as_float(shifted<28>(low)), set1(-0.0f)));
  }

  static F e8m0(I code) {  // 2^(code - 127); 0 is a subnormal number, 255 is NaN
    const I exponent = shifted<23>(both(code, set1i(0xff)));
    const I zero = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
    return nan_where_equal(as_float(either(exponent, both(zero, set1i(0x00400000)))), exponent, set1i(0x7f800000));
  }

  // unit[j] lane i = 32-bit word j of the 16 bytes at p + i * stride.
  static void transpose(const uint8_t* p, int64_t stride, I* unit) {
    I r[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      r[i] = _mm256_inserti128_si256(
          _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * stride))),
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + (i + 4) * stride)), 1);
    const I low01 = _mm256_unpacklo_epi32(r[0], r[1]), low23 = _mm256_unpacklo_epi32(r[2], r[3]);
    const I high01 = _mm256_unpackhi_epi32(r[0], r[1]), high23 = _mm256_unpackhi_epi32(r[2], r[3]);
    unit[0] = _mm256_unpacklo_epi64(low01, low23);
    unit[1] = _mm256_unpackhi_epi64(low01, low23);
    unit[2] = _mm256_unpacklo_epi64(high01, high23);
    unit[3] = _mm256_unpackhi_epi64(high01, high23);
  }
};

}  // namespace

// 6 x 2 sums, 2 weights and 1 broadcast fill 15 of 16 registers.
const MatmulKernels avx2_kernels = {6, 2 * Avx2::width, widen<Avx2>, tile<Avx2>, few_rows<Avx2>};

}  // namespace plumb::ops
