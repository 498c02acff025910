#include "train/dpo.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <filesystem>
#include <limits>
#include <numeric>
#include <optional>

#include "base/log.h"
#include "base/parallel.h"
#include "model/adapter_files.h"
#include "train/checkpoints.h"
#include "train/dpo_step.h"
#include "train/metrics.h"
#include "train/schedule.h"
#include "train/step.h"

namespace plumb {
namespace {

struct DpoData {
  std::vector<PreferencePair> train, eval;
};

DpoData read_data(const RunConfig& config, const ModelConfig& model) {
  const auto file = std::filesystem::path(config.model.path) / "tokenizer.json";
  std::optional<Tokenizer> tokenizer;
  if (std::filesystem::exists(file)) tokenizer = Tokenizer::load(file);
  const DatasetOptions options = dataset_options(config.data, model);
  const auto read = [&](const std::string& path) {
    PairDataset d = read_pairs(path, tokenizer ? &*tokenizer : nullptr, options);
    if (d.truncated > 0)
      log_warning(
          "{}: {} answers were cut off at {} tokens (the longest has {}); raise data.row_tokens to keep them whole",
          path, d.truncated, options.row_tokens, d.longest);
    if (d.left_out > 0) log_warning("{}: {} pairs were left out, no token of an answer counts", path, d.left_out);
    return std::move(d.pairs);
  };
  DpoData data;
  data.train = read(config.data.train);
  data.eval = hold_out(data.train, config.data.eval_fraction, config.data.train);
  if (!config.data.eval.empty()) data.eval = read(config.data.eval);
  return data;
}

// Pairs with what is known of the reference's log-probabilities, which never change: [2 * pairs], NaN = unknown.
struct ReferencedPairs {
  const std::vector<PreferencePair>& pairs;
  std::vector<double> reference;
  explicit ReferencedPairs(const std::vector<PreferencePair>& p)
      : pairs(p), reference(2 * p.size(), std::numeric_limits<double>::quiet_NaN()) {}
};

// Some of them, as rows.
struct PairBatch {
  RlRows rows;
  std::vector<double> reference;
};

class DpoLoop {
 public:
  // reference: nullptr = the model without adapter.
  DpoLoop(const RunConfig& config, Trainee& trainee, const DpoData& data, std::shared_ptr<const Adapter> reference,
          const RunDirectory& directory)
      : config_(config),
        trainee_(trainee),
        train_(data.train),
        eval_(data.eval),
        directory_(directory),
        numerics_(numerics_from_name(config.model.numerics.c_str())),
        options_{config.dpo.beta, config.dpo.label_smoothing},
        optimizer_(trainee, optimizer_options(config)),
        order_(std::vector<int>(data.train.size(), 1), 1, static_cast<uint64_t>(config.train.seed)) {
    if (reference) reference_.parts.push_back({std::move(reference), {}, true, nullptr});
    state_.command = "dpo";
    state_.optimizer = "adamw";
    state_.seed = config.train.seed;
    state_.row_tokens = config.data.row_tokens;
    state_.data = fingerprint(data.train);
    if (directory.resume) {
      summary_.checkpoint = folder(*directory.resume);
      state_ = read_checkpoint(summary_.checkpoint, trainee_, optimizer_, state_);
      order_.seek(state_.cursor);
    }
    const int64_t each = config.dpo.pairs_per_step, left = std::max<int64_t>(0, all_pairs() - state_.rows);
    summary_.total_steps = config.train.steps > 0 ? config.train.steps : state_.step + (left + each - 1) / each;
  }

  RunSummary run(const LoopHooks& hooks) {
    print_plan();
    MetricsWriter metrics(directory_.path, state_.step);
    run_steps(
        state_.command, config_.train.save_every, hooks, state_.step, summary_, [&] { return one_step(metrics); },
        [&] { save(); });
    return summary_;
  }

 private:
  bool due(int64_t every) const { return is_due(state_.step, every); }
  std::string folder(int64_t step) const { return directory_.path + "/" + checkpoint_name(step); }
  // Of all epochs; what a run of epochs ends with.
  int64_t all_pairs() const { return config_.train.epochs * static_cast<int64_t>(train_.pairs.size()); }

