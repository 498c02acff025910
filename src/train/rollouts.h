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
// Called when answer number `turn` (from 0) of a sample has ended and another one is allowed. Slow ones hold up the
// others.
using ReplyFunction = std::function<Reply(size_t sample, int turn, const LoggedSample& so_far)>;

struct RolloutOptions {
  SamplingParams sampling;
  std::string adapter;  // in the engine's registry; empty = base model
  int max_turns = 1;
  int row_tokens = 0;  // prompt, answers and replies together
  ReplyFunction reply;
};

// Samples what the log does not have yet and returns when every sample is finished. Calls `progress` after each step of
// the engine, which may be empty. What an interrupted run had begun goes on where it was: the same tokens as without
// the interruption.
void sample_rollouts(Engine& engine, const std::vector<RolloutTask>& tasks, const RolloutOptions& options,
                     RolloutLog& log, const std::function<void()>& progress = {});

// A finished sample as training sees it.
RlSample rl_sample(const RolloutTask& task, const LoggedSample& logged);

// Whether the last answer was cut off by a limit on length.
bool truncated(const LoggedSample& logged);

}  // namespace plumb
