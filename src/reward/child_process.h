// A program that answers lines with lines: started, written to, read from and stopped with a time limit on everything.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace plumb {

using Deadline = std::chrono::steady_clock::time_point;
// `seconds` from now; beyond a year it is a year.
Deadline deadline_in(double seconds);

struct ChildOptions {
  std::vector<std::string> command;                // searched in PATH; a relative path counts from `directory`
  std::string directory;                           // "" = the one of this process
  std::map<std::string, std::string> environment;  // added to the one of this process
  size_t max_line = 1 << 20;                       // bytes
};

// The child is the leader of a process group of its own, has pipes at its descriptors 0, 1 and 2 and nothing else open,
// and the default signal actions. When the object goes, the whole group is killed and the child is reaped. One thread
// at a time.
class ChildProcess {
 public:
  // log_line: gets what the child wrote to stderr, line by line, in the thread that calls a function of this class.
  // Error: the command cannot be started.
  ChildProcess(const ChildOptions& options, std::function<void(std::string_view)> log_line);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  enum class Status {
    done,
    late,      // the deadline has passed
    closed,    // the child has closed its stdout or its stdin, most likely because it has ended
    too_long,  // more than max_line bytes without an end of line
  };
  // Writes the line and an end of line. stderr and stdout are read meanwhile, so a child that writes first cannot
  // block.
  Status write_line(std::string_view line, Deadline deadline);
  // The next line of stdout, without its end.
  Status read_line(std::string& line, Deadline deadline);
  // Lines that the child has written already.
  std::vector<std::string> take_lines();

  // Closes the child's stdin: the request to end.
  void close_input();
  // Waits for the child to end; what it still writes to stdout is thrown away. False: the deadline has passed.
  bool wait_end(Deadline deadline);
  // Waits until the deadline for the child to end, then kills its group, and reaps it. Says how it ended: "exited with
  // code 3", "was killed by signal 11 (Segmentation fault)", "did not end" if it had to be killed.
  std::string finish(Deadline deadline);
  // Sends a signal to the group; does nothing after finish().
  void signal_group(int signal);

  pid_t pid() const { return pid_; }
  // The last line of stderr, "" if there is none.
  const std::string& last_log_line() const { return last_log_; }

 private:
  struct Stream {
    int fd = -1;
    std::string buffer;
    size_t scanned = 0;  // bytes of the buffer without an end of line
  };
  bool wait(bool for_write, bool for_exit, Deadline deadline);
  void read_available(Stream& stream);
  bool next_line(Stream& stream, std::string& line);
  void log_available();

  std::function<void(std::string_view)> log_line_;
  size_t max_line_;
  pid_t pid_ = -1;
  int exit_fd_ = -1;  // pidfd: readable when the child has ended
  int input_ = -1;
  Stream output_, errors_;
  std::string last_log_;
};

}  // namespace plumb
