#include "ops/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/gpu/dispatch.h"
#include "ops/key_products.h"
#include "ops/vector_math.h"

namespace plumb::ops {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// One problem with widths padded to whole vectors.
struct Problem {
  Tensor q, keys;
  ListView lists;
  const float* sink;
  int64_t rows, heads, width;
  float scale;  // from the width before padding
};

Problem make_problem(const Tensor& q, const Tensor& keys, const RowLists& lists, const Tensor& sink) {
  PLUMB_CHECK(q.dim() == 3 && keys.dim() == 2 && q.size(2) == keys.size(1), to_string(q.shape()));
  PLUMB_CHECK(sink.shape() == Shape{q.size(1)}, to_string(sink.shape()));
  const ListView view = checked_lists(lists, q.size(0), keys.size(0));
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(q.size(2))));
  const Tensor wide = padded_to_lanes(q);
  return {wide, padded_to_lanes(keys), view, sink.f32(), wide.size(0), wide.size(1), wide.size(2), scale};
}

// s *= scale for n scores; -inf after them up to a whole vector.
void scale_scores(float* s, int n, float scale) {
  for (int i = 0; i < n; i += kLanes) store(s + i, load(s + i) * splat(scale));
  for (int i = n; i % kLanes != 0; ++i) s[i] = kNone;
}

float largest(const float* s, int n) {
  Lanes top = splat(kNone);
  for (int i = 0; i < n; i += kLanes) top = _mm256_max_ps(load(s + i), top);  // NaN in s is passed over, see exp below
  return max_lanes(top);
}

// s -> exp(s - shift), n rounded up to whole vectors; returns their sum. NaN scores give NaN.
float exponentials(float* s, int n, float shift) {
  Lanes sum = splat(0);
  for (int i = 0; i < n; i += kLanes) {
    const Lanes p = exp(load(s + i) - splat(shift));
    store(s + i, p);
    sum += p;
  }
  return sum_lanes(sum);
}

void multiply(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, load(x + i) * splat(factor));
}

// log(denominator * e^top + e^sink) without overflow.
float log_sum(float top, float denominator, float sink) {
  const double m = std::max(top, sink);
  if (std::isinf(m) && m < 0) return kNone;
  return static_cast<float>(m + std::log(denominator * std::exp(top - m) + std::exp(sink - m)));
}

struct RowScratch {
  std::vector<float> p, top, denominator;
  explicit RowScratch(int64_t heads) : p(heads * kKeyBlock), top(heads), denominator(heads) {}
};

// o [heads, width] of one row, and its lse [heads].
void attend_row(const Problem& a, int64_t r, Numerics numerics, RowScratch& scratch, float* o, float* lse) {
  const float* q = a.q.f32() + r * a.heads * a.width;
  const int begin = a.lists.begin[r], end = a.lists.begin[r + 1];
  std::fill(o, o + a.heads * a.width, 0.0f);
  if (begin == end) {
    std::copy(a.sink, a.sink + a.heads, lse);
    return;
  }
  std::fill(scratch.top.begin(), scratch.top.end(), kNone);
  std::fill(scratch.denominator.begin(), scratch.denominator.end(), 0.0f);
  for (int at = begin; at < end; at += kKeyBlock) {
    const int n = std::min(kKeyBlock, end - at);
    const int* row = a.lists.row + at;
    key_scores(q, a.heads, a.width, a.keys.f32(), row, n, scratch.p.data());
    for (int64_t h = 0; h < a.heads; ++h) {
      float* p = scratch.p.data() + h * kKeyBlock;
      scale_scores(p, n, a.scale);
      const float before = scratch.top[h], top = std::max(before, largest(p, n));
      const float shift = top == kNone ? 0 : top;  // all scores -inf: nothing counts, nothing is NaN
      const float shrink = exp1(before - shift);
      scratch.denominator[h] = scratch.denominator[h] * shrink + exponentials(p, n, shift);
      scratch.top[h] = top;
      if (at != begin && shrink != 1) multiply(o + h * a.width, a.width, shrink);
    }
    round_point(numerics, Point::attn_p, scratch.p.data(), a.heads, n, kKeyBlock);
    add_weighted_keys(scratch.p.data(), a.heads, a.width, a.keys.f32(), row, n, o);
  }
  for (int64_t h = 0; h < a.heads; ++h) {
    const float total = scratch.denominator[h] + exp1(a.sink[h] - scratch.top[h]);
    for (float* x = o + h * a.width; x < o + (h + 1) * a.width; x += kLanes) store(x, load(x) / splat(total));
    lse[h] = log_sum(scratch.top[h], scratch.denominator[h], a.sink[h]);
  }
}

