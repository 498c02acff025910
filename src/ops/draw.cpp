#include "ops/draw.h"

#include <algorithm>
#include <numeric>

#include "ops/gpu/dispatch.h"
#include "ops/vector_math.h"

namespace plumb::ops {
namespace {

// Whether token a comes before token b among the most likely ones.
struct Before {
  const float* logits;
  bool operator()(int a, int b) const { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; }
};

constexpr size_t kRun = 256;
std::span<const float> run_of(std::span<const float> weight, size_t first) {
  return weight.subspan(first, std::min(kRun, weight.size() - first));
}
double sum_of(std::span<const float> run) {
  constexpr size_t kSums = 8;
  double sums[kSums] = {};
  for (size_t i = 0; i + kSums <= run.size(); i += kSums)
    for (size_t k = 0; k < kSums; ++k) sums[k] += run[i + k];
  for (size_t i = run.size() / kSums * kSums; i < run.size(); ++i) sums[0] += run[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

std::span<const float> row_of(const Logits& logits, int row) {
  const int64_t vocab = logits.value.size(1);
  return {logits.value.f32() + row * vocab, static_cast<size_t>(vocab)};
}

}  // namespace

// Those that could be among them are in a heap, so that most of the vocabulary is looked at once.
std::vector<int> most_likely(std::span<const float> logits, size_t count) {
  count = std::min(count, logits.size());
  const Before before{logits.data()};
  std::vector<int> best(count);
  std::iota(best.begin(), best.end(), 0);
  std::make_heap(best.begin(), best.end(), before);  // the least likely one in front
  for (size_t v = count; count > 0 && v < logits.size(); ++v) {
    if (!before(static_cast<int>(v), best.front())) continue;
    std::pop_heap(best.begin(), best.end(), before);
    best.back() = static_cast<int>(v);
    std::push_heap(best.begin(), best.end(), before);
  }
  std::sort_heap(best.begin(), best.end(), before);
  return best;
}

void weights_of(std::span<float> logits, float highest, float temperature, float min_p) {
  const Lanes top = splat(highest), t = splat(temperature);
  float* w = logits.data();
  for_lanes(static_cast<int64_t>(logits.size()),
            [&](int64_t i, int64_t n) { store_part(w + i, exp((load_part(w + i, n) - top) / t), n); });
  for (float& weight : logits) weight = weight < min_p ? 0 : weight;
}

double total_of(std::span<const float> weight) {
  double total = 0;
  for (size_t first = 0; first < weight.size(); first += kRun) total += sum_of(run_of(weight, first));
  return total;
}

size_t draw(std::span<const float> weight, double total, double u) {
  u *= total;
  double sum = 0, next = 0;  // weight in front of the run and of what comes behind it
  size_t run = 0;
  for (size_t first = 0; first < weight.size() && next <= u; first += kRun) {
    const double all = sum_of(run_of(weight, first));
    if (all > 0) run = first, sum = next, next += all;
  }
  size_t last = run;  // of those with any weight: rounding may leave u behind all of them
  for (size_t i = run; i < std::min(run + kRun, weight.size()); ++i) {
    if (weight[i] == 0) continue;
    last = i;
    if ((sum += weight[i]) > u) break;
  }
  return last;
}

std::vector<Drawn> draw_tokens(const Logits& logits, const std::vector<Draw>& draws) {
  PLUMB_ON_GPU(logits.value, draw_tokens(logits, draws));
  std::vector<Drawn> tokens;
  for (const Draw& d : draws) {
    const std::span<const float> row = row_of(logits, d.row);
    const float highest = logits.normaliser[d.row].highest;
    size_t token = static_cast<size_t>(std::find(row.begin(), row.end(), highest) - row.begin());
    double total = 0;
    if (d.temperature > 0) {
      std::vector<float> weight(row.begin(), row.end());
      weights_of(weight, highest, d.temperature, d.min_p);
      total = total_of(weight);
      token = draw(weight, total, d.u);
    }
    tokens.push_back({{static_cast<int>(token), row[token]}, total});
  }
  return tokens;
}

std::vector<TokenLogit> most_likely_tokens(const Logits& logits, int count) {
  PLUMB_ON_GPU(logits.value, most_likely_tokens(logits, count));
  std::vector<TokenLogit> tokens;
  for (int row = 0; row < logits.value.size(0); ++row)
    for (const int token : most_likely(row_of(logits, row), static_cast<size_t>(count)))
      tokens.push_back({token, row_of(logits, row)[token]});
  return tokens;
}

}  // namespace plumb::ops
