#include "train/run_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <map>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "base/files.h"
#include "base/log.h"
#include "train/checkpoints.h"

namespace plumb {
namespace {
namespace fs = std::filesystem;

// "table.key" -> value, from the text that to_toml makes: a table's name in brackets, then "key = value" lines.
std::map<std::string, std::string> values_by_key(const RunConfig& config) {
  std::map<std::string, std::string> values;
  std::istringstream in(to_toml(config));
  std::string table;
  for (std::string line; std::getline(in, line);) {
    const size_t equals = line.find(" = ");
    if (line.starts_with("["))
      table = line.substr(1, line.find(']') - 1) + ".";
    else if (!line.starts_with("#") && equals != std::string::npos)
      values[table + line.substr(0, equals)] = line.substr(equals + 3);
  }
  return values;
}

// Two runs in one folder would mix their metrics and remove each other's checkpoints. The system lets go of the lock
// when the process ends, however it does: one that was killed while it used a GPU takes seconds to. A file system
// without locks is not an error.
std::shared_ptr<void> lock_folder(const std::string& path) {
  constexpr std::chrono::milliseconds kPatience{5000}, kStep{50};
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  std::shared_ptr<void> lock(nullptr, [fd](void*) { ::close(fd); });
  const auto taken = [fd] { return fd >= 0 && ::flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK; };
  for (auto waited = 0 * kStep; taken(); waited += kStep) {
    if (waited >= kPatience)
      fail(path, "is in use by another run", "wait for it, stop it, or choose another output.dir");
    std::this_thread::sleep_for(kStep);
  }
  return lock;
}

}  // namespace

std::vector<std::string> config_changes(const RunConfig& before, const RunConfig& after) {
  std::vector<std::string> changes;
  const auto old = values_by_key(before);
  for (const auto& [key, value] : values_by_key(after)) {
    const auto at = old.find(key);
    if (at != old.end() && at->second != value) changes.push_back(key + ": " + at->second + " -> " + value);
  }
  return changes;
}

RunDirectory open_run_directory(const RunConfig& config) {
  RunDirectory run{config.output.dir, {}, {}};
  std::error_code error;
  fs::create_directories(run.path, error);
  if (error) fail(run.path, "cannot be created: " + error.message(), "choose another output.dir");
  run.lock = lock_folder(run.path);
  run.resume = newest_checkpoint(run.path);
  if (run.resume && config.output.resume == "never")
    fail(run.path, "holds the checkpoint " + checkpoint_name(*run.resume) + " already",
         "choose another output.dir, or output.resume = \"auto\" to go on from it");
  set_log_file(run.path + "/log.txt");
  const std::string file = run.path + "/config.toml";
  if (run.resume && fs::exists(file))
    for (const std::string& change : config_changes(load_run_config(config.command, file), config))
      log_info("changed since the last start: {}", change);
  write_text(file, to_toml(config));
  remove_old_checkpoints(run.path, std::max<int64_t>(config.train.keep_checkpoints, 1));
  return run;
}

}  // namespace plumb
