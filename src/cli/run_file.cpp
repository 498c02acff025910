#include "cli/run_file.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "base/progress.h"

namespace plumb::cli {
namespace {

volatile std::sig_atomic_t stop_wanted = 0;

extern "C" void want_stop(int signal) {
  constexpr char text[] = "\nstopping after this step, with a checkpoint (once more: at once)\n";
  stop_wanted = 1;
  std::signal(signal, SIG_DFL);
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text, sizeof text - 1);  // the log may be locked
}

struct Arguments {
  std::string file;
  std::vector<std::string> overrides;
  bool json = false;
};

void print_json(const RunConfig& config, const RunSummary& s) {
  nlohmann::ordered_json j;
  j["steps"] = s.steps;
  j["total_steps"] = s.total_steps;
  j["stopped"] = s.stopped;
  j["loss"] = s.loss;  // NaN becomes null
  j["eval_loss"] = s.eval_loss;
  if (config.command == RunCommand::rl) j["reward"] = s.reward, j["eval_reward"] = s.eval_reward;
  j["tokens"] = s.tokens;
  j["seconds"] = s.seconds;
  j["output"] = config.output.dir;
  j["checkpoint"] = s.checkpoint;
  std::printf("%s\n", j.dump().c_str());
}

void report(const RunConfig& config, const RunSummary& s) {
  auto known = [](const char* name, double value) {
    return std::isnan(value) ? std::string() : fmt::format(", {} {:.5f}", name, value);
  };
  if (s.stopped)
    log_info("stopped after step {} of {}; start the same command again to go on", s.steps, s.total_steps);
  else
    log_info("done: {} steps{}{}{}{}", s.steps, known("loss", s.loss), known("eval/loss", s.eval_loss),
             known("reward", s.reward), known("eval/reward", s.eval_reward));
  if (s.seconds > 0)
    log_info("time in steps: {}, {:.0f} tokens/s", duration_text(s.seconds), static_cast<double>(s.tokens) / s.seconds);
  log_info("checkpoint: {}", s.checkpoint.empty() ? "none" : s.checkpoint);
  log_info("metrics: {}/metrics.jsonl, or tensorboard --logdir {}/tb", config.output.dir, config.output.dir);
}

}  // namespace

std::function<void()> setup_run(CLI::App& app, RunCommand command,
                                RunSummary (*run)(const RunConfig& config, const LoopHooks& hooks)) {
  auto a = std::make_shared<Arguments>();
  app.add_option("FILE", a->file, "run file (TOML), its keys are listed below")->required();
  app.add_option("--set", a->overrides, "KEY=VALUE: value of a key instead of the file's; may be repeated")
      ->allow_extra_args(false);
  app.add_flag("--json", a->json, "print a summary as one JSON object at the end");
  app.footer("\nKeys of the run file (docs/training.md):\n" + describe_run_keys(command));
  return [a, command, run] {
    const RunConfig config = load_run_config(command, a->file, a->overrides);
    std::signal(SIGINT, want_stop);
    std::signal(SIGTERM, want_stop);
    LoopHooks hooks;
    hooks.stop = [] { return stop_wanted != 0; };
    try {
      const RunSummary summary = run(config, hooks);
      report(config, summary);
      if (a->json) print_json(config, summary);
    } catch (const std::exception& e) {  // the caller prints it
      log_to_file(LogLevel::error, e.what());
      throw;
    }
  };
}

}  // namespace plumb::cli
