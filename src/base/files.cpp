#include "base/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/error.h"

namespace plumb {
namespace {
namespace fs = std::filesystem;

[[noreturn]] void fail_errno(const std::string& path, const std::string& doing, int error) {
  std::string fix;
  if (error == ENOSPC || error == EDQUOT) fix = "the disk is full: free space or write to another disk";
  if (error == EFBIG) fix = "the file system or `ulimit -f` limits the size of a file: raise it or use smaller shards";
  if (error == ENOENT) fix = "check the path";
  if (error == EACCES || error == EPERM) fix = "check the permissions of the file and its folder";
  if (error == EROFS) fix = "the file system is read-only: write elsewhere";
  fail(path, doing + ": " + std::strerror(error), fix);
}

std::string folder_of(const std::string& path) {
  const std::string parent = fs::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

// A rename is durable once the folder that holds the name is.
void sync_folder(const std::string& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail_errno(folder, "cannot open the folder", errno);
  const int result = ::fsync(fd), error = errno;
  ::close(fd);
  if (result != 0 && error != EINVAL) fail_errno(folder, "cannot flush the folder", error);
}
}  // namespace

// ---- Reading --------------------------------------------------------------------------------------------------------

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail_errno(path, "cannot open", errno);
  struct stat info {};
  const bool regular = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  void* memory = nullptr;
  int error = 0;
  if (regular && info.st_size > 0) {
    memory = ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) error = errno, memory = nullptr;
  }
  ::close(fd);
  if (!regular) fail(path, "is not a regular file", "give the path of a file");
  if (error) fail_errno(path, "cannot map", error);
  std::shared_ptr<MappedFile> file(new MappedFile);
  file->path_ = path;
  file->data_ = static_cast<std::byte*>(memory);
  file->size_ = static_cast<size_t>(info.st_size);
  return file;
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(data_, size_);
}

void MappedFile::drop(size_t offset, size_t length) const {
  static const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t end = std::min(offset + length, size_);
  const size_t first = offset / page * page;
  if (data_ && first < end) ::madvise(data_ + first, end - first, MADV_DONTNEED);  // a hint: failure changes nothing
}

std::string read_text(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail_errno(path, "cannot open", errno);
  std::string text;
  char block[65536];
  ssize_t n;
  while ((n = ::read(fd, block, sizeof block)) > 0 || (n < 0 && errno == EINTR))
    if (n > 0) text.append(block, static_cast<size_t>(n));
  const int error = errno;
  ::close(fd);
  if (n < 0) fail_errno(path, "cannot read", error);
  return text;
}

// ---- Writing --------------------------------------------------------------------------------------------------------

FileWriter::FileWriter(std::string path) : path_(std::move(path)) {
  buffer_.reserve(1 << 20);
  std::error_code error;
  const fs::file_status status = fs::status(path_, error);
  if (fs::is_directory(status)) fail(path_, "is a folder", "give the path of a file");
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd_ < 0) fail_errno(path_, "cannot open", errno);
    return;
  }
  if (fs::is_symlink(fs::symlink_status(path_, error))) {
    const fs::path target = fs::weakly_canonical(path_, error);
    if (!error) path_ = target.string();
  }
  static std::atomic<int> serial{0};
  temporary_ = path_ + ".partial-" + std::to_string(::getpid()) + "-" + std::to_string(serial++);
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) fail_errno(path_, "cannot create", errno);
}

FileWriter::~FileWriter() {
  if (fd_ < 0) return;
  ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

namespace {
void write_all(int fd, const std::string& path, const char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t n = ::write(fd, data, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_errno(path, "cannot write", errno);
    data += n, bytes -= static_cast<size_t>(n);
  }
}
}  // namespace

void FileWriter::flush() {
  write_all(fd_, path_, buffer_.data(), buffer_.size());
  buffer_.clear();
}

void FileWriter::write(const void* data, size_t bytes) {
  PLUMB_CHECK(fd_ >= 0, "write after commit");
  const char* from = static_cast<const char*>(data);
  written_ += bytes;
  if (buffer_.size() + bytes > buffer_.capacity()) flush();
  if (bytes >= buffer_.capacity())
    write_all(fd_, path_, from, bytes);
  else
    buffer_.insert(buffer_.end(), from, from + bytes);
}

void FileWriter::commit() {
  PLUMB_CHECK(fd_ >= 0, "commit twice");
  flush();
  if (!temporary_.empty()) {
    if (::fsync(fd_) != 0) fail_errno(path_, "cannot flush to the disk", errno);
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_errno(path_, "cannot rename the finished file", errno);
  }
  ::close(fd_);
  fd_ = -1;
  if (!temporary_.empty()) sync_folder(folder_of(path_));
}

void write_text(const std::string& path, std::string_view text) {
  FileWriter file(path);
  file.write(text);
  file.commit();
}

FolderWriter::FolderWriter(std::string path) : path_(std::move(path)) {
  while (path_.size() > 1 && path_.back() == '/') path_.pop_back();
  partial_ = path_ + ".partial";
  std::error_code error;
  if (fs::exists(path_, error) && !(fs::is_directory(path_, error) && fs::is_empty(path_, error)))
    fail(path_, "exists already", "remove it or choose another folder");
  fs::remove_all(partial_, error);  // left by a run that was killed
  fs::create_directories(partial_, error);
  if (error) fail_errno(path_, "cannot create the folder", error.value());
}

FolderWriter::~FolderWriter() {
  std::error_code ignored;
  if (!done_) fs::remove_all(partial_, ignored);
}

void FolderWriter::commit() {
  sync_folder(partial_);
  if (::rename(partial_.c_str(), path_.c_str()) != 0) fail_errno(path_, "cannot rename the finished folder", errno);
  done_ = true;
  sync_folder(folder_of(path_));
}

}  // namespace plumb
