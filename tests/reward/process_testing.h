// Programs written in shell for the tests of processes, and what /proc says about those that are left.
#pragma once
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "reward/reward_config.h"

namespace plumb::testing {

// A shell program that reads requests, with $line and $id; `body` is a case list over $line, and other requests get the
// reward 1.
inline std::string answering(const std::string& cases, const std::string& before = "") {
  return before + R"(
while IFS= read -r line; do
  id=${line#'{"id":'}; id=${id%%,*}
  case $line in
    )" + cases +
         R"(
    *) echo "{\"id\":$id,\"reward\":1}" ;;
  esac
done)";
}

// Every process started with it can be found by this variable, also those that have changed their parent.
inline std::string mark() { return "PLUMB_REWARD_TEST=" + std::to_string(getpid()); }

// Limits of a program in a test: a warm process has 1 s, which only those that hang use up; a fresh one has time to
// start on a busy machine.
inline ProgramKeys shell_program(const std::string& script) {
  ProgramKeys keys{.command = {"/bin/sh", "-c", script}, .time_limit = 1, .start_limit = 20, .restart_delay = 0.01};
  keys.environment["PLUMB_REWARD_TEST"] = std::to_string(getpid());
  return keys;
}

// Processes that have the mark, and children of this process, zombies too.
inline int processes_left() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos || name == std::to_string(getpid())) continue;
    std::ifstream environment(entry.path() / "environ"), status(entry.path() / "stat");
    const std::string variables(std::istreambuf_iterator<char>(environment), {});
    const std::string stat(std::istreambuf_iterator<char>(status), {});
    const size_t behind_name = stat.rfind(')');  // "PID (NAME) STATE PARENT ..."
    const bool child =
        behind_name != std::string::npos && stat.substr(behind_name + 4).starts_with(std::to_string(getpid()) + " ");
    if (child || variables.find(mark()) != std::string::npos) ++count;
  }
  return count;
}

// The same when there has been time to die: a group is killed at once, but what the program had started is not reaped
// by this process, and goes a moment later.
inline int processes_left_after_killing() {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  int count = processes_left();
  while (count > 0 && std::chrono::steady_clock::now() < limit) count = processes_left();
  return count;
}

inline int open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<int>(std::distance(begin(all), end(all)));
}

}  // namespace plumb::testing
