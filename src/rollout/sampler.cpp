#include "rollout/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <string>

#include "base/error.h"
#include "base/philox.h"
#include "ops/head.h"

namespace plumb {

void check(const SamplingParams& p, int vocab) {
  auto range = [](const char* name, bool good, const std::string& value, const char* allowed) {
    if (!good) throw UsageError(name, value + " is out of range", std::string("allowed: ") + allowed);
  };
  auto known = [&](const char* name, int id) {
    if (id < 0 || (vocab > 0 && id >= vocab))
      throw UsageError(name, "token " + std::to_string(id) + " is not in the vocabulary",
                       vocab > 0 ? "allowed: 0 to " + std::to_string(vocab - 1) : "token ids are 0 or more");
  };
  range("max_tokens", p.max_tokens >= 1, std::to_string(p.max_tokens), "1 or more");
  range("min_tokens", p.min_tokens >= 0 && p.min_tokens <= p.max_tokens, std::to_string(p.min_tokens),
        "0 to max_tokens");
  range("temperature", p.temperature >= 0 && p.temperature <= 100, std::to_string(p.temperature),
        "0 to 100, 0 = greedy");
  range("top_p", p.top_p > 0 && p.top_p <= 1, std::to_string(p.top_p), "above 0, at most 1");
  range("top_k", p.top_k >= 0, std::to_string(p.top_k), "0 (all) or more");
  range("min_p", p.min_p >= 0 && p.min_p <= 1, std::to_string(p.min_p), "0 to 1");
  range("repetition_penalty", p.repetition_penalty > 0 && p.repetition_penalty <= 100,
        std::to_string(p.repetition_penalty), "above 0, at most 100");
  range("presence_penalty", std::fabs(p.presence_penalty) <= 100, std::to_string(p.presence_penalty), "-100 to 100");
  range("frequency_penalty", std::fabs(p.frequency_penalty) <= 100, std::to_string(p.frequency_penalty), "-100 to 100");
  range("top_logprobs", p.top_logprobs >= 0 && p.top_logprobs <= 100, std::to_string(p.top_logprobs), "0 to 100");
  for (const auto& [id, bias] : p.logit_bias) {
    known("logit_bias", id);
    range("logit_bias", std::fabs(bias) <= 100, std::to_string(bias), "-100 to 100");
  }
  for (int id : p.stop_tokens) known("stop_tokens", id);
}

void adjust_logits(std::span<float> logits, const SamplingParams& p, std::span<const int> tokens, size_t prompt) {
  for (const auto& [id, bias] : p.logit_bias) logits[id] += bias;
  if (p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0) {
    std::map<int, int> count;  // token -> occurrences in the answer; 0 = in the prompt only
    for (size_t i = 0; i < tokens.size(); ++i) count[tokens[i]] += i >= prompt;
    for (const auto& [id, n] : count) {
      float& logit = logits[id];
      logit = logit > 0 ? logit / p.repetition_penalty : logit * p.repetition_penalty;
      logit -= p.frequency_penalty * static_cast<float>(n) + (n > 0 ? p.presence_penalty : 0);
    }
  }
  if (tokens.size() - prompt < static_cast<size_t>(p.min_tokens))
    for (int id : p.stop_tokens) logits[id] = -std::numeric_limits<float>::infinity();
}

namespace {

// All token ids: the `keep` with the largest logits first, in order (ties: lower id), then the others.
std::vector<int> best_first(std::span<const float> logits, size_t keep) {
  std::vector<int> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  if (keep > 0)
    std::partial_sort(order.begin(), order.begin() + static_cast<ptrdiff_t>(keep), order.end(),
                      [&](int a, int b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
  return order;
}

int pick(std::span<const float> logits, const SamplingParams& p, uint64_t sequence, size_t position) {
  const int best = static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin());  // ties: lower id
  if (p.temperature == 0) return best;
  size_t keep = p.top_k > 0 ? std::min<size_t>(p.top_k, logits.size()) : logits.size();
  const bool sorted = keep < logits.size() || p.top_p < 1;
  const std::vector<int> order = best_first(logits, sorted ? keep : 0);
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
  const auto bits = philox(p.seed, sequence, position);
  const double u = (static_cast<double>(bits[0]) * 0x1p32 + bits[1] + 0.5) * 0x1p-64 * total;
  double sum = 0;
  size_t last = 0;
  for (size_t i = 0; i < keep; ++i) {
    if (weight[i] == 0) continue;
    last = i;
    if ((sum += weight[i]) > u) break;
  }
  return order[last];
}

}  // namespace

GeneratedToken sample_token(std::span<const float> logits, const SamplingParams& p, uint64_t sequence,
                            std::span<const int> tokens, size_t prompt) {
  const auto logprob = [&](int id) {
    return ops::log_probability(logits.data(), static_cast<int64_t>(logits.size()), id);
  };
  std::vector<float> adjusted(logits.begin(), logits.end());
  adjust_logits(adjusted, p, tokens, prompt);
  GeneratedToken token;
  token.id = pick(adjusted, p, sequence, tokens.size());
  token.logprob = logprob(token.id);
  if (p.top_logprobs > 0) {
    const size_t count = std::min<size_t>(p.top_logprobs, logits.size());
    const std::vector<int> order = best_first(logits, count);
    for (size_t i = 0; i < count; ++i) token.top.push_back({order[i], logprob(order[i])});
  }
  return token;
}

}  // namespace plumb
