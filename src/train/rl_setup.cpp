#include "train/rl_setup.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace plumb {
namespace fs = std::filesystem;

RlLossOptions loss_options(const RlKeys& k) {
  RlLossOptions o;
  o.loss = k.loss == "cispo" ? PolicyLoss::cispo : PolicyLoss::ppo;
  o.level = k.importance_sampling_level == "sequence"            ? ImportanceLevel::sequence
            : k.importance_sampling_level == "average"           ? ImportanceLevel::average
            : k.importance_sampling_level == "geometric_average" ? ImportanceLevel::geometric_average
                                                                 : ImportanceLevel::token;
  o.epsilon = k.epsilon, o.epsilon_high = k.epsilon_high;
  if (k.loss == "gspo") {
    o.level = ImportanceLevel::sequence;
    if (k.epsilon < 0) o.epsilon = 3e-4;
    if (k.epsilon_high < 0) o.epsilon_high = 4e-4;
  }
  o.max_ratio = k.max_negative_advantage_importance_sampling_weight;
  o.mask_ratio = k.mask_prob_ratio;
  o.kl_coefficient = k.kl_penalty_coef;
  o.kl_source = k.kl_penalty_source == "sample" ? KlSource::sample : KlSource::current_learner;
  o.kimi_tau = k.kimi_k2_tau;
  o.truncated_importance = k.truncated_importance_sampling;
  return o;
}

SamplingParams sampling_params(const RunConfig& config, const ModelConfig& model, double temperature) {
  SamplingParams p;
  p.max_tokens = static_cast<int>(config.sampling.max_tokens);
  p.temperature = static_cast<float>(temperature);
  p.top_p = static_cast<float>(config.sampling.top_p);
  p.top_k = static_cast<int>(config.sampling.top_k);
  p.min_p = static_cast<float>(config.sampling.min_p);
  p.seed = static_cast<uint64_t>(config.train.seed);
  p.stop_tokens = {model.eos_token_id};
  return p;
}

RlInputs read_rl_inputs(const RunConfig& config, const ModelConfig& model) {
  RlInputs in;
  const fs::path file = fs::path(config.model.path) / "tokenizer.json";
  if (fs::exists(file)) in.tokenizer = Tokenizer::load(file);
  const RewardTables tables = parse_rewards(config.text, config.file, config.distill.coefficient > 0);
  in.rewarded = tables.environment || !tables.rewards.empty();
  if (!in.rewarded && config.rl.kl_penalty_coef > 0)
    fail(config.file, "rl.kl_penalty_coef shapes advantages, and there is no reward",
         "leave it out, or add a [[reward]]");
  if (tables.environment) in.environment = std::make_unique<Environment>(*tables.environment);
  if (in.environment && !in.tokenizer)
    fail(config.file, "an environment needs text, and the model has no tokenizer.json",
         "put it into the model's folder");
  if (!in.environment && config.sampling.max_turns > 1)
    fail(config.file, fmt::format("sampling.max_turns = {} without an [environment]", config.sampling.max_turns),
         "only an environment's replies make further turns");
  in.scorer = std::make_unique<Scorer>(tables.rewards);
  const DatasetOptions options = dataset_options(config.data, model);
  const auto read = [&](const std::string& path) {
    std::vector<Prompt> prompts = read_prompts(path, in.text(), options, static_cast<int>(config.sampling.max_tokens));
    for (const Prompt& p : prompts) {
      const std::string where = fmt::format("{}:{}", path, p.number);
      if (in.environment && p.messages.empty()) fail(where, "is no conversation", "an [environment] needs messages");
      in.scorer->check_line(nlohmann::json::parse(p.line), where);
    }
    return prompts;
  };
  in.train = read(config.data.train);
  if (!config.data.eval.empty()) in.eval = read(config.data.eval);
  return in;
}

}  // namespace plumb
