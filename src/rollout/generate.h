// Answers to a list of requests, all at once: a loop over the engine.
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
  int prefill_chunk = 256;                 // tokens of one sequence in a step
  int batch = 16;                          // sequences at a time
  // Called after each token; return false to end that sequence. May be empty.
  std::function<bool(size_t request, const GeneratedToken&)> on_token;
};

// One answer a request. Errors: those of Engine::submit, before any token is made.
std::vector<Generation> generate(WeightStore& weights, const std::vector<GenerationRequest>& requests,
                                 const GenerateOptions& options);

}  // namespace plumb
