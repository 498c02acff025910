#include "train/rollouts.h"

#include <algorithm>
#include <limits>
#include <map>

#include "base/error.h"

namespace plumb {
namespace {

class Sampling {
 public:
  Sampling(Engine& engine, const std::vector<RolloutTask>& tasks, const RolloutOptions& options, RolloutLog& log)
      : engine_(engine), tasks_(tasks), options_(options), log_(log) {
    PLUMB_CHECK(tasks.size() == log.size());
    for (size_t i = 0; i < tasks.size(); ++i) go_on(i);
    log_.flush();
  }

  void run(const std::function<void()>& progress) {
    while (!engine_.idle()) {
      for (const Event& e : engine_.step()) take(e);
      log_.flush();
      if (progress) progress();
    }
  }

 private:
  // Starts the next answer of a sample, or the rest of one that was interrupted; nothing if it is finished.
  void go_on(size_t i) {
    const LoggedSample& s = log_[i];
    const bool open = s.open_tokens() > 0 || s.turn_end.empty();
    if (!open && s.turn_end.back() == static_cast<int>(s.tokens.size()) && !add_reply(i)) return;
    Request r;
    r.prompt = tasks_[i].prompt->tokens;
    const auto answer = log_[i].tokens.end() - log_[i].open_tokens();
    r.prompt.insert(r.prompt.end(), log_[i].tokens.begin(), answer);
    r.answer.assign(answer, log_[i].tokens.end());
    r.sampling = options_.sampling;
    r.sampling.max_tokens = std::min(r.sampling.max_tokens, options_.row_tokens - static_cast<int>(r.prompt.size()));
    r.key = tasks_[i].key;
    r.adapter = options_.adapter;
    sample_of_[engine_.submit(std::move(r))] = i;
  }

  // The environment's reply to an answer that has ended. false: the sample is finished.
  bool add_reply(size_t i) {
    const LoggedSample& s = log_[i];
    const int turns = static_cast<int>(s.turn_end.size());
    if (turns >= options_.max_turns || s.finish.back() != Finish::stop || !options_.reply) return false;
    const Reply reply = options_.reply(i, turns - 1, s);
    const size_t length = tasks_[i].prompt->tokens.size() + s.tokens.size() + reply.tokens.size();
    if (reply.tokens.empty() || length >= static_cast<size_t>(options_.row_tokens)) return false;
    log_.add_reply(i, reply.tokens);
    return true;
  }

  void take(const Event& e) {
    const auto at = sample_of_.find(e.request);
    PLUMB_CHECK(at != sample_of_.end());
    const size_t i = at->second;
    if (e.finish == Finish::error) fail("sampling", e.error);
    log_.add_token(i, e.token.id, e.token.logprob, e.finish);
    if (e.finish == Finish::none) return;
    sample_of_.erase(at);
    go_on(i);
  }

  Engine& engine_;
  const std::vector<RolloutTask>& tasks_;
  const RolloutOptions& options_;
  RolloutLog& log_;
  std::map<RequestId, size_t> sample_of_;
};

}  // namespace

void sample_rollouts(Engine& engine, const std::vector<RolloutTask>& tasks, const RolloutOptions& options,
                     RolloutLog& log, const std::function<void()>& progress) {
  Sampling(engine, tasks, options, log).run(progress);
}

RlSample rl_sample(const RolloutTask& task, const LoggedSample& logged) {
  RlSample s;
  s.tokens = task.prompt->tokens;
  s.prompt = static_cast<int>(s.tokens.size());
  s.group = task.group;
  s.mask.assign(s.tokens.size(), 0);
  s.logprob.assign(s.tokens.size(), std::numeric_limits<float>::quiet_NaN());
  s.tokens.insert(s.tokens.end(), logged.tokens.begin(), logged.tokens.end());
  s.logprob.insert(s.logprob.end(), logged.logprob.begin(), logged.logprob.end());
  for (size_t i = 0; i < logged.tokens.size(); ++i) s.mask.push_back(logged.policy_made(i));
  return s;
}

bool truncated(const LoggedSample& logged) { return !logged.finish.empty() && logged.finish.back() == Finish::length; }

}  // namespace plumb
