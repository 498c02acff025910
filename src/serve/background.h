// A thread for what takes too long for a network thread: reading an adapter's files.
#pragma once
#include <functional>
#include <memory>

#include "base/waiting.h"
#include "serve/http.h"

namespace plumb::serve {

class Background {
 public:
  // The answer is what `work` returns, once it has run; works run one after another. It must not throw.
  std::unique_ptr<Answer> answer(std::function<HttpReply()> work, Wake wake);

 private:
  WaitingThreads thread_{1};  // finishes the work that runs at the end, forgets the rest
};

}  // namespace plumb::serve
