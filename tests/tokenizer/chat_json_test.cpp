#include <gtest/gtest.h>

#include "base/error.h"
#include "tokenizer/python_json.h"

namespace plumb {
namespace {

std::string again(const std::string& text) { return python_dumps(parse_json(text, "test")); }

// Expected strings were printed by CPython 3.11: json.dumps(json.loads(text), ensure_ascii=False).
TEST(PythonJson, WritesNumbersAsPython) {
  const std::pair<const char*, const char*> cases[] = {
      {"0", "0"},
      {"-0", "0"},
      {"-0.0", "-0.0"},
      {"1.0", "1.0"},
      {"1E5", "100000.0"},
      {"1e16", "1e+16"},
      {"9999999999999998.0", "9999999999999998.0"},
      {"1e-4", "0.0001"},
      {"1e-5", "1e-05"},
      {"1.25e-7", "1.25e-07"},
      {"5e-324", "5e-324"},
      {"1.7976931348623157e308", "1.7976931348623157e+308"},
      {"1e999", "Infinity"},
      {"-1e999", "-Infinity"},
      {"NaN", "NaN"},
      {"123456789012345678901234567890", "123456789012345678901234567890"},
      {"123456.789", "123456.789"},
      {"0.1e1", "1.0"},
  };
  for (auto [text, expected] : cases) EXPECT_EQ(again(text), expected) << text;
}

TEST(PythonJson, KeepsOrderAndTheLastOfRepeatedKeys) {
  EXPECT_EQ(again(R"( {"b":1 ,"a":[ ],"b":{"x":null}} )"), R"({"b": {"x": null}, "a": []})");
}

TEST(PythonJson, WritesStringsAsPython) {
  EXPECT_EQ(again(R"("\u00e9\/\u001f\u007f\u2028\ud83d\ude00\t\n\r\b\f\"\\")"),
            "\"é/\\u001f\x7f\u2028😀\\t\\n\\r\\b\\f\\\"\\\\\"");
}

TEST(PythonJson, RefusesWhatIsNoJsonAndSaysWhere) {
  for (std::string text : {"",
                           "{",
                           "[1,]",
                           "{\"a\":1,}",
                           "01",
                           "1.",
                           "+1",
                           "tru",
                           "\"\n\"",
                           "\"\\x\"",
                           "\"\\ud800\"",
                           "\"\\udc00\"",
                           "\"\xff\"",
                           "\"\xc0\x80\"",
                           "\"\xed\xa0\x80\"",
                           "1 2",
                           "{a:1}",
                           "'a'",
                           "nul",
                           "-",
                           "\"abc"})
    EXPECT_THROW(parse_json(text, "test"), Error) << text;
  EXPECT_THROW(parse_json(std::string(5000, '['), "test"), Error);
  try {
    parse_json("{\n \"a\": ?}", "tools");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.where(), "tools");
    EXPECT_NE(std::string(e.what()).find("2:7"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace plumb
