// The thread that owns the engine. Connections put requests into its queue and get tokens through a mailbox each; no
// call here waits for the engine.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "rollout/engine.h"
#include "serve/exchange.h"
#include "serve/http.h"
#include "serve/metrics.h"

namespace plumb::serve {

// What the engine has for one exchange. Written by the engine's thread, read by the connection's.
class Mailbox {
 public:
  struct Item {
    int choice;
    Event event;
  };
  struct Content {
    bool accepted = false;  // the engine has taken the requests
    std::vector<Item> items;
    std::optional<ApiError> error;  // nothing comes after it
  };

  // wake: called when there is something new. limit: bytes that may lie here unread.
  Mailbox(Wake wake, size_t limit) : wake_(std::move(wake)), limit_(limit) {}
  Content take();
  void close();  // the reader has gone: it is not woken any more

  void accept();
  bool put(Item item);  // false: more than the limit lies here already, so the reader is too slow; nothing was put
  void fail(ApiError error);

 private:
  std::mutex mutex_;
  Wake wake_;
  size_t limit_, bytes_ = 0;
  Content content_;
};

struct EngineThreadOptions {
  int max_open = 1024;                   // answers that run or wait; more are refused with 429
  std::chrono::milliseconds timeout{0};  // of an answer, from its request; 0 = none
  size_t max_unread = size_t{8} << 20;   // bytes that a client may leave unread before it is cut off
};

class EngineThread {
 public:
  using JobId = uint64_t;
  EngineThread(std::unique_ptr<Engine> engine, const EngineThreadOptions& options, Metrics& metrics);
  ~EngineThread();  // ends what is still running with an error

  // Queues the requests of one exchange: the engine takes all of them or none. What becomes of them is told in the
  // mailbox. Error: ApiError 429 if too many are open already.
  JobId submit(std::vector<Request> requests, std::shared_ptr<Mailbox> mailbox);
  std::shared_ptr<Mailbox> mailbox(Wake wake) const {
    return std::make_shared<Mailbox>(std::move(wake), options_.max_unread);
  }
  // Frees at once what the exchange holds. Nothing happens if it has ended.
  void cancel(JobId job);
  EngineStats stats() const;  // after the last step

 private:
  using Clock = std::chrono::steady_clock;
  struct Command {
    JobId job = 0;
    std::vector<Request> requests;     // empty: cancel
    std::shared_ptr<Mailbox> mailbox;  // nullptr: cancel
    Clock::time_point asked;
  };
  struct Choice {
    RequestId request = 0;  // 0: it has ended
    int64_t prompt = 0;     // tokens
    bool begun = false;     // the engine has told something
    std::optional<Clock::time_point> last_token;
  };
  struct Job {
    std::shared_ptr<Mailbox> mailbox;
    std::vector<Choice> choices;
    int open = 0;  // choices that have not ended
    Clock::time_point asked;
  };
  using Jobs = std::map<JobId, Job>;

  void run();
  bool take_commands();  // false: stop
  void publish_stats();
  void start(Command& command);
  void step();
  void deliver(Event event);
  void count_token(Choice& choice, Clock::time_point asked);
  void end_choice(Jobs::iterator job, Choice& choice, const char* reason);
  void end_job(Jobs::iterator job, const char* reason, const std::optional<ApiError>& error);
  void end_late();

  // Of the engine's thread.
  std::unique_ptr<Engine> engine_;
  const EngineThreadOptions options_;
  Metrics& metrics_;
  Jobs jobs_;  // ids rise with time
  struct Place {
    JobId job;
    int choice;
  };
  std::unordered_map<RequestId, Place> places_;

  mutable std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::vector<Command> commands_;
  EngineStats stats_;
  JobId next_job_ = 1;
  int open_ = 0;
  bool stop_ = false;

  std::thread thread_;
};

}  // namespace plumb::serve
