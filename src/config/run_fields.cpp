#include "config/run_fields.h"

#include <algorithm>

namespace plumb {
namespace {

const std::vector<RunCommand> kSupervised = {RunCommand::train, RunCommand::pretrain};
const std::vector<RunCommand> kAdapters = {RunCommand::train, RunCommand::dpo, RunCommand::rl};  // trained alone
const std::vector<RunCommand> kSplit = {RunCommand::train, RunCommand::dpo, RunCommand::pretrain};

std::vector<Field> model_fields() {
  using K = ModelKeys;
  const auto t = &RunConfig::model;
  return {
      {.key = "model.path",
       .value = at(t, &K::path),
       .required = true,
       .help = "folder of the checkpoint; `plumb init` makes a random one"},
      {.key = "model.numerics",
       .value = at(t, &K::numerics),
       .choices = {"fp32", "bf16", "released"},
       .help = "where activations are rounded: nowhere, to BF16, or as the published inference code does"},
      {.key = "model.kernels",
       .value = at(t, &K::kernels),
       .choices = {"auto", "reference", "cuda"},
       .help = "what computes: the CPU's ops, the GPU's kernels (numerics released), or these where "
               "they can",
       .commands = kAdapters},
  };
}

std::vector<Field> data_fields() {
  using K = DataKeys;
  const auto t = &RunConfig::data;
  return {
      {.key = "data.train",
       .value = at(t, &K::train),
       .required = true,
       .help = "JSONL file, one example (dpo: one pair, rl: one prompt) a line"},
      {.key = "data.eval", .value = at(t, &K::eval), .help = "JSONL file that is evaluated and not trained on"},
      {.key = "data.eval_fraction",
       .value = at(t, &K::eval_fraction),
       .range = from(0, 0.5),
       .help = "part of `data.train` that is held out for evaluation instead of `data.eval`",
       .commands = kSplit},
      {.key = "data.format",
       .value = at(t, &K::format),
       .choices = {"auto", "messages", "prompt", "tokens", "text"},
       .help = "what an example holds: `messages` (with `tools`), `prompt` and `completion`, `tokens` and `mask`, or "
               "`text`; auto looks at its keys",
       .commands = kSupervised},
      {.key = "data.row_tokens",
       .value = at(t, &K::row_tokens),
       .range = from(16, 1048576),
       .unit = "tokens",
       .help = "length of a row, into which examples are packed"},
      {.key = "data.thinking_mode",
       .value = at(t, &K::thinking_mode),
       .choices = {"thinking", "chat"},
       .help = "mode in which messages are written"},
      {.key = "data.drop_thinking",
       .value = at(t, &K::drop_thinking),
       .help = "leave out the reasoning of turns before the last user turn, unless a message carries tools"},
      {.key = "data.effort_profile",
       .value = at(t, &K::effort_profile),
       .choices = {"preview", "official"},
       .help = "effort texts of the checkpoints of April 2026 (preview) or of 0731 and later (official)"},
      {.key = "data.reasoning_effort",
       .value = at(t, &K::reasoning_effort),
       .choices = {"", "low", "high", "max"},
       .help = "effort text at the start in thinking mode; empty = the one of the profile that has no text"},
  };
}

std::vector<Field> train_fields() {
  using K = TrainKeys;
  const auto t = &RunConfig::train;
  return {
      {.key = "train.steps",
       .value = at(t, &K::steps),
       .range = from(0),
       .unit = "steps",
       .help = "optimizer steps of the run; 0 = `train.epochs` decides"},
      {.key = "train.epochs",
       .value = at(t, &K::epochs),
       .range = from(1),
       .unit = "epochs",
       .help = "passes over the data if `train.steps` is 0"},
      {.key = "train.rows_per_step",
       .value = at(t, &K::rows_per_step),
       .range = from(1, 1e6),
       .unit = "rows",
       .help = "rows whose gradients make one optimizer step",
       .commands = kSupervised},
      {.key = "train.learning_rate",
       .value = at(t, &K::learning_rate),
       .range = from(0, 1),
       .help = "peak learning rate"},
      {.key = "train.warmup_steps",
       .value = at(t, &K::warmup_steps),
       .range = from(0),
       .unit = "steps",
       .help = "linear rise of the learning rate from 0"},
      {.key = "train.decay",
       .value = at(t, &K::decay),
       .choices = {"constant", "linear", "cosine"},
       .help = "learning rate from the end of the warm-up to the last step"},
      {.key = "train.final_lr_ratio",
       .value = at(t, &K::final_lr_ratio),
       .range = from(0, 1),
       .help = "last learning rate as a part of the peak, for linear and cosine"},
      {.key = "train.beta1",
       .value = at(t, &K::beta1),
       .range = {.min = 0, .max = 1, .below_max = true},
       .help = "AdamW, first moment"},
      {.key = "train.beta2",
       .value = at(t, &K::beta2),
       .range = {.min = 0, .max = 1, .below_max = true},
       .help = "AdamW, second moment"},
      {.key = "train.eps",
       .value = at(t, &K::eps),
       .range = {.min = 0, .max = 1, .above_min = true},
       .help = "AdamW, added to the root of the second moment"},
      {.key = "train.weight_decay",
       .value = at(t, &K::weight_decay),
       .range = from(0, 10),
       .help = "decoupled weight decay"},
      {.key = "train.max_grad_norm",
       .value = at(t, &K::max_grad_norm),
       .range = from(0),
       .help = "gradients with a greater norm are scaled down to it; 0 = never"},
      {.key = "train.seed",
       .value = at(t, &K::seed),
       .range = from(0),
       .help = "order of the data and initial adapter"},
      {.key = "train.eval_every",
       .value = at(t, &K::eval_every),
       .range = from(0),
       .unit = "steps",
       .help = "evaluate after so many steps; 0 = at the end only"},
      {.key = "train.save_every",
       .value = at(t, &K::save_every),
       .range = from(0),
       .unit = "steps",
       .help = "write a checkpoint after so many steps; 0 = at the end only"},
      {.key = "train.keep_checkpoints",
       .value = at(t, &K::keep_checkpoints),
       .range = from(1),
       .help = "older checkpoints than so many are deleted"},
      {.key = "train.log_every",
       .value = at(t, &K::log_every),
       .range = from(1),
       .unit = "steps",
       .help = "write metrics after so many steps"},
  };
}

std::vector<Field> dpo_fields() {
  using K = DpoKeys;
  const auto t = &RunConfig::dpo;
  const std::vector<RunCommand> only = {RunCommand::dpo};
  return {
      {.key = "dpo.beta",
       .value = at(t, &K::beta),
       .range = {.min = 0, .max = 1000, .above_min = true},
       .help = "a reward is beta times the log-ratio of policy and reference: the greater, the nearer they stay",
       .commands = only},
      {.key = "dpo.label_smoothing",
       .value = at(t, &K::label_smoothing),
       .range = {.min = 0, .max = 0.5, .below_max = true},
       .help = "probability that a pair is the wrong way round",
       .commands = only},
      {.key = "dpo.reference_adapter",
       .value = at(t, &K::reference_adapter),
       .help = "folder of the reference's adapter; empty = the reference is the model without adapter",
       .commands = only},
      {.key = "dpo.pairs_per_step",
       .value = at(t, &K::pairs_per_step),
       .range = from(1, 1e6),
       .unit = "pairs",
       .help = "pairs whose gradients make one optimizer step",
       .commands = only},
      {.key = "dpo.min_shared_tokens",
       .value = at(t, &K::min_shared_tokens),
       .range = from(1),
       .unit = "tokens",
       .help = "shorter common beginnings of both answers are computed twice",
       .commands = only},
  };
}

std::vector<Field> pretrain_fields() {
  using K = PretrainKeys;
  const auto t = &RunConfig::pretrain;
  const std::vector<RunCommand> only = {RunCommand::pretrain};
  return {
      {.key = "pretrain.optimizer",
       .value = at(t, &K::optimizer),
       .choices = {"muon", "adamw"},
       .help = "for matrices; embedding, head, norms and biases always have AdamW",
       .commands = only},
      {.key = "pretrain.muon_momentum",
       .value = at(t, &K::muon_momentum),
       .range = {.min = 0, .max = 1, .below_max = true},
       .help = "momentum of Muon",
       .commands = only},
      {.key = "pretrain.mtp_loss_weight",
       .value = at(t, &K::mtp_loss_weight),
       .range = from(0, 10),
       .help = "weight of the loss of the multi-token-prediction layers",
       .commands = only},
      {.key = "pretrain.balance_loss_weight",
       .value = at(t, &K::balance_loss_weight),
       .range = from(0, 10),
       .help = "weight of the sequence-wise balance loss of the router",
       .commands = only},
      {.key = "pretrain.bias_update_rate",
       .value = at(t, &K::bias_update_rate),
       .range = from(0, 1),
       .help = "change of the router bias of an expert in one step, towards equal load",
       .commands = only},
      {.key = "pretrain.indexer_loss_coeff",
       .value = at(t, &K::indexer_loss_coeff),
       .range = from(0, 1000),
       .help = "weight of the indexer's own loss; 0 = the indexer is not trained",
       .commands = only},
  };
}

std::vector<Field> lora_fields() {
  using K = LoraKeys;
  const auto t = &RunConfig::lora;
  return {
      {.key = "lora.rank",
       .value = at(t, &K::rank),
       .range = from(1, 1024),
       .help = "rank of every adapter",
       .commands = kAdapters},
      {.key = "lora.alpha",
       .value = at(t, &K::alpha),
       .range = {.min = 0, .max = 65536, .above_min = true},
       .help = "an adapter's output is scaled by alpha / rank",
       .commands = kAdapters},
      {.key = "lora.targets",
       .value = at(t, &K::targets),
       .choices = LoraKeys{}.targets,
       .required = true,
       .help =
           "matrices that get an adapter: of attention, of the compressor, of the shared expert, or all routed experts",
       .commands = kAdapters},
      {.key = "lora.init",
       .value = at(t, &K::init),
       .help = "folder of an adapter to start from",
       .commands = kAdapters},
  };
}

std::vector<Field> output_fields() {
  const auto t = &RunConfig::output;
  return {
      {.key = "output.dir",
       .value = at(t, &OutputKeys::dir),
       .required = true,
       .help = "run directory: resolved configuration, metrics, log, checkpoints"},
      {.key = "output.resume",
       .value = at(t, &OutputKeys::resume),
       .choices = {"auto", "never"},
       .help = "go on from the newest checkpoint of the run directory, if there is one, or refuse a directory that has "
               "one"},
      {.key = "machine.threads",
       .value = at(&RunConfig::machine, &MachineKeys::threads),
       .range = from(0, 1024),
       .unit = "threads",
       .help = "CPU threads; 0 = all cores; results do not depend on it"},
  };
}

}  // namespace

bool Field::belongs_to(RunCommand command) const { return std::ranges::find(commands, command) != commands.end(); }

const std::vector<Field>& run_fields() {
  static const std::vector<Field> fields = [] {
    std::vector<Field> all;
    for (auto part :
         {model_fields, data_fields, train_fields, dpo_fields, rl_fields, pretrain_fields, lora_fields, output_fields})
      for (Field& field : part()) all.push_back(std::move(field));
    return all;
  }();
  return fields;
}

const char* name(RunCommand command) {
  constexpr const char* kNames[] = {"train", "dpo", "rl", "pretrain"};
  return kNames[static_cast<int>(command)];
}

RunConfig default_run_config(RunCommand command) {
  RunConfig config;
  config.command = command;
  if (command == RunCommand::pretrain) {
    config.train.learning_rate = 2.7e-4;
    config.train.decay = "cosine";
    config.train.final_lr_ratio = 0.1;
    config.train.beta2 = 0.95;
    config.train.eps = 1e-20;
    config.train.weight_decay = 0.1;
  }
  if (command == RunCommand::dpo) config.train.learning_rate = 1e-5;  // ten times TRL's for all parameters
  if (command == RunCommand::rl) {                                    // the reference trainer's
    config.train.learning_rate = 5e-6;
    config.train.weight_decay = 0.1;
    config.train.max_grad_norm = 0.1;
  }
  return config;
}

}  // namespace plumb
