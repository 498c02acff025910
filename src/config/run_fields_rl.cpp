// The keys that `plumb rl` has besides those of all runs. Names and defaults of [rl] follow the reference trainer.
#include <algorithm>

#include "config/run_fields.h"

namespace plumb {
namespace {

const std::vector<RunCommand> only = {RunCommand::rl};

std::vector<Field> loop_fields() {
  using K = RlKeys;
  const auto t = &RunConfig::rl;
  return {
      {.key = "rl.groups_per_step",
       .value = at(t, &K::groups_per_step),
       .range = from(1, 1e6),
       .unit = "groups",
       .help = "prompts of an optimizer step",
       .commands = only},
      {.key = "rl.group_size",
       .value = at(t, &K::group_size),
       .range = from(1, 1e6),
       .unit = "samples",
       .help = "answers to each prompt; their rewards are compared with each other",
       .commands = only},
      {.key = "rl.steps_behind",
       .value = at(t, &K::steps_behind),
       .range = from(0, 64),
       .unit = "steps",
       .help = "0: sample, then train; N: while a step trains, answers are sampled for later ones, by an adapter that "
               "is up to N steps old",
       .commands = only},
      {.key = "rl.loss",
       .value = at(t, &K::loss),
       .choices = {"cispo", "ppo", "gspo", "none"},
       .help = "policy loss; gspo is ppo with the ratio of whole answers and a clip range of 3e-4 and 4e-4; none: "
               "rewards are only reported, what is trained is `distill`",
       .commands = only},
      {.key = "rl.epsilon",
       .value = at(t, &K::epsilon),
       .range = from(-1),
       .help =
           "ratios are clipped to [1 - epsilon, 1 + epsilon_high]; -1 = the usual one of the loss (cispo 1, ppo 0.2)",
       .commands = only},
      {.key = "rl.epsilon_high",
       .value = at(t, &K::epsilon_high),
       .range = from(-1),
       .help = "-1 = the usual one of the loss (cispo 4, ppo epsilon)",
       .commands = only},
      {.key = "rl.importance_sampling_level",
       .value = at(t, &K::importance_sampling_level),
       .choices = {"token", "sequence", "average", "geometric_average"},
       .help = "what the ratio of new and old probability is taken over",
       .commands = only},
      {.key = "rl.max_negative_advantage_importance_sampling_weight",
       .value = at(t, &K::max_negative_advantage_importance_sampling_weight),
       .range = from(0),
       .help = "greatest ratio; 0 = any",
       .commands = only},
      {.key = "rl.mask_prob_ratio",
       .value = at(t, &K::mask_prob_ratio),
       .help = "leave tokens outside the clip range out instead of clipping them",
       .commands = only},
      {.key = "rl.kl_penalty_coef",
       .value = at(t, &K::kl_penalty_coef),
       .range = from(0),
       .help = "tokens further from the reference than the mean lose advantage, nearer ones gain; 0 = no reference is "
               "needed",
       .commands = only},
      {.key = "rl.kl_penalty_source",
       .value = at(t, &K::kl_penalty_source),
       .choices = {"current_learner", "sample"},
       .help = "the divergence is that of the adapter in training, or of the one that sampled",
       .commands = only},
      {.key = "rl.kl_reference",
       .value = at(t, &K::kl_reference),
       .choices = {"base", "start", "lag", "adapter"},
       .help = "the model without adapter, the adapter that the run began with, that of `rl.kl_penalty_step_lag` steps "
               "ago, or `rl.kl_ref_adapter_path`",
       .commands = only},
      {.key = "rl.kl_penalty_step_lag",
       .value = at(t, &K::kl_penalty_step_lag),
       .range = from(1, 1000),
       .unit = "steps",
       .help = "for kl_reference = lag",
       .commands = only},
      {.key = "rl.kl_ref_adapter_path",
       .value = at(t, &K::kl_ref_adapter_path),
       .help = "for kl_reference = adapter: its folder",
       .commands = only},
      {.key = "rl.kimi_k2_tau",
       .value = at(t, &K::kimi_k2_tau),
       .range = from(0),
       .help = "advantage is lowered by this times the log-ratio",
       .commands = only},
      {.key = "rl.truncated_importance_sampling",
       .value = at(t, &K::truncated_importance_sampling),
       .range = from(0),
       .help = "greatest factor old / recorded probability; 0 = the factor is not used",
       .commands = only},
      {.key = "rl.scale_rewards",
       .value = at(t, &K::scale_rewards),
       .help = "divide by the standard deviation of a group",
       .commands = only},
      {.key = "rl.normalize_advantages",
       .value = at(t, &K::normalize_advantages),
       .help = "divide by the mean size over the trained tokens of a step",
       .commands = only},
      {.key = "rl.advantage_balance",
       .value = at(t, &K::advantage_balance),
       .range = from(-1, 1),
       .help = "> 0: negative advantages are scaled by 1 - this; < 0: positive ones by 1 + this",
       .commands = only},
      {.key = "rl.routing_replay",
       .value = at(t, &K::routing_replay),
       .help =
           "training sends each token to the experts that sampling chose; changes nothing unless `steps_behind` > 0",
       .commands = only},
      {.key = "rl.precalculate_logprobs",
       .value = at(t, &K::precalculate_logprobs),
       .help = "old log-probabilities are computed anew in front of the step instead of being the recorded ones",
       .commands = only},
      {.key = "rl.min_shared_tokens",
       .value = at(t, &K::min_shared_tokens),
       .range = from(1),
       .unit = "tokens",
       .help = "shorter common beginnings are computed for every answer anew",
       .commands = only},
      {.key = "rl.samples_every",
       .value = at(t, &K::samples_every),
       .range = from(0),
       .unit = "steps",
       .help = "write samples.jsonl after so many steps; 0 = never",
       .commands = only},
  };
}

std::vector<Field> distill_fields() {
  using K = DistillKeys;
  const auto t = &RunConfig::distill;
  return {
      {.key = "distill.coefficient",
       .value = at(t, &K::coefficient),
       .range = from(0),
       .help = "weight of the divergence from the teacher in the loss; 0 = there is no teacher",
       .commands = only},
      {.key = "distill.divergence",
       .value = at(t, &K::divergence),
       .choices = {"reverse_kl", "forward_kl"},
       .help =
           "over the whole vocabulary, of the student from the teacher (reverse) or of the teacher from the student",
       .commands = only},
      {.key = "distill.teacher_model",
       .value = at(t, &K::teacher_model),
       .help = "folder of the teacher's checkpoint, with the vocabulary of `model.path`; empty = that model itself",
       .commands = only},
      {.key = "distill.teacher_adapter",
       .value = at(t, &K::teacher_adapter),
       .help = "folder of the teacher's adapter; empty = none",
       .commands = only},
  };
}

std::vector<Field> sampling_fields() {
  using K = SamplingKeys;
  const auto t = &RunConfig::sampling;
  return {
      {.key = "sampling.max_tokens",
       .value = at(t, &K::max_tokens),
       .range = from(1, 1e7),
       .unit = "tokens",
       .help = "longest answer",
       .commands = only},
      {.key = "sampling.max_turns",
       .value = at(t, &K::max_turns),
       .range = from(1, 1000),
       .unit = "turns",
       .help = "answers of one sample, with replies of the environment between them",
       .commands = only},
      {.key = "sampling.temperature",
       .value = at(t, &K::temperature),
       .range = from(0, 100),
       .help = "0 = always the most likely token",
       .commands = only},
      {.key = "sampling.top_p",
       .value = at(t, &K::top_p),
       .range = {.min = 0, .max = 1, .above_min = true},
       .help = "keep the most likely tokens that have this probability together",
       .commands = only},
      {.key = "sampling.top_k",
       .value = at(t, &K::top_k),
       .range = from(0),
       .help = "keep so many most likely tokens; 0 = all",
       .commands = only},
      {.key = "sampling.min_p",
       .value = at(t, &K::min_p),
       .range = from(0, 1),
       .help = "drop tokens below this share of the most likely one's probability",
       .commands = only},
      {.key = "sampling.max_running",
       .value = at(t, &K::max_running),
       .range = from(0, 4096),
       .unit = "samples",
       .help = "answers written side by side; 0 = 16, on a GPU 256, and no more than a step has",
       .commands = only},
  };
}

std::vector<Field> eval_fields() {
  using K = EvalKeys;
  const auto t = &RunConfig::eval;
  return {
      {.key = "eval.samples",
       .value = at(t, &K::samples),
       .range = from(1, 1e6),
       .unit = "samples",
       .help = "answers to each prompt of `data.eval`",
       .commands = only},
      {.key = "eval.temperature",
       .value = at(t, &K::temperature),
       .range = from(0, 100),
       .help = "0 = always the most likely token",
       .commands = only},
  };
}

}  // namespace

std::vector<Field> rl_fields() {
  std::vector<Field> all;
  for (auto part : {loop_fields, distill_fields, sampling_fields, eval_fields})
    for (Field& field : part()) all.push_back(std::move(field));
  return all;
}

}  // namespace plumb
