// Logits in chunks of rows, and the softmax over a row of them. Private to the ops that are taken from the LM head.
#pragma once
#include <algorithm>
#include <limits>
#include <string>

#include "base/error.h"
#include "ops/linear.h"
#include "ops/vector_math.h"

namespace plumb::ops {

inline constexpr int64_t kChunkFloats = int64_t{1} << 24;  // logits that exist at a time: 64 MiB

inline int64_t chunk_rows(int64_t vocab) {
  return std::clamp<int64_t>(kChunkFloats / std::max<int64_t>(1, vocab), 16, 256);
}

// The first n of eight logits; the other lanes have an exponential of 0.
inline Lanes load_logits(const float* logits, int64_t n) {
  if (n == kLanes) return load(logits);
  float padded[kLanes];
  std::fill_n(padded, kLanes, -std::numeric_limits<float>::infinity());
  std::copy_n(logits, n, padded);
  return load(padded);
}

// Four running sums in FP64 (lane i: values i, i + 4, ... ), added in order at the end.
class WideSum {
 public:
  void add(Lanes x) {
    sums_ = _mm256_add_pd(sums_, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
    sums_ = _mm256_add_pd(sums_, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  }
  double total() const {
    alignas(32) double part[4];
    _mm256_store_pd(part, sums_);
    return part[0] + part[1] + part[2] + part[3];
  }

 private:
  __m256d sums_ = _mm256_setzero_pd();
};

struct SoftmaxSum {
  float highest;
  double sum;  // of exp(logit - highest)
};

inline SoftmaxSum softmax_sum(const float* logits, int64_t vocab) {
  Lanes top = splat(-std::numeric_limits<float>::infinity());
  for_lanes(vocab, [&](int64_t v, int64_t n) { top = _mm256_max_ps(load_logits(logits + v, n), top); });
  const float highest = max_lanes(top);
  WideSum sum;
  for_lanes(vocab, [&](int64_t v, int64_t n) { sum.add(exp(load_logits(logits + v, n) - splat(highest))); });
  return {highest, sum.total()};
}

inline void check_hidden(const Tensor& hidden, const Linear& head) {
  if (hidden.dim() != 2 || hidden.size(1) != head.in)
    fail("head", "hidden rows of " + std::to_string(head.in) + " expected, " + to_string(hidden.shape()) + " found");
}

// body(first row, logits [n, vocab]) for chunks of rows in order; the logits may be overwritten.
template <class Body>
void for_chunks(const Tensor& hidden, const Linear& head, Body&& body) {
  const int64_t rows = hidden.size(0), chunk = std::min(rows, chunk_rows(head.out));
  if (rows == 0) return;
  const Tensor buffer = Tensor::empty({chunk, head.out});
  for (int64_t first = 0; first < rows; first += chunk) {
    const Tensor logits = buffer.rows(0, std::min(chunk, rows - first));
    linear_into(hidden.f32() + first * head.in, head.in, logits.size(0), head, logits.f32(), head.out);
    body(first, logits);
  }
}

}  // namespace plumb::ops
