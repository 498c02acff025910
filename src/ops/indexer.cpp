#include "ops/indexer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/gpu/dispatch.h"
#include "ops/key_products.h"
#include "ops/vector_math.h"

namespace plumb::ops {
namespace {

// Index queries and keys with widths padded to whole vectors.
struct Index {
  Tensor q, keys;
  const float* w;
  int64_t rows, heads, width;
};

Index make_index(const Tensor& q, const Tensor& w, const Tensor& keys) {
  PLUMB_CHECK(q.dim() == 3 && keys.dim() == 2 && q.size(2) == keys.size(1), to_string(q.shape()));
  PLUMB_CHECK(w.shape() == (Shape{q.size(0), q.size(1)}), to_string(w.shape()));
  const Tensor wide = padded_to_lanes(q);
  return {wide, padded_to_lanes(keys), w.f32(), wide.size(0), wide.size(1), wide.size(2)};
}

// Index scores of one row for the listed entries, heads in order -> score [n]. products [heads, kKeyBlock]: of the last
// block, before the ReLU.
void index_scores(const Index& a, int64_t r, const int* entry, int n, float* products, float* score) {
  for (int at = 0; at < n; at += kKeyBlock) {
    const int count = std::min(kKeyBlock, n - at);
    key_scores(a.q.f32() + r * a.heads * a.width, a.heads, a.width, a.keys.f32(), entry + at, count, products);
    for_lanes(count, [&](int64_t i, int64_t lanes) {
      Lanes sum = splat(0);
      for (int64_t h = 0; h < a.heads; ++h)
        sum = fma(splat(a.w[r * a.heads + h]), _mm256_max_ps(splat(0), load(products + h * kKeyBlock + i)), sum);
      store_part(score + at + i, sum, lanes);
    });
  }
}

void append_visible(const EntryRanges& visible, int r, std::vector<int>& entry) {
  for (int i = visible.begin[r]; i < visible.begin[r + 1]; ++i)
    for (int e = visible.range[i].first; e < visible.range[i].last; ++e) entry.push_back(e);
}

int visible_count(const EntryRanges& visible, int r) {
  int count = 0;
  for (int i = visible.begin[r]; i < visible.begin[r + 1]; ++i) count += visible.range[i].last - visible.range[i].first;
  return count;
}

// The `keep` best of the n entries, in their own order: higher score first, then the earlier entry. NaN ranks last.
void keep_best(const std::vector<int>& entry, std::vector<float>& score, int keep, std::vector<int>& order, int* out) {
  for (float& s : score)
    if (std::isnan(s)) s = -std::numeric_limits<float>::infinity();
  order.resize(entry.size());
  std::iota(order.begin(), order.end(), 0);
  std::nth_element(order.begin(), order.begin() + (keep - 1), order.end(),
                   [&](int a, int b) { return score[a] != score[b] ? score[a] > score[b] : a < b; });
  std::sort(order.begin(), order.begin() + keep);
  for (int i = 0; i < keep; ++i) out[i] = entry[order[i]];
}

// log(sum exp(x[i])), FP64; -inf for n = 0.
double log_sum_exp(const double* x, int n) {
  const double top = n == 0 ? -INFINITY : *std::max_element(x, x + n);
  if (!std::isfinite(top)) return top;
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += std::exp(x[i] - top);
  return top + std::log(sum);
}

// What the teacher needs: the attention's queries and entries (padded), and the logarithm of its denominator.
struct Teacher {
  Tensor q, entries;
  const float* joint_lse;
  int64_t heads, width;
  double scale;
};

// Target distribution over the n entries of a row (spec 4.3): each head's share under the joint denominator, summed
// over heads, divided by the total. All heads are shifted by the largest log-mass, which cancels in the division, so
// that no row underflows. All zero if there is no mass at all.
void target_distribution(const Teacher& a, int64_t r, const int* entry, int n, std::vector<float>& products,
                         std::vector<double>& logits, std::vector<double>& target) {
  logits.resize(a.heads * n);
  for (int at = 0; at < n; at += kKeyBlock) {
    const int count = std::min(kKeyBlock, n - at);
    key_scores(a.q.f32() + r * a.heads * a.width, a.heads, a.width, a.entries.f32(), entry + at, count,
               products.data());
    for (int64_t h = 0; h < a.heads; ++h)
      for (int i = 0; i < count; ++i) logits[h * n + at + i] = a.scale * products[h * kKeyBlock + i];
  }
  double shift = -INFINITY;
  for (int64_t h = 0; h < a.heads; ++h) {
    double* x = logits.data() + h * n;
    const double mass = log_sum_exp(x, n), denominator = a.joint_lse[r * a.heads + h];
    for (int i = 0; i < n; ++i) x[i] -= denominator;
    shift = std::max(shift, mass - denominator);
  }
  target.assign(n, 0);
  if (!std::isfinite(shift)) return;
  double total = 0;
  for (int64_t h = 0; h < a.heads; ++h)
    for (int i = 0; i < n; ++i) target[i] += std::exp(logits[h * n + i] - shift);
  for (double t : target) total += t;
  for (double& t : target) t /= total;
}

// KL(target || softmax(score)) of a row; score is replaced by the loss's gradient: softmax * sum(target) - target.
double row_loss(const std::vector<double>& target, std::vector<float>& score) {
  const std::vector<double> logits(score.begin(), score.end());
  const double log_total = log_sum_exp(logits.data(), static_cast<int>(logits.size()));
  double loss = 0, mass = 0;
  for (double t : target) mass += t;
  for (size_t i = 0; i < target.size(); ++i) {
    const double log_student = logits[i] - log_total;
    loss += target[i] * (std::log(std::max(target[i], 1e-10)) - log_student);
    score[i] = static_cast<float>(std::exp(log_student) * mass - target[i]);
  }
  return loss;
}

// Gradient of the row's queries and head weights from d_score [n]; weights [n, heads] = d_score w [q.k > 0], for the
// sum over the entries' uses.
void row_gradients(const Index& a, int64_t r, const int* entry, const std::vector<float>& d_score,
                   std::vector<float>& products, float* weights, float* d_q, float* d_w) {
  const int n = static_cast<int>(d_score.size());
  const float* w = a.w + r * a.heads;
  for (int at = 0; at < n; at += kKeyBlock) {
    const int count = std::min(kKeyBlock, n - at);
    key_scores(a.q.f32() + r * a.heads * a.width, a.heads, a.width, a.keys.f32(), entry + at, count, products.data());
    for (int64_t h = 0; h < a.heads; ++h) {
      for (int i = 0; i < count; ++i) {
        float& product = products[h * kKeyBlock + i];
        const float d = product > 0 ? d_score[at + i] : 0;
        d_w[h] += d * product;
        product = d * w[h];
        weights[(at + i) * a.heads + h] = product;
      }
    }
    add_weighted_keys(products.data(), a.heads, a.width, a.keys.f32(), entry + at, count, d_q);
  }
}

}  // namespace

Tensor index_values(const Tensor& vectors) {
  PLUMB_ON_GPU(vectors, index_values(vectors));
  return vectors;
}

Tensor empty_index_keys(int64_t entries, int64_t width, Space space) {
#ifdef PLUMB_HAS_CUDA
  if (space == Space::device) return gpu::empty_index_keys(entries, width);
#endif
  return Tensor::zeros({entries, width}, DType::f32, space);
}

RowLists select_entries(const Tensor& q, const Tensor& w, const Tensor& keys, const Visibility& visibility, int topk) {
  PLUMB_ON_GPU(q, select_entries(q, w, keys, visibility, topk));
  const EntryRanges& visible = *visibility.ranges;
  const Index a = make_index(q, w, keys);
  PLUMB_CHECK(topk >= 0 && static_cast<int64_t>(visible.begin.size()) == a.rows + 1);
  for (const EntryRange& e : visible.range) PLUMB_CHECK(0 <= e.first && e.first <= e.last && e.last <= keys.size(0));
  std::vector<int> list_begin{0};
  for (int r = 0; r < a.rows; ++r) list_begin.push_back(list_begin.back() + std::min(topk, visible_count(visible, r)));
  const RowLists chosen(Tensor::of(list_begin), Tensor::empty({list_begin.back()}, DType::i32));
  parallel_for(a.rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<int> entry, order;
    std::vector<float> score, products(a.heads * kKeyBlock);
    for (int r = static_cast<int>(begin); r < end; ++r) {
      const int keep = list_begin[r + 1] - list_begin[r];
      int* out = chosen.row.ptr<int>() + list_begin[r];
      entry.clear();
      append_visible(visible, r, entry);
      if (keep == static_cast<int>(entry.size())) {
        std::copy(entry.begin(), entry.end(), out);
      } else if (keep > 0) {
        score.resize(entry.size());
        index_scores(a, r, entry.data(), static_cast<int>(entry.size()), products.data(), score.data());
        keep_best(entry, score, keep, order, out);
      }
    }
  });
  return chosen;
}

