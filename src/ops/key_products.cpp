#include "ops/key_products.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/matmul.h"
#include "ops/vector_math.h"

// g++ 12 takes the undefined operand inside its own AVX-512 intrinsics for an uninitialised variable.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace plumb::ops {
namespace {

// Heads x 4 keys at a time: eight chains in flight hide the latency of the multiply-adds.
template <int Heads>
void score_tile(const float* q, int64_t width, const float* const* key, float* s) {
  Lanes sum[Heads][4];
#pragma GCC unroll 2
  for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) sum[h][k] = splat(0);
  for (int64_t i = 0; i < width; i += kLanes) {
    Lanes a[Heads];
#pragma GCC unroll 2
    for (int h = 0; h < Heads; ++h) a[h] = load(q + h * width + i);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const Lanes b = load(key[k] + i);
#pragma GCC unroll 2
      for (int h = 0; h < Heads; ++h) sum[h][k] = fma(a[h], b, sum[h][k]);
    }
  }
#pragma GCC unroll 2
  for (int h = 0; h < Heads; ++h)
    _mm_storeu_ps(s + h * kKeyBlock, sum_lanes4(sum[h][0], sum[h][1], sum[h][2], sum[h][3]));
}

// score_tile for four heads on machines with AVX-512: two heads share a vector, so every chain is that of score_tile.
__attribute__((target("avx512f"))) void wide_score_tile(const float* q, int64_t width, const float* const* key,
                                                        float* s) {
  __m512 sum[2][4];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h)
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) sum[h][k] = _mm512_setzero_ps();
  for (int64_t i = 0; i < width; i += kLanes) {
    __m512 a[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const float* first = q + 2 * h * width + i;
      a[h] = _mm512_castpd_ps(_mm512_insertf64x4(_mm512_castps_pd(_mm512_castps256_ps512(load(first))),
                                                 _mm256_castps_pd(load(first + width)), 1));
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const __m512 b = _mm512_castpd_ps(_mm512_broadcast_f64x4(_mm256_castps_pd(load(key[k] + i))));
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) sum[h][k] = _mm512_fmadd_ps(a[h], b, sum[h][k]);
    }
  }
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    Lanes first[4], second[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      first[k] = _mm512_castps512_ps256(sum[h][k]);
      second[k] = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sum[h][k]), 1));
    }
    _mm_storeu_ps(s + 2 * h * kKeyBlock, sum_lanes4(first[0], first[1], first[2], first[3]));
    _mm_storeu_ps(s + (2 * h + 1) * kKeyBlock, sum_lanes4(second[0], second[1], second[2], second[3]));
  }
}

// Heads x (8 * Vectors) channels at a time, over all keys of the block.
template <int Heads, int Vectors>
void weighted_tile(const float* p, int64_t width, const float* keys, const int* row, int n, float* o) {
  Lanes sum[Heads][Vectors];
#pragma GCC unroll 4
  for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) sum[h][v] = load(o + h * width + v * kLanes);
  for (int i = 0; i < n; ++i) {
    const float* key = keys + row[i] * width;
    Lanes b[Vectors];
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) b[v] = load(key + v * kLanes);
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
      const Lanes a = splat(p[h * kKeyBlock + i]);
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) sum[h][v] = fma(a, b[v], sum[h][v]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) store(o + h * width + v * kLanes, sum[h][v]);
}

template <int Heads>
void weighted_heads(const float* p, int64_t width, const float* keys, const int* row, int n, float* o) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) weighted_tile<Heads, 2>(p, width, keys + i, row, n, o + i);
  for (; i < width; i += kLanes) weighted_tile<Heads, 1>(p, width, keys + i, row, n, o + i);
}

// One key, 8 * Vectors channels, all its uses.
template <int Vectors>
void use_tile(const KeyUses& uses, int64_t key, const float* weight, const float* x, int64_t heads, int64_t width,
              float* d_key) {
  Lanes sum[Vectors];
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) sum[v] = load(d_key + v * kLanes);
  for (int u = uses.begin[key]; u < uses.begin[key + 1]; ++u) {
    const float *w = weight + uses.item[u] * heads, *from = x + uses.row[u] * heads * width;
    for (int64_t h = 0; h < heads; ++h) {
      const Lanes a = splat(w[h]);
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[v] = fma(a, load(from + h * width + v * kLanes), sum[v]);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) store(d_key + v * kLanes, sum[v]);
}

