#include "rollout/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/parallel.h"
#include "base/philox.h"
#include "ops/draw.h"

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

bool has_top_k(const SamplingParams& p, size_t vocab) { return p.top_k > 0 && static_cast<size_t>(p.top_k) < vocab; }

// What is drawn from.
struct Candidates {
  bool truncated = false;
  std::vector<int> id;        // by falling probability if truncated; otherwise empty: the whole vocabulary in order
  std::vector<float> weight;  // relative to the most likely token of all
  double total = 0;
  int token(size_t i) const { return truncated ? id[i] : static_cast<int>(i); }
};

// Keeps the first of c that have the weight `wanted` together; all of them, and returns false, if they have not.
bool keep_first(Candidates& c, double wanted) {
  double sum = 0;
  size_t n = 0;
  while (n < c.weight.size() && sum < wanted) sum += c.weight[n++];
  c.id.resize(n), c.weight.resize(n);
  c.total = ops::total_of(c.weight);
  return sum >= wanted;
}

// Keeps the most likely tokens that have the share top_p of the weight together. Few of them usually do, so they are
// sought in growing numbers.
void keep_top_p(Candidates& c, std::span<const float> logits, float top_p) {
  const double wanted = top_p * c.total;
  if (c.truncated) {
    keep_first(c, wanted);
    return;
  }
  for (size_t count = std::min<size_t>(256, c.weight.size());; count = std::min(4 * count, c.weight.size())) {
    Candidates kept{true, ops::most_likely(logits, count), {}, 0};
    for (const int id : kept.id) kept.weight.push_back(c.weight[id]);
    if (!keep_first(kept, wanted) && count < c.weight.size()) continue;
    c = std::move(kept);
    return;
  }
}

// temperature > 0. logits as adjusted; best: the most likely token.
Candidates candidates(std::span<const float> logits, const SamplingParams& p, int best) {
  Candidates c;
  c.truncated = has_top_k(p, logits.size());
  if (c.truncated) {
    c.id = ops::most_likely(logits, p.top_k);
    for (const int id : c.id) c.weight.push_back(logits[id]);
  } else {
    c.weight.assign(logits.begin(), logits.end());
  }
  ops::weights_of(c.weight, logits[best], p.temperature, p.min_p);
  c.total = ops::total_of(c.weight);
  if (p.top_p < 1) keep_top_p(c, logits, p.top_p);
  return c;
}

// 0 to 1, of the token that comes behind `length` tokens.
double random_of(const SamplingParams& p, uint64_t sequence, size_t length) {
  const auto bits = philox(p.seed, sequence, length);
  return (static_cast<double>(bits[0]) * 0x1p32 + bits[1] + 0.5) * 0x1p-64;
}

void drop_impossible(std::vector<TokenLogprob>& top) {
  std::erase_if(top, [](const TokenLogprob& t) { return t.logprob == -std::numeric_limits<float>::infinity(); });
}

// The logits, in place, of the distribution that is drawn from: divided by the temperature, minus infinity for tokens
// that cannot be drawn.
void restrict_logits(std::span<float> logits, const Candidates& c, float temperature) {
  std::vector<char> possible(logits.size());
  for (size_t i = 0; i < c.weight.size(); ++i) possible[c.token(i)] = c.weight[i] > 0;
  for (size_t v = 0; v < logits.size(); ++v)
    logits[v] = possible[v] ? logits[v] / temperature : -std::numeric_limits<float>::infinity();
}

void check_finite(const ops::Normaliser& n) {
  if (std::isnan(n.logarithm))
    fail("sampling", "a row of logits has a NaN or an infinity",
         "look for numbers that are not finite in the checkpoint and the adapter");
}

bool truncates(const SamplingParams& p, size_t vocab) {
  return p.temperature > 0 && (p.top_p < 1 || has_top_k(p, vocab));
}

// Whether a few of the most likely tokens and the weight of all may be enough for this row.
bool can_stay_there(const SampledRow& row, size_t vocab) {
  const SamplingParams& p = *row.params;
  const int most = std::min<int>(ops::kMostLikely, static_cast<int>(vocab));
  return !p.processed_logprobs && !changes_logits(p, row.tokens.size() - row.prompt) && p.top_logprobs <= most &&
         (p.temperature == 0 || !has_top_k(p, vocab) || p.top_k <= most);
}

// candidates() of a row that truncates, from its most likely tokens, in order, and the weight of all; nothing if top-p
// wants more of them. highest: the first one's logit.
std::optional<Candidates> candidates_among(std::span<const ops::TokenLogit> best, const SamplingParams& p,
                                           float highest, double total, size_t vocab) {
  const bool top_k = has_top_k(p, vocab);
  Candidates c{true, {}, {}, total};
  for (const ops::TokenLogit& t : best.first(top_k ? static_cast<size_t>(p.top_k) : best.size()))
    c.id.push_back(t.token), c.weight.push_back(t.logit);
  ops::weights_of(c.weight, highest, p.temperature, p.min_p);
  if (top_k) c.total = ops::total_of(c.weight);
  const bool enough = p.top_p == 1 || keep_first(c, p.top_p * c.total);
  return enough || top_k || best.size() == vocab ? std::optional(std::move(c)) : std::nullopt;
}

