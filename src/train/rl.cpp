#include "train/rl.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <filesystem>
#include <future>

#include "base/error.h"
#include "base/log.h"
#include "base/parallel.h"
#include "train/checkpoints.h"
#include "train/policy_history.h"
#include "train/rl_batch.h"
#include "train/rl_report.h"
#include "train/rl_setup.h"
#include "train/schedule.h"
#include "train/step.h"

namespace plumb {
namespace {
namespace fs = std::filesystem;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class RlLoop {
 public:
  // teacher: nullptr if nothing is distilled.
  RlLoop(const RunConfig& config, Trainee& trainee, const RlInputs& in, const Teacher* teacher,
         const RunDirectory& directory)
      : config_(config),
        trainee_(trainee),
        in_(in),
        teacher_(teacher),
        directory_(directory),
        numerics_(numerics_from_name(config.model.numerics.c_str())),
        loss_(loss_options(config.rl)),
        optimizer_(trainee, optimizer_options(config)),
        order_(std::vector<int>(in.train.size(), 1), 1, static_cast<uint64_t>(config.train.seed)),
        history_(config.rl, loss_.kl_coefficient > 0, *trainee.adapter, trainee.weights->config()),
        sampler_(*trainee.weights, history_.registry(), config, in.text(), *in.scorer, in.environment.get(),
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

  void resume() {
    if (!directory_.resume) return history_.publish(0, copy_adapter(*host_adapter(trainee_)));
    const int64_t step = *directory_.resume;
    history_.make_places(step, *trainee_.adapter);
    summary_.checkpoint = folder(step);
    state_ = read_checkpoint(summary_.checkpoint, trainee_, optimizer_, state_, history_.tensors(step));
    history_.publish_read();
    history_.publish(step, copy_adapter(*host_adapter(trainee_)));
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
    r.adapter = PolicyHistory::name(history_.sampler_step(step));
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
    r.adapter = PolicyHistory::name(state_.step);
    r.log = directory_.path + "/rollouts/eval.log";
    for (const auto& batch : batches_) batch.wait();  // the engine does one batch at a time
    const RlBatch batch = sampler_.sample(r);
    fs::remove(r.log);
    const Metrics more = batch_metrics(batch, "eval/", in_.rewarded);
    values.insert(values.end(), more.begin(), more.end());
    if (in_.rewarded) {
      summary_.eval_reward = mean_reward(batch);
      log_info("step {}: eval/reward {:.4f}", state_.step, summary_.eval_reward);
    }
    if (!teacher_) return;
    const std::vector<RlSample> samples = samples_of(batch);
    const RlRows rows = rows_of(samples, kept(samples, std::vector<SampleWeight>(samples.size())), {});
    const double kl = mean_divergence(*trainee_.weights, &trainee_.adapters, rows.rows, numerics_, *teacher_);
    values.emplace_back("eval/teacher_kl", kl);
    log_info("step {}: eval/teacher_kl {:.4f}", state_.step, kl);
  }

  // ---- A step

  static std::vector<RlSample> samples_of(const RlBatch& batch) {
    std::vector<RlSample> samples;
    for (size_t i = 0; i < batch.tasks.size(); ++i) samples.push_back(rl_sample(batch.tasks[i], batch.samples[i]));
    return samples;
  }

  RlRows rows_of(const std::vector<RlSample>& samples, const std::vector<SampleWeight>& weights,
                 const ReplayShape& replay) const {
    return make_rl_rows(plan_shape(trainee_.weights->config()), samples, weights,
                        {static_cast<int>(config_.data.row_tokens), static_cast<int>(config_.rl.min_shared_tokens),
                         static_cast<uint64_t>(config_.train.seed + state_.step)},
                        replay);
  }

  ReplayShape replay_shape() const {
    const ModelConfig& c = trainee_.weights->config();
    if (!config_.rl.routing_replay) return {};
    return {c.num_hidden_layers, c.n_routed_experts, c.num_experts_per_tok};
  }

  // A teacher has something to say about every answer, whatever its reward.
  static std::vector<SampleWeight> kept(const std::vector<RlSample>& samples, std::vector<SampleWeight> weights) {
    for (size_t i = 0; i < samples.size(); ++i)
      if (!weights[i].kept) weights[i] = {0, 0, samples[i].trained() > 0};
    return weights;
  }

  bool uses_rewards() const { return in_.rewarded && config_.rl.loss != "none"; }

  std::vector<SampleWeight> weigh(const RlBatch& batch, const std::vector<RlSample>& samples,
                                  GroupCounts& counts) const {
    std::vector<SampleWeight> weights(samples.size());
    if (uses_rewards()) weights = weigh_by_rewards(batch, samples, counts);
    return teacher_ ? kept(samples, std::move(weights)) : weights;
  }

  std::vector<SampleWeight> weigh_by_rewards(const RlBatch& batch, const std::vector<RlSample>& samples,
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
      const std::shared_ptr<const Adapter> adapter = history_.reference(state_.step);
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
    f.result = accumulate_rl_gradients(trainee_, rows.rows, numerics_, loss_, teacher_);
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
    f.rewarded = in_.rewarded, f.uses_rewards = uses_rewards(), f.distilled = teacher_ != nullptr;
    f.steps_behind = state_.step - 1 - history_.sampler_step(state_.step);

    const auto training = std::chrono::steady_clock::now();
    const std::vector<RlSample> samples = samples_of(batch);
    const std::vector<SampleWeight> weights = weigh(batch, samples, f.groups);
    RlRows rows = rows_of(samples, weights, replay_shape());
    f.logical_tokens = rows.logical_tokens, f.physical_tokens = rows.physical_tokens, f.trained = rows.trained;
    f.learning_rate = learning_rate(config_.train, state_.step, summary_.total_steps);
    fill_logprobs(rows);
    const std::vector<std::vector<float>> difference = train_on(rows, samples.size(), f);
    history_.publish(state_.step, copy_adapter(*host_adapter(trainee_)));
    f.train_seconds = seconds_since(training);
    finish_step(batch, weights, difference, f, metrics, samples_file);
    summary_.tokens += rows.physical_tokens;
    summary_.seconds += seconds_since(start);
    return progress_note(f, batch);
  }

  void finish_step(const RlBatch& batch, const std::vector<SampleWeight>& weights,
                   const std::vector<std::vector<float>>& difference, const RlStepFigures& f, MetricsWriter& metrics,
                   JsonLines& samples_file) {
    const bool last = state_.step == summary_.total_steps;
    summary_.loss = f.result.loss;
    if (in_.rewarded) summary_.reward = mean_reward(batch);
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
                     history_.tensors(state_.step));
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
    const DistillKeys& d = config_.distill;
    line("loss", fmt::format("{}, learning rate {}, gradient norm up to {}",
                             uses_rewards() ? config_.rl.loss : "no policy loss", config_.train.learning_rate,
                             config_.train.max_grad_norm));
    if (teacher_)
      line("teacher",
           fmt::format("{}{}, {} times {}", d.teacher_model.empty() ? "the model itself" : d.teacher_model,
                       d.teacher_adapter.empty() ? "" : " with " + d.teacher_adapter, d.divergence, d.coefficient));
    if (config_.rl.steps_behind > 0)
      line("overlap", fmt::format("answers are up to {} steps behind", config_.rl.steps_behind));
    if (directory_.resume) line("resume", summary_.checkpoint);
    if (state_.step >= summary_.total_steps) log_info("nothing is left to do");
  }

