// Run files: what `plumb train`, `plumb dpo`, `plumb rl` and `plumb pretrain` do, as flat TOML. The table of keys in
// run_fields.cpp is the only place that knows their names, ranges and texts; docs/configuration.md is made from it.
// Defaults are the initial values below.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace plumb {

enum class RunCommand { train, dpo, rl, pretrain };

// One struct a table of the file, members named as the keys. Choices are strings that have been checked.
struct ModelKeys {
  std::string path;
  std::string numerics = "released";  // fp32, bf16, released
  std::string kernels = "auto";       // auto, reference, cuda
};

struct DataKeys {
  std::string train;
  std::string eval;             // "" = none
  double eval_fraction = 0;     // part of `train` that is held out
  std::string format = "auto";  // auto, messages, prompt, tokens, text
  int64_t row_tokens = 2048;
  std::string thinking_mode = "chat";  // thinking, chat
  bool drop_thinking = true;
  std::string effort_profile = "preview";  // preview, official
  std::string reasoning_effort;            // "" = the profile's usual one, low (official only), high, max
};

struct TrainKeys {
  int64_t steps = 0;  // 0 = `epochs` decides
  int64_t epochs = 1;
  int64_t rows_per_step = 1;
  double learning_rate = 1e-4;
  int64_t warmup_steps = 0;
  std::string decay = "constant";  // constant, linear, cosine
  double final_lr_ratio = 0;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double eps = 1e-13;
  double weight_decay = 0;
  double max_grad_norm = 1;  // 0 = not clipped
  int64_t seed = 0;
  int64_t eval_every = 0;  // 0 = at the end only, as for save_every
  int64_t save_every = 0;
  int64_t keep_checkpoints = 2;
  int64_t log_every = 1;
};

struct PretrainKeys {
  std::string optimizer = "muon";  // muon, adamw
  double muon_momentum = 0.95;
  double mtp_loss_weight = 0.3;
  double balance_loss_weight = 1e-4;
  double bias_update_rate = 1e-3;
  double indexer_loss_coeff = 0.01;
};

struct LoraKeys {
  int64_t rank = 8;
  double alpha = 32;  // the adapter's output is scaled by alpha / rank
  std::vector<std::string> targets = {
      "q_a_proj",  "q_b_proj", "kv_proj",   "o_a_proj", "o_b_proj", "compressor.kv_proj", "compressor.gate_proj",
      "gate_proj", "up_proj",  "down_proj", "experts"};
  std::string init;  // "" = a fresh adapter
};

struct DpoKeys {
  double beta = 0.1;
  double label_smoothing = 0;
  std::string reference_adapter;  // "" = the model without adapter
  int64_t pairs_per_step = 8;
  int64_t min_shared_tokens = 64;
};

struct RlKeys {
  int64_t groups_per_step = 4;
  int64_t group_size = 8;
  int64_t steps_behind = 0;
  std::string loss = "cispo";  // cispo, ppo, gspo, none
  double epsilon = -1;         // -1 = the loss's default
  double epsilon_high = -1;
  std::string importance_sampling_level = "token";               // token, sequence, average, geometric_average
  double max_negative_advantage_importance_sampling_weight = 0;  // 0 = none
  bool mask_prob_ratio = false;
  double kl_penalty_coef = 0;
  std::string kl_penalty_source = "current_learner";  // current_learner, sample
  std::string kl_reference = "base";                  // base, start, lag, adapter
  int64_t kl_penalty_step_lag = 1;
  std::string kl_ref_adapter_path;
  double kimi_k2_tau = 0;
  double truncated_importance_sampling = 0;  // 0 = none
  bool scale_rewards = true;
  bool normalize_advantages = true;
  double advantage_balance = 0;
  bool precalculate_logprobs = false;
  bool routing_replay = false;
  int64_t min_shared_tokens = 64;
  int64_t samples_every = 1;
};

struct DistillKeys {
  double coefficient = 0;                 // 0 = nothing is distilled
  std::string divergence = "reverse_kl";  // reverse_kl, forward_kl
  std::string teacher_model;              // "" = the run's model
  std::string teacher_adapter;            // "" = none
};

struct SamplingKeys {
  int64_t max_tokens = 256;
  int64_t max_turns = 1;
  double temperature = 1;
  double top_p = 1;
  int64_t top_k = 0;
  double min_p = 0;
  int64_t max_running = 0;
};

struct EvalKeys {
  int64_t samples = 1;
  double temperature = 0;
};

struct OutputKeys {
  std::string dir;
  std::string resume = "auto";  // auto, never
};

struct MachineKeys {
  int64_t threads = 0;  // 0 = all cores
};

struct RunConfig {
  RunCommand command = RunCommand::train;
  ModelKeys model;
  DataKeys data;
  TrainKeys train;
  PretrainKeys pretrain;  // pretrain only
  DpoKeys dpo;            // dpo only
  RlKeys rl;              // rl only, as the next three
  DistillKeys distill;
  SamplingKeys sampling;
  EvalKeys eval;
  LoraKeys lora;  // not pretrain
  OutputKeys output;
  MachineKeys machine;
  // The run file as it was read, for what another room knows: rl's [[reward]] tables and
  // [environment].
  std::string file, text;
};

// The defaults of a command. Pretraining follows the technical report of DeepSeek-V4 (cosine, AdamW .9/.95/1e-20,
// weight decay .1), fine-tuning starts from plain AdamW without decay.
RunConfig default_run_config(RunCommand command);

// Reads a run file, then `overrides` ("train.learning_rate=1e-4", in this order; the value is TOML, quotes around a
// text may be left out), then checks what concerns several keys. Errors name file and line or the override, the key,
// and what is allowed; an unknown key, the nearest known one. A wrong override is a UsageError.
RunConfig load_run_config(RunCommand command, const std::string& file, const std::vector<std::string>& overrides = {});
RunConfig parse_run_config(RunCommand command, const std::string& toml, const std::string& file,
                           const std::vector<std::string>& overrides = {});

// All keys of the command with their values, for `config.toml` of the run directory; parses to an equal configuration.
std::string to_toml(const RunConfig& config);

// One line a key: name, default, what is allowed, what it does. For --help.
std::string describe_run_keys(RunCommand command);

// The tables of docs/configuration.md.
std::string run_keys_as_markdown();

}  // namespace plumb
