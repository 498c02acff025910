// The engine's thread without a network: queues, mailboxes, ends.
#include "serve/engine_thread.h"

#include <gtest/gtest.h>

#include <condition_variable>

#include "base/error.h"
#include "support/tiny_model.h"

namespace plumb::serve {
namespace {

using plumb::testing::random_model;
using plumb::testing::random_tokens;
using plumb::testing::tiny_config;
using std::chrono::milliseconds;

// Reads a mailbox until its exchange has ended.
class Reader {
 public:
  Wake wake() {
    return [this] {
      const std::lock_guard lock(mutex_);
      woken_ = true;
      changed_.notify_one();
    };
  }
  // Everything that comes, up to an error or the end of `choices` answers.
  Mailbox::Content all(Mailbox& box, int choices) {
    Mailbox::Content all;
    while (choices > 0 && !all.error) {
      wait();
      Mailbox::Content c = box.take();
      all.accepted |= c.accepted;
      all.error = c.error;
      for (auto& item : c.items) {
        choices -= item.event.finish != Finish::none;
        all.items.push_back(std::move(item));
      }
    }
    return all;
  }

 private:
  void wait() {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, std::chrono::seconds(20), [&] { return woken_; }));
    woken_ = false;
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool woken_ = false;
};

struct Fixture {
  explicit Fixture(EngineThreadOptions options = {}, std::function<void(SequencePlan&)> edit_plan = {})
      : weights(random_model(tiny_config(), 1)) {
    EngineOptions e;
    e.numerics = Numerics::fp32;
    e.max_running = 4, e.key_pages = 128, e.entry_pages = 1024;
    e.edit_plan = std::move(edit_plan);
    thread.emplace(std::make_unique<Engine>(*weights, e), options, metrics);
  }
  Request request(int tokens, int prompt = 5) const {
    Request r;
    r.prompt = random_tokens(weights->model, prompt, 3);
    r.sampling.max_tokens = tokens;
    return r;
  }
  // Waits for the engine: a request is answered only after all that was asked before it.
  EngineStats settled() {
    Reader reader;
    const auto box = thread->mailbox(reader.wake());
    thread->submit({request(1)}, box);
    reader.all(*box, 1);
    EngineStats s = thread->stats();
    while (s.running + s.waiting > 0) s = thread->stats();
    return s;
  }

  std::shared_ptr<ResidentWeights> weights;
  Metrics metrics;
  std::optional<EngineThread> thread;
};

TEST(EngineThread, AllChoicesOfAnExchangeComeToItsMailbox) {
  Fixture f;
  Reader reader;
  const auto box = f.thread->mailbox(reader.wake());
  f.thread->submit({f.request(3), f.request(5)}, box);
  const auto got = reader.all(*box, 2);
  EXPECT_TRUE(got.accepted);
  int tokens[2] = {0, 0};
  for (const auto& item : got.items) ++tokens[item.choice];
  EXPECT_EQ(tokens[0], 3);
  EXPECT_EQ(tokens[1], 5);
}

TEST(EngineThread, OneBadRequestRefusesTheWholeExchange) {
  Fixture f;
  Reader reader;
  const auto box = f.thread->mailbox(reader.wake());
  Request bad = f.request(3);
  bad.prompt[2] = 1'000'000;
  f.thread->submit({f.request(100), bad}, box);
  const auto got = reader.all(*box, 2);
  ASSERT_TRUE(got.error);
  EXPECT_EQ(got.error->status, 400);
  EXPECT_EQ(got.error->field, "prompt");
  EXPECT_FALSE(got.accepted);
  const EngineStats s = f.settled();
  EXPECT_EQ(s.held_entry_pages + s.held_key_pages, 0);
}

TEST(EngineThread, CancelFreesWhatIsHeld) {
  Fixture f;
  Reader reader;
  const auto box = f.thread->mailbox(reader.wake());
  const auto job = f.thread->submit({f.request(4000), f.request(4000)}, box);
  f.thread->cancel(job);
  f.thread->cancel(job);
  const EngineStats s = f.settled();
  EXPECT_EQ(s.held_entry_pages + s.held_key_pages, 0);
}

TEST(EngineThread, FullQueueIs429AndHasRoomAgainLater) {
  EngineThreadOptions o;
  o.max_open = 2;
  Fixture f(o);
  Reader reader;
  const auto box = f.thread->mailbox(reader.wake());
  const auto job = f.thread->submit({f.request(4000), f.request(4000)}, box);
  const auto status = [&](int count) {
    try {
      f.thread->submit(std::vector<Request>(count, f.request(1)), box);
    } catch (const ApiError& e) {
      EXPECT_EQ(e.retry_after > 0, e.status == 429);
      return e.status;
    }
    return 0;
  };
  EXPECT_EQ(status(1), 429);
  EXPECT_EQ(status(3), 400);  // more than there will ever be room for
  f.thread->cancel(job);
  while (status(1) == 429) std::this_thread::yield();
}

TEST(EngineThread, ReaderThatLeavesTooMuchUnreadIsCutOff) {
  EngineThreadOptions o;
  o.max_unread = 4 * sizeof(Event);
  Fixture f(o);
  const auto box = f.thread->mailbox([] {});
  f.thread->submit({f.request(2000)}, box);
  const EngineStats s = f.settled();
  EXPECT_EQ(s.held_entry_pages + s.held_key_pages, 0);
  const auto got = box->take();
  ASSERT_TRUE(got.error);
  EXPECT_EQ(got.error->status, 408);
  EXPECT_LT(got.items.size(), 8u);
}

TEST(EngineThread, AnswersEndAfterTheTimeout) {
  EngineThreadOptions o;
  o.timeout = milliseconds(30);
  Fixture f(o);
  Reader reader;
  const auto box = f.thread->mailbox(reader.wake());
  f.thread->submit(std::vector<Request>(8, f.request(4000)), box);
  const auto got = reader.all(*box, 8);
  ASSERT_TRUE(got.error);
  EXPECT_EQ(got.error->status, 504);
}

TEST(EngineThread, FailureOfAStepEndsItsRequestsAndTheEngineGoesOn) {
  bool broken = true;
  Fixture f({}, [&](SequencePlan&) {
    if (std::exchange(broken, false)) throw std::runtime_error("planted");
  });
  Reader reader;
  const auto box = f.thread->mailbox(reader.wake());
  f.thread->submit({f.request(3)}, box);
  const auto failed = reader.all(*box, 1);
  ASSERT_TRUE(failed.error);
  EXPECT_EQ(failed.error->status, 500);
  EXPECT_NE(failed.error->message.find("planted"), std::string::npos);

  const auto next = f.thread->mailbox(reader.wake());
  f.thread->submit({f.request(3)}, next);
  EXPECT_EQ(reader.all(*next, 1).items.size(), 3u);
  EXPECT_EQ(f.settled().held_entry_pages, 0);
}

TEST(EngineThread, EndOfTheThreadEndsWhatRuns) {
  Fixture f;
  Reader reader;
  const auto box = f.thread->mailbox(reader.wake());
  f.thread->submit({f.request(4000)}, box);
  f.thread.reset();
  const auto got = reader.all(*box, 1);
  ASSERT_TRUE(got.error);
  EXPECT_EQ(got.error->status, 503);
}

}  // namespace
}  // namespace plumb::serve
