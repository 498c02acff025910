#include "serve/background.h"

namespace plumb::serve {
namespace {

// Shared by the answer and the work: either may outlive the other.
struct Result {
  std::mutex mutex;
  std::optional<HttpReply> reply;
  Wake wake;
};

class BackgroundAnswer : public Answer {
 public:
  explicit BackgroundAnswer(std::shared_ptr<Result> result) : result_(std::move(result)) {}
  ~BackgroundAnswer() override {
    const std::lock_guard lock(result_->mutex);
    result_->wake = [] {};
  }
  std::optional<HttpReply> reply() override {
    const std::lock_guard lock(result_->mutex);
    return std::move(result_->reply);
  }
  bool more(std::string&) override { return true; }
  void quiet(std::string&) override {}

 private:
  std::shared_ptr<Result> result_;
};

}  // namespace

Background::Background() : thread_([this] { run(); }) {}

Background::~Background() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

std::unique_ptr<Answer> Background::answer(std::function<HttpReply()> work, Wake wake) {
  auto result = std::make_shared<Result>();
  result->wake = std::move(wake);
  auto answer = std::make_unique<BackgroundAnswer>(result);
  {
    const std::lock_guard lock(mutex_);
    works_.push_back([result, work = std::move(work)] {
      HttpReply reply = work();
      const std::lock_guard lock(result->mutex);
      result->reply = std::move(reply);
      result->wake();
    });
  }
  changed_.notify_one();
  return answer;
}

void Background::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !works_.empty(); });
    if (stop_) return;
    const auto work = std::move(works_.front());
    works_.pop_front();
    lock.unlock();
    work();
    lock.lock();
  }
}

}  // namespace plumb::serve
