// Decoding of a few sequences side by side over one cache: prefill in chunks, then one token a step. The same forward
// pass as in training; the log-probability that is recorded for a sampled token is the one that training computes for
// it, bit for bit.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "model/forward.h"

namespace plumb {

struct SamplingParams {
  int max_tokens = 256;
  float temperature = 1;  // 0 = greedy
  float top_p = 1;
  int top_k = 0;  // 0 = all
  float min_p = 0;
  uint64_t seed = 0;
  std::vector<int> stop_tokens;
};
void check(const SamplingParams& p);  // Error that names the option and its range

struct GeneratedToken {
  int id;
  float logprob;  // the model's own: temperature 1, before truncation
};

// The next token of one sequence from its logits. The random number depends on (seed, sequence, position) alone, so on
// nothing else in the batch. logits [vocab].
GeneratedToken sample_token(const float* logits, int64_t vocab, const SamplingParams& p, uint64_t sequence,
                            int position);

struct GenerationRequest {
  std::vector<int> prompt;  // at least one token
  SamplingParams sampling;
  uint64_t id = 0;  // part of the random key
};
struct Generation {
  std::vector<GeneratedToken> tokens;  // the stop token included
  bool stopped = false;                // by a stop token; otherwise by max_tokens
};

struct GenerateOptions {
  Numerics numerics = Numerics::released;
  std::shared_ptr<const Adapter> adapter;  // for all sequences, or nullptr
  int prefill_chunk = 256;                 // tokens of one sequence in a step
  int batch = 16;                          // sequences at a time
  // Called after each token; return false to end that sequence. May be empty.
  std::function<bool(size_t request, const GeneratedToken&)> on_token;
};

std::vector<Generation> generate(WeightStore& weights, const std::vector<GenerationRequest>& requests,
                                 const GenerateOptions& options);

}  // namespace plumb
