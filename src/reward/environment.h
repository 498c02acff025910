// Conversations of several turns with a program: it answers each answer of the model with new messages (tool results, a
// user's next words) until it is done (docs/rewards.md has the protocol).
#pragma once
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <vector>

#include "reward/program.h"
#include "reward/reward.h"

namespace plumb {

struct EnvironmentTurn {
  nlohmann::json messages = nlohmann::json::array();  // to be added to the conversation, in OpenAI's form; none is the
                                                      // assistant's
  nlohmann::json tools;  // of the first turn: function objects that replace the prompt's, or null
  bool done = false;     // the conversation is over
};

class EnvironmentSession;

// The processes of an environment. Sessions may be opened, advanced and closed from several threads at once, each
// session from one at a time. A session stays with one process. A process holds several sessions if there are more than
// processes; then one that hangs is killed with all of them, so `processes` should be the number of samples in flight
// where that matters.
class Environment {
 public:
  // Starts the first process, others when they are needed. Error: the command cannot be started.
  explicit Environment(const ProgramKeys& keys);
  ~Environment();  // after all sessions

  // The sample's line, messages, group and number begin a conversation. `first` gets what the program wants to add to
  // the prompt. Error: as for a request; a crash is tried again in a fresh process.
  std::unique_ptr<EnvironmentSession> open(const RewardSample& sample, EnvironmentTurn& first);

 private:
  friend class EnvironmentSession;
  struct Place {
    std::mutex busy;  // held for a request
    Program* program = nullptr;
    int sessions = 0;  // under mutex_
  };
  Place& take_place();
  void leave_place(Place& place);

  int64_t retries_;
  std::vector<std::unique_ptr<Program>> programs_;
  std::vector<std::unique_ptr<Place>> places_;
  std::mutex mutex_;
  int64_t next_session_ = 1;  // under mutex_
};

// One conversation. An Error of any function is the reason why the sample has no score; the session is over with it.
class EnvironmentSession {
 public:
  ~EnvironmentSession();  // tells the program, if the conversation was not over, and does not wait
  EnvironmentSession(const EnvironmentSession&) = delete;
  EnvironmentSession& operator=(const EnvironmentSession&) = delete;

  // What the model said, and what comes next. Error: as for a request; the process has ended, with all that it knew.
  EnvironmentTurn advance(const Answer& answer);

  // Ends the conversation: reason is done, or why it ends before (length, turns, tokens, ...), of which the program is
  // told and may give a last reward. Gives the sum of all rewards and the last value of each metric. Error: no reward
  // was given.
  Score close(const std::string& reason = "done");

  int64_t turns() const { return turns_; }

 private:
  friend class Environment;
  EnvironmentSession(Environment& environment, Environment::Place& place, int64_t id)
      : environment_(environment), place_(place), id_(id) {}
  nlohmann::json ask(const nlohmann::json& request);
  EnvironmentTurn read_turn(const nlohmann::json& reply);
  void collect(const nlohmann::json& reply);

  Environment& environment_;
  Environment::Place& place_;
  int64_t id_;
  int64_t generation_ = 0;  // of the process that knows the session
  int64_t turns_ = 0;
  bool over_ = false;
  bool rewarded_ = false;
  Score score_;
};

}  // namespace plumb
