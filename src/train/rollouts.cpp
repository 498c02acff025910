#include "train/rollouts.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <limits>
#include <map>
#include <mutex>

#include "base/error.h"
#include "base/waiting.h"

namespace plumb {
namespace {

constexpr int kOutside = 16;                        // samples that programs and endpoints are asked about at once
constexpr std::chrono::milliseconds kPatience{50};  // between two calls of `progress` while there is only waiting

class Sampling {
 public:
  Sampling(Engine& engine, const std::vector<RolloutTask>& tasks, const RolloutOptions& options, RolloutLog& log)
      : engine_(engine), tasks_(tasks), options_(options), log_(log) {
    PLUMB_CHECK(tasks.size() == log.size());
    for (size_t i = 0; i < tasks.size(); ++i) go_on(i);
    log_.flush();
  }

  void run(const std::function<void()>& progress) {
    while (!engine_.idle() || outside_ > 0) {
      take_results(engine_.idle());
      if (!engine_.idle())
        for (const Event& e : engine_.step()) take(e);
      log_.flush();
      if (progress) progress();
    }
  }

 private:
  // Begins what comes next for a sample: an answer, the rest of one that was interrupted, the reply to one that has
  // ended, or the reward.
  void go_on(size_t i) {
    const LoggedSample& s = log_[i];
    if (s.open_tokens() > 0 || s.turn_end.empty() || s.turn_end.back() < static_cast<int>(s.tokens.size()))
      return answer(i);
    const int turns = static_cast<int>(s.turn_end.size());
    if (s.reward || !options_.reply || turns >= options_.max_turns || s.finish.back() != Finish::stop) return score(i);
    ask([this, i, turns, s] { return options_.reply(i, turns - 1, s); },
        [this, i](const Reply& reply) {
          const size_t length = tasks_[i].prompt->tokens.size() + log_[i].tokens.size() + reply.tokens.size();
          if (reply.tokens.empty() || length >= static_cast<size_t>(options_.row_tokens)) return score(i);
          log_.add_reply(i, reply.tokens);
          answer(i);
        });
  }

  void answer(size_t i) {
    const LoggedSample& s = log_[i];
    Request r;
    r.prompt = tasks_[i].prompt->tokens;
    const auto begun = s.tokens.end() - s.open_tokens();
    r.prompt.insert(r.prompt.end(), s.tokens.begin(), begun);
    r.answer.assign(begun, s.tokens.end());
    r.sampling = options_.sampling;
    r.sampling.max_tokens = std::min(r.sampling.max_tokens, options_.row_tokens - static_cast<int>(r.prompt.size()));
    r.key = tasks_[i].key;
    r.adapter = options_.adapter;
    r.routed_experts = options_.routed;
    sample_of_[engine_.submit(std::move(r))] = i;
  }

  void score(size_t i) {
    if (log_[i].reward || !options_.score) return;
    ask([this, i, s = log_[i]] { return options_.score(i, s); },
        [this, i](const std::string& json) { log_.set_reward(i, json); });
  }

  void take(const Event& e) {
    const auto at = sample_of_.find(e.request);
    PLUMB_CHECK(at != sample_of_.end());
    const size_t i = at->second;
    if (e.finish == Finish::error) fail("sampling", e.error);
    if (e.routed.defined()) log_.set_routed(i, {e.routed.ptr<int32_t>(), e.routed.ptr<int32_t>() + e.routed.numel()});
    log_.add_token(i, e.token.id, e.token.logprob, e.finish);
    if (e.finish == Finish::none) return;
    sample_of_.erase(at);
    go_on(i);
  }

  // Runs `outside` on another thread and, some time later, `then` with its result on this one.
  template <class Outside, class Then>
  void ask(Outside outside, Then then) {
    ++outside_;
    threads_.add([this, outside = std::move(outside), then = std::move(then)] {
      std::function<void()> result;
      try {
        result = [then, value = outside()] { then(value); };
      } catch (...) {
        result = [error = std::current_exception()] { std::rethrow_exception(error); };
      }
      const std::lock_guard lock(mutex_);
      results_.push_back(std::move(result));
      came_.notify_one();
    });
  }

  void take_results(bool wait) {
    std::deque<std::function<void()>> results;
    {
      std::unique_lock lock(mutex_);
      if (wait) came_.wait_for(lock, kPatience, [this] { return !results_.empty(); });
      results.swap(results_);
    }
    for (const auto& result : results) {
      --outside_;
      result();
    }
  }

  Engine& engine_;
  const std::vector<RolloutTask>& tasks_;
  const RolloutOptions& options_;
  RolloutLog& log_;
  std::map<RequestId, size_t> sample_of_;
  size_t outside_ = 0;  // samples that wait for a reply or a reward
  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<std::function<void()>> results_;  // under mutex_
  WaitingThreads threads_{kOutside};           // last: its works use the members above
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
  s.routed = logged.routed;
  return s;
}

bool truncated(const LoggedSample& logged) { return !logged.finish.empty() && logged.finish.back() == Finish::length; }

}  // namespace plumb
