// What a run of reinforcement learning reads at its start, and how its keys become the options of losses and samplers.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "config/run_config.h"
#include "data/prompts.h"
#include "reward/environment.h"
#include "reward/scorer.h"
#include "rollout/engine.h"
#include "train/rl_loss.h"

namespace plumb {

RlLossOptions loss_options(const RlKeys& keys);
SamplingParams sampling_params(const RunConfig& config, const ModelConfig& model, double temperature);

struct RlInputs {
  std::optional<Tokenizer> tokenizer;
  std::vector<Prompt> train, eval;
  std::unique_ptr<Scorer> scorer;
  std::unique_ptr<Environment> environment;
  bool rewarded = true;  // there is a reward or an environment; only with a teacher there may be none
  const Tokenizer* text() const { return tokenizer ? &*tokenizer : nullptr; }
};
// Errors: those of prompts and rewards; what an environment or a reward needs of the model or of a line is missing.
RlInputs read_rl_inputs(const RunConfig& config, const ModelConfig& model);

}  // namespace plumb
