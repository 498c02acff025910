#include "rollout/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <string>

#include "base/error.h"
#include "base/philox.h"
#include "ops/vector_math.h"

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

namespace {

bool has_penalties(const SamplingParams& p) {
  return p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0;
}
bool excludes_stops(const SamplingParams& p, size_t answered) {
  return answered < static_cast<size_t>(p.min_tokens) && !p.stop_tokens.empty();
}
bool changes_logits(const SamplingParams& p, size_t answered) {
  return !p.logit_bias.empty() || has_penalties(p) || excludes_stops(p, answered);
}

}  // namespace

void adjust_logits(std::span<float> logits, const SamplingParams& p, std::span<const int> tokens, size_t prompt) {
  for (const auto& [id, bias] : p.logit_bias) logits[id] += bias;
  if (has_penalties(p)) {
    std::map<int, int> count;  // token -> occurrences in the answer; 0 = in the prompt only
    for (size_t i = 0; i < tokens.size(); ++i) count[tokens[i]] += i >= prompt;
    for (const auto& [id, n] : count) {
      float& logit = logits[id];
      logit = logit > 0 ? logit / p.repetition_penalty : logit * p.repetition_penalty;
      logit -= p.frequency_penalty * static_cast<float>(n) + (n > 0 ? p.presence_penalty : 0);
    }
  }
  if (excludes_stops(p, tokens.size() - prompt))
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

// What is drawn from.
struct Candidates {
  bool truncated = false;
  std::vector<int> id;        // by falling probability if truncated; otherwise empty: the whole vocabulary in order
  std::vector<float> weight;  // relative to the most likely token of all
  double total = 0;
  int token(size_t i) const { return truncated ? id[i] : static_cast<int>(i); }
};

// Weights are added up in blocks and the blocks in order, here and by draw(), which then looks into one block.
constexpr size_t kBlock = 256;
std::span<const float> block_of(const std::vector<float>& weight, size_t first) {
  return std::span(weight).subspan(first, std::min(kBlock, weight.size() - first));
}
double sum_of(std::span<const float> block) {
  constexpr size_t kSums = 8;
  double sums[kSums] = {};
  for (size_t i = 0; i + kSums <= block.size(); i += kSums)
    for (size_t k = 0; k < kSums; ++k) sums[k] += block[i + k];
  for (size_t i = block.size() / kSums * kSums; i < block.size(); ++i) sums[0] += block[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}
double total_of(const std::vector<float>& weight) {
  double total = 0;
  for (size_t first = 0; first < weight.size(); first += kBlock) total += sum_of(block_of(weight, first));
  return total;
}

// Keeps the most likely tokens that have the share top_p of the weight together. Few of them usually do, so they are
// sought in growing numbers.
void keep_top_p(Candidates& c, std::span<const float> logits, float top_p) {
  const double wanted = top_p * c.total;
  for (size_t count = std::min<size_t>(256, c.weight.size());; count = std::min(4 * count, c.weight.size())) {
    Candidates kept{true, c.truncated ? c.id : most_likely(logits, count), {}, 0};
    double sum = 0;
    for (size_t i = 0; i < kept.id.size() && sum < wanted; ++i)
      sum += kept.weight.emplace_back(c.weight[c.truncated ? i : kept.id[i]]);
    if (sum < wanted && kept.id.size() < c.weight.size()) continue;
    kept.id.resize(kept.weight.size()), kept.total = total_of(kept.weight);
    c = std::move(kept);
    return;
  }
}

// temperature > 0. logits as adjusted; best: the most likely token.
Candidates candidates(std::span<const float> logits, const SamplingParams& p, int best) {
  Candidates c;
  c.truncated = p.top_k > 0 && static_cast<size_t>(p.top_k) < logits.size();
  if (c.truncated) {
    c.id = most_likely(logits, p.top_k);
    for (const int id : c.id) c.weight.push_back(logits[id]);
  } else {
    c.weight.assign(logits.begin(), logits.end());
  }
  const ops::Lanes highest = ops::splat(logits[best]), temperature = ops::splat(p.temperature);
  float* w = c.weight.data();
  ops::for_lanes(static_cast<int64_t>(c.weight.size()), [&](int64_t i, int64_t n) {
    ops::store_part(w + i, ops::exp((ops::load_part(w + i, n) - highest) / temperature), n);
  });
  for (float& weight : c.weight) weight = weight < p.min_p ? 0 : weight;
  c.total = total_of(c.weight);
  if (p.top_p < 1) keep_top_p(c, logits, p.top_p);
  return c;
}

int draw(const Candidates& c, const SamplingParams& p, uint64_t sequence, size_t position) {
  const auto bits = philox(p.seed, sequence, position);
  const double u = (static_cast<double>(bits[0]) * 0x1p32 + bits[1] + 0.5) * 0x1p-64 * c.total;
  double sum = 0, next = 0;  // weight in front of the block and of what comes behind it
  size_t block = 0;
  for (size_t first = 0; first < c.weight.size() && next <= u; first += kBlock) {
    const double all = sum_of(block_of(c.weight, first));
    if (all > 0) block = first, sum = next, next += all;
  }
  size_t last = block;  // of those with any weight: rounding may leave u behind all of them
  for (size_t i = block; i < std::min(block + kBlock, c.weight.size()); ++i) {
    if (c.weight[i] == 0) continue;
    last = i;
    if ((sum += c.weight[i]) > u) break;
  }
  return c.token(last);
}

// The logits, in place, of the distribution that is drawn from: divided by the temperature, minus infinity for tokens
// that cannot be drawn.
void restrict_logits(std::span<float> logits, const Candidates& c, float temperature) {
  std::vector<char> possible(logits.size());
  for (size_t i = 0; i < c.weight.size(); ++i) possible[c.token(i)] = c.weight[i] > 0;
  for (size_t v = 0; v < logits.size(); ++v)
    logits[v] = possible[v] ? logits[v] / temperature : -std::numeric_limits<float>::infinity();
}

}  // namespace

std::vector<TokenLogprob> top_logprobs(std::span<const float> logits, const ops::Normaliser& n, int count) {
  std::vector<TokenLogprob> top;
  if (count <= 0) return top;
  for (const int id : most_likely(logits, static_cast<size_t>(count)))
    top.push_back({id, ops::log_probability(logits[id], n)});
  return top;
}

GeneratedToken sample_token(std::span<const float> logits, const ops::Normaliser& n, const SamplingParams& p,
                            uint64_t sequence, std::span<const int> tokens, size_t prompt) {
  std::vector<float> adjusted;  // empty: as they are, which saves half a megabyte of copy
  if (p.processed_logprobs || changes_logits(p, tokens.size() - prompt)) {
    adjusted.assign(logits.begin(), logits.end());
    adjust_logits(adjusted, p, tokens, prompt);
  }
  const std::span<const float> seen = adjusted.empty() ? logits : adjusted;
  const auto best = adjusted.empty() ? std::find(seen.begin(), seen.end(), n.highest)
                                     : std::max_element(seen.begin(), seen.end());  // ties: lower id
  if (best == seen.end())
    fail("sampling", "a row of logits is NaN",
         "look for numbers that are not finite in the checkpoint and the adapter");
  Candidates c{true, {static_cast<int>(best - seen.begin())}, {1}, 1};
  if (p.temperature > 0) c = candidates(seen, p, c.id[0]);
  GeneratedToken token;
  token.id = p.temperature > 0 ? draw(c, p, sequence, tokens.size()) : c.id[0];
  if (p.processed_logprobs) {
    restrict_logits(adjusted, c, p.temperature > 0 ? p.temperature : 1.0f);
    logits = adjusted;
  }
  const ops::Normaliser of_logits = p.processed_logprobs ? ops::normaliser_of(adjusted) : n;
  token.logprob = ops::log_probability(logits[token.id], of_logits);
  token.top = top_logprobs(logits, of_logits, p.top_logprobs);
  std::erase_if(token.top, [](const TokenLogprob& t) { return t.logprob == -std::numeric_limits<float>::infinity(); });
  return token;
}

}  // namespace plumb
