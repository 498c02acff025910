// Threads for work that waits (for programs, endpoints, disks), where base/parallel.h is for work that computes.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace plumb {

// Calls body(0) ... body(n - 1), each once, on at most `threads` threads; returns when all are done. The body must not
// throw.
void for_each_waiting(int64_t n, int threads, const std::function<void(int64_t)>& body);

// Does works in the background, in the order in which they were added.
class WaitingThreads {
 public:
  explicit WaitingThreads(int most) : most_(static_cast<size_t>(most)) {}
  ~WaitingThreads();  // finishes the works that run, forgets the others
  WaitingThreads(const WaitingThreads&) = delete;
  WaitingThreads& operator=(const WaitingThreads&) = delete;

  // Must not throw. From any thread.
  void add(std::function<void()> work);

 private:
  void run();

  size_t most_, idle_ = 0;
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> works_;
  std::vector<std::jthread> threads_;  // started when there is work for them
};

}  // namespace plumb
