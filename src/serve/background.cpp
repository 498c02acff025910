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

std::unique_ptr<Answer> Background::answer(std::function<HttpReply()> work, Wake wake) {
  auto result = std::make_shared<Result>();
  result->wake = std::move(wake);
  auto answer = std::make_unique<BackgroundAnswer>(result);
  thread_.add([result, work = std::move(work)] {
    HttpReply reply = work();
    const std::lock_guard lock(result->mutex);
    result->reply = std::move(reply);
    result->wake();
  });
  return answer;
}

}  // namespace plumb::serve