// sample_token of each row in `list`, from what is found where the logits are. Returns those of which that is not
// enough.
std::vector<int> sample_there(const ops::Logits& logits, const std::vector<SampledRow>& rows,
                              const std::vector<int>& list, std::vector<GeneratedToken>& sampled) {
  const auto vocab = static_cast<size_t>(logits.value.size(1));
  std::vector<ops::Draw> draws;
  int count = 0;  // of most likely tokens
  for (const int i : list) {
    const SamplingParams& p = *rows[i].params;
    draws.push_back({i, p.temperature, p.min_p, random_of(p, rows[i].sequence, rows[i].tokens.size())});
    count = std::max(count, p.top_logprobs);
    if (truncates(p, vocab)) count = std::min<int>(ops::kMostLikely, static_cast<int>(vocab));
  }
  const std::vector<ops::Drawn> drawn = ops::draw_tokens(logits, draws);
  const auto best = count > 0 ? ops::most_likely_tokens(logits, count) : std::vector<ops::TokenLogit>{};
  std::vector<int> left;
  for (size_t k = 0; k < list.size(); ++k) {
    const int i = list[k];
    const SamplingParams& p = *rows[i].params;
    const auto best_of_row = std::span(best).subspan(best.empty() ? 0 : static_cast<size_t>(i) * count, count);
    ops::TokenLogit token = drawn[k].token;
    if (truncates(p, vocab)) {
      const auto c = candidates_among(best_of_row, p, logits.normaliser[i].highest, drawn[k].total, vocab);
      if (!c) {
        left.push_back(i);
        continue;
      }
      token = best_of_row[ops::draw(c->weight, c->total, draws[k].u)];
    }
    sampled[i].id = token.token, sampled[i].logprob = ops::log_probability(token.logit, logits.normaliser[i]);
    for (const ops::TokenLogit& t : best_of_row.first(p.top_logprobs))
      sampled[i].top.push_back({t.token, ops::log_probability(t.logit, logits.normaliser[i])});
    drop_impossible(sampled[i].top);
  }
  return left;
}

}  // namespace

std::vector<TokenLogprob> top_logprobs(std::span<const float> logits, const ops::Normaliser& n, int count) {
  std::vector<TokenLogprob> top;
  if (count <= 0) return top;
  for (const int id : ops::most_likely(logits, static_cast<size_t>(count)))
    top.push_back({id, ops::log_probability(logits[id], n)});
  return top;
}

GeneratedToken sample_token(std::span<const float> logits, const ops::Normaliser& n, const SamplingParams& p,
                            uint64_t sequence, std::span<const int> tokens, size_t prompt) {
  check_finite(n);
  std::vector<float> adjusted;  // empty: as they are, which saves half a megabyte of copy
  if (p.processed_logprobs || changes_logits(p, tokens.size() - prompt)) {
    adjusted.assign(logits.begin(), logits.end());
    adjust_logits(adjusted, p, tokens, prompt);
  }
  const std::span<const float> seen = adjusted.empty() ? logits : adjusted;
  const auto best = adjusted.empty() ? std::find(seen.begin(), seen.end(), n.highest)
                                     : std::max_element(seen.begin(), seen.end());  // ties: lower id
  Candidates c{true, {static_cast<int>(best - seen.begin())}, {1}, 1};
  if (p.temperature > 0) c = candidates(seen, p, c.id[0]);
  GeneratedToken token;
  token.id = c.token(ops::draw(c.weight, c.total, random_of(p, sequence, tokens.size())));
  if (p.processed_logprobs) {
    restrict_logits(adjusted, c, p.temperature > 0 ? p.temperature : 1.0f);
    logits = adjusted;
  }
  const ops::Normaliser of_logits = p.processed_logprobs ? ops::normaliser_of(adjusted) : n;
  token.logprob = ops::log_probability(logits[token.id], of_logits);
  token.top = top_logprobs(logits, of_logits, p.top_logprobs);
  drop_impossible(token.top);
  return token;
}

std::vector<GeneratedToken> sample_tokens(const ops::Logits& logits, const std::vector<SampledRow>& rows) {
  const auto vocab = static_cast<size_t>(logits.value.size(1));
  std::vector<GeneratedToken> sampled(rows.size());
  std::vector<int> there, here;
  for (int i = 0; i < static_cast<int>(rows.size()); ++i) {
    check_finite(logits.normaliser[i]);
    (logits.value.on_device() && can_stay_there(rows[i], vocab) ? there : here).push_back(i);
  }
  if (!there.empty()) {
    const std::vector<int> left = sample_there(logits, rows, there, sampled);
    here.insert(here.end(), left.begin(), left.end());
  }
  const Tensor values = logits.value.on_device() ? ops::logits_on_host(logits, here) : logits.value;
  parallel_for(static_cast<int64_t>(here.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const int i = here[k];
      const SampledRow& row = rows[i];
      sampled[i] = sample_token({values.f32() + k * vocab, vocab}, logits.normaliser[i], *row.params, row.sequence,
                                row.tokens, row.prompt);
    }
  });
  return sampled;
}

}  // namespace plumb
