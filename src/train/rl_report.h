// What a step of reinforcement learning tells: metrics, samples.jsonl, warnings.
#pragma once
#include "train/json_lines.h"
#include "train/metrics.h"
#include "train/rl_batch.h"
#include "train/rl_step.h"

namespace plumb {

// Figures of a batch under `prefix` ("" or "eval/"): rewards if there are any, lengths, failures.
Metrics batch_metrics(const RlBatch& batch, const std::string& prefix, bool rewarded);
double mean_reward(const RlBatch& batch);

struct RlStepFigures {
  RlStepResult result;
  GroupCounts groups;
  int64_t logical_tokens = 0, physical_tokens = 0, trained = 0;
  double grad_norm = 0, learning_rate = 0;
  double sample_seconds = 0, wait_seconds = 0, train_seconds = 0;
  int64_t steps_behind = 0;
  bool rewarded = true;      // answers have rewards
  bool uses_rewards = true;  // and the loss looks at them
  bool distilled = false;    // there is a teacher
};
Metrics step_metrics(const RlStepFigures& figures, const RlBatch& batch);

// The figures of the progress line: reward, mismatch, distances, length, speed.
std::string progress_note(const RlStepFigures& figures, const RlBatch& batch);

// One line a sample. difference: per trained token, new log-probability - recorded one; empty for samples that were not
// trained.
void write_samples(JsonLines& file, int64_t step, const RlBatch& batch, const std::vector<SampleWeight>& weights,
                   const std::vector<std::vector<float>>& difference);

// Logs what a person should look at: mismatch, no variance, truncation, failed rewards.
void warn(int64_t step, const RlStepFigures& figures, const RlBatch& batch);

}  // namespace plumb
