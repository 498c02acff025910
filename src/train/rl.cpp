#include "train/rl.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <filesystem>
#include <future>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/log.h"
#include "base/parallel.h"
#include "model/adapter_files.h"
#include "train/checkpoints.h"
#include "train/rl_batch.h"
#include "train/rl_report.h"
#include "train/schedule.h"
#include "train/step.h"

namespace plumb {
namespace {
namespace fs = std::filesystem;

constexpr const char* kPolicy = "policy";  // + "-STEP": the adapter after that step, in the registry
std::string policy_name(int64_t step) { return fmt::format("{}-{}", kPolicy, step); }

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

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// What is read at the start and does not change.
struct RlInputs {
  std::optional<Tokenizer> tokenizer;
  std::vector<Prompt> train, eval;
  std::unique_ptr<Scorer> scorer;
  std::unique_ptr<Environment> environment;
  const Tokenizer* text() const { return tokenizer ? &*tokenizer : nullptr; }
};

RlInputs read_inputs(const RunConfig& config, const ModelConfig& model) {
  RlInputs in;
  const fs::path file = fs::path(config.model.path) / "tokenizer.json";
  if (fs::exists(file)) in.tokenizer = Tokenizer::load(file);
  const RewardTables tables = parse_rewards(config.text, config.file);
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

class RlLoop {
 public:
  RlLoop(const RunConfig& config, Trainee& trainee, const RlInputs& in, const RunDirectory& directory)
      : config_(config),
        trainee_(trainee),
        in_(in),
        directory_(directory),
        numerics_(numerics_from_name(config.model.numerics.c_str())),
        loss_(loss_options(config.rl)),
        optimizer_(trainee, optimizer_options(config)),
        order_(std::vector<int>(in.train.size(), 1), 1, static_cast<uint64_t>(config.train.seed)),
        sampler_(*trainee.weights, registry_, config, in.text(), *in.scorer, in.environment.get(),
                 [this] { return abandoned_.load(); }) {
    check(loss_);
    state_.command = "rl";
    state_.optimizer = "adamw";
    state_.seed = config.train.seed;
    state_.row_tokens = config.data.row_tokens;
    state_.data = fingerprint(in.train);
    const int64_t prompts = static_cast<int64_t>(in.train.size()), groups = config.rl.groups_per_step;
    summary_.total_steps =
        config.train.steps > 0 ? config.train.steps : (config.train.epochs * prompts + groups - 1) / groups;
    fs::create_directories(directory.path + "/rollouts");
    prepare_reference();
    resume();
  }
  ~RlLoop() { abandoned_ = true; }  // batches that are being sampled end soon; their futures wait for them

  RunSummary run(const LoopHooks& hooks) {
    print_plan();
    MetricsWriter metrics(directory_.path, state_.step);
    JsonLines samples(directory_.path + "/samples.jsonl", state_.step);
    if (state_.step == 0 && !in_.eval.empty()) {  // what the model can do before it learns
      Metrics values;
      evaluate_policy(values);
      metrics.write(0, values);
    }
    run_steps(
        state_.command, config_.train.save_every, hooks, state_.step, summary_,
        [&] { return one_step(metrics, samples); }, [&] { save(); });
    return summary_;
  }

 private:
  bool due(int64_t every) const { return is_due(state_.step, every); }
  std::string folder(int64_t step) const { return directory_.path + "/" + checkpoint_name(step); }
  std::string log_path(int64_t step) const { return fmt::format("{}/rollouts/step_{:06}.log", directory_.path, step); }

  // ---- Adapters of earlier steps: who samples, and what advantages are measured against

  int64_t sampler_step(int64_t step) const { return std::max<int64_t>(0, step - 1 - config_.rl.steps_behind); }
  int64_t reference_step(int64_t step) const { return std::max<int64_t>(0, step - 1 - config_.rl.kl_penalty_step_lag); }
  bool lagging_reference() const { return loss_.kl_coefficient > 0 && config_.rl.kl_reference == "lag"; }
  // The oldest step whose adapter step `step` and later ones need.
  int64_t oldest_needed(int64_t step) const {
    return std::min(sampler_step(step), lagging_reference() ? reference_step(step) : step - 1);
  }

  void publish_policy(int64_t step, std::shared_ptr<const Adapter> adapter) {
    registry_->publish(policy_name(step), adapter);
    history_[step] = std::move(adapter);
    while (!history_.empty() && history_.begin()->first < oldest_needed(step + 1)) {
      registry_->remove(policy_name(history_.begin()->first));
      history_.erase(history_.begin());
    }
  }

  void prepare_reference() {
    const std::string& kind = config_.rl.kl_reference;
    if (loss_.kl_coefficient == 0 || kind == "base") return;
    if (kind == "adapter") reference_ = load_adapter(config_.rl.kl_ref_adapter_path, trainee_.weights->config());
    if (kind == "start") reference_ = copy_adapter(*trainee_.adapter);  // before a checkpoint replaces it
  }

  NamedTensors history_tensors(int64_t step) {
    NamedTensors list;
    for (auto& [at, adapter] : history_) {
      if (at == step) continue;  // the masters
      for (size_t l = 0; l < adapter->layers.size(); ++l) {
        LayerLora layer = adapter->layers[l];
        LayerLoraGrad none;
        visit_lora(layer, none, [&, at = at](const std::string& name, LoraPair& p, LoraGrad&) {
          if (!p.defined()) return;
          list.emplace_back(fmt::format("history.{}.layers.{}.{}.a", at, l, name), p.a);
          list.emplace_back(fmt::format("history.{}.layers.{}.{}.b", at, l, name), p.b);
        });
      }
    }
    return list;
  }

  void resume() {
    if (!directory_.resume) return publish_policy(0, copy_adapter(*trainee_.adapter));
    const int64_t step = *directory_.resume;
    for (int64_t s = oldest_needed(step + 1); s < step; ++s) history_[s] = copy_adapter(*trainee_.adapter);  // places
    summary_.checkpoint = folder(step);
    state_ = read_checkpoint(summary_.checkpoint, trainee_, optimizer_, state_, history_tensors(step));
    for (const auto& [s, adapter] : history_) registry_->publish(policy_name(s), adapter);
    publish_policy(step, copy_adapter(*trainee_.adapter));
  }

  // ---- Batches

  BatchRequest batch_request(int64_t step) {
    BatchRequest r;
    const int64_t groups = config_.rl.groups_per_step, prompts = static_cast<int64_t>(in_.train.size());
    for (int64_t i = (step - 1) * groups; i < step * groups; ++i) {
      order_.seek({i / prompts, i % prompts});
      r.prompts.push_back(&in_.train[static_cast<size_t>(order_.next()[0])]);
    }
    r.group_size = static_cast<int>(config_.rl.group_size);
    r.first_key = static_cast<uint64_t>((step - 1) * groups * config_.rl.group_size);
    r.sampling = sampling_params(config_, trainee_.weights->config(), config_.sampling.temperature);
    r.adapter = policy_name(sampler_step(step));
    r.log = log_path(step);
    r.routed = config_.rl.routing_replay;
    return r;
  }

  // Starts the batches whose adapter is there: that of the next step, and of later ones if those may be sampled by an
  // older adapter. One after the other, on a thread of their own.
  void start_batches() {
    const int64_t last = std::min(summary_.total_steps, state_.step + 1 + config_.rl.steps_behind);
    for (int64_t step = state_.step + 1 + static_cast<int64_t>(batches_.size()); step <= last; ++step) {
      const std::shared_future<RlBatch> before = batches_.empty() ? std::shared_future<RlBatch>() : batches_.back();
      batches_.push_back(std::async(std::launch::async, [this, before, request = batch_request(step)] {
                           if (before.valid()) before.wait();
                           return sampler_.sample(request);
                         }).share());
    }
  }

  void evaluate_policy(Metrics& values) {
    BatchRequest r;
    for (const Prompt& p : in_.eval) r.prompts.push_back(&p);
    r.group_size = static_cast<int>(config_.eval.samples);
    r.first_key = (uint64_t{1} << 62) + static_cast<uint64_t>(state_.step) * in_.eval.size() * r.group_size;
    r.sampling = sampling_params(config_, trainee_.weights->config(), config_.eval.temperature);
    r.adapter = policy_name(state_.step);
    r.log = directory_.path + "/rollouts/eval.log";
    for (const auto& batch : batches_) batch.wait();  // the engine does one batch at a time
    const RlBatch batch = sampler_.sample(r);
    fs::remove(r.log);
    summary_.eval_reward = mean_reward(batch);
    log_info("step {}: eval/reward {:.4f}", state_.step, summary_.eval_reward);
    const Metrics more = batch_metrics(batch, "eval/");
    values.insert(values.end(), more.begin(), more.end());
  }

  // ---- A step

  ReplayShape replay_shape() const {
    const ModelConfig& c = trainee_.weights->config();
    if (!config_.rl.routing_replay) return {};
    return {c.num_hidden_layers, c.n_routed_experts, c.num_experts_per_tok};
  }

  std::vector<SampleWeight> weigh(const RlBatch& batch, const std::vector<RlSample>& samples,
                                  GroupCounts& counts) const {
    std::vector<RewardedSample> rewarded;
    std::vector<size_t> which;
    for (size_t i = 0; i < samples.size(); ++i) {
      if (batch.scores[i].failed()) continue;
      which.push_back(i);
      rewarded.push_back({samples[i].group, batch.scores[i].reward, samples[i].trained()});
    }
    const RlKeys& k = config_.rl;
    const std::vector<SampleWeight> of_rewarded =
        sample_weights(rewarded, {k.scale_rewards, k.normalize_advantages, k.advantage_balance}, &counts);
    std::vector<SampleWeight> weights(samples.size());
    for (size_t n = 0; n < which.size(); ++n) weights[which[n]] = of_rewarded[n];
    return weights;
  }

  void fill_logprobs(RlRows& rows) {
    for (RlRow& row : rows.rows) {
      if (config_.rl.precalculate_logprobs) {
        const Tensor old = row_logprobs(*trainee_.weights, &trainee_.adapters, row, numerics_);
        for (size_t i = 0; i < row.tokens.size(); ++i) row.tokens[i].old_logprob = old.f32()[i];
      }
      if (loss_.kl_coefficient == 0) continue;
      const auto& adapter = lagging_reference() ? history_.at(reference_step(state_.step)) : reference_;
      const AdapterBatch batch{{{adapter, {}, true, nullptr}}};
      const Tensor reference = row_logprobs(*trainee_.weights, adapter ? &batch : nullptr, row, numerics_);
      for (size_t i = 0; i < row.tokens.size(); ++i) row.tokens[i].reference = reference.f32()[i];
    }
  }

  // -> new - recorded log-probability of each trained token of each sample.
  std::vector<std::vector<float>> train_on(const RlRows& rows, size_t samples, RlStepFigures& f) {
    std::vector<std::vector<float>> difference(samples);
    if (rows.trained == 0) return difference;
    zero_gradients(trainee_);
    f.result = accumulate_rl_gradients(trainee_, rows.rows, numerics_, loss_);
    require_finite_loss(f.result.loss, state_.step, summary_.checkpoint);
    f.grad_norm = apply_gradients(trainee_, optimizer_, f.learning_rate, config_.train.max_grad_norm, state_.step,
                                  summary_.checkpoint);
    for (size_t r = 0; r < rows.rows.size(); ++r)
      for (size_t i = 0; i < rows.rows[r].origin.size(); ++i)
        difference[static_cast<size_t>(rows.rows[r].origin[i].sample)].push_back(f.result.logprobs[r].f32()[i] -
                                                                                 rows.rows[r].tokens[i].original);
    return difference;
  }

  // -> the note of the progress line
  std::string one_step(MetricsWriter& metrics, JsonLines& samples_file) {
    const auto start = std::chrono::steady_clock::now();
    start_batches();
    const RlBatch batch = batches_.front().get();
    batches_.pop_front();
    RlStepFigures f;
    f.wait_seconds = seconds_since(start);
    f.sample_seconds = batch.seconds;
    ++state_.step;
    f.steps_behind = state_.step - 1 - sampler_step(state_.step);

    const auto training = std::chrono::steady_clock::now();
    std::vector<RlSample> samples;
    for (size_t i = 0; i < batch.tasks.size(); ++i) samples.push_back(rl_sample(batch.tasks[i], batch.samples[i]));
    const std::vector<SampleWeight> weights = weigh(batch, samples, f.groups);
    RlRows rows =
        make_rl_rows(plan_shape(trainee_.weights->config()), samples, weights,
                     {static_cast<int>(config_.data.row_tokens), static_cast<int>(config_.rl.min_shared_tokens),
                      static_cast<uint64_t>(config_.train.seed + state_.step)},
                     replay_shape());
    f.logical_tokens = rows.logical_tokens, f.physical_tokens = rows.physical_tokens, f.trained = rows.trained;
    f.learning_rate = learning_rate(config_.train, state_.step, summary_.total_steps);
    fill_logprobs(rows);
    const std::vector<std::vector<float>> difference = train_on(rows, samples.size(), f);
    publish_policy(state_.step, copy_adapter(*trainee_.adapter));
    f.train_seconds = seconds_since(training);
    finish_step(batch, weights, difference, f, metrics, samples_file);
    summary_.tokens += rows.physical_tokens;
    summary_.seconds += seconds_since(start);
    return fmt::format("reward {:.3f}, mismatch {}, grad {:.3g}", summary_.reward, f.result.stats.largest_difference,
                       f.grad_norm);
  }

  void finish_step(const RlBatch& batch, const std::vector<SampleWeight>& weights,
                   const std::vector<std::vector<float>>& difference, const RlStepFigures& f, MetricsWriter& metrics,
                   JsonLines& samples_file) {
    const bool last = state_.step == summary_.total_steps;
    summary_.loss = f.result.loss;
    summary_.reward = mean_reward(batch);
    warn(state_.step, f, batch);
    Metrics values;
    if (last || due(config_.train.log_every)) values = step_metrics(f, batch);
    if (!in_.eval.empty() && (last || due(config_.train.eval_every))) evaluate_policy(values);
    if (!values.empty()) metrics.write(state_.step, values);
    if (due(config_.rl.samples_every)) write_samples(samples_file, state_.step, batch, weights, difference);
  }

  void save() {
    const int64_t groups = config_.rl.groups_per_step, prompts = static_cast<int64_t>(in_.train.size());
    state_.rows = state_.step * groups;
    state_.cursor = {state_.rows / prompts, state_.rows % prompts};
    summary_.checkpoint = folder(state_.step);
    write_checkpoint(summary_.checkpoint, trainee_, optimizer_, state_, config_.model.path,
                     history_tensors(state_.step));
    remove_old_checkpoints(directory_.path, config_.train.keep_checkpoints);
    for (; logs_removed_ < state_.step; ++logs_removed_) fs::remove(log_path(logs_removed_ + 1));
    log_info("step {}: saved {}", state_.step, summary_.checkpoint);
  }

  void print_plan() const {
    auto line = [](const char* name, const std::string& text) { log_info("{:14} {}", name, text); };
    line("prompts", fmt::format("{}: {}{}", config_.data.train, with_commas(static_cast<int64_t>(in_.train.size())),
                                in_.eval.empty() ? "" : fmt::format("; {} to evaluate", in_.eval.size())));
    line("steps",
         fmt::format("{} of {} groups of {} answers{}", with_commas(summary_.total_steps), config_.rl.groups_per_step,
                     config_.rl.group_size, state_.step > 0 ? fmt::format(", {} of them done", state_.step) : ""));
    line("loss", fmt::format("{}, learning rate {}, gradient norm up to {}", config_.rl.loss,
                             config_.train.learning_rate, config_.train.max_grad_norm));
    if (config_.rl.steps_behind > 0)
      line("overlap", fmt::format("answers are up to {} steps behind", config_.rl.steps_behind));
    if (directory_.resume) line("resume", summary_.checkpoint);
    if (state_.step >= summary_.total_steps) log_info("nothing is left to do");
  }

  const RunConfig& config_;
  Trainee& trainee_;
  const RlInputs& in_;
  const RunDirectory& directory_;
  Numerics numerics_;
  RlLossOptions loss_;
  Optimizer optimizer_;
  RowStream order_;  // of the prompts
  TrainerState state_;
  RunSummary summary_;
  int64_t logs_removed_ = 0;
  std::shared_ptr<const Adapter> reference_;  // nullptr: the base model
  std::map<int64_t, std::shared_ptr<const Adapter>> history_;
  std::shared_ptr<AdapterRegistry> registry_ = std::make_shared<AdapterRegistry>();
  std::atomic<bool> abandoned_ = false;
  BatchSampler sampler_;
  std::deque<std::shared_future<RlBatch>> batches_;  // of the next steps, in order; last member: waits first
};

}  // namespace

RunSummary run_rl(const RunConfig& config, const LoopHooks& hooks) {
  if (config.machine.threads > 0) set_thread_count(static_cast<int>(config.machine.threads));
  const RunDirectory directory = open_run_directory(config);
  std::shared_ptr<ResidentWeights> weights = load_weights(Checkpoint::open(config.model.path));
  const ModelConfig& model = weights->model;
  const RlInputs inputs = read_inputs(config, model);
  const std::unique_ptr<Trainee> trainee = lora_trainee(weights, first_adapter(config, model));
  log_info("{:14} {}: {} layers, hidden size {}, {} experts, numerics {}", "model", config.model.path,
           model.num_hidden_layers, model.hidden_size, model.n_routed_experts, config.model.numerics);
  log_info("{:14} {} parameters: LoRA of rank {}, alpha {}, on {}", "trained", with_commas(parameter_count(*trainee)),
           trainee->adapter->rank, trainee->adapter->alpha, fmt::join(trainee->adapter->targets, ", "));
  return RlLoop(config, *trainee, inputs, directory).run(hooks);
}

}  // namespace plumb
