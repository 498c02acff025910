#include "base/waiting.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <future>
#include <latch>
#include <thread>

namespace plumb {
namespace {

TEST(ForEachWaiting, EachIndexOnce) {
  for (const int threads : {1, 3, 100}) {
    std::vector<std::atomic<int>> calls(37);
    for_each_waiting(37, threads, [&](int64_t k) { ++calls[static_cast<size_t>(k)]; });
    for (const auto& count : calls) EXPECT_EQ(count, 1);
  }
  for_each_waiting(0, 4, [](int64_t) { FAIL(); });
}

TEST(ForEachWaiting, AsManyAtOnceAsThereAreThreads) {
  std::barrier meet(4);  // with fewer threads nobody would go on
  for_each_waiting(40, 4, [&](int64_t) { meet.arrive_and_wait(); });
}

TEST(WaitingThreads, AsManyAtOnceAsAllowed) {
  std::barrier meet(4);
  std::latch done(40);
  WaitingThreads threads(4);
  for (int i = 0; i < 40; ++i)
    threads.add([&] {
      meet.arrive_and_wait();
      done.count_down();
    });
  done.wait();
}

TEST(WaitingThreads, OneThreadKeepsTheOrder) {
  std::vector<int> order;
  std::promise<void> last;
  WaitingThreads thread(1);
  for (int i = 0; i < 20; ++i) thread.add([&, i] { order.push_back(i); });
  thread.add([&] { last.set_value(); });
  last.get_future().wait();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(order[i], i);
}

TEST(WaitingThreads, TheEndWaitsForWhatRuns) {
  bool finished = false;
  std::promise<void> begun, ending;
  std::jthread helper;
  {
    WaitingThreads thread(1);
    thread.add([&] {
      begun.set_value();
      ending.get_future().wait();
      finished = true;
    });
    begun.get_future().wait();
    helper = std::jthread([&] { ending.set_value(); });
  }
  EXPECT_TRUE(finished);
}

}  // namespace
}  // namespace plumb