// Where the rows of a chunk leave what the sums over keys need: [items of the chunk, heads].
struct ChunkWeights {
  std::vector<float> p, ds;
};

// One row of the backward pass (spec 4.2): D = dO . o; dS = P (dO . k - D); dq = scale sum dS k. P and scale * dS go to
// the chunk's weights at `item`; d_sink_row [heads] = -p_sink D.
void row_backward(const Problem& a, int64_t r, const float* d_o, const float* o, const float* lse,
                  std::vector<float>& scratch, int64_t item, ChunkWeights& weights, float* dq, float* d_sink_row) {
  const float* q = a.q.f32() + r * a.heads * a.width;
  const int64_t stride = a.heads * kKeyBlock;
  float *p = scratch.data(), *dp = p + stride, *d = dp + stride;
  std::fill(dq, dq + a.heads * a.width, 0.0f);
  for (int64_t h = 0; h < a.heads; ++h) {
    d[h] = dot(d_o + h * a.width, o + h * a.width, a.width);
    const float p_sink = a.sink[h] == kNone ? 0 : exp1(a.sink[h] - lse[h]);
    d_sink_row[h] = -p_sink * d[h];
  }
  const int end = a.lists.begin[r + 1];
  for (int at = a.lists.begin[r]; at < end; at += kKeyBlock) {
    const int n = std::min(kKeyBlock, end - at);
    const int* row = a.lists.row + at;
    key_scores(q, a.heads, a.width, a.keys.f32(), row, n, p);
    key_scores(d_o, a.heads, a.width, a.keys.f32(), row, n, dp);
    for (int64_t h = 0; h < a.heads; ++h) {
      float *ph = p + h * kKeyBlock, *dh = dp + h * kKeyBlock;
      scale_scores(ph, n, a.scale);
      exponentials(ph, n, lse[h]);
      for (int i = 0; i < n; i += kLanes) store(dh + i, load(ph + i) * (load(dh + i) - splat(d[h])) * splat(a.scale));
    }
    add_weighted_keys(dp, a.heads, a.width, a.keys.f32(), row, n, dq);
    for (int i = 0; i < n; ++i, ++item) {
      for (int64_t h = 0; h < a.heads; ++h) {
        weights.p[item * a.heads + h] = p[h * kKeyBlock + i];
        weights.ds[item * a.heads + h] = dp[h * kKeyBlock + i];
      }
    }
  }
}

}  // namespace

RowLists merge_keys(const RowLists& window, const RowLists& entries, int key_rows) {
  PLUMB_ON_GPU(window.begin, merge_keys(window, entries, key_rows));
  PLUMB_CHECK(window.size() == entries.size());
  RowLists all(Tensor::empty(window.begin.shape(), DType::i32),
               Tensor::empty({window.row.numel() + entries.row.numel()}, DType::i32));
  const int *window_begin = window.begin.ptr<int>(), *entry_begin = entries.begin.ptr<int>();
  const int *key = window.row.ptr<int>(), *entry = entries.row.ptr<int>();
  int *begin = all.begin.ptr<int>(), *out = all.row.ptr<int>();
  begin[0] = 0;
  for (int64_t r = 0; r < window.size(); ++r) {
    int* to = std::copy(key + window_begin[r], key + window_begin[r + 1], out + begin[r]);
    for (int i = entry_begin[r]; i < entry_begin[r + 1]; ++i) *to++ = entry[i] + key_rows;
    begin[r + 1] = static_cast<int>(to - out);
  }
  return all;
}

AttentionResult sparse_attention(const Tensor& q, const Tensor& keys, const RowLists& lists, const Tensor& sink,
                                 Numerics numerics) {
  const Problem a = make_problem(q, keys, lists, sink);
  AttentionResult result{Tensor::empty(a.q.shape()), Tensor::empty({a.rows, a.heads})};
  parallel_for(a.rows, 1, [&](int64_t begin, int64_t end) {
    RowScratch scratch(a.heads);
    for (int64_t r = begin; r < end; ++r)
      attend_row(a, r, numerics, scratch, result.o.f32() + r * a.heads * a.width, result.lse.f32() + r * a.heads);
  });
  if (a.width != q.size(2)) {
    Tensor narrow = Tensor::zeros(q.shape());
    add_unpadded(result.o, narrow);
    result.o = narrow;
  }
  round_point(numerics, Point::out_attn, result.o);
  return result;
}

