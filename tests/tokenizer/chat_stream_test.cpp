#include "tokenizer/chat_stream.h"

#include <gtest/gtest.h>

#include <regex>

#include "chat_testing.h"

namespace plumb {
namespace {

using namespace chat_testing;
using namespace chat_format;
using Events = std::vector<ChatEvent>;
using Kind = ChatEvent::Kind;

bool is_delta(Kind k) { return k != Kind::call_begin && k != Kind::call_end && k != Kind::finish; }

// Neighbours of one kind as one event: what must not depend on the feeds.
Events merged(const Events& events) {
  Events out;
  for (const ChatEvent& e : events) {
    if (!out.empty() && is_delta(e.kind) && out.back().kind == e.kind) {
      out.back().text += e.text;
      out.back().source += e.source;
    } else {
      out.push_back(e);
    }
  }
  return out;
}

std::string shown(const Events& events) {
  static const char* names[] = {"reasoning", "content", "call_begin", "arguments", "call_end", "markup", "finish"};
  std::string s;
  for (const ChatEvent& e : events)
    s += std::string(names[static_cast<int>(e.kind)]) + "(" + e.text + "|" + e.source + ")\n";
  return s;
}

// next(rest) gives the length of the next feed.
template <class Next>
Events run(const std::string& text, ThinkingMode mode, Next next) {
  ChatStream stream(mode);
  Events events;
  auto add = [&](Events more) { events.insert(events.end(), more.begin(), more.end()); };
  for (size_t at = 0; at < text.size();) {
    size_t n = std::min<size_t>(next(), text.size() - at);
    add(stream.feed_text(std::string_view(text).substr(at, n)));
    at += n;
  }
  add(stream.finish(false));
  return events;
}
Events whole(const std::string& text, ThinkingMode mode) {
  return run(text, mode, [&] { return text.size(); });
}
Events bytes(const std::string& text, ThinkingMode mode) {
  return run(text, mode, [] { return 1; });
}

std::string cut_end(std::string text) {
  if (text.ends_with(kEnd)) text.resize(text.size() - kEnd.size());
  return text;
}

struct Expected {
  std::string content, arguments;
};
// Where text would be lost, it is kept instead (docs/chat.md): the answers that differ from the released parser's.
const std::map<std::string, Expected> kKept = {
    {"text_after_block", {"ctail", "{\"a\": \"1\"}"}},
    {"two_blocks",
     {"c\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"g\">\n<｜DSML｜parameter name=\"b\" "
      "string=\"true\">2</｜DSML｜parameter>\n"
      "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
      "{\"a\": \"1\"}"}},
    {"json_body", {"{\"a\": 1}", "{}"}},
    {"bad_string_attribute", {"", "{\"a\": maybe\">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"}}};

TEST(ChatStream, GoldenTurns) {
  size_t n = 0, kept = 0;
  for (const Golden& c : golden("cases")["parse"]) {
    ++n;
    std::string name = c["name"], text = cut_end(c["text"]);
    ThinkingMode mode = c["thinking_mode"] == "chat" ? ThinkingMode::chat : ThinkingMode::thinking;
    const Golden& expected = c["recipe_stream"];
    Events events = whole(text, mode);
    ParsedTurn turn = collect(events);
    auto it = kKept.find(name);
    kept += it != kKept.end();
    EXPECT_EQ(turn.reasoning, expected["reasoning"].get<std::string>()) << name;
    EXPECT_EQ(turn.content, it != kKept.end() ? it->second.content : expected["content"].get<std::string>()) << name;
    ASSERT_EQ(turn.calls.size(), expected["tool_calls"].size()) << name;
    for (size_t i = 0; i < turn.calls.size(); ++i) {
      const Golden& call = expected["tool_calls"][i];
      EXPECT_EQ(turn.calls[i].name, call["name"].get<std::string>()) << name;
      EXPECT_EQ(turn.calls[i].arguments,
                it != kKept.end() ? it->second.arguments : call["arguments"].get<std::string>())
          << name;
    }
    EXPECT_EQ(events.back().text, expected["finish_reason"].get<std::string>()) << name;
    EXPECT_EQ(shown(merged(bytes(text, mode))), shown(merged(events))) << name;
    std::string sources;
    for (const ChatEvent& e : events) sources += e.source;
    EXPECT_EQ(sources, text) << name;
  }
  EXPECT_EQ(n, 39u);
  EXPECT_EQ(kept, kKept.size());
}

// The golden texts as tokens, markers as control tokens: the same events.
TEST(ChatStream, TokensGiveTheSameAsText) {
  ChatTokenizer t = byte_tokenizer();
  for (const Golden& c : golden("cases")["parse"]) {
    std::string text = cut_end(c["text"]);
    ThinkingMode mode = c["thinking_mode"] == "chat" ? ThinkingMode::chat : ThinkingMode::thinking;
    ChatStream stream(mode);
    Events events;
    auto add = [&](Events more) { events.insert(events.end(), more.begin(), more.end()); };
    for (size_t at = 0; at < text.size();) {
      std::string token(1, text[at]);
      for (std::string_view control : {kDsml, kThinkClose})
        if (text.compare(at, control.size(), control) == 0) token = control;
      add(stream.feed_token(token.size() > 1 ? *t.token_to_id(token) : static_cast<unsigned char>(token[0]), t));
      at += token.size();
    }
    add(stream.finish(false));
    EXPECT_EQ(shown(merged(events)), shown(merged(whole(text, mode)))) << c["name"];
  }
}

TEST(ChatStream, SpelledMarkersInTokensAreText) {
  ChatStream stream(ThinkingMode::thinking);
  Events events;
  std::string text = "a</think>b\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">";
  for (unsigned char c : text)
    for (ChatEvent& e : stream.feed_token(c, byte_tokenizer())) events.push_back(e);
  for (ChatEvent& e : stream.finish(true)) events.push_back(e);
  EXPECT_EQ(collect(events).reasoning, text);
  EXPECT_EQ(events.back().text, "length");
}

TEST(ChatStream, StreamsArgumentsAsTheyCome) {
  ChatStream stream(ThinkingMode::chat);
  stream.feed_text(
      "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"true\">");
  Events events = stream.feed_text("one \"two");
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, Kind::arguments);
  EXPECT_EQ(events[0].text, "one \\\"two");
}

TEST(ChatStream, CallAfterABrokenOneIsRead) {
  std::string text =
      "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter "
      "name=\"a\">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
      "<｜DSML｜invoke name=\"g\">\n<｜DSML｜parameter name=\"b\" "
      "string=\"false\">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
      "</｜DSML｜tool_calls>";
  ParsedTurn turn = collect(whole(text, ThinkingMode::chat));
  ASSERT_EQ(turn.calls.size(), 2u);
  EXPECT_EQ(turn.calls[0].arguments, "{\"a\">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n");
  EXPECT_EQ(turn.calls[1].arguments, "{\"b\": 1}");
}

TEST(ChatStream, CutTagsAreMarkupAndCutArgumentsStayOpen) {
  auto parsed = [](const std::string& text) { return collect(whole(text, ThinkingMode::chat)); };
  EXPECT_EQ(parsed("c\n\n<｜DSML｜tool_ca").content, "c");
  EXPECT_EQ(parsed("c <").content, "c <");
  EXPECT_EQ(parsed("see <｜DSML｜ here").content, "see <｜DSML｜ here");
  std::string call = "<｜DSML｜invoke name=\"f\">\n";
  EXPECT_EQ(parsed(call).calls.at(0).arguments, "");
  EXPECT_EQ(parsed(call + "<｜DSML｜parameter na").calls.at(0).arguments, "");
  EXPECT_EQ(parsed(call + "<｜DSML｜parameter name=\"lo").calls.at(0).arguments, "{\"lo");
  EXPECT_EQ(parsed(call + "<｜DSML｜parameter name=\"a\" string=\"true\">x</｜DSML｜par").calls.at(0).arguments,
            "{\"a\": \"x");
}

// ---- Random garbage ------------------------------------------------------------------------------------------------

const std::vector<std::string> kScraps = {"<｜DSML｜tool_calls>\n",
                                          "</｜DSML｜tool_calls>",
                                          "<｜DSML｜invoke name=\"f\">\n",
                                          "</｜DSML｜invoke>\n",
                                          "<｜DSML｜parameter name=\"a\" string=\"true\">",
                                          "<｜DSML｜parameter name=\"b\" string=\"false\">",
                                          "</｜DSML｜parameter>\n",
                                          "<｜DSML｜parameter name=\"",
                                          "<｜DSML｜invoke name=\"",
                                          "\" string=\"",
                                          "true\">",
                                          "\">",
                                          "invoke",
                                          " name=\"",
                                          "<",
                                          "</",
                                          ">",
                                          "/",
                                          "｜DSML｜",
                                          "｜DSML",
                                          "｜",
                                          "</think>",
                                          "<think>",
                                          "</thi",
                                          "\n",
                                          "\n\n",
                                          " ",
                                          "word",
                                          "\"",
                                          "\\",
                                          "é",
                                          "🎉",
                                          "x",
                                          "{",
                                          "}"};

void check_garbage(const std::string& text, ThinkingMode mode, Random& r) {
  Events events = whole(text, mode);
  std::string sources, expected = shown(merged(events));
  int open = 0;
  for (const ChatEvent& e : events) {
    sources += e.source;
    open += e.kind == Kind::call_begin;
    open -= e.kind == Kind::call_end;
    ASSERT_TRUE(open == 0 || open == 1);
    ASSERT_TRUE(e.kind != Kind::arguments || open == 1);
    bool prose = e.kind == Kind::reasoning || e.kind == Kind::content;
    ASSERT_TRUE(!prose || e.text == e.source);
  }
  ASSERT_EQ(open, 0);
  ASSERT_EQ(events.back().kind, Kind::finish);
  ASSERT_EQ(sources, text);
  ASSERT_EQ(shown(merged(bytes(text, mode))), expected) << text;
  ASSERT_EQ(shown(merged(run(text, mode, [&] { return 1 + r.below(9); }))), expected) << text;
}

TEST(ChatStream, GarbageKeepsEveryByteAndDoesNotDependOnFeeds) {
  Random r(7);
  for (int round = 0; round < 4000; ++round) {
    std::string text = r.join(kScraps, 30);
    check_garbage(text, r.flip() ? ThinkingMode::thinking : ThinkingMode::chat, r);
    if (HasFatalFailure()) return;
  }
}

TEST(ChatStream, BytesThatAreNotTextAreKeptToo) {
  Random r(8);
  for (int round = 0; round < 500; ++round) {
    std::string text;
    for (int n = r.below(40); n > 0; --n)
      text += r.flip() ? std::string(1, static_cast<char>(r.below(256))) : r.pick(kScraps);
    check_garbage(text, ThinkingMode::thinking, r);
    if (HasFatalFailure()) return;
  }
}

// What does not reach the client is tags and white space, whatever the model wrote.
TEST(ChatStream, OnlyTagsAndWhiteSpaceAreMarkup) {
  Random r(9);
  const std::regex markup("(\\s|</think>|</?｜DSML｜[a-z_]*( name=\"[^\n]*)?>?)*");
  for (int round = 0; round < 1000; ++round) {
    std::string text = r.join(kScraps, 20);
    for (const ChatEvent& e : merged(whole(text, ThinkingMode::thinking)))
      ASSERT_TRUE(e.kind != Kind::markup || std::regex_match(e.source, markup)) << e.source << "\nin " << text;
  }
}

TEST(ChatStream, PiecesEndBetweenCharacters) {
  Random r(10);
  for (int round = 0; round < 300; ++round) {
    std::string text = r.join(kScraps, 20);
    for (const ChatEvent& e : bytes(text, ThinkingMode::chat))
      ASSERT_NO_THROW(nlohmann::json(e.text).dump()) << text;  // dump refuses text that is not UTF-8
  }
}

}  // namespace
}  // namespace plumb
