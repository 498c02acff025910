#include "reward/verifiers.h"

#include <gmock/gmock.h>

#include "reward/json_text.h"
#include "reward/pattern.h"
#include "testing.h"

namespace plumb {
namespace {

using nlohmann::json;
using testing::error_of;
using ::testing::HasSubstr;
using testing::sample_of;

double reward(Reward& of, const std::string& content, json line = json::object()) {
  return of.score(sample_of(content, std::move(line))).reward;
}

TEST(Exact, ComparesTrimmedTexts) {
  const auto exact = make_verifier(ExactKeys{});
  struct Row {
    std::string content;
    json wanted;
    double reward;
  };
  const std::vector<Row> rows = {
      {"Paris", "Paris", 1},
      {" \n\tParis\r\n", "Paris", 1},
      {"Paris", "  Paris ", 1},
      {"paris", "Paris", 0},
      {"Paris.", "Paris", 0},
      {"", "Paris", 0},
      {"", "", 1},
      {"  ", "", 1},
      {"42", 42, 1},
      {"42.0", 42, 0},
      {"0.5", 0.5, 1},
      {"true", true, 1},
      {"b", {"a", "b"}, 1},
      {"c", {"a", "b"}, 0},
      {"7", {"a", 7}, 1},
      {"a\nb", "a\nb", 1},
      {"M\xC3\xBCller", "M\xC3\xBCller", 1},
  };
  for (const Row& row : rows)
    EXPECT_EQ(reward(*exact, row.content, {{"answer", row.wanted}}), row.reward) << row.content << " " << row.wanted;
}

TEST(Exact, FoldsCaseOfAllAlphabets) {
  const auto exact = make_verifier(ExactKeys{.ignore_case = true});
  EXPECT_EQ(reward(*exact, "PARIS", {{"answer", "Paris"}}), 1);
  EXPECT_EQ(reward(*exact, "M\xC3\x9CLLER", {{"answer", "m\xC3\xBCller"}}), 1);
  EXPECT_EQ(reward(*exact, "Paris!", {{"answer", "Paris"}}), 0);
  EXPECT_EQ(reward(*exact, "a.c", {{"answer", "A.C"}}), 1);
  EXPECT_EQ(reward(*exact, "abc", {{"answer", "A.C"}}), 0);  // the text is no pattern
  EXPECT_EQ(reward(*exact, "\xFF\xFE", {{"answer", "Paris"}}), 0);
}

TEST(Exact, FieldsByNameAndByPointer) {
  const auto exact = make_verifier(ExactKeys{.field = "/solution/values/1", .of = "reasoning"});
  RewardSample sample = sample_of("no", {{"solution", {{"values", {"a", "yes"}}}}});
  sample.answer.reasoning = "yes";
  EXPECT_EQ(exact->score(sample).reward, 1);
  EXPECT_NO_THROW(exact->check_line(sample.line, "d.jsonl:1"));
  EXPECT_EQ(error_of([&] { exact->check_line(json::object(), "d.jsonl:3"); }),
            "d.jsonl:3: has no field /solution/values/1 (the reward compares the answer with it)");
  EXPECT_THAT(error_of([&] {
                make_verifier(ExactKeys{})->check_line({{"answer", json::object()}}, "d:1");
              }),
              HasSubstr("field answer is {}"));
  EXPECT_THROW(exact->score(sample_of("yes")), Error);
}

TEST(Number, LastNumberOfAText) {
  const std::vector<std::pair<std::string, std::optional<double>>> rows = {
      {"42", 42},
      {"The answer is 42.", 42},
      {"first 1, then 2", 2},
      {"-3", -3},
      {"x = -3", -3},
      {"+3", 3},
      {"\xE2\x88\x92"
       "3.5",
       -3.5},
      {"5-3", 3},
      {"(2)-3", 3},
      {"2026-11-30", 30},
      {"1,234,567.5", 1234567.5},
      {"$1,000", 1000},
      {"1,2,3", 3},
      {"1,2000", 2000},
      {"12,345,67", 67},
      {".5", 0.5},
      {"about .25!", 0.25},
      {"3.", 3},
      {"1.2.3", 1.2},
      {"1e3", 1000},
      {"2.5E-2 m", 0.025},
      {"1e+2", 100},
      {"x42", std::nullopt},
      {"v2 is 7kg", 7},
      {"**8**", 8},
      {"no number", std::nullopt},
      {"", std::nullopt},
      {"1e999", std::nullopt},
      {"\xFF 9 \xFF", 9},
      {"50%", 50},
      {"#### 72", 72},
  };
  for (const auto& [text, wanted] : rows) EXPECT_EQ(last_number(text), wanted) << text;
}

TEST(Number, Tolerances) {
  const auto plain = make_verifier(NumberKeys{.tolerance = 0.01});
  EXPECT_EQ(reward(*plain, "3.145", {{"answer", 3.14}}), 1);
  EXPECT_EQ(reward(*plain, "3.16", {{"answer", 3.14}}), 0);
  EXPECT_EQ(reward(*plain, "no idea", {{"answer", 3.14}}), 0);
  EXPECT_EQ(reward(*plain, "72", {{"answer", "So 70 + 2 = 72\n#### 72"}}), 1);
  EXPECT_THAT(error_of([&] {
                plain->check_line({{"answer", "none"}}, "d:2");
              }),
              HasSubstr("d:2: field answer is \"none\" (it must be a number"));
  const auto relative = make_verifier(NumberKeys{.tolerance = 0, .relative_tolerance = 0.1});
  EXPECT_EQ(reward(*relative, "-109", {{"answer", -100}}), 1);
  EXPECT_EQ(reward(*relative, "-111", {{"answer", -100}}), 0);
  EXPECT_EQ(plain->score(sample_of("none", {{"answer", 1}})).metrics.at("has_number"), 0);
}

TEST(Regex, SearchesOrMatchesTheWholeText) {
  const auto search = make_verifier(RegexKeys{.pattern = "a+b"}, "run.toml:1");
  EXPECT_EQ(reward(*search, "xx aab xx"), 1);
  EXPECT_EQ(reward(*search, "b"), 0);
  const auto full = make_verifier(RegexKeys{.pattern = "a|ab", .full = true}, "run.toml:1");
  EXPECT_EQ(reward(*full, "ab"), 1);  // the second alternative, although the first matches a part
  EXPECT_EQ(reward(*full, "ab\n"), 0);
  const auto of_line = make_verifier(RegexKeys{.field = "pattern", .ignore_case = true}, "run.toml:1");
  EXPECT_EQ(reward(*of_line, "HELLO", {{"pattern", "^hel+o$"}}), 1);
  EXPECT_THAT(error_of([&] {
                of_line->check_line({{"pattern", "("}}, "d.jsonl:7");
              }),
              HasSubstr("d.jsonl:7: pattern (: missing closing parenthesis at byte 1"));
  EXPECT_THAT(error_of([&] { make_verifier(RegexKeys{.pattern = "[z"}, "run.toml:4"); }),
              HasSubstr("run.toml:4: pattern [z"));
}

TEST(Regex, BacktrackingWithoutEndCostsTheSample) {
  const auto evil = make_verifier(RegexKeys{.pattern = "^(a+)+$"}, "run.toml:1");
  EXPECT_THAT(error_of([&] { reward(*evil, std::string(200, 'a') + "b"); }),
              HasSubstr("the search in an answer of 201 bytes was given up: match limit exceeded"));
  // A long answer costs no stack.
  const auto deep = make_verifier(RegexKeys{.pattern = "^(?:a|b)*+$"}, "run.toml:1");
  EXPECT_EQ(reward(*deep, std::string(400'000, 'a')), 1);
}

TEST(Length, DistanceFromTheTarget) {
  // The task of the reference trainer: -|n - 10| / 10 tokens.
  const auto tokens = make_verifier(LengthKeys{.target = 10, .scale = 10});
  RewardSample sample = sample_of("");
  for (const auto& [n, wanted] : std::vector<std::pair<int, double>>{{10, 0}, {0, -1}, {15, -0.5}, {30, -2}}) {
    sample.answer.tokens = n;
    EXPECT_EQ(tokens->score(sample).reward, wanted);
    EXPECT_EQ(tokens->score(sample).metrics.at("absolute_error"), std::abs(n - 10));
  }
  const auto characters = make_verifier(LengthKeys{.target = 4, .scale = 2, .unit = "characters"});
  EXPECT_EQ(reward(*characters, "\xC3\xA4\xE2\x82\xAC\xF0\x9F\x98\x80"), -0.5);  // three code points
  const auto words = make_verifier(LengthKeys{.target = 3, .scale = 1, .unit = "words"});
  EXPECT_EQ(reward(*words, " one\ttwo \n three, "), 0);
  EXPECT_EQ(reward(*words, ""), -3);
}

TEST(Choice, YesNoMaybe) {
  const ChoiceKeys keys{.rewards = {{"yes", 0.5}, {"no", 0.75}, {"maybe", 1.0}}, .otherwise = -0.25};
  const auto choice = make_verifier(keys);
  for (const auto& [text, wanted] : std::vector<std::pair<std::string, double>>{{"yes", 0.5},
                                                                                {"no", 0.75},
                                                                                {" maybe\n", 1},
                                                                                {"Maybe", -0.25},
                                                                                {"maybe.", -0.25},
                                                                                {"", -0.25},
                                                                                {"yes no", -0.25}})
    EXPECT_EQ(reward(*choice, text), wanted) << text;
  EXPECT_EQ(choice->score(sample_of("yes")).metrics.at("chosen"), 1);
  EXPECT_EQ(choice->score(sample_of("?")).metrics.at("chosen"), 0);
  ChoiceKeys folded = keys;
  folded.ignore_case = true;
  EXPECT_EQ(reward(*make_verifier(folded), "MAYBE"), 1);
}

TEST(ToolCall, NameAndArguments) {
  const auto call = make_verifier(ToolCallKeys{.name_reward = 0.25});
  const json wanted = {{"name", "add"}, {"arguments", {{"a", 1}, {"b", {2, "x"}}}}};
  const auto score = [&](std::vector<AnswerCall> calls, const json& field) {
    RewardSample sample = sample_of("", {{"tool_call", field}});
    sample.answer.calls = std::move(calls);
    return call->score(sample).reward;
  };
  EXPECT_EQ(score({{"1", "add", R"({"a": 1, "b": [2, "x"]})"}}, wanted), 1);
  EXPECT_EQ(score({{"1", "add", R"( {"b":[2.0,"x"],"a":1.0} )"}}, wanted), 1);  // order and spelling do not count
  EXPECT_EQ(score({{"1", "add", R"({"a": 1, "b": ["x", 2]})"}}, wanted), 0.25);
  EXPECT_EQ(score({{"1", "add", R"({"a": "1", "b": [2, "x"]})"}}, wanted), 0.25);
  EXPECT_EQ(score({{"1", "add", R"({"a": 1, "b": [2, "x"], "c": null})"}}, wanted), 0.25);
  EXPECT_EQ(score({{"1", "add", "rubbish"}}, wanted), 0.25);
  EXPECT_EQ(score({{"1", "sub", R"({"a": 1, "b": [2, "x"]})"}}, wanted), 0);
  EXPECT_EQ(score({}, wanted), 0);
  EXPECT_EQ(score({}, json::array()), 1);  // no call is wanted
  const json openai = {{"type", "function"},
                       {"function", {{"name", "add"}, {"arguments", R"({"a": 1, "b": [2, "x"]})"}}}};
  EXPECT_EQ(score({{"1", "add", R"({"a": 1, "b": [2, "x"]})"}}, openai), 1);
  const json two = {{{"name", "f"}, {"arguments", json::object()}}, {{"name", "g"}, {"arguments", json::object()}}};
  EXPECT_EQ(score({{"1", "f", "{}"}, {"2", "g", "{}"}}, two), 1);
  EXPECT_EQ(score({{"1", "g", "{}"}, {"2", "f", "{}"}}, two), 0);
  EXPECT_EQ(score({{"1", "f", "{}"}}, two), 0);
  EXPECT_THAT(error_of([&] {
                call->check_line({{"tool_call", {{"name", "f"}}}}, "d:5");
              }),
              HasSubstr("d:5: field tool_call"));
}

TEST(ToolCall, AnyOrder) {
  const auto call = make_verifier(ToolCallKeys{.field = "calls", .any_order = true});
  RewardSample sample = sample_of(
      "", {{"calls", {{{"name", "f"}, {"arguments", {{"x", 1}}}}, {{"name", "f"}, {"arguments", {{"x", 2}}}}}}});
  sample.answer.calls = {{"1", "f", R"({"x":2})"}, {"2", "f", R"({"x":1})"}};
  EXPECT_EQ(call->score(sample).reward, 1);
  sample.answer.calls = {{"1", "f", R"({"x":2})"}, {"2", "f", R"({"x":2})"}};
  EXPECT_EQ(call->score(sample).reward, 0);
}

TEST(JsonText, RefusesWhatIsNoneOrTooDeep) {
  EXPECT_EQ(parse_json_text(" [1] \n"), json({1}));
  for (const char* text : {"", "[1", "[1] 2", "NaN", "{\"a\":1,}", "\"\xFF\"", "1e999", "// x\n1"})
    EXPECT_FALSE(parse_json_text(text)) << text;
  EXPECT_TRUE(parse_json_text(std::string(kJsonDepth, '[') + std::string(kJsonDepth, ']')));
  EXPECT_FALSE(parse_json_text(std::string(kJsonDepth + 1, '[') + std::string(kJsonDepth + 1, ']')));
  EXPECT_FALSE(parse_json_text(std::string(1'000'000, '[')));
  EXPECT_TRUE(parse_json_text("\"" + std::string(1000, '[') + "\\\"[\""));
  EXPECT_EQ(shortened("a\nb"), "a b");
  EXPECT_EQ(shortened("a\xE2\x82\xAC", 3), "a... (4 bytes)");
}

}  // namespace
}  // namespace plumb
