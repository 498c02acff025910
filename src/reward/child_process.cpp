#include "reward/child_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace plumb {
namespace {

// Longer lines of stderr are logged in pieces.
constexpr size_t kLogLine = 4096;

constexpr Deadline kNow{};  // has passed already

void close_fd(int& fd) {
  if (fd >= 0) ::close(fd);
  fd = -1;
}

struct Pipe {
  int read = -1, write = -1;
  explicit Pipe(const std::string& where) {
    int fds[2];
    // Without CLOEXEC another thread that starts a program meanwhile would hand our end to it.
    if (::pipe2(fds, O_CLOEXEC) != 0) fail(where, fmt::format("no pipe: {}", std::strerror(errno)), "ulimit -n");
    read = fds[0];
    write = fds[1];
  }
  ~Pipe() {
    close_fd(read);
    close_fd(write);
  }
  int release(int& end) { return std::exchange(end, -1); }
};

// Writing to a child that has gone raises SIGPIPE, which would end this process. For the life of the guard it is held
// back from this thread, and one that was raised is taken away, so that other users of the signal see nothing.
class NoSigpipe {
 public:
  NoSigpipe() {
    sigset_t pending;
    ::sigpending(&pending);
    was_pending_ = ::sigismember(&pending, SIGPIPE) == 1;
    ::sigemptyset(&pipe_);
    ::sigaddset(&pipe_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoSigpipe() {
    const timespec now{};
    if (!was_pending_) ::sigtimedwait(&pipe_, nullptr, &now);
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t pipe_, before_;
  bool was_pending_;
};

// What posix_spawn takes, and gives back, as one object.
struct SpawnPlan {
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  SpawnPlan(const std::string& directory, int in, int out, int err) {
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawnattr_init(&attributes);
    ::posix_spawn_file_actions_adddup2(&actions, in, 0);
    ::posix_spawn_file_actions_adddup2(&actions, out, 1);
    ::posix_spawn_file_actions_adddup2(&actions, err, 2);
    ::posix_spawn_file_actions_addclosefrom_np(&actions, 3);
    if (!directory.empty()) ::posix_spawn_file_actions_addchdir_np(&actions, directory.c_str());
    sigset_t all, none;
    ::sigfillset(&all);
    ::sigemptyset(&none);
    ::posix_spawnattr_setsigdefault(&attributes, &all);
    ::posix_spawnattr_setsigmask(&attributes, &none);
    ::posix_spawnattr_setpgroup(&attributes, 0);
    ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
  }
  ~SpawnPlan() {
    ::posix_spawn_file_actions_destroy(&actions);
    ::posix_spawnattr_destroy(&attributes);
  }
};

// This process's environment with the additions in place of variables of the same name.
std::vector<std::string> environment_with(const std::map<std::string, std::string>& additions) {
  std::vector<std::string> all;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    if (!additions.contains(text.substr(0, text.find('=')))) all.push_back(text);
  }
  for (const auto& [name, value] : additions) all.push_back(name + "=" + value);
  return all;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (std::string& text : texts) all.push_back(text.data());
  all.push_back(nullptr);
  return all;
}

int milliseconds_left(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

void make_nonblocking(int fd) { ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK); }

}  // namespace

Deadline deadline_in(double seconds) {
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                std::chrono::duration<double>(std::min(seconds, 365 * 86400.0)));
}

ChildProcess::ChildProcess(const ChildOptions& options, std::function<void(std::string_view)> log_line)
    : log_line_(std::move(log_line)), max_line_(options.max_line) {
  PLUMB_CHECK(!options.command.empty());
  const std::string where = "program " + options.command.front();
  Pipe in(where), out(where), err(where);
  const SpawnPlan plan(options.directory, in.read, out.write, err.write);
  std::vector<std::string> command = options.command, environment = environment_with(options.environment);
  const int error = ::posix_spawnp(&pid_, command[0].c_str(), &plan.actions, &plan.attributes, pointers(command).data(),
                                   pointers(environment).data());
  if (error != 0) {
    pid_ = -1;
    fail(where, fmt::format("cannot be started: {}", std::strerror(error)),
         options.directory.empty() ? "check the command and PATH"
                                   : "check the command and the folder " + options.directory);
  }
  // By its number: the declaration of glibc 2.36 is not that of its function. -1 on an old kernel: then finish() waits
  // for the end of stdout and stderr alone.
  exit_fd_ = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
  input_ = in.release(in.write);
  output_.fd = out.release(out.read);
  errors_.fd = err.release(err.read);
  for (int fd : {input_, output_.fd, errors_.fd}) make_nonblocking(fd);
}

ChildProcess::~ChildProcess() {
  finish(kNow);
  close_fd(output_.fd);
  close_fd(errors_.fd);
}

// Waits until there is something to do, and reads what stdout and stderr have. False: the deadline has passed.
bool ChildProcess::wait(bool for_write, bool for_exit, Deadline deadline) {
  // Output that nobody has taken yet is bounded: beyond that stdout is left alone until somebody has.
  const bool room = output_.buffer.size() <= 2 * max_line_;
  pollfd fds[4] = {{room ? output_.fd : -1, POLLIN, 0},
                   {errors_.fd, POLLIN, 0},
                   {for_write ? input_ : -1, POLLOUT, 0},
                   {for_exit ? exit_fd_ : -1, POLLIN, 0}};
  const int ready = ::poll(fds, 4, milliseconds_left(deadline));
  if (fds[0].revents) read_available(output_);
  if (fds[1].revents) {
    read_available(errors_);
    log_available();
  }
  return ready != 0 || std::chrono::steady_clock::now() < deadline;
}

// One read: a child that floods one stream must not keep this loop from looking at the deadline.
void ChildProcess::read_available(Stream& stream) {
  char bytes[65536];
  const ssize_t got = ::read(stream.fd, bytes, sizeof bytes);
  if (got > 0) stream.buffer.append(bytes, static_cast<size_t>(got));
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) close_fd(stream.fd);
}

