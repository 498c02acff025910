#include "tokenizer/chat_encode.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "chat_testing.h"

namespace plumb {
namespace {

using namespace chat_testing;

// The tokens of the mask, each stretch in brackets: readable and exact at once.
std::string marked(const ChatTokens& t) {
  std::string out;
  for (size_t i = 0; i < t.ids.size(); ++i) {
    if (t.mask[i] && (i == 0 || !t.mask[i - 1])) out += "[[";
    out += decode({t.ids[i]});
    if (t.mask[i] && (i + 1 == t.ids.size() || !t.mask[i + 1])) out += "]]";
  }
  return out;
}

std::string sample(const std::string& list, const ChatOptions& options) {
  return marked(encode_for_training(messages_from_json(parse_json(list, "test")), options, byte_tokenizer()));
}

constexpr const char* kLoop = R"([{"role":"user","content":"Q"},
  {"role":"assistant","content":"C","reasoning_content":"R","tool_calls":[{"id":"c","function":{"name":"f","arguments":"{}"}}]},
  {"role":"tool","tool_call_id":"c","content":"T"},{"role":"assistant","content":"A","reasoning_content":"S"}])";
constexpr const char* kCall =
    "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";

TEST(ChatEncode, MaskIsWhatTheModelProduces) {
  ChatOptions options;
  options.drop_thinking = false;
  EXPECT_EQ(sample(kLoop, options),
            std::string("<｜begin▁of▁sentence｜><｜User｜>Q<｜Assistant｜><think>[[R</think>C") + kCall +
                "<｜end▁of▁sentence｜>]]<｜User｜><tool_result>T</tool_result><｜Assistant｜><think>[[S</think>A"
                "<｜end▁of▁sentence｜>]]");
}

// A turn whose reasoning is forgotten begins behind the closed think tag, which is then part of the header.
TEST(ChatEncode, DroppedReasoningIsNotATarget) {
  EXPECT_EQ(sample(kLoop, {}), std::string("<｜begin▁of▁sentence｜><｜User｜>Q<｜Assistant｜></think>[[C") + kCall +
                                   "<｜end▁of▁sentence｜>]]<｜User｜><tool_result>T</tool_result><｜Assistant｜><think>"
                                   "[[S</think>A<｜end▁of▁sentence｜>]]");
}

TEST(ChatEncode, WeightZeroIsNotTrained) {
  EXPECT_EQ(
      sample(R"([{"role":"user","content":"Q"},{"role":"assistant","content":"A","weight":0},
                       {"role":"user","content":"P"},{"role":"assistant","content":"B","wo_eos":true}])",
             {}),
      "<｜begin▁of▁sentence｜><｜User｜>Q<｜Assistant｜></think>A<｜end▁of▁sentence｜><｜User｜>P<｜Assistant｜><think>"
      "[[</think>B]]");
}

TEST(ChatEncode, TaskTokensBelongToThePrompt) {
  EXPECT_EQ(sample(R"([{"role":"user","content":"Q"},{"role":"assistant","content":"A","task":"title"},
                       {"role":"assistant","content":"T"}])",
                   {}),
            "<｜begin▁of▁sentence｜><｜User｜>Q<｜Assistant｜><think>[[</think>A<｜end▁of▁sentence｜>]]<｜title｜>[[T"
            "<｜end▁of▁sentence｜>]]");
}

// The sampler sees the very tokens that training sees before a turn.
TEST(ChatEncode, PromptIsThePrefixOfTheSample) {
  ChatOptions options;
  options.drop_thinking = false;
  auto list = messages_from_json(parse_json(kLoop, "test"));
  ChatTokens whole = encode_for_training(list, options, byte_tokenizer());
  for (size_t k : {1, 3}) {
    auto prompt = encode_prompt({list.begin(), list.begin() + k}, options, byte_tokenizer());
    ASSERT_LT(prompt.size(), whole.ids.size());
    EXPECT_TRUE(std::equal(prompt.begin(), prompt.end(), whole.ids.begin()));
    EXPECT_EQ(whole.mask[prompt.size() - 1], 0);
    EXPECT_EQ(whole.mask[prompt.size()], 1);
  }
}

// Without a header before it the answer is glued to what precedes; a token that covers both is not the model's.
TEST(ChatEncode, TokenAcrossTheBorderIsNoTarget) {
  auto list = messages_from_json(
      parse_json(R"([{"role":"system","content":"abc"},{"role":"assistant","content":"def"}])", "test"));
  ChatTokenizer pairs = byte_tokenizer();  // two letters a token, numbered 1000 + place
  std::string seen;
  pairs.encode_text = [&](std::string_view s) {
    seen = s;
    return std::vector<int32_t>{1000, 1001, 1002};
  };
  pairs.id_to_bytes = [&](int32_t id) { return seen.substr((id - 1000) * 2, 2); };
  ChatOptions options;
  options.mode = ThinkingMode::chat;
  ChatTokens tokens = encode_for_training(list, options, pairs);
  EXPECT_EQ(seen, "abcdef");
  EXPECT_EQ(tokens.mask, (std::vector<uint8_t>{0, 0, 0, 1, 1}));  // begin, ab, cd, ef, end
}

TEST(ChatEncode, ControlTokensAreNotSpelledByUsers) {
  Message user;
  user.content = "<｜User｜>";
  auto ids = encode_prompt({user}, {}, byte_tokenizer());
  EXPECT_EQ(std::count(ids.begin(), ids.end(), *byte_tokenizer().token_to_id("<｜User｜>")), 1);
}

TEST(ChatEncode, MissingTokenIsNamed) {
  ChatTokenizer t = byte_tokenizer();
  t.token_to_id = [](std::string_view) { return std::optional<int32_t>(); };
  try {
    encode_prompt({}, {}, t);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("<｜begin▁of▁sentence｜>"), std::string::npos);
  }
}

}  // namespace
}  // namespace plumb
