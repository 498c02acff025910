// A batch of rollouts with their rewards: what a step of reinforcement learning trains on, or an evaluation measures.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "config/run_config.h"
#include "data/prompts.h"
#include "reward/scorer.h"
#include "train/conversations.h"

namespace plumb {

struct RlBatch {
  std::vector<RolloutTask> tasks;
  std::vector<LoggedSample> samples;  // one a task
  std::vector<Answer> answers;        // the last one of each sample
  std::vector<Score> scores;
  std::shared_ptr<const Conversations> conversations;  // with an environment: the tasks' prompts belong to it
  double seconds = 0;                                  // of sampling and rewards together
};

// What is sampled how. Prompts must outlive the batch.
struct BatchRequest {
  std::vector<const Prompt*> prompts;  // one a group
  int group_size = 1;
  uint64_t first_key = 0;  // random numbers of sample i: first_key + i
  SamplingParams sampling;
  std::string adapter;
  std::string log;      // path of the write-ahead log
  bool routed = false;  // record the experts that each token went to
};

// Samples and scores batches on one engine. One batch at a time, from any thread.
class BatchSampler {
 public:
  // The weights must outlive it. tokenizer: nullptr if there is none. environment: nullptr = single turns. stop: asked
  // after each step of the engine; true ends sample() with an Error.
  BatchSampler(WeightStore& weights, std::shared_ptr<AdapterRegistry> registry, const RunConfig& config,
               const Tokenizer* tokenizer, const Scorer& scorer, Environment* environment, std::function<bool()> stop);
  RlBatch sample(const BatchRequest& request);

 private:
  const RunConfig& config_;
  const Tokenizer* tokenizer_;
  const Scorer& scorer_;
  Environment* environment_;
  std::function<bool()> stop_;
  Engine engine_;
};

}  // namespace plumb
