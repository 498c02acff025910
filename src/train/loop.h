// The loop of a run: rows, step, metrics, evaluation, checkpoints; the same for adapters (sft.h) and whole models
// (pretrain.h). A run that was killed at any time goes on from its newest checkpoint with the bits that it would have
// had.
#pragma once
#include <cmath>
#include <functional>
#include <string>

#include "config/run_config.h"
#include "train/parameters.h"
#include "train/run_directory.h"
#include "train/training_data.h"

namespace plumb {

struct LoopHooks {
  std::function<bool()> stop;                    // asked after each step; true: save a checkpoint and return
  std::function<void(int64_t step)> after_step;  // after the step's metrics and checkpoint are written
};

struct RunSummary {
  int64_t steps = 0;                  // of the run so far, those before a resumption included
  int64_t total_steps = 0;            // of the whole run
  double loss = std::nan("");         // of the last step; NaN if none was done now
  double eval_loss = std::nan("");    // last evaluation; NaN if there was none
  double reward = std::nan("");       // rl: mean of the last step
  double eval_reward = std::nan("");  // rl: mean of the last evaluation
  int64_t tokens = 0;                 // computed now
  double seconds = 0;                 // spent in steps now
  std::string checkpoint;             // folder of the newest checkpoint, "" = none
  bool stopped = false;               // by LoopHooks::stop before the last step
};

// Errors name the step: a loss or a gradient that is not finite (nothing is saved then), a full disk.
RunSummary run_loop(const RunConfig& config, Trainee& trainee, const TrainingData& data, const RunDirectory& directory,
                    const LoopHooks& hooks = {});

// The steps of any loop, from `done` to summary.total_steps: progress, stopping, checkpoints. step: does one, raises
// `done`, gives the note of the progress line. save: writes a checkpoint; called every save_every steps (0 = never), at
// the end and on a stop.
void run_steps(const std::string& what, int64_t save_every, const LoopHooks& hooks, const int64_t& done,
               RunSummary& summary, const std::function<std::string()>& step, const std::function<void()>& save);

// Whether something that is done every so many steps (0 = never) is due after `step`.
inline bool is_due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

// "1,234,567"
std::string with_commas(int64_t n);

}  // namespace plumb
