#include "base/files.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"

namespace plumb {
namespace {
namespace fs = std::filesystem;

class Files : public ::testing::Test {
 protected:
  Files() {
    std::string pattern = (fs::temp_directory_path() / "plumb-files-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~Files() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  int count() const {
    return static_cast<int>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }
  fs::path folder_;
};

std::string message(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST_F(Files, WrittenFileAppearsAtCommitOnly) {
  {
    FileWriter w(path("a"));
    w.write("hello ");
    w.write(std::string(3 << 20, 'x'));  // larger than the buffer
    EXPECT_FALSE(fs::exists(path("a")));
    w.commit();
  }
  EXPECT_EQ(read_text(path("a")), "hello " + std::string(3 << 20, 'x'));
  EXPECT_EQ(count(), 1);
}

// A rename would put a file in place of the device or of the link.
TEST_F(Files, DevicesAndLinksStayWhatTheyAre) {
  fs::create_symlink("/dev/full", path("device"));
  EXPECT_NE(message([&] { write_text(path("device"), "text"); }).find("the disk is full"), std::string::npos);
  EXPECT_EQ(fs::read_symlink(path("device")), "/dev/full");
  write_text(path("a"), "old");
  fs::create_symlink("a", path("link"));
  write_text(path("link"), "new");
  EXPECT_EQ(fs::read_symlink(path("link")), "a");
  EXPECT_EQ(read_text(path("a")), "new");
  EXPECT_NE(message([&] { write_text(folder_.string(), "text"); }).find("is a folder"), std::string::npos);
  EXPECT_EQ(count(), 3);
}

TEST_F(Files, FileOfAFailedWriterIsGoneAndTheOldOneStays) {
  write_text(path("a"), "old");
  try {
    FileWriter w(path("a"));
    w.write("new");
    fail("somewhere", "something went wrong");
  } catch (const Error&) {
  }
  EXPECT_EQ(read_text(path("a")), "old");
  EXPECT_EQ(count(), 1);
}

// A limit on the size of a file stands for the full disk: both make write() fail halfway. In a child, because the limit
// cannot be taken back.
TEST_F(Files, FullDiskIsReportedAndLeavesNothing) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100000, 100000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const std::string text = message([&] { write_text(path("a"), std::string(5 << 20, 'x')); });
    ::_exit(text.find("smaller shards") != std::string::npos && text.starts_with(path("a")) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(count(), 0);
}

TEST_F(Files, FolderAppearsWholeOrNotAtAll) {
  {
    FolderWriter w(path("f/"));
    write_text(w.partial() + "/a", "1");
    EXPECT_FALSE(fs::exists(path("f")));
  }
  EXPECT_EQ(count(), 0);
  FolderWriter w(path("f"));
  write_text(w.partial() + "/a", "1");
  w.commit();
  EXPECT_EQ(read_text(path("f/a")), "1");
  EXPECT_EQ(count(), 1);
  EXPECT_NE(message([&] { FolderWriter again(path("f")); }).find("exists already"), std::string::npos);
  EXPECT_EQ(read_text(path("f/a")), "1");
}

TEST_F(Files, MappingKeepsBytesAndOutlivesTheName) {
  write_text(path("a"), std::string(10000, 'q') + "end");
  const auto file = MappedFile::open(path("a"));
  fs::remove(path("a"));
  file->drop(0, file->size());
  EXPECT_EQ(file->size(), 10003u);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(file->data()) + 9999, 4), "qend");
  write_text(path("empty"), "");
  EXPECT_EQ(MappedFile::open(path("empty"))->size(), 0u);
}

TEST_F(Files, ErrorsNameTheFile) {
  EXPECT_NE(message([&] { read_text(path("none")); }).find(path("none")), std::string::npos);
  EXPECT_NE(message([&] { MappedFile::open(path("none")); }).find("check the path"), std::string::npos);
  EXPECT_NE(message([&] { MappedFile::open(folder_.string()); }).find("not a regular file"), std::string::npos);
  EXPECT_NE(message([&] { write_text(path("no/such"), ""); }).find("check the path"), std::string::npos);
}

TEST_F(Files, BadJsonNamesFileAndLine) {
  write_text(path("a.json"), "{\n \"a\": 1,\n \"b\": }\n");
  EXPECT_NE(message([&] { read_json_file(path("a.json")); }).find(path("a.json") + ":3"), std::string::npos);
  write_text(path("b.json"), "{\"a\": [1]}");
  EXPECT_EQ(read_json_file(path("b.json"))["a"][0], 1);
}

}  // namespace
}  // namespace plumb
