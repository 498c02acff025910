// The inner loops of matmul over a vector type V, included by one translation unit for each vector unit. Everything has
// internal linkage and calls nothing from the standard library: code compiled for a wider unit must not be shared with
// the rest of the program by the linker.
//
// V gives: F, I (float and 32-bit integer vectors of `width` lanes) and the operations used below. Its `e2m1` takes the
// code in the lowest four bits of a lane, its `e8m0` in the lowest byte; the other bits may hold anything.
// `shifted<n>`: n bits to the left, or -n to the right.
#pragma once
#include "ops/matmul_kernels.h"

#define PLUMB_INLINE __attribute__((always_inline)) inline
#define PLUMB_INLINE_LAMBDA __attribute__((always_inline))

namespace plumb::ops {
namespace {

// f.operator()<0>(), ..., <n-1>(): a loop whose counter is a constant (shift counts must be).
template <int n, int i = 0, class Body>
PLUMB_INLINE void unrolled(Body&& body) {
  if constexpr (i < n) {
    body.template operator()<i>();
    unrolled<n, i + 1>(body);
  }
}

template <WeightFormat f>
constexpr int kPerUnit = f == WeightFormat::f32    ? 1
                         : f == WeightFormat::bf16 ? 2
                         : f == WeightFormat::fp8  ? 4
                                                   : 8;
template <WeightFormat f>
constexpr bool kScaled = f == WeightFormat::fp8 || f == WeightFormat::fp4;

// Code i (0 to 3, from the low byte) of each 32-bit unit -> its e4m3 value. Exponent and mantissa moved to their places
// in FP32 give 1.m * 2^(e-7), right for all codes but the subnormal ones (e = 0), which lack the leading 1: there the
// value is 2 f - 2^-6, elsewhere that is the larger of the two. (Multiplying an FP32 subnormal instead would trap into
// microcode.) The two NaN codes become +-480 unless `nan`.
template <class V, int i, bool nan>
PLUMB_INLINE typename V::F e4m3_value(typename V::I unit) {
  const auto magnitude = V::both(V::template shifted<20 - 8 * i>(unit), V::set1i(0x07f00000));
  const auto f = V::as_float(V::plus(magnitude, V::set1i(120 << 23)));
  const auto value = V::smaller(f, V::fma(f, V::set1(2.0f), V::set1(-0x1p-6f)));
  const auto w = V::with_sign(value, V::template shifted<24 - 8 * i>(unit));
  if constexpr (!nan) return w;
  return V::nan_where_equal(w, magnitude, V::set1i(0x07f00000));
}

template <class V>
PLUMB_INLINE typename V::I top_bit_where_nan(typename V::I unit) {
  return V::plus(V::both(unit, V::set1i(0x7f7f7f7f)), V::set1i(0x01010101));
}

// Whether any of the codes in four vectors is NaN. Hardly any weight has one, so looking for them all at once is
// cheaper than minding each.
template <class V>
PLUMB_INLINE bool has_nan_codes(const typename V::I* unit) {
  const auto low = V::either(top_bit_where_nan<V>(unit[0]), top_bit_where_nan<V>(unit[1]));
  const auto high = V::either(top_bit_where_nan<V>(unit[2]), top_bit_where_nan<V>(unit[3]));
  return V::any_bit(V::either(low, high), static_cast<int>(0x80808080u));
}

// Value i of the kPerUnit values packed in each 32-bit unit, before its scale.
template <class V, WeightFormat f, int i, bool nan>
PLUMB_INLINE typename V::F expand(typename V::I unit) {
  if constexpr (f == WeightFormat::f32) return V::as_float(unit);
  if constexpr (f == WeightFormat::bf16)
    return V::as_float(i == 0 ? V::template shifted<16>(unit) : V::both(unit, V::set1i(static_cast<int>(0xffff0000u))));
  if constexpr (f == WeightFormat::fp8) return e4m3_value<V, i, nan>(unit);
  if constexpr (f == WeightFormat::fp4) return V::e2m1(V::template shifted<-4 * i>(unit));
}

// ---- rows of B are outputs: a group of `width` rows is transposed in registers, 16 bytes of each at a time
// ---------------
template <class V>
struct RowGroup {
  const uint8_t* data;  // of the first row
  const uint8_t* scale;
  int64_t stride, scale_stride;  // from row to row; fp8: all rows share one row of scales
  int rows;                      // that exist, at most V::width
  // fp4: scales of 128 k, four codes a row. They are fetched that many at a time because a vector made of scalars waits
  // until these have been written to memory.
  alignas(64) int scales[V::width];
};
constexpr int64_t kScalesK = 128;

template <class V>
PLUMB_INLINE void open_group(const PanelOperand& b, int64_t n, RowGroup<V>& g) {
  g.data = b.data + n * b.row_bytes, g.stride = b.row_bytes, g.scale_stride = b.scale_stride;
  g.rows = static_cast<int>(b.rows - n < V::width ? b.rows - n : V::width);
  g.scale = b.scale + (b.format == WeightFormat::fp8 ? n / 128 : n) * b.scale_stride;
}

// Before each k that is a multiple of kScalesK, and before the first.
template <class V>
PLUMB_INLINE void fetch_scales(const PanelOperand& b, int64_t k, RowGroup<V>& g) {
  const int64_t first = k / kScalesK * 4, left = b.scale_stride - first;
  for (int lane = 0; lane < g.rows; ++lane) {
    const uint8_t* from = g.scale + lane * g.scale_stride + first;
    if (left >= 4)
      __builtin_memcpy(&g.scales[lane], from, 4);
    else
      __builtin_memcpy(&g.scales[lane], from, left);
  }
}

template <class V, WeightFormat f>
PLUMB_INLINE typename V::F group_scale(const RowGroup<V>& g, int64_t k) {
  if constexpr (f == WeightFormat::fp8) return V::set1(e8m0.value[g.scale[k / 128]]);
  if constexpr (f == WeightFormat::fp4) return V::e8m0(V::shifted_right(V::load_int(g.scales), k % kScalesK / 32 * 8));
  return V::zero();  // unscaled
}

// body.operator()<j>(w) for j = 0, 1, ...: w = weights of the group at k + j, for the 16 bytes that start at k; count:
// how many of them exist (all, if whole).
template <class V, WeightFormat f, bool whole, class Body>
PLUMB_INLINE void transposed_step(const RowGroup<V>& g, int64_t k, int count, Body&& body) {
  constexpr int per_unit = kPerUnit<f>;
  const int64_t offset = k * 4 / per_unit;
  typename V::I unit[4];
  if (whole && g.rows == V::width) {
    V::transpose(g.data + offset, g.stride, unit);
  } else {  // never read past the matrix
    alignas(16) uint8_t copy[V::width][16] = {};
    for (int lane = 0; lane < g.rows; ++lane)
      __builtin_memcpy(copy[lane], g.data + lane * g.stride + offset, (count * 4 + per_unit - 1) / per_unit);
    V::transpose(copy[0], 16, unit);
  }
  const auto scale = group_scale<V, f>(g, k);
  const auto expand_all = [&]<bool nan>() PLUMB_INLINE_LAMBDA {
    unrolled<4>([&]<int u>() PLUMB_INLINE_LAMBDA {
      unrolled<per_unit>([&]<int i>() PLUMB_INLINE_LAMBDA {
        constexpr int j = u * per_unit + i;
        if (!whole && j >= count) return;
        auto w = expand<V, f, i, nan>(unit[u]);
        if constexpr (kScaled<f>) w = V::mul(w, scale);
        body.template operator()<j>(w);
      });
    });
  };
  if constexpr (f == WeightFormat::fp8)
    if (__builtin_expect(has_nan_codes<V>(unit), 0)) return expand_all.template operator()<true>();
  expand_all.template operator()<false>();
}

template <class V, WeightFormat f>
void widen_rows(const PanelOperand& b, int64_t n0, int64_t k0, int64_t k1, float* panel) {
  constexpr int step = 4 * kPerUnit<f>, lanes = 2 * V::width;
  for (int half = 0; half < 2; ++half) {
    const int64_t n = n0 + half * V::width;
    if (n >= b.rows) return;
    RowGroup<V> g;
    open_group<V>(b, n, g);
    float* out = panel + half * V::width;
    const auto put = [&]<bool whole>(int64_t k, int count) PLUMB_INLINE_LAMBDA {
      if (f == WeightFormat::fp4 && (k == k0 || k % kScalesK == 0)) fetch_scales<V>(b, k, g);
      transposed_step<V, f, whole>(g, k, count,
                                   [&]<int j>(typename V::F w) PLUMB_INLINE_LAMBDA { V::store(out + j * lanes, w); });
      out += step * lanes;
    };
    int64_t k = k0;
    for (; k + step <= k1; k += step) put.template operator()<true>(k, step);
    if (k < k1) put.template operator()<false>(k, static_cast<int>(k1 - k));
  }
}

// Asks for the cache lines that this group's rows reach `kAhead` bytes after `offset`, or, at the end of the rows,
// those at the beginning of the rows `skip` below: the walk is along short pieces of many rows, which no hardware
// foresees.
template <class V>
PLUMB_INLINE void prefetch_group(const RowGroup<V>& g, int64_t offset, int64_t skip) {
  constexpr int64_t kAhead = 128;
  int64_t at = offset + kAhead;
  if (at >= g.stride) at += skip * g.stride - g.stride;
  const uint8_t* p = g.data + at;
#pragma GCC unroll 16
  for (int lane = 0; lane < V::width; ++lane, p += g.stride) __builtin_prefetch(p, 0, 2);
}

template <class V, WeightFormat f, int rows>
void few_rows_of(const float* x, int64_t ldx, const PanelOperand& b, int64_t n0, int64_t n1, float* c, int64_t ldc,
                 bool load) {
  constexpr int step = 4 * kPerUnit<f>, width = V::width;
  // k a group takes before the next one: enough to use up cache lines (rows at strides of a power of two evict each
  // other), few enough that the chains of several groups overlap.
  constexpr int turn = step < 16 ? 16 / step : 1;
  alignas(64) float sums[kStreamLanes][rows][width];
  RowGroup<V> group[kStreamLanes];
  for (int64_t n = n0; n < n1; n += kStreamLanes * width) {
    const int64_t outputs = n1 - n < kStreamLanes * width ? n1 - n : kStreamLanes * width;
    const int groups = static_cast<int>((outputs + width - 1) / width);
    for (int g = 0; g < groups; ++g) {
      open_group<V>(b, n + g * width, group[g]);
      for (int r = 0; r < rows; ++r)
        for (int lane = 0; lane < width; ++lane)
          sums[g][r][lane] = load && g * width + lane < outputs ? c[r * ldc + n + g * width + lane] : 0;
    }
    const auto walk = [&]<bool whole>(int64_t k, int steps, int count) PLUMB_INLINE_LAMBDA {
      if (f == WeightFormat::fp4 && k % kScalesK == 0)
        for (int g = 0; g < groups; ++g) fetch_scales<V>(b, k, group[g]);
      for (int g = 0; g < groups; ++g) {
        const int64_t offset = k * 4 / kPerUnit<f>;
        if (offset % 64 == 0) prefetch_group<V>(group[g], offset, kStreamLanes * width);
        typename V::F sum[rows];
        unrolled<rows>([&]<int r>() PLUMB_INLINE_LAMBDA { sum[r] = V::load(sums[g][r]); });
        for (int64_t at = k; at < k + steps * step; at += step)
          transposed_step<V, f, whole>(group[g], at, count, [&]<int j>(typename V::F w) PLUMB_INLINE_LAMBDA {
            unrolled<rows>([&]<int r>()
                               PLUMB_INLINE_LAMBDA { sum[r] = V::fma(V::set1(x[r * ldx + at + j]), w, sum[r]); });
          });
        unrolled<rows>([&]<int r>() PLUMB_INLINE_LAMBDA { V::store(sums[g][r], sum[r]); });
      }
    };
    int64_t k = 0;
    for (; k + turn * step <= b.columns; k += turn * step) walk.template operator()<true>(k, turn, step);
    for (; k + step <= b.columns; k += step) walk.template operator()<true>(k, 1, step);
    if (k < b.columns) walk.template operator()<false>(k, 1, static_cast<int>(b.columns - k));
    for (int g = 0; g < groups; ++g)
      for (int r = 0; r < rows; ++r) {
        const int64_t valid = outputs - g * width < width ? outputs - g * width : width;
        __builtin_memcpy(c + r * ldc + n + g * width, sums[g][r], valid * sizeof(float));
      }
  }
}

// ---- columns of B are outputs: weights of a row lie side by side
// --------------------------------------------------------
template <class V, WeightFormat f>
PLUMB_INLINE typename V::F adjacent(const uint8_t* p) {
  if constexpr (f == WeightFormat::f32) return V::load(reinterpret_cast<const float*>(p));
  if constexpr (f == WeightFormat::bf16) return V::as_float(V::template shifted<16>(V::load_u16(p)));
  if constexpr (f == WeightFormat::fp8) return e4m3_value<V, 0, true>(V::load_u8(p));
  if constexpr (f == WeightFormat::fp4) return V::e2m1(V::load_nibbles(p));
}

template <class V, WeightFormat f>
void widen_columns(const PanelOperand& b, int64_t n0, int64_t k0, int64_t k1, float* panel) {
  constexpr int lanes = 2 * V::width, per_unit = kPerUnit<f>;
  if constexpr (f == WeightFormat::f32) {
    if (n0 + lanes <= b.columns) {  // both halves at once: each cache line of a row is met once
      const float* source = reinterpret_cast<const float*>(b.data + k0 * b.row_bytes) + n0;
      const int64_t stride = b.row_bytes / static_cast<int64_t>(sizeof(float));
      for (int64_t k = k0; k < k1; ++k, source += stride, panel += lanes) {
        V::store(panel, V::load(source));
        V::store(panel + V::width, V::load(source + V::width));
      }
      return;
    }
  }
  for (int half = 0; half < 2; ++half) {
    const int64_t n = n0 + half * V::width;
    if (n >= b.columns) return;
    const int valid = static_cast<int>(b.columns - n < V::width ? b.columns - n : V::width);
    const uint8_t* source = b.data + k0 * b.row_bytes + n * 4 / per_unit;
    float* out = panel + half * V::width;
    for (int64_t k = k0; k < k1; ++k, source += b.row_bytes, out += lanes) {
      alignas(64) uint8_t copy[V::width * 4];
      const uint8_t* p = source;
      if (valid < V::width) {  // never read past the matrix
        __builtin_memset(copy, 0, sizeof copy);
        __builtin_memcpy(copy, source, (valid * 4 + per_unit - 1) / per_unit);
        p = copy;
      }
      auto w = adjacent<V, f>(p);
      if constexpr (f == WeightFormat::fp8)
        w = V::mul(w, V::set1(e8m0.value[b.scale[k / 128 * b.scale_stride + n / 128]]));
      if constexpr (f == WeightFormat::fp4) w = V::mul(w, V::set1(e8m0.value[b.scale[k * b.scale_stride + n / 32]]));
      V::store(out, w);
    }
  }
}

// ---- the tile
// ----------------------------------------------------------------------------------------------------------
// vectors: 2, or 1 where the outputs fit into one (low-rank products).
template <class V, int rows, int vectors>
PLUMB_INLINE void full_tile(const float* a, const float* panel, int64_t stride, int64_t k, float* c, int64_t ldc,
                            bool load) {
  constexpr int width = V::width;
  typename V::F sum[rows][vectors];
#pragma GCC unroll 8  // on all three loops: otherwise g++ keeps the sums in memory
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) sum[r][v] = load ? V::load(c + r * ldc + v * width) : V::zero();
  for (int64_t i = 0; i < k; ++i, a += rows, panel += stride) {
    typename V::F b[vectors];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) b[v] = V::load(panel + v * width);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const auto x = V::set1(a[r]);
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) sum[r][v] = V::fma(x, b[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) V::store(c + r * ldc + v * width, sum[r][v]);
}

template <class V, int rows, int vectors>
void narrow_tile(const float* a, const float* panel, int64_t stride, int64_t k, float* c, int64_t ldc, int valid,
                 bool load) {
  constexpr int lanes = vectors * V::width;
  alignas(64) float whole[rows * lanes] = {};
  for (int r = 0; r < rows && load; ++r) __builtin_memcpy(whole + r * lanes, c + r * ldc, valid * sizeof(float));
  full_tile<V, rows, vectors>(a, panel, stride, k, whole, lanes, load);
  for (int r = 0; r < rows; ++r) __builtin_memcpy(c + r * ldc, whole + r * lanes, valid * sizeof(float));
}

template <class V, int rows>
void tile_of(const float* a, const float* panel, int64_t stride, int64_t k, float* c, int64_t ldc, int valid,
             bool load) {
  if (valid == 2 * V::width) return full_tile<V, rows, 2>(a, panel, stride, k, c, ldc, load);
  if (valid > V::width) return narrow_tile<V, rows, 2>(a, panel, stride, k, c, ldc, valid, load);
  narrow_tile<V, rows, 1>(a, panel, stride, k, c, ldc, valid, load);
}

// ---- choice of the instance
// --------------------------------------------------------------------------------------------
template <class V>
void tile(int rows, const float* a, const float* panel, int64_t stride, int64_t k, float* c, int64_t ldc, int valid,
          bool load) {
  using Tile = void (*)(const float*, const float*, int64_t, int64_t, float*, int64_t, int, bool);
  static_assert(kMaxRows == 8);
  static constexpr Tile table[] = {tile_of<V, 1>, tile_of<V, 2>, tile_of<V, 3>, tile_of<V, 4>,
                                   tile_of<V, 5>, tile_of<V, 6>, tile_of<V, 7>, tile_of<V, 8>};
  table[rows - 1](a, panel, stride, k, c, ldc, valid, load);
}

template <class V, WeightFormat f>
void widen_format(const PanelOperand& b, int64_t n0, int64_t k0, int64_t k1, float* panel) {
  b.outputs_are_rows ? widen_rows<V, f>(b, n0, k0, k1, panel) : widen_columns<V, f>(b, n0, k0, k1, panel);
}

template <class V>
void widen(const PanelOperand& b, int64_t n0, int64_t k0, int64_t k1, float* panel) {
  switch (b.format) {
    case WeightFormat::f32:
      return widen_format<V, WeightFormat::f32>(b, n0, k0, k1, panel);
    case WeightFormat::bf16:
      return widen_format<V, WeightFormat::bf16>(b, n0, k0, k1, panel);
    case WeightFormat::fp8:
      return widen_format<V, WeightFormat::fp8>(b, n0, k0, k1, panel);
    case WeightFormat::fp4:
      return widen_format<V, WeightFormat::fp4>(b, n0, k0, k1, panel);
  }
}

template <class V, WeightFormat f>
void few_rows_format(int rows, const float* x, int64_t ldx, const PanelOperand& b, int64_t n0, int64_t n1, float* c,
                     int64_t ldc, bool load) {
  static_assert(kFewRows == 8);
  switch (rows) {
    case 1:
      return few_rows_of<V, f, 1>(x, ldx, b, n0, n1, c, ldc, load);
    case 2:
      return few_rows_of<V, f, 2>(x, ldx, b, n0, n1, c, ldc, load);
    case 3:
      return few_rows_of<V, f, 3>(x, ldx, b, n0, n1, c, ldc, load);
    case 4:
      return few_rows_of<V, f, 4>(x, ldx, b, n0, n1, c, ldc, load);
    case 5:
      return few_rows_of<V, f, 5>(x, ldx, b, n0, n1, c, ldc, load);
    case 6:
      return few_rows_of<V, f, 6>(x, ldx, b, n0, n1, c, ldc, load);
    case 7:
      return few_rows_of<V, f, 7>(x, ldx, b, n0, n1, c, ldc, load);
    case 8:
      return few_rows_of<V, f, 8>(x, ldx, b, n0, n1, c, ldc, load);
  }
}

template <class V>
void few_rows(int rows, const float* x, int64_t ldx, const PanelOperand& b, int64_t n0, int64_t n1, float* c,
              int64_t ldc, bool load) {
  switch (b.format) {
    case WeightFormat::f32:
      return few_rows_format<V, WeightFormat::f32>(rows, x, ldx, b, n0, n1, c, ldc, load);
    case WeightFormat::bf16:
      return few_rows_format<V, WeightFormat::bf16>(rows, x, ldx, b, n0, n1, c, ldc, load);
    case WeightFormat::fp8:
      return few_rows_format<V, WeightFormat::fp8>(rows, x, ldx, b, n0, n1, c, ldc, load);
    case WeightFormat::fp4:
      return few_rows_format<V, WeightFormat::fp4>(rows, x, ldx, b, n0, n1, c, ldc, load);
  }
}

}  // namespace
}  // namespace plumb::ops
