// Messages for people: to stderr and, once a file is set, to a log file. One log a process; calls from several threads
// do not mix their lines.
#pragma once
#include <fmt/format.h>

#include <string>
#include <string_view>

namespace plumb {

enum class LogLevel { debug, info, warning, error };

// Less important messages than `level` are dropped (default: info).
void set_log_level(LogLevel level);
// Messages are also appended to this file, with date, time and level. "" closes it. Error: it cannot be written.
void set_log_file(const std::string& path);

// A message may have several lines. On stderr, warnings and errors begin with their level.
void log(LogLevel level, std::string_view message);

// To the log file alone: for errors that are printed elsewhere.
void log_to_file(LogLevel level, std::string_view message);

template <class... T>
void log_info(fmt::format_string<T...> format, T&&... values) {
  log(LogLevel::info, fmt::format(format, std::forward<T>(values)...));
}
template <class... T>
void log_warning(fmt::format_string<T...> format, T&&... values) {
  log(LogLevel::warning, fmt::format(format, std::forward<T>(values)...));
}

// Whether stderr is a terminal, on which a line can be rewritten.
bool log_on_terminal();
// The line at the bottom of a terminal, rewritten in place: messages appear above it. "" removes it. Does nothing when
// stderr is no terminal.
void set_status_line(std::string_view line);

}  // namespace plumb
