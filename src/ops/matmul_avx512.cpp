#include <immintrin.h>

#include "ops/matmul_kernels.h"

// From here on code may use AVX-512; it is called only on machines that have it. Headers of the library come before, so
// that none of their inline functions is compiled for it.
#pragma GCC target("avx512f")
// g++ 12 takes the undefined operand inside its own AVX-512 intrinsics for an uninitialised variable.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include "ops/matmul_simd.h"

namespace plumb::ops {
namespace {

struct Avx512 {
  using F = __m512;
  using I = __m512i;
  static constexpr int width = 16;

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F smaller(F a, F b) { return _mm512_min_ps(a, b); }

  static I set1i(int x) { return _mm512_set1_epi32(x); }
  static F as_float(I v) { return _mm512_castsi512_ps(v); }
  static I as_int(F v) { return _mm512_castps_si512(v); }
  static I both(I a, I b) { return _mm512_and_si512(a, b); }
  static I either(I a, I b) { return _mm512_or_si512(a, b); }
  static I plus(I a, I b) { return _mm512_add_epi32(a, b); }
  template <int n>
  static I shifted(I v) {
    if constexpr (n > 0) return _mm512_slli_epi32(v, n);
    if constexpr (n < 0) return _mm512_srli_epi32(v, -n);
    return v;
  }
  static I shifted_right(I v, int64_t n) { return _mm512_srl_epi32(v, _mm_cvtsi64_si128(n)); }
  static F with_sign(F magnitude, I sign) {  // the top bit of `sign`, the others of `magnitude`
    return as_float(_mm512_ternarylogic_epi32(set1i(0x7fffffff), as_int(magnitude), sign, 0xca));
  }
  static bool any_bit(I v, int mask) { return _mm512_test_epi32_mask(v, set1i(mask)) != 0; }
  static F nan_where_equal(F v, I a, I b) {
    return as_float(_mm512_mask_set1_epi32(as_int(v), _mm512_cmpeq_epi32_mask(a, b), -1));
  }

  static I load_int(const int* p) { return _mm512_loadu_si512(p); }
  static I load_u16(const uint8_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static I load_u8(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I load_nibbles(const uint8_t* p) {
    int eight[2];
    __builtin_memcpy(eight, p, 8);
    const I words = _mm512_mask_set1_epi32(_mm512_set1_epi32(eight[0]), 0xff00, eight[1]);
    return _mm512_srlv_epi32(words, _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28));
  }

  static F e2m1(I low) {  // the permutation looks at four bits of its index
    return _mm512_permutexvar_ps(low,
                                 _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6));
  }

  static F e8m0(I code) {  // 2^(code - 127); 0 is a subnormal number, 255 is NaN
    const I exponent = shifted<23>(both(code, set1i(0xff)));
    const I value = _mm512_mask_set1_epi32(exponent, _mm512_testn_epi32_mask(exponent, exponent), 0x00400000);
    return nan_where_equal(as_float(value), exponent, set1i(0x7f800000));
  }

  // unit[j] lane i = 32-bit word j of the 16 bytes at p + i * stride.
  static void transpose(const uint8_t* p, int64_t stride, I* unit) {
    I r[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const auto quarter = [&](int lane) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + lane * stride));
      };
      r[i] = _mm512_castsi128_si512(quarter(i));
      r[i] = _mm512_inserti32x4(r[i], quarter(i + 4), 1);
      r[i] = _mm512_inserti32x4(r[i], quarter(i + 8), 2);
      r[i] = _mm512_inserti32x4(r[i], quarter(i + 12), 3);
    }
    const I low01 = _mm512_unpacklo_epi32(r[0], r[1]), low23 = _mm512_unpacklo_epi32(r[2], r[3]);
    const I high01 = _mm512_unpackhi_epi32(r[0], r[1]), high23 = _mm512_unpackhi_epi32(r[2], r[3]);
    unit[0] = _mm512_unpacklo_epi64(low01, low23);
    unit[1] = _mm512_unpackhi_epi64(low01, low23);
    unit[2] = _mm512_unpacklo_epi64(high01, high23);
    unit[3] = _mm512_unpackhi_epi64(high01, high23);
  }
};

}  // namespace

// 8 x 2 sums hide the latency of two units; more rows would only shorten the last tile.
const MatmulKernels avx512_kernels = {8, 2 * Avx512::width, widen<Avx512>, tile<Avx512>, few_rows<Avx512>};

}  // namespace plumb::ops
