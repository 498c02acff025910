#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/philox.h"
#include "ops/head.h"
#include "rollout/generate.h"

namespace plumb {

void check(const SamplingParams& p) {
  auto range = [](const char* name, bool good, const std::string& value, const char* allowed) {
    if (!good) throw UsageError(name, value + " is out of range", std::string("allowed: ") + allowed);
  };
  range("max_tokens", p.max_tokens >= 1, std::to_string(p.max_tokens), "1 or more");
  range("temperature", p.temperature >= 0 && p.temperature <= 100, std::to_string(p.temperature),
        "0 to 100, 0 = greedy");
  range("top_p", p.top_p > 0 && p.top_p <= 1, std::to_string(p.top_p), "above 0, at most 1");
  range("top_k", p.top_k >= 0, std::to_string(p.top_k), "0 (all) or more");
  range("min_p", p.min_p >= 0 && p.min_p <= 1, std::to_string(p.min_p), "0 to 1");
}

GeneratedToken sample_token(const float* logits, int64_t vocab, const SamplingParams& p, uint64_t sequence,
                            int position) {
  auto pick = [&](int id) { return GeneratedToken{id, ops::log_probability(logits, vocab, id)}; };
  const int best = static_cast<int>(std::max_element(logits, logits + vocab) - logits);  // ties: lower id
  if (p.temperature == 0) return pick(best);

  // Candidates by descending logit (ties: lower id), cut by top-k, min-p and top-p in this order; their weights at the
  // temperature.
  std::vector<int> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  auto before = [&](int a, int b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
  size_t keep = p.top_k > 0 ? std::min<size_t>(p.top_k, order.size()) : order.size();
  const bool sorted = keep < order.size() || p.top_p < 1;
  if (sorted) std::partial_sort(order.begin(), order.begin() + keep, order.end(), before);
  std::vector<double> weight(keep);
  double total = 0;
  for (size_t i = 0; i < keep; ++i) {
    weight[i] = std::exp((static_cast<double>(logits[order[i]]) - logits[best]) / p.temperature);
    if (weight[i] < p.min_p) weight[i] = 0;  // relative to the most likely token, whose weight is 1
    total += weight[i];
  }
  if (p.top_p < 1) {
    double sum = 0;
    const double wanted = p.top_p * total;
    for (size_t i = 0; i < keep; ++i)
      if ((sum += weight[i]) >= wanted) {
        keep = i + 1, total = sum;
        break;
      }
  }
  const auto bits = philox(p.seed, sequence, static_cast<uint64_t>(position));
  const double u = (static_cast<double>(bits[0]) * 0x1p32 + bits[1] + 0.5) * 0x1p-64 * total;
  double sum = 0;
  size_t last = 0;
  for (size_t i = 0; i < keep; ++i) {
    if (weight[i] == 0) continue;
    last = i;
    if ((sum += weight[i]) > u) break;
  }
  return pick(order[last]);
}

}  // namespace plumb
