#include "base/progress.h"

#include <gtest/gtest.h>

namespace plumb {
namespace {

TEST(Progress, RateAndRemainingTime) {
  EXPECT_EQ(progress_text("train", "steps", 30, 200, 0, 12, "loss 2.31"),
            "train 30/200 steps, 15%, 2.5 steps/s, 1:08 left, loss 2.31");
  EXPECT_EQ(progress_text("train", "steps", 2, 4, 0, 10, ""), "train 2/4 steps, 50%, 5 s each, 0:10 left");
}

TEST(Progress, WorkDoneBeforeTheStartIsNotInTheRate) {
  EXPECT_EQ(progress_text("train", "steps", 110, 120, 100, 5, ""), "train 110/120 steps, 92%, 2 steps/s, 0:05 left");
  EXPECT_EQ(progress_text("train", "steps", 100, 120, 100, 0, ""), "train 100/120 steps, 83%");
}

TEST(Progress, UnknownTotal) { EXPECT_EQ(progress_text("read", "lines", 10, 0, 0, 5, ""), "read 10 lines, 2 lines/s"); }

TEST(Progress, Durations) {
  EXPECT_EQ(duration_text(0), "0:00");
  EXPECT_EQ(duration_text(59.6), "1:00");
  EXPECT_EQ(duration_text(7380), "2:03:00");
}

}  // namespace
}  // namespace plumb