RowLists visible_entries(const EntryRanges& visible) {
  KeyLists all;
  for (int r = 0; r + 1 < static_cast<int>(visible.begin.size()); ++r) {
    append_visible(visible, r, all.row);
    all.begin.push_back(static_cast<int>(all.row.size()));
  }
  return all;
}

IndexerLossGrad indexer_loss(const IndexerLoss& options, const Tensor& q, const Tensor& w, const Tensor& keys,
                             const RowLists& valid_lists, const Tensor& attn_q, const Tensor& attn_entries,
                             const Tensor& joint_lse) {
  PLUMB_ON_GPU(q, indexer_loss(options, q, w, keys, valid_lists, attn_q, attn_entries, joint_lse));
  const Index a = make_index(q, w, keys);
  PLUMB_CHECK(attn_q.dim() == 3 && attn_q.size(0) == a.rows && attn_q.size(2) == attn_entries.size(1));
  PLUMB_CHECK(attn_entries.size(0) == keys.size(0) && joint_lse.shape() == (Shape{a.rows, attn_q.size(1)}));
  const IndexerLossGrad grad{0, zeros_like(q), zeros_like(w), zeros_like(keys)};
  const ListView valid = checked_lists(valid_lists, a.rows, keys.size(0));
  const Tensor wide_q = padded_to_lanes(attn_q);
  const Teacher teacher{wide_q,          padded_to_lanes(attn_entries),
                        joint_lse.f32(), wide_q.size(1),
                        wide_q.size(2),  1 / std::sqrt(static_cast<double>(attn_q.size(2)))};
  const bool narrow = a.width != q.size(2);
  const Tensor dq = narrow ? Tensor::zeros(a.q.shape()) : grad.d_q,
               dk = narrow ? Tensor::zeros(a.keys.shape()) : grad.d_keys;
  const float factor = static_cast<float>(options.coefficient / options.rows_total);
  std::vector<double> loss(a.rows, 0.0);
  constexpr int64_t kChunk = 256;  // rows whose weights are held at a time
  for (int64_t first = 0; first < a.rows; first += kChunk) {
    const int64_t last = std::min(a.rows, first + kChunk);
    const int base = valid.begin[first];
    std::vector<float> weights((valid.begin[last] - base) * a.heads);
    parallel_for(last - first, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> score, products(std::max(a.heads, teacher.heads) * kKeyBlock);
      std::vector<double> logits, target;
      for (int64_t r = first + begin; r < first + end; ++r) {
        const int n = valid.begin[r + 1] - valid.begin[r];
        const int* entry = valid.row + valid.begin[r];
        if (n == 0) continue;
        score.resize(n);
        index_scores(a, r, entry, n, products.data(), score.data());
        target_distribution(teacher, r, entry, n, products, logits, target);
        loss[r] = row_loss(target, score);
        for (float& d : score) d *= factor;
        row_gradients(a, r, entry, score, products, weights.data() + (valid.begin[r] - base) * a.heads,
                      dq.f32() + r * a.heads * a.width, grad.d_w.f32() + r * a.heads);
      }
    });
    const KeyUses uses = transpose_lists(valid, static_cast<int>(first), static_cast<int>(last), keys.size(0));
    add_uses(uses, weights.data(), a.q.f32(), a.heads, a.width, dk.f32());
  }
  if (narrow) {
    add_unpadded(dq, grad.d_q);
    add_unpadded(dk, grad.d_keys);
  }
  return {std::accumulate(loss.begin(), loss.end(), 0.0), grad.d_q, grad.d_w, grad.d_keys};
}

}  // namespace plumb::ops
