#include "serve/training_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "base/error.h"
#include "tokenizer/unicode.h"

namespace plumb::serve {
namespace {

constexpr int kDepth = 3;
constexpr size_t kMostRuns = 1000, kMostFolders = 20'000;
constexpr size_t kBlock = size_t{256} << 10;
constexpr size_t kLongestLine = size_t{64} << 20;

OpenFile open_folder(int at, const char* name) {
  return OpenFile(::openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

bool is_run(const OpenFile& folder) {
  return open_run_file(folder, "metrics.jsonl") || open_run_file(folder, "config.toml");
}

// What can be shown, sent in JSON and asked for again.
bool is_plain_name(std::string_view name) {
  if (name.empty() || name[0] == '.') return false;
  if (std::ranges::any_of(name, [](unsigned char c) { return c < 0x20 || c == 0x7f; })) return false;
  return valid_utf8_length(name) == name.size();
}

std::vector<std::string> entries(const OpenFile& folder) {
  std::vector<std::string> names;
  // The stream owns its descriptor; one of its own leaves the position of `folder` alone.
  const int fd = ::openat(folder.fd(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(fd < 0 ? nullptr : ::fdopendir(fd), ::closedir);
  if (!stream) return names;
  while (const dirent* entry = ::readdir(stream.get()))
    if ((entry->d_type == DT_DIR || entry->d_type == DT_UNKNOWN) && is_plain_name(entry->d_name))
      names.emplace_back(entry->d_name);
  std::ranges::sort(names);
  return names;
}

struct Search {
  std::vector<std::string> found;
  size_t folders = 0;

  void below(const OpenFile& folder, const std::string& prefix, int depth) {
    for (const std::string& name : entries(folder)) {
      if (found.size() >= kMostRuns || ++folders > kMostFolders) return;
      const OpenFile inner = open_folder(folder.fd(), name.c_str());
      if (!inner) continue;
      if (is_run(inner))
        found.push_back(prefix + name);
      else if (depth > 1)
        below(inner, prefix + name + "/", depth - 1);
    }
  }
};

}  // namespace

OpenFile::~OpenFile() {
  if (fd_ >= 0) ::close(fd_);
}
OpenFile& OpenFile::operator=(OpenFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

// ---- Runs ----------------------------------------------------------------------------------------------------------

RunsFolder::RunsFolder(std::string path) {
  std::error_code error;
  const auto whole = std::filesystem::canonical(path, error);
  if (error || !std::filesystem::is_directory(whole))
    fail(path, "is no folder", "name the folder of a run, or one that holds runs (output.dir of a run file)");
  path_ = whole.string();
  own_name_ = whole.has_filename() ? whole.filename().string() : "run";
}

std::vector<std::string> RunsFolder::names() const {
  const OpenFile root = open_folder(AT_FDCWD, path_.c_str());
  if (!root) return {};
  if (is_run(root)) return {own_name_};
  Search search;
  search.below(root, "", kDepth);
  return search.found;
}

OpenFile RunsFolder::open(std::string_view name) const {
  OpenFile folder = open_folder(AT_FDCWD, path_.c_str());
  if (!folder) return folder;
  if (is_run(folder)) return name == own_name_ ? std::move(folder) : OpenFile();
  if (name.ends_with('/')) return OpenFile();
  for (int depth = 0; folder && !name.empty(); ++depth) {
    const std::string part(name.substr(0, name.find('/')));
    // No "..", no absolute path, and no NUL, at which the system would stop reading.
    if (depth == kDepth || !is_plain_name(part)) return OpenFile();
    folder = open_folder(folder.fd(), part.c_str());
    name.remove_prefix(std::min(name.size(), part.size() + 1));
  }
  return folder && is_run(folder) ? std::move(folder) : OpenFile();
}

bool is_locked(const OpenFile& run) {
  struct stat s {};
  if (::fstat(run.fd(), &s) != 0) return false;
  const std::string inode =
      fmt::format(" {:02x}:{:02x}:{} ", major(s.st_dev), minor(s.st_dev), static_cast<uint64_t>(s.st_ino));
  // Lines are "1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF"; the file has no size, so it is read as a stream.
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> locks(std::fopen("/proc/locks", "re"), std::fclose);
  char line[256];
  while (locks && std::fgets(line, sizeof line, locks.get())) {
    const std::string_view text(line);
    if (text.find("FLOCK") != text.npos && text.find("WRITE") != text.npos && text.find(inode) != text.npos)
      return true;
  }
  return false;
}

// ---- Files ---------------------------------------------------------------------------------------------------------

std::optional<RunFile> open_run_file(const OpenFile& run, const std::string& name) {
  // Without O_NONBLOCK opening a pipe would wait for a writer.
  RunFile f{OpenFile(::openat(run.fd(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)), {}};
  struct statx s {};
  if (!f.file || ::statx(f.file.fd(), "", AT_EMPTY_PATH, STATX_BASIC_STATS | STATX_BTIME, &s) != 0) return {};
  if (!S_ISREG(s.stx_mode)) return {};
  // Inode numbers are used again; the time of birth tells them apart (0 on file systems that do not keep it).
  f.identity = fmt::format("{:x}.{:x}.{:x}.{:x}.{:x}", s.stx_dev_major, s.stx_dev_minor, s.stx_ino, s.stx_btime.tv_sec,
                           s.stx_btime.tv_nsec);
  f.size = s.stx_size;
  f.modified = static_cast<double>(s.stx_mtime.tv_sec) + 1e-9 * s.stx_mtime.tv_nsec;
  return f;
}

std::string read_part(const RunFile& file, uint64_t from, size_t most) {
  std::string text;
  while (text.size() < most) {
    const size_t before = text.size(), wanted = std::min(most - before, kBlock);
    text.resize(before + wanted);
    const ssize_t n = ::pread(file.file.fd(), text.data() + before, wanted, static_cast<off_t>(from + before));
    text.resize(before + static_cast<size_t>(std::max<ssize_t>(n, 0)));
    if (n <= 0) break;
  }
  return text;
}

uint64_t for_each_line(const RunFile& file, uint64_t from, uint64_t most, const OnLine& line) {
  uint64_t begin = from;  // of the line that is being read
  std::string rest;       // of it, from the blocks before
  bool too_long = false;
  for (uint64_t at = from; begin - from < most;) {
    const std::string block = read_part(file, at, kBlock);
    if (block.empty()) break;
    size_t start = 0;
    for (size_t end; begin - from < most && (end = block.find('\n', start)) != block.npos; start = end + 1) {
      const std::string_view piece = std::string_view(block).substr(start, end - start);
      if (too_long)
        line(begin, std::nullopt);
      else
        line(begin, rest.empty() ? piece : std::string_view(rest.append(piece)));
      rest.clear();
      too_long = false;
      begin = at + end + 1;
    }
    at += block.size();
    if (rest.size() + block.size() - start > kLongestLine) too_long = true;
    too_long ? rest.clear() : void(rest.append(block, start));
  }
  return begin;
}

bool begins_line(const RunFile& file, uint64_t at) {
  return at == 0 || (at <= file.size && read_part(file, at - 1, 1) == "\n");
}

}  // namespace plumb::serve
