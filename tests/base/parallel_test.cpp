#include "base/parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

namespace plumb {
namespace {

class Parallel : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { before_ = thread_count(), set_thread_count(GetParam()); }
  void TearDown() override { set_thread_count(before_); }
  int before_ = 1;
};

// Each index once, whatever the length and the grain; loops follow each other at once, so that workers come late.
TEST_P(Parallel, EveryIndexIsVisitedOnce) {
  for (int round = 0; round < 200; ++round)
    for (int64_t n : {0, 1, 2, 7, 64, 1000})
      for (int64_t grain : {1, 3, 100}) {
        std::vector<int> visits(n);
        parallel_for(n, grain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++visits[i];
        });
        ASSERT_EQ(std::count(visits.begin(), visits.end(), 1), n) << "n " << n << " grain " << grain;
      }
}

TEST_P(Parallel, NestedLoopsRunOnTheCallingThread) {
  std::vector<int> visits(400);
  parallel_for(20, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto self = std::this_thread::get_id();
      parallel_for(20, 1, [&](int64_t first, int64_t last) {
        EXPECT_EQ(std::this_thread::get_id(), self);
        for (int64_t j = first; j < last; ++j) ++visits[i * 20 + j];
      });
    }
  });
  EXPECT_EQ(std::count(visits.begin(), visits.end(), 1), 400);
}

TEST_P(Parallel, TheFirstExceptionReachesTheCallerAndThePoolGoesOn) {
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> visited{0};
    const auto body = [&](int64_t begin, int64_t end) {
      visited += static_cast<int>(end - begin);
      if (begin == 0) throw std::runtime_error("here");
    };
    EXPECT_THROW(parallel_for(100, 1, body), std::runtime_error);
    EXPECT_EQ(visited, 100);
  }
}

// Two callers at a time take turns.
TEST_P(Parallel, SeveralCallers) {
  std::atomic<int64_t> sum{0};
  const auto caller = [&] {
    for (int round = 0; round < 500; ++round)
      parallel_for(64, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
  };
  std::thread other(caller);
  caller();
  other.join();
  EXPECT_EQ(sum, 2 * 500 * 64);
}

INSTANTIATE_TEST_SUITE_P(Threads, Parallel, ::testing::Values(1, 2, 5));

}  // namespace
}  // namespace plumb
