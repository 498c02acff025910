#include "ops/numerics.h"

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>

#include "base/error.h"
#include "base/float_formats.h"
#include "base/parallel.h"

namespace plumb {

Numerics numerics_from_name(const char* name) {
  for (Numerics n : {Numerics::fp32, Numerics::bf16, Numerics::released})
    if (std::strcmp(name, numerics_name(n)) == 0) return n;
  fail("numerics", std::string("no profile is called \"") + name + "\"", "use fp32, bf16 or released");
}

const char* numerics_name(Numerics n) {
  switch (n) {
    case Numerics::fp32:
      return "fp32";
    case Numerics::bf16:
      return "bf16";
    case Numerics::released:
      return "released";
  }
  return "?";
}

const char* point_name(Point p) {
  static constexpr const char* name[] = {
      "hc.pre",    "norm.block", "act.wq_a", "out.wq_a",   "norm.q",   "act.wq_b", "out.wq_b", "norm.qhead", "rope.q",
      "act.wkv",   "out.wkv",    "norm.kv",  "rope.kv",    "sim.kv",   "pool.ckv", "norm.ckv", "rope.ckv",   "sim.ckv",
      "act.iwq_b", "out.iwq_b",  "rope.iq",  "had.iq",     "sim.iq",   "pool.ik",  "norm.ik",  "rope.ik",    "had.ik",
      "sim.ik",    "out.iw",     "attn.p",   "out.attn",   "rope.o",   "out.wo_a", "act.wo_b", "out.wo_b",   "hc.post",
      "act.w13",   "out.w13",    "hid.w2",   "act.w2",     "out.w2",   "act.s13",  "out.s13",  "hid.s2",     "act.s2",
      "out.s2",    "moe.sum",    "hc.head",  "norm.final", "norm.mtp", "act.mtp",  "out.mtp",  "mtp.sum",    "none"};
  static_assert(std::size(name) == static_cast<size_t>(Point::none) + 1);
  return name[static_cast<size_t>(p)];
}

PointKind point_kind(Numerics n, Point p) {
  if (n == Numerics::fp32 || p == Point::none) return PointKind::keep;
  PointKind kind = PointKind::bf16;
  switch (p) {
    case Point::act_wq_a:
    case Point::act_wq_b:
    case Point::act_wkv:
    case Point::act_iwq_b:
    case Point::act_wo_b:
    case Point::act_w13:
    case Point::act_w2:
    case Point::act_s13:
    case Point::act_s2:
    case Point::act_mtp:
      kind = PointKind::fp8x128;
      break;
    case Point::sim_kv:
    case Point::sim_ckv:
      kind = PointKind::fp8x64;
      break;
    case Point::sim_iq:
    case Point::sim_ik:
      kind = PointKind::fp4x32;
      break;
    // The Hadamard transform spreads outliers in front of FP4; without FP4 it has no purpose.
    case Point::had_iq:
    case Point::had_ik:
      return n == Numerics::released ? PointKind::bf16 : PointKind::keep;
    default:
      break;
  }
  return kind == PointKind::bf16 || n == Numerics::released ? kind : PointKind::keep;
}

namespace ops {
namespace {

constexpr uint32_t kSign = 0x80000000u, kInfinity = 0x7f800000u;

// Loops below have constant trip counts, so that the compiler vectorises them without a scalar remainder.
template <int n>
void round_bf16_block(float* x) {
  for (int i = 0; i < n; ++i) {
    const uint32_t u = std::bit_cast<uint32_t>(x[i]);
    const uint32_t nearest = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    x[i] = std::bit_cast<float>((u & ~kSign) > kInfinity ? u | 0x00400000u : nearest);
  }
}

void round_bf16_row(float* x, int64_t width) {
  int64_t i = 0;
  for (; i + 32 <= width; i += 32) round_bf16_block<32>(x + i);
  for (; i < width; ++i) x[i] = round_bf16(x[i]);
}

struct Fp8 {
  static constexpr int lowest = -6, mantissa_bits = 3;
  static constexpr float largest = 448;
  static float scale(float amax) { return fp8_scale(amax); }
};
struct Fp4 {
  static constexpr int lowest = 0, mantissa_bits = 1;
  static constexpr float largest = 6;
  static float scale(float amax) { return fp4_scale(amax); }
};

// Replaces n values by the nearest multiples that the format can hold of one power-of-two scale.
template <class Format, int n>
void quantise_block(float* x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256i tops = _mm256_setzero_si256();  // magnitudes order like their bits
  for (int i = 0; i < n; i += 8)
    tops = _mm256_max_epu32(tops, _mm256_castps_si256(_mm256_andnot_ps(sign, _mm256_loadu_ps(x + i))));
  alignas(32) uint32_t lane[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lane), tops);
  const uint32_t top = *std::max_element(lane, lane + 8);
  if (top >= kInfinity) {  // no scale holds an infinity: the whole block shows it
    std::fill(x, x + n, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  const float power = Format::scale(std::bit_cast<float>(top));
  const __m256 scale = _mm256_set1_ps(power), inverse = _mm256_set1_ps(1 / power);
  const __m256 largest = _mm256_set1_ps(Format::largest), lowest = _mm256_set1_ps(exp2_int(Format::lowest));
  const __m256i exponent = _mm256_set1_epi32(kInfinity), half = _mm256_set1_epi32(0x00400000),
                shift = _mm256_set1_epi32((23 - Format::mantissa_bits) << 23);
  for (int i = 0; i < n; i += 8) {
    const __m256 value = _mm256_loadu_ps(x + i);
    const __m256 v = _mm256_min_ps(_mm256_mul_ps(_mm256_andnot_ps(sign, value), inverse), largest);
    // 1.5 * 2^23 grid steps: adding them leaves no bits below the step, rounded to nearest even by the addition itself.
    const __m256i binade = _mm256_and_si256(_mm256_castps_si256(_mm256_max_ps(v, lowest)), exponent);
    const __m256 steps = _mm256_castsi256_ps(_mm256_or_si256(_mm256_add_epi32(binade, shift), half));
    const __m256 rounded = _mm256_mul_ps(_mm256_sub_ps(_mm256_add_ps(v, steps), steps), scale);
    _mm256_storeu_ps(x + i, _mm256_or_ps(rounded, _mm256_and_ps(sign, value)));
  }
}

template <class Format, int block>
void quantise_row(float* x, int64_t width) {
  int64_t i = 0;
  for (; i + block <= width; i += block) quantise_block<Format, block>(x + i);
  if (i == width) return;
  float last[block] = {};  // zeros do not change the largest magnitude
  std::copy(x + i, x + width, last);
  quantise_block<Format, block>(last);
  std::copy(last, last + (width - i), x + i);
}

}  // namespace

void round_point(Numerics n, Point p, float* x, int64_t rows, int64_t width, int64_t ld) {
  const PointKind kind = point_kind(n, p);
  if (kind == PointKind::keep || rows == 0 || width == 0) return;
  parallel_for(rows, std::max<int64_t>(1, 65536 / width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* row = x + r * ld;
      switch (kind) {
        case PointKind::bf16:
          round_bf16_row(row, width);
          break;
        case PointKind::fp8x128:
          quantise_row<Fp8, 128>(row, width);
          break;
        case PointKind::fp8x64:
          quantise_row<Fp8, 64>(row, width);
          break;
        case PointKind::fp4x32:
          quantise_row<Fp4, 32>(row, width);
          break;
        case PointKind::keep:
          break;
      }
    }
  });
}

void round_point(Numerics n, Point p, const Tensor& x) {
  if (x.numel() == 0) return;
  const int64_t width = x.size(-1);
  round_point(n, p, x.f32(), x.numel() / width, width, width);
}

}  // namespace ops
}  // namespace plumb