  const RunConfig& config_;
  Trainee& trainee_;
  const RlInputs& in_;
  const Teacher* teacher_;
  const RunDirectory& directory_;
  Numerics numerics_;
  RlLossOptions loss_;
  Optimizer optimizer_;
  RowStream order_;  // of the prompts
  TrainerState state_;
  RunSummary summary_;
  int64_t logs_removed_ = 0;
  PolicyHistory history_;
  std::atomic<bool> abandoned_ = false;
  BatchSampler sampler_;
  std::deque<std::shared_future<RlBatch>> batches_;  // of the next steps, in order; last member: waits first
};

}  // namespace

RunSummary run_rl(const RunConfig& config, const LoopHooks& hooks) {
  if (config.machine.threads > 0) set_thread_count(static_cast<int>(config.machine.threads));
  const RunDirectory directory = open_run_directory(config);
  const std::shared_ptr<WeightStore> weights = open_weights(config.model);
  const ModelConfig& model = weights->config();
  const RlInputs inputs = read_rl_inputs(config, model);
  const std::optional<Teacher> teacher = load_teacher(config, weights, inputs.text());
  const std::unique_ptr<Trainee> trainee = lora_trainee(weights, first_adapter(config, model));
  log_info("{:14} {}: {} layers, hidden size {}, {} experts, numerics {}", "model", config.model.path,
           model.num_hidden_layers, model.hidden_size, model.n_routed_experts, config.model.numerics);
  log_info("{:14} {} parameters: LoRA of rank {}, alpha {}, on {}", "trained", with_commas(parameter_count(*trainee)),
           trainee->adapter->rank, trainee->adapter->alpha, fmt::join(trainee->adapter->targets, ", "));
  return RlLoop(config, *trainee, inputs, teacher ? &*teacher : nullptr, directory).run(hooks);
}

}  // namespace plumb
