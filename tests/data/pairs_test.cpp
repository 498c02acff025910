#include "data/pairs.h"

#include <gtest/gtest.h>

#include <fstream>

#include "base/error.h"
#include "support/temp_path.h"

namespace plumb {
namespace {

struct PairsTest : ::testing::Test {
  std::string path = testing::temp_path("pairs_test.jsonl");
  DatasetOptions options;
  Tokenizer tokenizer = Tokenizer::load(std::string(PLUMB_SOURCE_DIR) + "/assets/tiny/tokenizer.json");

  void SetUp() override {
    options.row_tokens = 256;
    options.vocab_size = tokenizer.vocab_size();
    options.chat.mode = ThinkingMode::chat;
  }
  PairDataset read(const std::string& text, bool with_tokenizer = true) {
    std::ofstream(path) << text;
    return read_pairs(path, with_tokenizer ? &tokenizer : nullptr, options);
  }
  void expect_error(const std::string& text, const std::string& what) {
    try {
      read(text);
      ADD_FAILURE() << "accepted: " << text;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(what), std::string::npos) << e.what();
    }
  }
  std::string trained(const Sample& s) const {  // text of the tokens that count
    std::vector<int32_t> ids;
    for (size_t i = 0; i < s.tokens.size(); ++i)
      if (s.mask[i]) ids.push_back(s.tokens[i]);
    return tokenizer.decode(ids, true);
  }
  std::string rest(const Sample& s) const {  // and of the others
    std::vector<int32_t> ids;
    for (size_t i = 0; i < s.tokens.size(); ++i)
      if (!s.mask[i]) ids.push_back(s.tokens[i]);
    return tokenizer.decode(ids, false);
  }
};

TEST_F(PairsTest, Texts) {
  const PairDataset d = read(R"({"prompt": "Say cat.", "chosen": " cat", "rejected": " dog"})");
  ASSERT_EQ(d.pairs.size(), 1u);
  const PreferencePair& p = d.pairs[0];
  EXPECT_EQ(trained(p.chosen), " cat");
  EXPECT_EQ(trained(p.rejected), " dog");
  EXPECT_EQ(rest(p.chosen), "<｜begin▁of▁sentence｜>Say cat.");
  EXPECT_EQ(rest(p.chosen), rest(p.rejected));
  EXPECT_EQ(p.chosen.tokens.back(), 1);  // end of sentence, trained
  EXPECT_EQ(p.chosen.mask.back(), 1);
}

TEST_F(PairsTest, MessagesWithAPromptAndWholeConversationsAreTheSame) {
  const std::string prompt = R"({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"},
    {"role": "user", "content": "Say cat."})";
  std::string one = prompt;
  std::erase(one, '\n');
  const std::string cat = R"({"role": "assistant", "content": "cat"})",
                    dog = R"({"role": "assistant", "content": "dog"})";
  const PairDataset with =
      read(R"({"prompt": [)" + one + R"(], "chosen": [)" + cat + R"(], "rejected": [)" + dog + "]}\n");
  const PairDataset whole =
      read(R"({"chosen": [)" + one + ", " + cat + R"(], "rejected": [)" + one + ", " + dog + "]}");
  ASSERT_EQ(with.pairs.size(), 1u);
  EXPECT_EQ(trained(with.pairs[0].chosen), "cat");  // not Ho, which is part of the prompt
  EXPECT_EQ(trained(with.pairs[0].rejected), "dog");
  EXPECT_EQ(with.pairs[0].chosen.tokens, whole.pairs[0].chosen.tokens);
  EXPECT_EQ(with.pairs[0].chosen.mask, whole.pairs[0].chosen.mask);
  EXPECT_EQ(with.pairs[0].rejected.mask, whole.pairs[0].rejected.mask);
}

TEST_F(PairsTest, ToolsStandInBothAnswers) {
  const PairDataset d = read(
      R"({"prompt": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}], )"
      R"("chosen": [{"role": "assistant", "content": "cat"}], "rejected": [{"role": "assistant", "content": "dog"}]})");
  EXPECT_NE(rest(d.pairs[0].chosen).find("look"), std::string::npos);
  EXPECT_EQ(trained(d.pairs[0].chosen), "cat");
  EXPECT_EQ(rest(d.pairs[0].chosen), rest(d.pairs[0].rejected));
}

TEST_F(PairsTest, TokensNeedNoTokenizer) {
  const PairDataset d = read(R"({"prompt": [5, 6], "chosen": [7], "rejected": [8, 9]})", false);
  EXPECT_EQ(d.pairs[0].chosen.tokens, (std::vector<int>{5, 6, 7}));
  EXPECT_EQ(d.pairs[0].rejected.mask, (std::vector<uint8_t>{0, 0, 1, 1}));
}

TEST_F(PairsTest, LongAnswersAreCutAndPairsWithoutOneAreLeftOut) {
  options.row_tokens = 4;
  const PairDataset d = read(
      "{\"prompt\": [5, 6], \"chosen\": [7, 8, 9], \"rejected\": [8]}\n"
      "{\"prompt\": [5, 6, 7, 8], \"chosen\": [7], \"rejected\": [8]}\n");
  ASSERT_EQ(d.pairs.size(), 1u);
  EXPECT_EQ(d.pairs[0].chosen.tokens, (std::vector<int>{5, 6, 7, 8}));
  EXPECT_EQ(d.truncated, 3);
  EXPECT_EQ(d.longest, 5);
  EXPECT_EQ(d.left_out, 1);
}

TEST_F(PairsTest, HoldingOutDependsOnAPairAloneAndKeepsBothAnswersTogether) {
  std::string text;
  for (int i = 0; i < 60; ++i)
    text += R"({"prompt": [5, )" + std::to_string(6 + i) + R"(], "chosen": [7], "rejected": [8]})" + "\n";
  std::vector<PreferencePair> pairs = read(text).pairs, fewer = read(text).pairs;
  const uint64_t all = fingerprint(pairs);
  const std::vector<PreferencePair> held = hold_out(pairs, 0.2, path);
  EXPECT_EQ(held.size() + pairs.size(), 60u);
  EXPECT_GT(held.size(), 3u);
  EXPECT_NE(fingerprint(pairs), all);
  for (const PreferencePair& p : held) EXPECT_EQ(p.chosen.tokens[1], p.rejected.tokens[1]);
  for (const PreferencePair& p : pairs) EXPECT_EQ(p.chosen.tokens[1], p.line + 5);  // still in order, each once
}

TEST_F(PairsTest, WrongLinesAreNamed) {
  const std::string ok = R"({"prompt": "a", "chosen": "b", "rejected": "c"})"
                         "\n";
  expect_error("", "is empty");
  expect_error(ok + R"({"prompt": "a", "chosen": "b"})", ":2: has no key rejected");
  expect_error(ok + R"({"prompt": "a", "chosen": "b", "rejected": [1]})",
               ":2: rejected and chosen are of different kinds");
  expect_error(R"({"chosen": "b", "rejected": "c"})", ":1: has no key prompt");
  expect_error(R"({"prompt": "a", "chosen": 3, "rejected": "c"})", ":1: chosen is a number");
  expect_error(R"({"prompt": [1], "chosen": [1], "rejected": [99999]})", "token 99999 is not in the vocabulary");
  const std::string hi = R"([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}])";
  expect_error(R"({"chosen": )" + hi + R"(, "rejected": )" + hi + "}",
               "one conversation is the beginning of the other");
  expect_error(R"({"prompt": [], "chosen": [{"role": "nobody"}], "rejected": []})", ":1: ");
  try {
    read(ok, false);
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(":1: needs a tokenizer"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace plumb
