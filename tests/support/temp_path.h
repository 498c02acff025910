// A place for a test's files that no other test, run or checkout uses at the same time. Gone when the process ends.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

namespace plumb::testing {

class TempFolder {
 public:
  TempFolder() : path_(::testing::TempDir() + "plumb-" + std::to_string(getpid())) {
    std::filesystem::create_directories(path_);
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline std::string temp_path(const std::string& name) {
  static TempFolder folder;
  return folder.path() + "/" + name;
}

}  // namespace plumb::testing