Tensor sparse_attention_backward(const Tensor& d_o, const Tensor& q, const Tensor& keys, const RowLists& lists,
                                 const Tensor& sink, const AttentionResult& forward, const Tensor& d_keys,
                                 const Tensor& d_sink) {
  const Problem a = make_problem(q, keys, lists, sink);
  PLUMB_CHECK(d_o.shape() == q.shape() && forward.o.shape() == q.shape() && d_keys.shape() == keys.shape());
  const Tensor g = padded_to_lanes(d_o), o = padded_to_lanes(forward.o);
  const bool narrow = a.width != q.size(2);
  const Tensor dk = narrow ? Tensor::zeros(a.keys.shape()) : d_keys;
  const Tensor dq = Tensor::empty(a.q.shape()), d_sink_rows = Tensor::empty({a.rows, a.heads});
  const int64_t size = a.heads * a.width;
  constexpr int64_t kChunk = 256;  // rows whose weights are held at a time; any number gives the same sums over q
  for (int64_t first = 0; first < a.rows; first += kChunk) {
    const int64_t last = std::min(a.rows, first + kChunk);
    const int base = a.lists.begin[first];
    ChunkWeights weights;
    weights.p.resize((a.lists.begin[last] - base) * a.heads);
    weights.ds.resize(weights.p.size());
    parallel_for(last - first, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> scratch(a.heads * (2 * kKeyBlock + 1));
      for (int64_t r = first + begin; r < first + end; ++r)
        row_backward(a, r, g.f32() + r * size, o.f32() + r * size, forward.lse.f32() + r * a.heads, scratch,
                     a.lists.begin[r] - base, weights, dq.f32() + r * size, d_sink_rows.f32() + r * a.heads);
    });
    const KeyUses uses = transpose_lists(a.lists, static_cast<int>(first), static_cast<int>(last), keys.size(0));
    add_uses(uses, weights.ds.data(), a.q.f32(), a.heads, a.width, dk.f32());
    add_uses(uses, weights.p.data(), g.f32(), a.heads, a.width, dk.f32());
  }
  if (d_sink.defined()) {
    PLUMB_CHECK(d_sink.shape() == sink.shape());
    for (int64_t r = 0; r < a.rows; ++r)
      for (int64_t h = 0; h < a.heads; ++h) d_sink.f32()[h] += d_sink_rows.f32()[r * a.heads + h];
  }
  if (!narrow) return dq;
  add_unpadded(dk, d_keys);
  Tensor exact = Tensor::zeros(q.shape());
  add_unpadded(dq, exact);
  return exact;
}

RotatedAttention rotated_attention(const Tensor& q, const Tensor& keys, const RowLists& lists, const Tensor& sink,
                                   const RotaryTable& table, Numerics numerics) {
  PLUMB_ON_GPU(q, rotated_attention(q, keys, lists, sink, table, numerics));
  RotatedAttention result{sparse_attention(q, keys, lists, sink, numerics), {}};
  result.turned = result.core.o.clone();
  rotate(result.turned.f32(), q.size(1), q.size(2), table, true);
  round_point(numerics, Point::rope_o, result.turned);
  return result;
}

AttentionGrad rotated_attention_backward(const Tensor& d_turned, const Tensor& q, const Tensor& keys,
                                         const RowLists& lists, const Tensor& sink, const RotaryTable& table,
                                         const RotatedAttention& forward, const Tensor& d_sink) {
  PLUMB_ON_GPU(q, rotated_attention_backward(d_turned, q, keys, lists, sink, table, forward, d_sink));
  rotate(d_turned.f32(), q.size(1), q.size(2), table, false);
  AttentionGrad g{{}, Tensor::zeros(keys.shape())};
  g.dq = sparse_attention_backward(d_turned, q, keys, lists, sink, forward.core, g.d_keys, d_sink);
  return g;
}

}  // namespace plumb::ops
