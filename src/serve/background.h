// A thread for what takes too long for a network thread: reading an adapter's files.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "serve/http.h"

namespace plumb::serve {

class Background {
 public:
  Background();
  ~Background();  // finishes the work that runs, forgets the rest
  // The answer is what `work` returns, once it has run; works run one after another. It must not throw.
  std::unique_ptr<Answer> answer(std::function<HttpReply()> work, Wake wake);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> works_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace plumb::serve
