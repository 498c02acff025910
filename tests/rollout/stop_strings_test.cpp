// Answers that end at stop strings, against a search in the whole text.
#include "rollout/stop_strings.h"

#include <gtest/gtest.h>

#include "base/philox.h"

namespace plumb {
namespace {

struct Result {
  std::string text, stop_string;
  size_t tokens = 0;
};

// All tokens pushed one by one; checks on the way that nothing is said too early and that no token is lost.
Result run(const std::vector<std::string>& stops, const std::vector<std::string>& tokens, size_t min_tokens = 0) {
  AnswerText answer(stops);
  Result r;
  const auto say = [&](const std::vector<TextToken>& certain) {
    for (const TextToken& t : certain) {
      EXPECT_EQ(t.token.id, static_cast<int>(r.tokens));
      r.text += t.text, ++r.tokens;
    }
  };
  for (size_t i = 0; i < tokens.size() && answer.stop_string().empty(); ++i) {
    GeneratedToken token;
    token.id = static_cast<int>(i);
    say(answer.push({token, tokens[i]}, i >= min_tokens));
  }
  say(answer.rest());
  r.stop_string = answer.stop_string();
  return r;
}

TEST(StopStrings, AgreeWithASearchInTheWholeText) {
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    Random g(seed);
    const auto word = [&](int length) {
      std::string s;
      while (static_cast<int>(s.size()) < length) s += static_cast<char>('a' + g.below(2 + seed % 2));
      return s;
    };
    std::vector<std::string> stops(g.below(4)), tokens(1 + g.below(12));
    for (std::string& s : stops) s = word(1 + static_cast<int>(g.below(5)));
    std::string whole;
    for (std::string& t : tokens) whole += t = word(static_cast<int>(g.below(4)));
    size_t end = std::string::npos;  // of the string that is complete first
    std::string ended_by;
    for (const std::string& s : stops) {
      const size_t at = whole.find(s);
      if (at == std::string::npos) continue;
      const size_t e = at + s.size();
      if (e < end || (e == end && s.size() > ended_by.size())) end = e, ended_by = s;
    }
    const Result r = run(stops, tokens);
    EXPECT_EQ(r.stop_string, ended_by) << seed;
    EXPECT_EQ(r.text, ended_by.empty() ? whole : whole.substr(0, end - ended_by.size())) << seed;
    size_t count = 0, bytes = 0;  // tokens up to the one that completes the string
    while (count < tokens.size() && (ended_by.empty() || bytes < end)) bytes += tokens[count++].size();
    EXPECT_EQ(r.tokens, count) << seed;
  }
}

TEST(StopStrings, HoldBackNoMoreThanMayBelongToOne) {
  AnswerText answer({"END", "\n\n"});
  const auto said = [&](const std::string& text) {
    std::string s;
    for (const TextToken& t : answer.push({{}, text}, true)) s += "[" + t.text + "]";
    return s;
  };
  EXPECT_EQ(said("abc"), "[abc]");
  EXPECT_EQ(said("xE"), "");
  EXPECT_EQ(said("N"), "");
  EXPECT_EQ(said(""), "");  // a token without text keeps its place
  EXPECT_EQ(said("E"), "[xE][N][]");
  EXPECT_EQ(said("x\n"), "[E]");
  EXPECT_EQ(said("y"), "[x\n][y]");
  EXPECT_EQ(said("\nE"), "");
  EXPECT_EQ(said("NDless"), "[\n][]");
  EXPECT_EQ(answer.stop_string(), "END");
}

TEST(StopStrings, TheFirstTokensEndNothing) {
  const Result r = run({"ab"}, {"ab", "xa", "b", "ab"}, 2);
  EXPECT_EQ(r.text, "abx");
  EXPECT_EQ(r.tokens, 3u);
  EXPECT_EQ(run({"aa"}, {"a", "a", "a", "b"}, 2).text, "a");  // overlaps the one that was ignored
}

}  // namespace
}  // namespace plumb
