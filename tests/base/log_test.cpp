#include "base/log.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "base/error.h"
#include "base/files.h"
#include "support/temp_path.h"

namespace plumb {
namespace {

TEST(Log, FileGetsLevelAndText) {
  const std::string path = testing::temp_path("log_test.txt");
  std::filesystem::remove(path);
  ::testing::internal::CaptureStderr();
  set_log_file(path);
  log_info("row {} of {}", 3, 4);
  log_warning("short row");
  log(LogLevel::debug, "not shown");
  log_to_file(LogLevel::error, "printed elsewhere");
  set_log_file("");
  log_info("after the file was closed");
  const std::string seen = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(seen, "row 3 of 4\nwarning: short row\nafter the file was closed\n");
  const std::string text = read_text(path);
  EXPECT_NE(text.find(" info    row 3 of 4\n"), std::string::npos) << text;
  EXPECT_NE(text.find(" warning short row\n"), std::string::npos) << text;
  EXPECT_NE(text.find(" error   printed elsewhere\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("not shown"), std::string::npos);
  EXPECT_EQ(text.find("after"), std::string::npos);
}

TEST(Log, FileThatCannotBeWrittenIsAnError) {
  EXPECT_THROW(set_log_file(::testing::TempDir() + "no_such_folder/log.txt"), Error);
}

}  // namespace
}  // namespace plumb