  PairBatch make_batch(ReferencedPairs& from, const std::vector<int>& which, uint64_t seed) {
    std::vector<const PreferencePair*> pairs;
    PairBatch batch;
    for (const int i : which) {
      pairs.push_back(&from.pairs[static_cast<size_t>(i)]);
      for (const size_t answer : {2 * static_cast<size_t>(i), 2 * static_cast<size_t>(i) + 1})
        batch.reference.push_back(from.reference[answer]);
    }
    batch.rows = make_pair_rows(
        plan_shape(trainee_.weights->config()), pairs,
        {static_cast<int>(config_.data.row_tokens), static_cast<int>(config_.dpo.min_shared_tokens), seed});
    fill_answer_logprobs(*trainee_.weights, &reference_, batch.rows, numerics_, batch.reference);
    for (size_t n = 0; n < which.size(); ++n)
      for (const size_t side : {size_t{0}, size_t{1}})
        from.reference[2 * static_cast<size_t>(which[n]) + side] = batch.reference[2 * n + side];
    return batch;
  }

  std::vector<int> next_pairs() {
    int64_t n = config_.dpo.pairs_per_step;
    if (config_.train.steps == 0) n = std::min(n, all_pairs() - state_.rows);
    std::vector<int> which;
    for (int64_t i = 0; i < n; ++i) which.push_back(order_.next()[0]);
    return which;
  }

  // -> the note of the progress line
  std::string one_step(MetricsWriter& metrics) {
    const auto start = std::chrono::steady_clock::now();
    const std::vector<int> which = next_pairs();
    ++state_.step;
    state_.rows += static_cast<int64_t>(which.size());
    state_.cursor = order_.cursor();
    const PairBatch batch = make_batch(train_, which, static_cast<uint64_t>(config_.train.seed + state_.step));

    zero_gradients(trainee_);
    const std::vector<double> policy =
        accumulate_dpo_gradients(trainee_, batch.rows, numerics_, options_, batch.reference);
    const DpoFigures figures = dpo_figures(options_, policy, batch.reference);
    require_finite_loss(figures.loss, state_.step, summary_.checkpoint);
    const double lr = learning_rate(config_.train, state_.step, summary_.total_steps);
    const double norm =
        apply_gradients(trainee_, optimizer_, lr, config_.train.max_grad_norm, state_.step, summary_.checkpoint);

    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    summary_.loss = figures.loss;
    summary_.tokens += batch.rows.physical_tokens;
    summary_.seconds += seconds;
    Metrics values;
    const bool last = state_.step == summary_.total_steps;
    if (last || due(config_.train.log_every)) {
      values = metrics_of(figures, "");
      const double epoch = static_cast<double>(state_.rows) / static_cast<double>(train_.pairs.size());
      const Metrics more = {{"grad_norm", norm},
                            {"learning_rate", lr},
                            {"epoch", epoch},
                            {"pairs", static_cast<double>(which.size())},
                            {"trained_tokens", static_cast<double>(batch.rows.trained)},
                            {"logical_tokens", static_cast<double>(batch.rows.logical_tokens)},
                            {"physical_tokens", static_cast<double>(batch.rows.physical_tokens)},
                            {"step_seconds", seconds},
                            {"tokens_per_second", static_cast<double>(batch.rows.physical_tokens) / seconds}};
      values.insert(values.end(), more.begin(), more.end());
    }
    if (!eval_.pairs.empty() && (last || due(config_.train.eval_every))) {
      const Metrics more = metrics_of(evaluate(), "eval/");
      values.insert(values.end(), more.begin(), more.end());
    }
    if (!values.empty()) metrics.write(state_.step, values);
    return fmt::format("loss {:.4f}, accuracy {:.2f}", figures.loss, figures.accuracy);
  }

