#include "serve/auth.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/files.h"
#include "support/temp_path.h"

namespace plumb::serve {
namespace {

TEST(Auth, OnlyWholeKeysAreKeys) {
  const std::vector<std::string> keys = {"first-key", "k2"};
  for (const char* good : {"first-key", "k2"}) EXPECT_TRUE(is_key(keys, good));
  for (const char* bad : {"", "first-ke", "first-key2", "k", "k2k2", "K2", "first-keyfirst-key"})
    EXPECT_FALSE(is_key(keys, bad)) << bad;
}

TEST(Auth, KeyOfARequest) {
  const auto key = [](const char* name, const char* value) {
    HttpRequest r;
    r.headers = {{name, value}};
    return std::string(key_of(r));
  };
  EXPECT_EQ(key("Authorization", "Bearer abc"), "abc");
  EXPECT_EQ(key("authorization", "bearer  abc"), "abc");
  EXPECT_EQ(key("X-Api-Key", "abc"), "abc");
  EXPECT_EQ(key("Authorization", "Basic abc"), "");
  EXPECT_EQ(key("Authorization", "Bearer "), "");
  EXPECT_EQ(key("Authorization", "Bearer"), "");
}

TEST(Auth, KeysOfAFile) {
  const std::string path = plumb::testing::temp_path("keys");
  write_text(path, "# people\n  abc \n\ndef\r\n");
  EXPECT_EQ(read_keys(path), (std::vector<std::string>{"abc", "def"}));
  write_text(path, "# nobody\n");
  EXPECT_THROW(read_keys(path), Error);
  write_text(path, "two words\n");
  EXPECT_THROW(read_keys(path), Error);
  EXPECT_THROW(read_keys(path + "-absent"), Error);
}

}  // namespace
}  // namespace plumb::serve
