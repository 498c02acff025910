#include "base/log.h"

#include <fmt/chrono.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <mutex>

#include "base/error.h"

namespace plumb {
namespace {

struct Log {
  std::mutex mutex;
  LogLevel level = LogLevel::info;
  std::FILE* file = nullptr;
  std::string status;
};
Log& the_log() {
  static Log log;
  return log;
}

const char* level_name(LogLevel level) {
  constexpr const char* names[] = {"debug", "info", "warning", "error"};
  return names[static_cast<int>(level)];
}

constexpr const char* kEraseLine = "\r\033[K";

void write_to_file(Log& l, LogLevel level, std::string_view message) {
  if (!l.file || level < l.level) return;
  std::tm now{};
  const std::time_t seconds = std::time(nullptr);
  ::localtime_r(&seconds, &now);
  fmt::print(l.file, "{:%Y-%m-%d %H:%M:%S} {:7} {}\n", now, level_name(level), message);
  std::fflush(l.file);
}

}  // namespace

void set_log_level(LogLevel level) {
  const std::lock_guard lock(the_log().mutex);
  the_log().level = level;
}

void set_log_file(const std::string& path) {
  Log& l = the_log();
  const std::lock_guard lock(l.mutex);
  if (l.file) std::fclose(l.file);
  l.file = nullptr;
  if (path.empty()) return;
  l.file = std::fopen(path.c_str(), "ae");
  if (!l.file) fail(path, "the log file cannot be written", "check the folder and its permissions");
}

void log(LogLevel level, std::string_view message) {
  Log& l = the_log();
  const std::lock_guard lock(l.mutex);
  if (level < l.level) return;
  const std::string prefix = level >= LogLevel::warning ? fmt::format("{}: ", level_name(level)) : "";
  fmt::print(stderr, "{}{}{}\n{}", l.status.empty() ? "" : kEraseLine, prefix, message, l.status);
  std::fflush(stderr);
  write_to_file(l, level, message);
}

void log_to_file(LogLevel level, std::string_view message) {
  const std::lock_guard lock(the_log().mutex);
  write_to_file(the_log(), level, message);
}

bool log_on_terminal() {
  static const bool terminal = ::isatty(STDERR_FILENO) == 1;
  return terminal;
}

void set_status_line(std::string_view line) {
  if (!log_on_terminal()) return;
  Log& l = the_log();
  const std::lock_guard lock(l.mutex);
  if (line.empty() && l.status.empty()) return;
  l.status = line;
  fmt::print(stderr, "{}{}", kEraseLine, l.status);
  std::fflush(stderr);
}

}  // namespace plumb
