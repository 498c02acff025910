#include "base/progress.h"

#include <fmt/format.h>

#include <cmath>

#include "base/log.h"

namespace plumb {
namespace {
constexpr std::chrono::seconds kBetweenLogLines{30};
}

std::string duration_text(double seconds) {
  const auto s = static_cast<int64_t>(std::llround(seconds));
  if (s < 3600) return fmt::format("{}:{:02}", s / 60, s % 60);
  return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

std::string progress_text(const std::string& what, const std::string& unit, int64_t done, int64_t total,
                          int64_t started, double seconds, const std::string& note) {
  std::string text = fmt::format("{} {}", what, done);
  if (total > 0) text += fmt::format("/{}", total);
  text += " " + unit;
  if (total > 0) text += fmt::format(", {:.0f}%", 100.0 * static_cast<double>(done) / static_cast<double>(total));
  if (done > started && seconds > 0) {
    const double rate = static_cast<double>(done - started) / seconds;
    text += rate >= 1 ? fmt::format(", {:.3g} {}/s", rate, unit) : fmt::format(", {:.3g} s each", 1 / rate);
    if (total > done) text += fmt::format(", {} left", duration_text(static_cast<double>(total - done) / rate));
  }
  return note.empty() ? text : text + ", " + note;
}

ProgressLine::ProgressLine(std::string what, std::string unit, int64_t total, int64_t done)
    : what_(std::move(what)),
      unit_(std::move(unit)),
      total_(total),
      started_(done),
      start_(Clock::now()),
      last_line_(start_) {}

ProgressLine::~ProgressLine() { set_status_line(""); }

void ProgressLine::update(int64_t done, const std::string& note) {
  const Clock::time_point now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const std::string text = progress_text(what_, unit_, done, total_, started_, seconds, note);
  if (log_on_terminal()) {
    set_status_line(text);
  } else if (now - last_line_ >= kBetweenLogLines || done == total_) {
    last_line_ = now;
    log(LogLevel::info, text);
  }
}

}  // namespace plumb
