// A place for a test's files that no other test, run or checkout uses at the same time.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

namespace plumb::testing {

inline std::string temp_path(const std::string& name) {
  return ::testing::TempDir() + "plumb-" + std::to_string(getpid()) + "-" + name;
}

}  // namespace plumb::testing
