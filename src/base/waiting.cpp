#include "base/waiting.h"

#include <algorithm>
#include <atomic>

namespace plumb {

void for_each_waiting(int64_t n, int threads, const std::function<void(int64_t)>& body) {
  std::atomic<int64_t> next = 0;
  const auto work = [&] {
    for (int64_t k = next++; k < n; k = next++) body(k);
  };
  std::vector<std::jthread> others;
  for (int64_t k = 1; k < std::min<int64_t>(threads, n); ++k) others.emplace_back(work);
  work();
}

WaitingThreads::~WaitingThreads() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  threads_.clear();  // joins
}

void WaitingThreads::add(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  works_.push_back(std::move(work));
  if (idle_ < works_.size() && threads_.size() < most_) threads_.emplace_back([this] { run(); });
  changed_.notify_one();
}

void WaitingThreads::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    ++idle_;
    changed_.wait(lock, [this] { return stop_ || !works_.empty(); });
    --idle_;
    if (stop_) return;
    const auto work = std::move(works_.front());
    works_.pop_front();
    lock.unlock();
    work();
    lock.lock();
  }
}

}  // namespace plumb