  DpoFigures evaluate() {
    std::vector<int> all(eval_.pairs.size());
    std::iota(all.begin(), all.end(), 0);
    const PairBatch batch = make_batch(eval_, all, 0);
    std::vector<double> policy(batch.reference.size(), std::numeric_limits<double>::quiet_NaN());
    fill_answer_logprobs(*trainee_.weights, &trainee_.adapters, batch.rows, numerics_, policy);
    const DpoFigures f = dpo_figures(options_, policy, batch.reference);
    summary_.eval_loss = f.loss;
    log_info("step {}: eval/loss {:.5f}, eval/rewards/accuracies {:.3f}", state_.step, f.loss, f.accuracy);
    return f;
  }

  static Metrics metrics_of(const DpoFigures& f, const std::string& prefix) {
    return {{prefix + "loss", f.loss},
            {prefix + "rewards/chosen", f.reward_chosen},
            {prefix + "rewards/rejected", f.reward_rejected},
            {prefix + "rewards/accuracies", f.accuracy},
            {prefix + "rewards/margins", f.margin},
            {prefix + "logps/chosen", f.logp_chosen},
            {prefix + "logps/rejected", f.logp_rejected}};
  }

  void save() {
    summary_.checkpoint = folder(state_.step);
    write_checkpoint(summary_.checkpoint, trainee_, optimizer_, state_, config_.model.path);
    remove_old_checkpoints(directory_.path, config_.train.keep_checkpoints);
    log_info("step {}: saved {}", state_.step, summary_.checkpoint);
  }

  void print_plan() const {
    auto line = [](const char* name, const std::string& text) { log_info("{:14} {}", name, text); };
    line("pairs", fmt::format("{}: {}{}", config_.data.train, with_commas(static_cast<int64_t>(train_.pairs.size())),
                              eval_.pairs.empty() ? "" : fmt::format("; {} to evaluate", eval_.pairs.size())));
    line("steps", fmt::format("{} of {} pairs{}", with_commas(summary_.total_steps), config_.dpo.pairs_per_step,
                              state_.step > 0 ? fmt::format(", {} of them done", state_.step) : ""));
    line("loss", fmt::format("DPO, beta {}, label smoothing {}, learning rate {}", options_.beta,
                             options_.label_smoothing, config_.train.learning_rate));
    line("reference", config_.dpo.reference_adapter.empty() ? "the model without adapter"
                                                            : "the adapter " + config_.dpo.reference_adapter);
    if (directory_.resume) line("resume", summary_.checkpoint);
    if (state_.step >= summary_.total_steps) log_info("nothing is left to do");
  }

  const RunConfig& config_;
  Trainee& trainee_;
  ReferencedPairs train_, eval_;
  const RunDirectory& directory_;
  Numerics numerics_;
  DpoOptions options_;
  Optimizer optimizer_;
  RowStream order_;  // of the pairs
  AdapterBatch reference_;
  TrainerState state_;
  RunSummary summary_;
};

}  // namespace

RunSummary run_dpo(const RunConfig& config, const LoopHooks& hooks) {
  if (config.machine.threads > 0) set_thread_count(static_cast<int>(config.machine.threads));
  const RunDirectory directory = open_run_directory(config);
  const std::shared_ptr<WeightStore> weights = open_weights(config.model);
  const ModelConfig& model = weights->config();
  const DpoData data = read_data(config, model);
  const std::string& adapter = config.dpo.reference_adapter;
  std::shared_ptr<const Adapter> reference = adapter.empty() ? nullptr : load_adapter(adapter, model);
  const std::unique_ptr<Trainee> trainee = lora_trainee(weights, first_adapter(config, model));
  log_info("{:14} {}: {} layers, hidden size {}, {} experts, numerics {}", "model", config.model.path,
           model.num_hidden_layers, model.hidden_size, model.n_routed_experts, config.model.numerics);
  log_info("{:14} {} parameters: LoRA of rank {}, alpha {}, on {}", "trained", with_commas(parameter_count(*trainee)),
           trainee->adapter->rank, trainee->adapter->alpha, fmt::join(trainee->adapter->targets, ", "));
  return DpoLoop(config, *trainee, data, std::move(reference), directory).run(hooks);
}

}  // namespace plumb
