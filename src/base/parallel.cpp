#include "base/parallel.h"

#include <immintrin.h>

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

// Decoding runs loops of some ten microseconds one after the other; going to sleep between them would cost more than
// they take. So threads look for work, or for the others' end, a moment before they sleep.
template <class Condition>
void spin_until(Condition&& met) {
  constexpr int kLooks = 400;  // about 20 microseconds
  for (int i = 0; i < kLooks && !met(); ++i) _mm_pause();
}

// One loop at a time: threads take chunks from a shared counter until none is left. A worker that comes when the caller
// has taken the last chunk is not waited for.
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
    bool wake;
    {
      std::lock_guard lock(mutex_);
      body_ = &body, n_ = n, chunk_ = chunk, next_ = 0, error_ = nullptr;
      open_ = true;
      wake = sleeping_ > 0;
      ++generation_;
    }
    if (wake) wake_.notify_all();
    take_chunks();
    std::unique_lock lock(mutex_);
    open_ = false;
    if (active_ > 0) {
      lock.unlock();
      spin_until([this] { return active_ == 0; });
      lock.lock();
      done_.wait(lock, [this] { return active_ == 0; });
    }
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
    const auto called = [&] { return stop_ || generation_ != seen; };
    for (;;) {
      spin_until(called);
      std::unique_lock lock(mutex_);
      ++sleeping_;
      wake_.wait(lock, called);
      --sleeping_;
      if (stop_) return;
      seen = generation_;
      if (!open_) continue;
      ++active_;
      lock.unlock();
      take_chunks();
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  const int threads_;
  std::vector<std::thread> workers_;
  std::mutex loop_mutex_, mutex_;  // mutex_: all below; what spinning threads look at is atomic as well
  std::condition_variable wake_, done_;
  const std::function<void(int64_t, int64_t)>* body_ = nullptr;
  int64_t n_ = 0, chunk_ = 1;
  std::atomic<int64_t> next_{0};
  bool open_ = false;           // chunks may be left: workers may join
  std::atomic<int> active_{0};  // workers inside the loop
  int sleeping_ = 0;
  std::atomic<uint64_t> generation_{0};
  std::atomic<bool> stop_{false};
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

bool inside_parallel_for() { return inside_loop; }

int thread_count() { return the_pool()->threads(); }

void set_thread_count(int n) {
  auto fresh = std::make_shared<Pool>(std::max(1, n));
  std::lock_guard lock(pool_mutex);
  pool.swap(fresh);
}

}  // namespace plumb
