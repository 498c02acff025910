#include "base/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include <sched.h>

namespace plumb {
namespace {

thread_local bool inside_loop = false;

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

// One loop at a time: workers take chunks from a shared counter until none is left.
class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& w : workers_) w.join();
  }
  int threads() const { return threads_; }

  void run(int64_t n, int64_t chunk, const std::function<void(int64_t, int64_t)>& body) {
    std::lock_guard one_loop(loop_mutex_);
    {
      std::lock_guard lock(mutex_);
      body_ = &body, n_ = n, chunk_ = chunk, next_ = 0, error_ = nullptr;
      busy_ = static_cast<int>(workers_.size());
      ++generation_;
    }
    wake_.notify_all();
    take_chunks();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    body_ = nullptr;
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void take_chunks() {
    inside_loop = true;
    for (int64_t begin; (begin = next_.fetch_add(chunk_)) < n_;) {
      try {
        (*body_)(begin, std::min(begin + chunk_, n_));
      } catch (...) {
        std::lock_guard lock(mutex_);
        if (!error_) error_ = std::current_exception();
      }
    }
    inside_loop = false;
  }
  void work() {
    uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
        if (stop_) return;
        seen = generation_;
      }
      take_chunks();
      std::lock_guard lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }

  const int threads_;
  std::vector<std::thread> workers_;
  std::mutex loop_mutex_, mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(int64_t, int64_t)>* body_ = nullptr;
  int64_t n_ = 0, chunk_ = 1;
  std::atomic<int64_t> next_{0};
  int busy_ = 0;
  uint64_t generation_ = 0;
  bool stop_ = false;
  std::exception_ptr error_;
};

std::mutex pool_mutex;
std::shared_ptr<Pool> pool;

std::shared_ptr<Pool> the_pool() {
  std::lock_guard lock(pool_mutex);
  if (!pool) pool = std::make_shared<Pool>(usable_cores());
  return pool;
}

}  // namespace

void parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  if (inside_loop || n <= grain) return body(0, n);
  const auto p = the_pool();
  if (p->threads() == 1) return body(0, n);
  const int64_t even = (n + p->threads() * 4 - 1) / (p->threads() * 4);  // four chunks a thread balance uneven bodies
  p->run(n, std::max(grain, even), body);
}

int thread_count() { return the_pool()->threads(); }

void set_thread_count(int n) {
  auto fresh = std::make_shared<Pool>(std::max(1, n));
  std::lock_guard lock(pool_mutex);
  pool.swap(fresh);
}

}  // namespace plumb