// use_tile<8> for 128 channels on machines with AVX-512: every channel has the same chain.
__attribute__((target("avx512f"))) void wide_use_tile(const KeyUses& uses, int64_t key, const float* weight,
                                                      const float* x, int64_t heads, int64_t width, float* d_key) {
  __m512 sum[8];
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) sum[v] = _mm512_loadu_ps(d_key + v * 16);
  for (int u = uses.begin[key]; u < uses.begin[key + 1]; ++u) {
    const float *w = weight + uses.item[u] * heads, *from = x + uses.row[u] * heads * width;
    for (int64_t h = 0; h < heads; ++h) {
      const __m512 a = _mm512_set1_ps(w[h]);
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) sum[v] = _mm512_fmadd_ps(a, _mm512_loadu_ps(from + h * width + v * 16), sum[v]);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) _mm512_storeu_ps(d_key + v * 16, sum[v]);
}

}  // namespace

Tensor padded_to_lanes(const Tensor& x) {
  const int64_t width = x.size(-1);
  if (width % kLanes == 0) return x;
  Shape shape = x.shape();
  shape.back() = (width + kLanes - 1) / kLanes * kLanes;
  Tensor wide = Tensor::zeros(shape);
  for (int64_t r = 0; r < x.numel() / width; ++r)
    std::memcpy(wide.f32() + r * shape.back(), x.f32() + r * width, sizeof(float) * width);
  return wide;
}

void add_unpadded(const Tensor& from, const Tensor& to) {
  const int64_t wide = from.size(-1), width = to.size(-1);
  for (int64_t r = 0; r < to.numel() / width; ++r)
    for (int64_t i = 0; i < width; ++i) to.f32()[r * width + i] += from.f32()[r * wide + i];
}

void key_scores(const float* q, int64_t heads, int64_t width, const float* keys, const int* row, int n, float* s) {
  const bool wide = vector_unit() == VectorUnit::avx512;
  for (int k = 0; k < n; k += 4) {
    const float* key[4];
    for (int j = 0; j < 4; ++j) key[j] = keys + row[std::min(k + j, n - 1)] * width;
    int64_t h = 0;
    for (; wide && h + 4 <= heads; h += 4) wide_score_tile(q + h * width, width, key, s + h * kKeyBlock + k);
    for (; h + 2 <= heads; h += 2) score_tile<2>(q + h * width, width, key, s + h * kKeyBlock + k);
    if (h < heads) score_tile<1>(q + h * width, width, key, s + h * kKeyBlock + k);
  }
}

void add_weighted_keys(const float* p, int64_t heads, int64_t width, const float* keys, const int* row, int n,
                       float* o) {
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4) weighted_heads<4>(p + h * kKeyBlock, width, keys, row, n, o + h * width);
  for (; h < heads; ++h) weighted_heads<1>(p + h * kKeyBlock, width, keys, row, n, o + h * width);
}

KeyUses transpose_lists(const ListView& lists, int first, int last, int64_t keys) {
  KeyUses uses;
  const int base = lists.begin[first], count = lists.begin[last] - base;
  uses.begin.assign(keys + 1, 0);
  uses.row.resize(count);
  uses.item.resize(count);
  for (int i = 0; i < count; ++i) ++uses.begin[lists.row[base + i] + 1];
  for (int64_t k = 0; k < keys; ++k) uses.begin[k + 1] += uses.begin[k];
  std::vector<int> next(uses.begin.begin(), uses.begin.end() - 1);
  for (int r = first; r < last; ++r) {
    for (int i = lists.begin[r]; i < lists.begin[r + 1]; ++i) {
      const int at = next[lists.row[i]]++;
      uses.row[at] = r;
      uses.item[at] = i - base;
    }
  }
  return uses;
}

void add_uses(const KeyUses& uses, const float* weight, const float* x, int64_t heads, int64_t width, float* d_keys) {
  const bool wide = vector_unit() == VectorUnit::avx512;
  parallel_for(static_cast<int64_t>(uses.begin.size()) - 1, 4, [&](int64_t begin, int64_t end) {
    for (int64_t key = begin; key < end; ++key) {
      if (uses.begin[key] == uses.begin[key + 1]) continue;
      float* d_key = d_keys + key * width;
      int64_t i = 0;
      for (; wide && i + 128 <= width; i += 128) wide_use_tile(uses, key, weight, x + i, heads, width, d_key + i);
      for (; i + 8 * kLanes <= width; i += 8 * kLanes) use_tile<8>(uses, key, weight, x + i, heads, width, d_key + i);
      for (; i < width; i += kLanes) use_tile<1>(uses, key, weight, x + i, heads, width, d_key + i);
    }
  });
}

ListView checked_lists(const RowLists& lists, int64_t rows, int64_t keys) {
  PLUMB_CHECK(lists.size() == rows, std::to_string(lists.size()) + " lists for " + std::to_string(rows) + " rows");
  const int* row = lists.row.ptr<int>();
  for (int64_t i = 0; i < lists.row.numel(); ++i)
    PLUMB_CHECK(row[i] >= 0 && row[i] < keys, "key " + std::to_string(row[i]));
  return {lists.begin.ptr<int>(), row};
}

}  // namespace plumb::ops
