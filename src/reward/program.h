// A program that answers JSON lines with JSON lines, kept alive: one request at a time, restarted when it has to be.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "reward/child_process.h"
#include "reward/reward.h"
#include "reward/reward_config.h"

namespace plumb {

// The program has ended, or closed its output, before it answered: the request may be asked again in a fresh process.
class ProgramCrashed : public Error {
  using Error::Error;
};

// One process of a program, and those that replace it. One thread at a time.
class Program {
 public:
  // label: stands in front of its stderr lines and of errors, "program judge[2]". Starts nothing.
  Program(const ProgramKeys& keys, std::string label);
  ~Program();

  // Starts the process if there is none. Error: the command cannot be started.
  void start();

  // Sends the request, an object that is not empty, with an "id" of its own, starting a process if there is none, and
  // gives the answer with the same id. Lines with ids of earlier requests are dropped: they came too late. Waits at
  // most the time limit, with start_limit on top for a fresh process.
  //
  // ProgramCrashed: see there. The next start is put off, longer with each crash in a row; a request waits up to 2 s
  // for it. Error: the next start is further away; no answer in time or no end of a line (the process is killed); no
  // JSON object; another id.
  nlohmann::json ask(const nlohmann::json& request);

  // Sends a request whose answer nobody wants. Does nothing if there is no process; never throws.
  void tell(const nlohmann::json& request) noexcept;

  // Changes with each start: what a process knew is gone with it.
  int64_t generation() const { return generation_; }
  // The process that runs, -1 if there is none.
  pid_t pid() const { return child_ ? child_->pid() : -1; }
  const std::string& label() const { return label_; }
  // Whether ask() would begin at once.
  bool ready() const { return child_ || std::chrono::steady_clock::now() >= next_start_; }

  // Stops all of them together: end of input, half a second; SIGTERM, half a second; SIGKILL.
  static void stop(const std::vector<std::unique_ptr<Program>>& programs);

 private:
  nlohmann::json exchange(const nlohmann::json& request);
  void wait_for_restart(Deadline deadline);
  std::optional<nlohmann::json> read_answer(const std::string& line, int64_t id);
  [[noreturn]] void give_up(ChildProcess::Status status, double limit);
  void log_line(std::string_view line);
  void end_log();
  void note_stray(const std::string& line);
  void report_strays();

  ProgramKeys keys_;
  std::string label_;
  std::unique_ptr<ChildProcess> child_;
  int64_t next_id_ = 1, generation_ = 0;
  bool fresh_ = true;       // the process has not answered yet
  int crashes_ = 0;         // in a row
  Deadline next_start_{};   // not earlier
  int64_t logged_ = 0;      // lines of stderr since the last request
  std::set<int64_t> told_;  // ids of requests whose answers nobody wants
  int64_t strays_ = 0;      // lines of the last request that answered another
  std::string first_stray_;
};

// Rewards by keys.processes processes of a program; as many samples at once, others wait. Starts them all at once.
// Error: the command cannot be started.
std::unique_ptr<Reward> make_program_reward(const ProgramKeys& keys, const std::string& name);

}  // namespace plumb
