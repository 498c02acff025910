#include "tokenizer/chat_parse.h"

#include <gtest/gtest.h>

#include <set>

#include "base/error.h"
#include "chat_testing.h"
#include "tokenizer/chat_stream.h"

namespace plumb {
namespace {

using namespace chat_testing;
using namespace chat_format;

ThinkingMode mode_of(const Golden& c) {
  return c["thinking_mode"] == "chat" ? ThinkingMode::chat : ThinkingMode::thinking;
}

TEST(ChatParse, GoldenTurns) {
  int n = 0;
  for (const Golden& c : golden("cases")["parse"]) {
    ++n;
    const Golden& expected = c["strict"];
    std::string text = c["text"];
    if (expected.contains("error")) {
      EXPECT_THROW(parse_turn(text, mode_of(c)), Error) << c["name"];
      continue;
    }
    ParsedTurn turn = parse_turn(text, mode_of(c));
    EXPECT_EQ(turn.reasoning, expected["reasoning"].get<std::string>()) << c["name"];
    EXPECT_EQ(turn.content, expected["content"].get<std::string>()) << c["name"];
    ASSERT_EQ(turn.calls.size(), expected["tool_calls"].size()) << c["name"];
    for (size_t i = 0; i < turn.calls.size(); ++i) {
      EXPECT_EQ(turn.calls[i].name, expected["tool_calls"][i]["name"].get<std::string>()) << c["name"];
      EXPECT_EQ(turn.calls[i].arguments, expected["tool_calls"][i]["arguments"].get<std::string>()) << c["name"];
    }
  }
  EXPECT_EQ(n, 39);
}

TEST(ChatParse, ErrorsSayWhereAndWhat) {
  try {
    parse_turn("r</think>c\n\n<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>", ThinkingMode::thinking);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("byte 58: the block of calls is empty"), std::string::npos) << e.what();
  }
}

// ---- parse(render(x)) = x ------------------------------------------------------------------------------------------

const std::vector<std::string> kScraps = {"a",      "B ",   " ",      "\n",          "\n\n",    "<",    "</",   ">",
                                          "\"",     "\\",   "é",      "🎉",           "｜",      "DSML", "{",    "}",
                                          "think>", "</b>", "invoke", "tool_calls>", "name=\"", "\t",   "\x01", "true"};

// Text that the format can carry: no control token spelled in it.
std::string random_text(Random& r, int most) {
  while (true) {
    std::string s = r.join(kScraps, most);
    bool clean = true;
    for (std::string_view t : {kThinkOpen, kThinkClose, kDsml}) clean = clean && s.find(t) == std::string::npos;
    if (clean) return s;
  }
}

std::string quoted(const std::string& s) { return nlohmann::json(s).dump(); }

// Already spelled as Python would: then the arguments come back unchanged.
std::string random_arguments(Random& r) {
  static const std::vector<std::string> values = {"0",
                                                  "-12",
                                                  "1.5",
                                                  "1e-07",
                                                  "1e+16",
                                                  "true",
                                                  "null",
                                                  "[]",
                                                  "{}",
                                                  "[1, {\"k\": \"v\"}]",
                                                  "123456789012345678901234567890"};
  std::string s = "{";
  for (int i = 0, n = r.below(4); i < n; ++i) {
    if (i) s += ", ";
    s += quoted(random_text(r, 2) + std::to_string(i)) + ": " + (r.flip() ? quoted(random_text(r, 8)) : r.pick(values));
  }
  return s + "}";
}

std::vector<Message> random_conversation(Random& r) {
  std::vector<Message> list;
  auto add = [&](ChatRole role) -> Message& {
    list.emplace_back();
    list.back().role = role;
    list.back().content = random_text(r, 6);
    return list.back();
  };
  if (r.flip()) {
    add(ChatRole::system);
    if (r.flip()) list.back().tools.push_back(parse_json("{\"name\": \"f\"}", "test"));
  }
  for (int turns = 1 + r.below(3); turns > 0; --turns) {
    add(ChatRole::user);
    for (bool calls = r.flip();; calls = r.flip()) {
      add(ChatRole::assistant).reasoning = random_text(r, 6);
      if (!calls) break;
      size_t assistant = list.size() - 1;
      for (int i = 1 + r.below(3); i > 0; --i)
        list[assistant].calls.push_back(
            {"c" + std::to_string(i), "tool_" + std::to_string(r.below(9)), random_arguments(r)});
      for (const ToolCall& call : std::vector<ToolCall>(list[assistant].calls)) add(ChatRole::tool).call_id = call.id;
    }
  }
  return list;
}

std::string without_line_ends(std::string s, bool front, bool back) {
  while (back && s.ends_with('\n')) s.pop_back();
  while (front && s.starts_with('\n')) s.erase(0, 1);
  return s;
}

// The tolerant parser drops line ends at the borders and nothing else.
void expect_same_stream(const std::string& text, const std::vector<int32_t>& ids, ThinkingMode mode,
                        const ParsedTurn& turn) {
  for (bool tokens : {false, true}) {
    ChatStream stream(mode);
    std::vector<ChatEvent> events;
    auto add = [&](std::vector<ChatEvent> more) { events.insert(events.end(), more.begin(), more.end()); };
    if (!tokens) add(stream.feed_text(text));
    for (size_t i = 0; tokens && i < ids.size(); ++i) add(stream.feed_token(ids[i], byte_tokenizer()));
    add(stream.finish(false));
    ParsedTurn got = collect(events);
    EXPECT_EQ(got.reasoning, without_line_ends(turn.reasoning, true, true)) << text;
    EXPECT_EQ(got.content, without_line_ends(turn.content, true, !turn.calls.empty())) << text;
    ASSERT_EQ(got.calls.size(), turn.calls.size()) << text;
    for (size_t i = 0; i < turn.calls.size(); ++i) {
      EXPECT_EQ(got.calls[i].name, turn.calls[i].name);
      EXPECT_EQ(got.calls[i].arguments, turn.calls[i].arguments) << text;
    }
  }
}

TEST(ChatParse, ReadsBackEveryTurnThatWasWritten) {
  Random r(20260501);
  int turns = 0, with_reasoning = 0, with_calls = 0;
  for (int round = 0; round < 400; ++round) {
    std::vector<Message> list = random_conversation(r);
    ChatOptions options;
    options.mode = r.flip() ? ThinkingMode::thinking : ThinkingMode::chat;
    options.drop_thinking = r.flip();
    auto pieces = render_chat(list, options);
    size_t at = 0;
    for (const Message& m : list) {
      if (m.role != ChatRole::assistant) continue;
      while (!pieces[at].target) ++at;
      ThinkingMode mode = pieces[at - 1].text == kThinkOpen ? ThinkingMode::thinking : ThinkingMode::chat;
      std::vector<ChatPiece> own;
      while (at < pieces.size() && pieces[at].target) own.push_back(pieces[at++]);
      ParsedTurn turn = parse_turn(chat_text(own), mode);
      EXPECT_EQ(turn.reasoning, mode == ThinkingMode::thinking ? m.reasoning : "");
      EXPECT_EQ(turn.content, m.content);
      ASSERT_EQ(turn.calls.size(), m.calls.size());
      for (size_t i = 0; i < m.calls.size(); ++i) {
        EXPECT_EQ(turn.calls[i].name, m.calls[i].name);
        EXPECT_EQ(turn.calls[i].arguments, m.calls[i].arguments);
      }
      own.pop_back();  // the end of sentence
      expect_same_stream(chat_text(own), encode_pieces(own, byte_tokenizer()).ids, mode, turn);
      ++turns;
      with_reasoning += mode == ThinkingMode::thinking;
      with_calls += !turn.calls.empty();
    }
    while (at < pieces.size()) EXPECT_FALSE(pieces[at++].target);
  }
  // The generator reaches the interesting forms often.
  EXPECT_GT(turns, 800);
  EXPECT_GT(with_reasoning, 200);
  EXPECT_GT(with_calls, 200);
}

}  // namespace
}  // namespace plumb
