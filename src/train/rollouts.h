// Answers to a batch of prompts, by the engine: one or several turns, token by token into the log.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/prompts.h"
#include "rollout/engine.h"
#include "train/rl_step.h"
#include "train/rollout_log.h"

namespace plumb {

struct RolloutTask {
  const Prompt* prompt = nullptr;
  int group = 0, number = 0;  // samples of a group answer one prompt
  uint64_t key = 0;           // of the random numbers; no other sample of the run has it
};

// What comes after an answer that ended by itself.
struct Reply {
  std::vector<int> tokens;  // to be read in front of the next answer; empty: the sample is finished
};

struct RolloutOptions {
  SamplingParams sampling;
  std::string adapter;  // in the engine's registry; empty = base model
  int max_turns = 1;
  int row_tokens = 0;   // prompt, answers and replies together
  bool routed = false;  // record the experts that each token went to

  // Both may be empty. They are called on threads of their own, for several samples at a time but never twice at once
  // for one, while the others are sampled: a slow one holds up its own sample alone.
  // Called when answer number `turn` (from 0) of a sample has ended and another one is allowed.
  std::function<Reply(size_t sample, int turn, const LoggedSample& so_far)> reply;
  // Called when a sample is finished and the log has no reward for it: the reward to be logged, as JSON.
  std::function<std::string(size_t sample, const LoggedSample& whole)> score;
};

// Samples and scores what the log does not have yet and returns when every sample is finished. Calls `progress`, which
// may be empty, after each step of the engine and every now and then while there is only waiting to be done. What an
// interrupted run had begun goes on where it was: the same tokens as without the interruption. What reply and score
// throw is thrown here.
void sample_rollouts(Engine& engine, const std::vector<RolloutTask>& tasks, const RolloutOptions& options,
                     RolloutLog& log, const std::function<void()>& progress = {});

// A finished sample as training sees it.
RlSample rl_sample(const RolloutTask& task, const LoggedSample& logged);

// Whether the last answer was cut off by a limit on length.
bool truncated(const LoggedSample& logged);

}  // namespace plumb
