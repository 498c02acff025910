// The next token of a sequence from its logits.
#pragma once
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "ops/head.h"

namespace plumb {

struct SamplingParams {
  int max_tokens = 256;   // 0: only the prompt is read, see Request
  int min_tokens = 0;     // before so many tokens are made, no stop token is, and no stop string ends the answer
  float temperature = 1;  // 0 = greedy
  float top_p = 1;
  int top_k = 0;  // 0 = all
  float min_p = 0;
  uint64_t seed = 0;
  std::vector<int> stop_tokens;
  std::vector<std::pair<int, float>> logit_bias;  // token, added to its logit
  float repetition_penalty = 1;  // logits of tokens of prompt and answer: positive ones / this, others * this
  float presence_penalty = 0;    // subtracted once if the answer has the token
  float frequency_penalty = 0;   // subtracted as often as the answer has it
  int top_logprobs = 0;          // most likely tokens to record with each token
  // Record the log-probabilities of the distribution that is drawn from, i.e. after bias, penalties, temperature and
  // truncation, instead of the model's own. Greedy: 0 for the token, as nothing else could have been.
  bool processed_logprobs = false;
};
// UsageError that names the option and its range; token ids are checked if the vocabulary is known (> 0).
void check(const SamplingParams& p, int vocab = 0);

struct TokenLogprob {
  int id;
  float logprob;
  bool operator==(const TokenLogprob&) const = default;
};
// Log-probabilities are the model's own: temperature 1, before bias, penalties and truncation; or else those that
// SamplingParams::processed_logprobs asks for.
struct GeneratedToken {
  int id = 0;
  float logprob = 0;
  std::vector<TokenLogprob> top;  // [top_logprobs] most likely first, ties: lower id; processed: only possible tokens
  int64_t adapter_version = 0;    // of the adapter that made it; 0 = base model
  bool operator==(const GeneratedToken&) const = default;
};

// The logits [vocab] as sampling sees them, in place: bias, then repetition, frequency and presence penalty, then stop
// tokens excluded while the answer is shorter than min_tokens. tokens: prompt, then the answer so far.
void adjust_logits(std::span<float> logits, const SamplingParams& p, std::span<const int> tokens, size_t prompt);

// The `count` most likely tokens of logits [vocab], most likely first, ties: lower id. n: what ops::head_logits gave
// with these logits.
std::vector<TokenLogprob> top_logprobs(std::span<const float> logits, const ops::Normaliser& n, int count);

// Picks a token among the most likely ones (top-k, then min-p, then top-p at the temperature). logits [vocab], n: of
// ops::head_logits; tokens: prompt, then the answer so far. The random number depends on (seed, sequence, number of
// tokens) alone, so on nothing else in the batch. adapter_version is left 0. Error: a logit is NaN.
GeneratedToken sample_token(std::span<const float> logits, const ops::Normaliser& n, const SamplingParams& p,
                            uint64_t sequence, std::span<const int> tokens, size_t prompt);

// A row of logits and what is asked of it.
struct SampledRow {
  const SamplingParams* params;
  uint64_t sequence;
  std::span<const int> tokens;  // prompt, then the answer so far
  size_t prompt;
};
// sample_token of each row of logits. Of logits on a device, only rows that change or truncate them come to the host;
// from the others a token is drawn there, with the same bits.
std::vector<GeneratedToken> sample_tokens(const ops::Logits& logits, const std::vector<SampledRow>& rows);

}  // namespace plumb
