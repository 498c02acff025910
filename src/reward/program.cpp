#include "reward/program.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "base/log.h"
#include "reward/json_text.h"
#include "reward/wire.h"

namespace plumb {
namespace {

using nlohmann::json;

constexpr double kEndGrace = 0.5;            // seconds for a process to end by itself
constexpr double kLongestRestartDelay = 10;  // seconds
constexpr double kLongestPause = 2;          // seconds that a request waits for a restart
constexpr int64_t kLogLines = 20;            // of stderr for a request; the rest is counted
constexpr size_t kLogWidth = 500;            // bytes of such a line

// The id stands first, so that a program finds it without reading JSON.
std::string request_line(int64_t id, const json& request) {
  return fmt::format(R"({{"id":{},{})", id, json_line(request).substr(1));
}

}  // namespace

Program::Program(const ProgramKeys& keys, std::string label) : keys_(keys), label_(std::move(label)) {}

Program::~Program() { child_.reset(); }  // while there is still something to log its last words

void Program::start() {
  if (child_) return;
  const ChildOptions options{.command = keys_.command,
                             .directory = keys_.directory,
                             .environment = keys_.environment,
                             .max_line = static_cast<size_t>(keys_.max_line)};
  child_ = std::make_unique<ChildProcess>(options, [this](std::string_view line) { log_line(line); });
  told_.clear();
  ++generation_;
  fresh_ = true;
}

void Program::log_line(std::string_view line) {
  if (++logged_ <= kLogLines) log_info("{}: {}", label_, shortened(line, kLogWidth));
}

void Program::end_log() {
  if (logged_ > kLogLines) log_info("{}: {} more lines on stderr", label_, logged_ - kLogLines);
  logged_ = 0;
  report_strays();
}

json Program::ask(const json& request) {
  try {
    json answer = exchange(request);
    end_log();
    return answer;
  } catch (...) {
    end_log();
    throw;
  }
}

// A short pause before the next start is waited for. With a long one the program is broken, and a batch of samples
// should not wait for it one by one.
void Program::wait_for_restart(Deadline deadline) {
  if (child_) return;
  if (next_start_ > deadline)
    fail(label_, fmt::format("has ended {} times in a row and is started again later", crashes_),
         "its stderr is in the log");
  std::this_thread::sleep_until(next_start_);
}

json Program::exchange(const json& request) {
  wait_for_restart(deadline_in(kLongestPause));
  try {
    start();
  } catch (const Error& e) {  // it could be started once, so this may pass: no memory, no more processes
    throw ProgramCrashed(e.where(), e.what());
  }
  for (const std::string& line : child_->take_lines()) note_stray(line);
  const int64_t id = next_id_++;
  const double limit = keys_.time_limit + (fresh_ ? keys_.start_limit : 0);
  const Deadline deadline = deadline_in(limit);
  using Status = ChildProcess::Status;
  if (const Status status = child_->write_line(request_line(id, request), deadline); status != Status::done)
    give_up(status, limit);
  for (std::string line;;) {
    if (const Status status = child_->read_line(line, deadline); status != Status::done) give_up(status, limit);
    std::optional<json> answer = read_answer(line, id);
    if (!answer) continue;
    fresh_ = false;
    crashes_ = 0;
    return std::move(*answer);
  }
}

// Nothing: the answer to an earlier request.
std::optional<json> Program::read_answer(const std::string& line, int64_t id) {
  std::optional<json> answer = parse_json_text(line);
  if (!answer || !answer->is_object()) fail(label_, "answered with no JSON object: " + shortened(line));
  const auto found = answer->find("id");
  if (found == answer->end() || !found->is_number_integer() || *found > id || *found < 1)
    fail(label_, fmt::format("answered request {} with another id or none: {}", id, shortened(line)));
  if (*found == id) return answer;
  note_stray(line);
  return std::nullopt;
}

// Remembers a line that answers no open request, unless nobody wanted that answer.
void Program::note_stray(const std::string& line) {
  const std::optional<json> answer = parse_json_text(line);
  const json* id = answer && answer->is_object() ? find_field(*answer, "id") : nullptr;
  if (id && id->is_number_integer() && told_.erase(id->get<int64_t>()) > 0) return;
  if (strays_++ == 0) first_stray_ = shortened(line);
}

void Program::report_strays() {
  if (strays_ > 0)
    log_warning("{}: {} lines that answer no open request, the first: {}", label_, strays_, first_stray_);
  strays_ = 0;
}

// Ends the process and says why.
void Program::give_up(ChildProcess::Status status, double limit) {
  const std::unique_ptr<ChildProcess> child = std::move(child_);
  if (status == ChildProcess::Status::late) {
    child->finish(Deadline{});
    fail(label_, fmt::format("gave no answer within {} s and was killed", limit));
  }
  if (status == ChildProcess::Status::too_long) {
    child->finish(Deadline{});
    fail(label_, fmt::format("wrote more than {} bytes without an end of line and was killed", keys_.max_line));
  }
  const std::string end = child->finish(deadline_in(kEndGrace));
  const double delay = std::min(std::ldexp(keys_.restart_delay, std::min(crashes_++, 30)), kLongestRestartDelay);
  next_start_ = deadline_in(delay);
  const std::string& last = child->last_log_line();
  throw ProgramCrashed(label_, fmt::format("closed its output before it answered and {}{}", end,
                                           last.empty() ? "" : "; its last line on stderr: " + shortened(last)));
}

void Program::tell(const json& request) noexcept {
  try {
    if (!child_) return;
    told_.insert(next_id_);
    child_->write_line(request_line(next_id_++, request), deadline_in(kEndGrace));
  } catch (const std::exception& e) {
    log_warning("{}: {}", label_, e.what());
  }
}

void Program::stop(const std::vector<std::unique_ptr<Program>>& programs) {
  std::vector<ChildProcess*> running;
  for (const auto& program : programs)
    if (program->child_) running.push_back(program->child_.get());
  for (ChildProcess* child : running) child->close_input();
  Deadline deadline = deadline_in(kEndGrace);
  std::erase_if(running, [&](ChildProcess* child) { return child->wait_end(deadline); });
  for (ChildProcess* child : running) child->signal_group(SIGTERM);
  deadline = deadline_in(kEndGrace);
  for (ChildProcess* child : running) child->wait_end(deadline);
  for (const auto& program : programs) program->child_.reset();  // kills the groups and reaps
}

namespace {

class ProgramReward : public Reward {
 public:
  ProgramReward(const ProgramKeys& keys, const std::string& name) : retries_(keys.retries) {
    for (int64_t k = 0; k < keys.processes; ++k)
      programs_.push_back(std::make_unique<Program>(keys, fmt::format("reward {}[{}]", name, k)));
    for (const auto& program : programs_) {
      program->start();
      free_.push_back(program.get());
    }
  }
  ~ProgramReward() override { Program::stop(programs_); }

  Score score(const RewardSample& sample) override {
    json request = sample_to_json(sample);
    request["type"] = "score";
    Program* const program = take();
    const std::unique_ptr<Program, std::function<void(Program*)>> guard(program, [this](Program* p) { put_back(p); });
    for (int64_t attempt = 0;; ++attempt) {
      try {
        return read_score(program->ask(request), program->label());
      } catch (const ProgramCrashed&) {
        if (attempt == retries_) throw;
      }
    }
  }

 private:
  Program* take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !free_.empty(); });
    // One that has just crashed only if there is no other.
    auto best = std::ranges::find_if(free_, [](const Program* p) { return p->ready(); });
    if (best == free_.end()) best = free_.begin();
    Program* const taken = *best;
    free_.erase(best);
    return taken;
  }
  void put_back(Program* program) {
    const std::lock_guard lock(mutex_);
    free_.push_back(program);
    changed_.notify_one();
  }

  int64_t retries_;
  std::vector<std::unique_ptr<Program>> programs_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Program*> free_;
};

}  // namespace

std::unique_ptr<Reward> make_program_reward(const ProgramKeys& keys, const std::string& name) {
  return std::make_unique<ProgramReward>(keys, name);
}

}  // namespace plumb
