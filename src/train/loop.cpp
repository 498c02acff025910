#include "train/loop.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "base/log.h"
#include "base/progress.h"
#include "data/packing.h"
#include "train/checkpoints.h"
#include "train/metrics.h"
#include "train/schedule.h"
#include "train/step.h"

namespace plumb {
namespace {

LossWeights loss_weights(const RunConfig& config) {
  if (config.command != RunCommand::pretrain) return {};
  const PretrainKeys& p = config.pretrain;
  return {p.mtp_loss_weight, p.balance_loss_weight, p.indexer_loss_coeff};
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The busiest expert of all layers: its rows over the mean.
double greatest_load(const std::vector<std::vector<int64_t>>& expert_rows) {
  double greatest = 0;
  for (const auto& rows : expert_rows) {
    int64_t total = 0;
    for (int64_t n : rows) total += n;
    for (int64_t n : rows)
      if (total > 0) greatest = std::max(greatest, double(n) * double(rows.size()) / double(total));
  }
  return greatest;
}

class Loop {
 public:
  Loop(const RunConfig& config, Trainee& trainee, const TrainingData& data, const RunDirectory& directory)
      : config_(config),
        trainee_(trainee),
        data_(data),
        directory_(directory),
        numerics_(numerics_from_name(config.model.numerics.c_str())),
        options_(optimizer_options(config)),
        optimizer_(trainee, options_),
        stream_(lengths_of(data.train), static_cast<int>(config.data.row_tokens),
                static_cast<uint64_t>(config.train.seed)) {
    state_.command = config.command == RunCommand::pretrain ? "pretrain" : "train";
    state_.optimizer = options_.use_muon ? "muon" : "adamw";
    state_.seed = config.train.seed;
    state_.row_tokens = config.data.row_tokens;
    state_.data = fingerprint(data.train);
    resume();
    plan_steps();
    const PlanShape shape = plan_shape(trainee.weights->config());
    if (!data.eval.empty())
      for (const Row& row : pack_epoch(lengths_of(data.eval), static_cast<int>(config.data.row_tokens), 0, 0))
        eval_rows_.push_back(make_row(shape, data.eval, row));
  }

  RunSummary run(const LoopHooks& hooks) {
    print_plan();
    MetricsWriter metrics(directory_.path, state_.step);
    run_steps(
        state_.command, config_.train.save_every, hooks, state_.step, summary_,
        [&] {
          one_step(metrics);
          return fmt::format("loss {:.4f}", summary_.loss);
        },
        [&] { save(); });
    return summary_;
  }

 private:
  bool due(int64_t every) const { return is_due(state_.step, every); }
  std::string folder(int64_t step) const { return directory_.path + "/" + checkpoint_name(step); }

  void resume() {
    if (!directory_.resume) return;
    summary_.checkpoint = folder(*directory_.resume);
    state_ = read_checkpoint(summary_.checkpoint, trainee_, optimizer_, state_);
    stream_.seek(state_.cursor);
  }

  void plan_steps() {
    const TrainKeys& t = config_.train;
    summary_.total_steps = t.steps;
    if (t.steps > 0) return;
    total_rows_ = stream_.rows_in(t.epochs);
    const int64_t left = std::max<int64_t>(0, *total_rows_ - state_.rows);
    summary_.total_steps = state_.step + (left + t.rows_per_step - 1) / t.rows_per_step;
  }

  void print_plan() const {
    const TrainKeys& t = config_.train;
    auto line = [](const char* name, const std::string& text) { log_info("{:14} {}", name, text); };
    line("rows", fmt::format("{} of up to {} tokens in this epoch, {} a step", with_commas(stream_.epoch_rows()),
                             with_commas(config_.data.row_tokens), t.rows_per_step));
    line("steps", fmt::format("{}{}", with_commas(summary_.total_steps),
                              state_.step > 0 ? fmt::format(", {} of them done", with_commas(state_.step)) : ""));
    line("optimizer",
         fmt::format("{}betas {}, {}, eps {}, weight decay {}, gradient norm up to {}",
                     options_.use_muon ? "Muon for matrices, AdamW for the rest: " : "AdamW: ", t.beta1, t.beta2, t.eps,
                     t.weight_decay, t.max_grad_norm > 0 ? fmt::format("{}", t.max_grad_norm) : "any"));
    line("learning rate", fmt::format("{}, warm-up {} steps, then {}", t.learning_rate, t.warmup_steps, t.decay));
    if (directory_.resume) line("resume", summary_.checkpoint);
    if (state_.step >= summary_.total_steps) log_info("nothing is left to do");
  }

  std::vector<TrainRow> next_rows() {
    int64_t n = config_.train.rows_per_step;
    if (total_rows_) n = std::min(n, *total_rows_ - state_.rows);
    const PlanShape shape = plan_shape(trainee_.weights->config());
    std::vector<TrainRow> rows;
    for (int64_t i = 0; i < n; ++i) rows.push_back(make_row(shape, data_.train, stream_.next()));
    return rows;
  }

  void one_step(MetricsWriter& metrics) {
    const auto start = std::chrono::steady_clock::now();
    const std::vector<TrainRow> rows = next_rows();
    ++state_.step;
    state_.rows += static_cast<int64_t>(rows.size());
    state_.cursor = stream_.cursor();

    zero_gradients(trainee_);
    const StepLosses losses = accumulate_gradients(trainee_, rows, numerics_, loss_weights(config_));
    require_finite_loss(losses.loss, state_.step, summary_.checkpoint);
    const double lr = learning_rate(config_.train, state_.step, summary_.total_steps);
    const double norm =
        apply_gradients(trainee_, optimizer_, lr, config_.train.max_grad_norm, state_.step, summary_.checkpoint);
    if (config_.command == RunCommand::pretrain)
      update_router_bias(trainee_, losses.expert_rows, config_.pretrain.bias_update_rate);

    const double seconds = seconds_since(start);
    summary_.loss = losses.loss;
    summary_.tokens += losses.tokens;
    summary_.seconds += seconds;
    Metrics values;
    const bool last = state_.step == summary_.total_steps;
    if (last || due(config_.train.log_every))
      values = step_metrics(losses, norm, lr, seconds, static_cast<int64_t>(rows.size()));
    if (!eval_rows_.empty() && (last || due(config_.train.eval_every))) {
      summary_.eval_loss = evaluate(trainee_, eval_rows_, numerics_);
      values.emplace_back("eval/loss", summary_.eval_loss);
      log_info("step {}: eval/loss {:.5f}", state_.step, summary_.eval_loss);
    }
    if (!values.empty()) metrics.write(state_.step, values);
  }

  Metrics step_metrics(const StepLosses& losses, double norm, double lr, double seconds, int64_t rows) const {
    const auto room = static_cast<double>(rows * config_.data.row_tokens);
    Metrics m = {{"loss", losses.loss},
                 {"grad_norm", norm},
                 {"learning_rate", lr},
                 {"epoch", static_cast<double>(state_.cursor.epoch) +
                               static_cast<double>(state_.cursor.row) / static_cast<double>(stream_.epoch_rows())},
                 {"rows", static_cast<double>(rows)},
                 {"tokens", static_cast<double>(losses.tokens)},
                 {"trained_tokens", static_cast<double>(losses.trained)},
                 {"padding", 1 - static_cast<double>(losses.tokens) / room},
                 {"step_seconds", seconds},
                 {"tokens_per_second", static_cast<double>(losses.tokens) / seconds}};
    if (config_.command != RunCommand::pretrain) return m;
    const LossWeights w = loss_weights(config_);
    if (w.mtp != 0 && trainee_.weights->mtp_count() > 0) m.emplace_back("mtp_loss", losses.mtp);
    if (w.balance != 0) m.emplace_back("balance_loss", losses.balance);
    if (w.indexer != 0) m.emplace_back("indexer_loss", losses.indexer);
    m.emplace_back("greatest_expert_load", greatest_load(losses.expert_rows));
    return m;
  }

  void save() {
    summary_.checkpoint = folder(state_.step);
    write_checkpoint(summary_.checkpoint, trainee_, optimizer_, state_, config_.model.path);
    remove_old_checkpoints(directory_.path, config_.train.keep_checkpoints);
    log_info("step {}: saved {}", state_.step, summary_.checkpoint);
  }

  const RunConfig& config_;
  Trainee& trainee_;
  const TrainingData& data_;
  const RunDirectory& directory_;
  Numerics numerics_;
  OptimizerOptions options_;
  Optimizer optimizer_;
  RowStream stream_;
  TrainerState state_;
  std::optional<int64_t> total_rows_;  // if train.epochs decides
  std::vector<TrainRow> eval_rows_;
  RunSummary summary_;
};

}  // namespace

std::string with_commas(int64_t n) {
  std::string text = std::to_string(n);
  for (auto i = static_cast<int64_t>(text.size()) - 3; i > (n < 0); i -= 3) text.insert(static_cast<size_t>(i), ",");
  return text;
}

void run_steps(const std::string& what, int64_t save_every, const LoopHooks& hooks, const int64_t& done,
               RunSummary& summary, const std::function<std::string()>& step, const std::function<void()>& save) {
  ProgressLine progress(what, "steps", summary.total_steps, done);
  while (done < summary.total_steps && !summary.stopped) {
    const std::string note = step();
    progress.update(done, note);
    const bool last = done == summary.total_steps;
    summary.stopped = !last && hooks.stop && hooks.stop();
    if (last || summary.stopped || is_due(done, save_every)) save();
    if (hooks.after_step) hooks.after_step(done);
  }
  summary.steps = done;
}

RunSummary run_loop(const RunConfig& config, Trainee& trainee, const TrainingData& data, const RunDirectory& directory,
                    const LoopHooks& hooks) {
  return Loop(config, trainee, data, directory).run(hooks);
}

}  // namespace plumb
