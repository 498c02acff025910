// Progress of long work: one line with rate and remaining time that is rewritten on a terminal, and now and then a
// plain line in the log otherwise.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace plumb {

// "train 30/200 steps, 15%, 2.5 steps/s, 1:08 left, loss 2.31". The rate is that of `done - started` units in
// `seconds`; rate and time are left out while nothing is known. total 0: unknown.
std::string progress_text(const std::string& what, const std::string& unit, int64_t done, int64_t total,
                          int64_t started, double seconds, const std::string& note);

// "0:42", "1:08", "2:03:00".
std::string duration_text(double seconds);

class ProgressLine {
 public:
  // what: the work ("train"); unit: plural of what is counted ("steps"); done: work that is finished already (resume).
  ProgressLine(std::string what, std::string unit, int64_t total, int64_t done = 0);
  ~ProgressLine();  // removes the line
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void update(int64_t done, const std::string& note = "");

 private:
  using Clock = std::chrono::steady_clock;
  std::string what_, unit_;
  int64_t total_, started_;
  Clock::time_point start_, last_line_;
};

}  // namespace plumb
