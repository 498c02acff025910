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
  range("max_tokens", p.max_tokens >= 0, std::to_string(p.max_tokens), "0 or more");
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

// Whether token a comes before token b among the most likely ones.
struct Before {
  const float* logits;
  bool operator()(int a, int b) const { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; }
};

// The `count` most likely tokens, in order: those that could be among them in a heap, so that most of the vocabulary is
// looked at once.
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

// What is drawn from: tokens and their weights, which add up to `total`.
struct Candidates {
  std::vector<int> id;  // by falling probability if truncated; otherwise the whole vocabulary in order
  std::vector<double> weight;
  double total = 0;
  bool truncated = false;
};

// Keeps the most likely tokens that have the share top_p of the weight together. Few of them usually do, so they are
// sought in growing numbers.
void keep_top_p(Candidates& c, std::span<const float> logits, float top_p) {
  const double wanted = top_p * c.total;
  std::vector<double> weight_of(logits.size());
  for (size_t i = 0; i < c.id.size(); ++i) weight_of[c.id[i]] = c.weight[i];
  for (size_t count = std::min<size_t>(256, c.id.size());; count = std::min(4 * count, c.id.size())) {
    const std::vector<int> best = c.truncated ? c.id : most_likely(logits, count);
    double sum = 0;
    size_t kept = 0;
    while (kept < best.size() && sum < wanted) sum += weight_of[best[kept++]];
    if (sum < wanted && best.size() < c.id.size()) continue;
    c.id.assign(best.begin(), best.begin() + static_cast<ptrdiff_t>(kept));
    c.weight.resize(kept), c.total = sum, c.truncated = true;
    for (size_t i = 0; i < kept; ++i) c.weight[i] = weight_of[c.id[i]];
    return;
  }
}

// temperature > 0. logits as adjusted; best: the most likely token.
Candidates candidates(std::span<const float> logits, const SamplingParams& p, int best) {
  Candidates c;
  c.truncated = p.top_k > 0 && static_cast<size_t>(p.top_k) < logits.size();
  if (c.truncated) {
    c.id = most_likely(logits, p.top_k);
  } else {
    c.id.resize(logits.size());
    std::iota(c.id.begin(), c.id.end(), 0);
  }
  for (const int id : c.id) {
    double w = std::exp((static_cast<double>(logits[id]) - logits[best]) / p.temperature);
    if (w < p.min_p) w = 0;  // relative to the most likely token, whose weight is 1
    c.weight.push_back(w), c.total += w;
  }
  if (p.top_p < 1) keep_top_p(c, logits, p.top_p);
  return c;
}

int draw(const Candidates& c, const SamplingParams& p, uint64_t sequence, size_t position) {
  const auto bits = philox(p.seed, sequence, position);
  const double u = (static_cast<double>(bits[0]) * 0x1p32 + bits[1] + 0.5) * 0x1p-64 * c.total;
  double sum = 0;
  size_t last = 0;
  for (size_t i = 0; i < c.id.size(); ++i) {
    if (c.weight[i] == 0) continue;
    last = i;
    if ((sum += c.weight[i]) > u) break;
  }
  return c.id[last];
}

// The logits, in place, of the distribution that is drawn from: divided by the temperature, minus infinity for tokens
// that cannot be drawn.
void restrict_logits(std::span<float> logits, const Candidates& c, float temperature) {
  std::vector<char> possible(logits.size());
  for (size_t i = 0; i < c.id.size(); ++i) possible[c.id[i]] = c.weight[i] > 0;
  for (size_t v = 0; v < logits.size(); ++v)
    logits[v] = possible[v] ? logits[v] / temperature : -std::numeric_limits<float>::infinity();
}

}  // namespace

std::vector<TokenLogprob> top_logprobs(std::span<const float> logits, int count) {
  if (count <= 0) return {};
  const std::vector<int> ids = most_likely(logits, static_cast<size_t>(count));
  const std::vector<float> values = ops::log_probabilities(logits.data(), static_cast<int64_t>(logits.size()), ids);
  std::vector<TokenLogprob> top;
  for (size_t i = 0; i < ids.size(); ++i) top.push_back({ids[i], values[i]});
  return top;
}

GeneratedToken sample_token(std::span<const float> logits, const SamplingParams& p, uint64_t sequence,
                            std::span<const int> tokens, size_t prompt) {
  std::vector<float> adjusted(logits.begin(), logits.end());
  adjust_logits(adjusted, p, tokens, prompt);
  const auto highest = std::max_element(adjusted.begin(), adjusted.end());  // ties: lower id
  Candidates c{{static_cast<int>(highest - adjusted.begin())}, {1.0}, 1.0, true};
  if (p.temperature > 0) c = candidates(adjusted, p, c.id[0]);
  GeneratedToken token;
  token.id = p.temperature > 0 ? draw(c, p, sequence, tokens.size()) : c.id[0];
  if (p.processed_logprobs) {
    restrict_logits(adjusted, c, p.temperature > 0 ? p.temperature : 1.0f);
    logits = adjusted;
  }
  token.logprob = ops::log_probability(logits.data(), static_cast<int64_t>(logits.size()), token.id);
  token.top = top_logprobs(logits, p.top_logprobs);
  std::erase_if(token.top, [](const TokenLogprob& t) { return t.logprob == -std::numeric_limits<float>::infinity(); });
  return token;
}

}  // namespace plumb