bool ChildProcess::next_line(Stream& stream, std::string& line) {
  const size_t end = stream.buffer.find('\n', stream.scanned);
  if (end == std::string::npos) {
    stream.scanned = stream.buffer.size();
    return false;
  }
  line = stream.buffer.substr(0, end);
  if (line.ends_with('\r')) line.pop_back();
  stream.buffer.erase(0, end + 1);
  stream.scanned = 0;
  return true;
}

void ChildProcess::log_available() {
  std::string line;
  const auto put = [&] {
    if (line.find_first_not_of(" \t") == std::string::npos) return;
    last_log_ = line;
    log_line_(line);
  };
  while (next_line(errors_, line)) put();
  if (errors_.buffer.size() > kLogLine || (errors_.fd < 0 && !errors_.buffer.empty())) {
    line = std::exchange(errors_.buffer, "");
    errors_.scanned = 0;
    put();
  }
}

ChildProcess::Status ChildProcess::write_line(std::string_view line, Deadline deadline) {
  const NoSigpipe guard;
  std::string rest(line);
  rest += '\n';
  for (size_t done = 0; done < rest.size();) {
    if (input_ < 0) return Status::closed;
    const ssize_t wrote = ::write(input_, rest.data() + done, rest.size() - done);
    if (wrote > 0) {
      done += static_cast<size_t>(wrote);
    } else if (errno == EAGAIN) {
      if (!wait(/*for_write=*/true, /*for_exit=*/false, deadline)) return Status::late;
    } else if (errno != EINTR) {
      return Status::closed;
    }
  }
  return Status::done;
}

ChildProcess::Status ChildProcess::read_line(std::string& line, Deadline deadline) {
  for (;;) {
    if (next_line(output_, line)) return line.size() > max_line_ ? Status::too_long : Status::done;
    if (output_.buffer.size() > max_line_) return Status::too_long;
    if (output_.fd < 0) return Status::closed;
    if (!wait(/*for_write=*/false, /*for_exit=*/false, deadline)) return Status::late;
  }
}

std::vector<std::string> ChildProcess::take_lines() {
  if (output_.fd >= 0) wait(false, false, kNow);
  std::vector<std::string> lines;
  for (std::string line; next_line(output_, line);) lines.push_back(line);
  return lines;
}

void ChildProcess::close_input() { close_fd(input_); }

void ChildProcess::signal_group(int signal) {
  if (pid_ > 0) ::kill(-pid_, signal);
}

bool ChildProcess::wait_end(Deadline deadline) {
  if (pid_ < 0) return true;
  const auto ended = [&] {  // WNOWAIT: as long as the leader is not reaped nobody else gets its group's number
    siginfo_t info{};
    return ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid_;
  };
  while (!ended()) {
    output_.buffer.clear();  // nobody wants it any more, and a full pipe would keep the child from ending
    output_.scanned = 0;
    const bool waiting = exit_fd_ >= 0 || output_.fd >= 0 || errors_.fd >= 0;
    if (!waiting || !wait(/*for_write=*/false, /*for_exit=*/true, deadline)) return ended();
  }
  return true;
}

std::string ChildProcess::finish(Deadline deadline) {
  if (pid_ < 0) return "has ended";
  close_input();
  const bool in_time = wait_end(deadline);
  signal_group(SIGKILL);  // also those that the child has started
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  close_fd(exit_fd_);
  if (errors_.fd >= 0) wait(false, false, kNow);  // its last words
  if (!in_time) return "did not end";
  if (WIFSIGNALED(status))
    return fmt::format("was killed by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
  return fmt::format("exited with code {}", WEXITSTATUS(status));
}

}  // namespace plumb
