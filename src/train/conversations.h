// Samples of several turns with an environment program: its replies as tokens, its verdict as a score.
#pragma once
#include <memory>
#include <vector>

#include "reward/environment.h"
#include "train/rollouts.h"

namespace plumb {

// What the model said in answer number `turn` of a sample, for rewards.
Answer read_answer(const LoggedSample& sample, size_t turn, const Prompt& prompt, const Tokenizer* tokenizer,
                   const std::vector<int>& stop_tokens);
RewardSample reward_sample(const RolloutTask& task);

class Conversations {
 public:
  // All must outlive it; the prompts of the tasks are of format messages. Begins a conversation for each task: what the
  // environment adds to the prompt is in prompt(i). One that cannot be begun costs its sample.
  // row_tokens: prompt and answers together.
  Conversations(Environment& environment, const std::vector<RolloutTask>& tasks, const Tokenizer& tokenizer,
                const std::vector<int>& stop_tokens, int row_tokens);

  const Prompt& prompt(size_t i) const { return conversations_[i].prompt; }

  // What the environment says to answer number `turn`; answers that it has not heard yet (those of an interrupted run)
  // are told first. No tokens: the conversation is over, or the environment has failed.
  Reply reply(size_t i, int turn, const LoggedSample& so_far);
  // Tells what is left to tell and ends the conversation: the environment's rewards, or why there are none.
  Score close(size_t i, const LoggedSample& sample);

 private:
  struct Conversation {
    Prompt prompt;                                // with what the environment added
    std::unique_ptr<EnvironmentSession> session;  // nullptr: it has failed, or is over
    std::vector<Message> messages;
    size_t told = 0;  // answers
    bool done = false;
    std::string failure;
  };
  void open(Conversation& c, const RolloutTask& task, int row_tokens);
  Reply advance(Conversation& c, size_t turns, const LoggedSample& sample);

  Environment& environment_;
  const Tokenizer& tokenizer_;
  const std::vector<int>& stop_tokens_;
  std::vector<Conversation> conversations_;
};

}  // namespace plumb
