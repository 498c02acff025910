// Files of training runs as other processes write them: which runs a folder holds, and their lines from some place on.
// Everything here stands between names that a client sends and the disk, so a run is opened component by component
// below the folder and never through a symbolic link, and only regular files are read.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace plumb::serve {

// An open file or folder; closed with the object.
class OpenFile {
 public:
  explicit OpenFile(int fd = -1) : fd_(fd) {}
  ~OpenFile();
  OpenFile(OpenFile&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  OpenFile& operator=(OpenFile&& other) noexcept;
  explicit operator bool() const { return fd_ >= 0; }
  int fd() const { return fd_; }

 private:
  int fd_;
};

// A regular file for reading. A run that goes on from a checkpoint writes its files anew: `identity` tells the old one
// from the new one, also after the old one is gone.
struct RunFile {
  OpenFile file;
  std::string identity;
  uint64_t size = 0;
  double modified = 0;  // seconds since 1970
};

// A folder that is a run itself (it holds metrics.jsonl or config.toml), or that holds runs, up to three levels down.
class RunsFolder {
 public:
  // Error: no folder.
  explicit RunsFolder(std::string path);

  const std::string& path() const { return path_; }
  // Names of the runs ("demo", "sweep/3"), sorted; that of a folder that is a run itself is its last component. At most
  // 1,000. Left out: hidden folders, symbolic links, names that are not UTF-8 or have control characters.
  std::vector<std::string> names() const;
  // Not open if there is no such run; `name` may be anything.
  OpenFile open(std::string_view name) const;

 private:
  std::string path_, own_name_;
};

// nullopt: not there, or no regular file.
std::optional<RunFile> open_run_file(const OpenFile& run, const std::string& name);
// The bytes [from, from + most) as far as they are there.
std::string read_part(const RunFile& file, uint64_t from, size_t most);

// Whether some process holds the lock that a run keeps on its folder (train/run_directory.h). Looked up in /proc/locks:
// taking the lock to find out could make a run fail that is just starting.
bool is_locked(const OpenFile& run);

// Calls `line` with each complete line from `from` on, without its newline, and the place where it begins. A line of
// more than 64 MB is reported as nullopt. Stops once `most` bytes are behind it. -> where the next line begins; what is
// behind the last newline is not there yet.
using OnLine = std::function<void(uint64_t begin, std::optional<std::string_view> line)>;
uint64_t for_each_line(const RunFile& file, uint64_t from, uint64_t most, const OnLine& line);
// Whether a line begins at this byte of the file: 0, or behind a newline.
bool begins_line(const RunFile& file, uint64_t at);

}  // namespace plumb::serve
