// Files: read-only mappings, whole text files, and writers whose result appears whole or not at all. A failed or
// interrupted write leaves nothing behind under the final name; a full disk is reported as such.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace plumb {

// A whole file mapped for reading. Tensors made over it hold the shared pointer, so the mapping lives as long as they
// do. The memory must not be written to, and the file must not be truncated while it is mapped.
class MappedFile {
 public:
  // Errors: no such file, no permission, a folder.
  static std::shared_ptr<const MappedFile> open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  const std::string& path() const { return path_; }
  // These bytes are not needed again soon: their pages leave the process (they are read again if touched).
  void drop(size_t offset, size_t length) const;

 private:
  MappedFile() = default;
  std::string path_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

std::string read_text(const std::string& path);

// Writes `path` under a temporary name in the same folder; commit() makes it durable and renames it. Without commit()
// the destructor removes it. A symbolic link stays, the file it names is replaced. What is no regular file (a pipe, a
// terminal, /dev/stdout) is written as it is, never replaced. Errors name the file; a full disk, a quota and a file
// size limit have their own message.
class FileWriter {
 public:
  explicit FileWriter(std::string path);
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(const void* data, size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  void commit();
  uint64_t written() const { return written_; }

 private:
  void flush();
  std::string path_, temporary_;  // temporary_ is empty for what is no regular file
  std::vector<char> buffer_;
  uint64_t written_ = 0;
  int fd_ = -1;
};

void write_text(const std::string& path, std::string_view text);

// A folder that appears whole or not at all: write files into partial(), then commit() renames it to `path`. Without
// commit() the destructor removes it. `path` must not exist or be an empty folder.
class FolderWriter {
 public:
  explicit FolderWriter(std::string path);
  ~FolderWriter();
  FolderWriter(const FolderWriter&) = delete;
  FolderWriter& operator=(const FolderWriter&) = delete;

  const std::string& partial() const { return partial_; }
  void commit();

 private:
  std::string path_, partial_;
  bool done_ = false;
};

}  // namespace plumb
