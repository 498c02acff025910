// Answers to a list of requests, or log-probabilities of given tokens, all at once: loops over the engine.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "model/forward.h"
#include "rollout/sampler.h"

namespace plumb {

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
  int prefill_chunk = 0;                   // tokens of one sequence in a step; 0: see set_step_sizes
  int batch = 16;                          // sequences at a time
  // Called after each token; return false to end that sequence. May be empty.
  std::function<bool(size_t request, const GeneratedToken&)> on_token;
};

// One answer a request. Errors: those of Engine::submit, before any token is made.
std::vector<Generation> generate(WeightStore& weights, const std::vector<GenerationRequest>& requests,
                                 const GenerateOptions& options);

struct ScoreOptions {
  Numerics numerics = Numerics::released;
  std::shared_ptr<const Adapter> adapter;  // for all documents, or nullptr
  bool routed_experts = false;
  int step_tokens = 2048;  // computed together at most; changes no result
};
struct Scores {
  std::vector<float> logprobs;  // [tokens - 1] of tokens 1, 2, ...
  Tensor routed;                // on request: i32 [tokens, layers, experts of a token]
};

// Calls done(document, its scores) for all documents, in order, as soon as they are there. Errors: those of
// Engine::submit, before anything is computed.
void score(WeightStore& weights, const std::vector<std::vector<int>>& documents, const ScoreOptions& options,
           const std::function<void(size_t document, const Scores&)>& done);

}  // namespace plumb
