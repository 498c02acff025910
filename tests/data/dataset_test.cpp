#include "data/dataset.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

#include "base/error.h"
#include "data/prompts.h"
#include "support/temp_path.h"

namespace plumb {
namespace {

// A vocabulary of single bytes: "a" to "z" (ids 2 to 27), space (28), the rest from 40 on, which the tests' models do
// not have; and control tokens of the chat format.
Tokenizer letters() {
  std::string vocab;
  int rest = 40, unprintable = 256;
  for (int b = 0; b < 256; ++b) {
    const bool printable = (33 <= b && b <= 126) || (161 <= b && b <= 172) || 174 <= b;  // GPT-2's byte alphabet
    const int id = 'a' <= b && b <= 'z' ? b - 'a' + 2 : b == ' ' ? 28 : rest++;
    vocab += fmt::format("{}\"\\u{:04x}\": {}", b ? ", " : "", printable ? b : unprintable++, id);
  }
  std::string added;
  const char* control[] = {
      "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"};
  const int ids[] = {0, 1, 29, 30, 31, 32};
  for (int i = 0; i < 6; ++i)
    added += std::string(i ? ", " : "") + R"({"id": )" + std::to_string(ids[i]) + R"(, "content": ")" + control[i] +
             R"(", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})";
  return Tokenizer::parse(R"({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [)" + added +
                              R"(], "normalizer": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    "post_processor": null, "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
              "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": {)" +
                              vocab + R"(}, "merges": []}})",
                          "letters.json");
}

struct DatasetTest : ::testing::Test {
  std::string path = testing::temp_path("dataset_test.jsonl");
  DatasetOptions options;
  Tokenizer tokenizer = letters();

  void SetUp() override {
    options.row_tokens = 16;
    options.vocab_size = 40;
    options.chat.mode = ThinkingMode::chat;
  }
  Dataset read(const std::string& text) {
    std::ofstream(path) << text;
    return read_dataset(path, &tokenizer, options);
  }
  void expect_error(const std::string& text, const std::string& where, const std::string& what) {
    try {
      read(text);
      ADD_FAILURE() << "accepted: " << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.where(), path + where) << e.what();
      EXPECT_NE(std::string(e.what()).find(what), std::string::npos) << e.what();
    }
  }
};
using Ids = std::vector<int>;
using Mask = std::vector<uint8_t>;

TEST_F(DatasetTest, Tokens) {
  const Dataset d = read("{\"tokens\": [5, 6, 7], \"mask\": [1, 0, 1]}\n\n{\"tokens\": [8, 9]}\n");
  ASSERT_EQ(d.samples.size(), 2u);
  EXPECT_EQ(d.format, "tokens");
  EXPECT_EQ(d.samples[0].tokens, (Ids{5, 6, 7}));
  EXPECT_EQ(d.samples[0].mask, (Mask{0, 0, 1}));  // nothing predicts the first token
  EXPECT_EQ(d.samples[1].mask, (Mask{0, 1}));
  EXPECT_EQ(d.samples[1].line, 3);
}

TEST_F(DatasetTest, PromptAndCompletion) {
  const Dataset d = read(R"({"prompt": "ab ", "completion": "c"})");
  EXPECT_EQ(d.samples[0].tokens, (Ids{0, 2, 3, 28, 4, 1}));
  EXPECT_EQ(d.samples[0].mask, (Mask{0, 0, 0, 0, 1, 1}));
}

TEST_F(DatasetTest, MessagesTrainTheAssistantsTurns) {
  const Dataset d = read(R"({"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]})");
  const Sample& s = d.samples[0];
  // begin, User, a, b, Assistant, </think>, c, end
  EXPECT_EQ(s.tokens, (Ids{0, 29, 2, 3, 30, 32, 4, 1}));
  EXPECT_EQ(s.mask, (Mask{0, 0, 0, 0, 0, 0, 1, 1}));
}

TEST_F(DatasetTest, ALineMayChooseItsThinkingMode) {
  const std::string answer = R"({"role": "assistant", "content": "c", "reasoning_content": "d"})";
  const std::string messages = R"("messages": [{"role": "user", "content": "ab"}, )" + answer + "]}\n";
  const Dataset d = read("{" + messages + R"({"thinking_mode": "thinking", )" + messages);
  EXPECT_EQ(d.samples[0].tokens, (Ids{0, 29, 2, 3, 30, 32, 4, 1}));  // the mode of the run: </think>, c
  EXPECT_EQ(d.samples[1].tokens, (Ids{0, 29, 2, 3, 30, 31, 5, 32, 4, 1}));
  EXPECT_EQ(d.samples[1].mask, (Mask{0, 0, 0, 0, 0, 0, 1, 1, 1, 1}));
  expect_error(R"({"thinking_mode": "loud", )" + messages, ":1", "loud");
}

TEST_F(DatasetTest, LongTextIsContinuedAndOthersAreCutOff) {
  Dataset d = read(R"({"text": "abcdefghijklmnopqrstuvwxyz"})");
  ASSERT_EQ(d.samples.size(), 2u);  // 28 tokens with begin and end
  EXPECT_EQ(d.samples[0].tokens.size(), 16u);
  EXPECT_EQ(d.samples[1].tokens.size(), 12u);
  EXPECT_EQ(d.samples[1].tokens.back(), 1);
  EXPECT_EQ(d.samples[1].mask[0], 0);
  EXPECT_EQ(d.truncated, 0);
  EXPECT_EQ(d.longest, 28);

  d = read(R"({"prompt": "ab", "completion": "cdefghijklmnopqrstuvwxyz"})");
  ASSERT_EQ(d.samples.size(), 1u);
  EXPECT_EQ(d.samples[0].tokens.size(), 16u);
  EXPECT_EQ(d.truncated, 1);
}

TEST_F(DatasetTest, SamplesWithoutTrainedTokensAreCounted) {
  const Dataset d = read("{\"tokens\": [5, 6], \"mask\": [1, 0]}\n{\"tokens\": [5, 6]}\n{\"tokens\": []}\n");
  EXPECT_EQ(d.samples.size(), 1u);
  EXPECT_EQ(d.untrained, 2);
}

TEST_F(DatasetTest, BadLines) {
  const std::string good = "{\"tokens\": [1, 2]}\n";
  expect_error(good + "{\"tokens\": [1,", ":2", "");
  expect_error(good + "not json\n", ":2", "");
  expect_error(good + "[1, 2]\n", ":2", "not an object");
  expect_error(good + "{\"text\": \"ab\"}\n", ":2", "has no key tokens");
  expect_error("{\"words\": []}\n", ":1", "has none of the keys");
  expect_error("{\"tokens\": \"ab\"}\n", ":1", "tokens is a string");
  expect_error("{\"tokens\": [1, 40]}\n", ":1", "token 40 is not in the vocabulary");
  expect_error("{\"tokens\": [1, -1]}\n", ":1", "-1");
  expect_error("{\"tokens\": [1, 2.0]}\n", ":1", "2.0");
  expect_error("{\"tokens\": [1, 99999999999]}\n", ":1", "99999999999");
  expect_error("{\"tokens\": [1, 2], \"mask\": [1]}\n", ":1", "mask has 1 values, tokens 2");
  expect_error("{\"tokens\": [1, 2], \"mask\": [1, 2]}\n", ":1", "write 0 or 1");
  expect_error("{\"prompt\": \"a\"}\n", ":1", "has no key completion");
  expect_error("{\"messages\": [{\"role\": \"uncle\", \"content\": \"a\"}]}\n", ":1", "uncle");
}

TEST_F(DatasetTest, NothingToTrainOn) {
  expect_error("", "", "is empty");
  expect_error("\n  \n", "", "is empty");
  expect_error("{\"tokens\": [5, 6], \"mask\": [0, 0]}\n", "", "no token of them is trained");
  EXPECT_THROW(read_dataset(path + ".none", &tokenizer, options), Error);
}

TEST_F(DatasetTest, TextNeedsATokenizer) {
  std::ofstream(path) << "{\"text\": \"ab\"}\n";
  EXPECT_THROW(read_dataset(path, nullptr, options), Error);
}

std::vector<Sample> numbered(int n) {
  std::vector<Sample> samples;
  for (int i = 0; i < n; ++i) samples.push_back({{i, i + 1}, {0, 1}, i + 1});
  return samples;
}

TEST(HoldOut, DependsOnTheSampleAlone) {
  std::vector<Sample> all = numbered(1000), fewer = numbered(500);
  const std::vector<Sample> held = hold_out(all, 0.1, "x"), held_of_fewer = hold_out(fewer, 0.1, "x");
  EXPECT_EQ(held.size() + all.size(), 1000u);
  EXPECT_NEAR(static_cast<double>(held.size()), 100, 30);  // 3 standard deviations of a binomial
  for (const Sample& s : held_of_fewer)                    // but the first one, which is held out so that there is one
    EXPECT_TRUE(&s == &held_of_fewer[0] ||
                std::ranges::count_if(held, [&](const Sample& h) { return h.line == s.line; }) == 1)
        << s.line;
}

TEST(HoldOut, AlwaysOneAndNeverAll) {
  for (double fraction : {1e-9, 0.5}) {
    std::vector<Sample> two = numbered(2);
    EXPECT_EQ(hold_out(two, fraction, "x").size(), 1u);
    EXPECT_EQ(two.size(), 1u);
  }
  std::vector<Sample> one = numbered(1);
  EXPECT_THROW(hold_out(one, 0.5, "x"), Error);
  EXPECT_TRUE(hold_out(one, 0, "x").empty());
}

TEST(Fingerprint, SeesTokensMasksAndBoundaries) {
  std::vector<Sample> a = numbered(3), b = numbered(3);
  EXPECT_EQ(fingerprint(a), fingerprint(b));
  b[1].mask[1] = 0;
  EXPECT_NE(fingerprint(a), fingerprint(b));
  b = numbered(3), b[2].tokens[0] = 9;
  EXPECT_NE(fingerprint(a), fingerprint(b));
}

// ---- Prompts

struct PromptsTest : DatasetTest {
  std::vector<Prompt> read_all(const std::string& text, int answer_tokens = 4) {
    std::ofstream(path) << text;
    return read_prompts(path, &tokenizer, options, answer_tokens);
  }
  std::string refusal(const std::string& text) {
    try {
      read_all(text);
    } catch (const Error& e) {
      return e.what();
    }
    return "accepted";
  }
};

TEST_F(PromptsTest, EveryFormatAndTheLineItself) {
  const std::string messages = R"({"messages": [{"role": "user", "content": "ab"}], "answer": "c"})";
  const std::vector<Prompt> p = read_all(messages + "\n\n{\"prompt\": \"ab\"}\n{\"tokens\": [0, 5]}\n");
  ASSERT_EQ(p.size(), 3u);
  EXPECT_EQ(p[0].tokens, (Ids{0, 29, 2, 3, 30, 32}));  // begin, user, a, b, assistant, no thinking
  EXPECT_EQ(p[0].line, messages);
  ASSERT_EQ(p[0].messages.size(), 1u);
  EXPECT_EQ(p[1].tokens, (Ids{0, 2, 3}));
  EXPECT_EQ(p[2].tokens, (Ids{0, 5}));
  EXPECT_EQ(p[2].number, 4);
  EXPECT_NE(fingerprint(p), fingerprint({p[0], p[2], p[1]}));
}

TEST_F(PromptsTest, BadLinesAreNamed) {
  EXPECT_EQ(refusal("{\"tokens\": [0]}\n{\"text\": \"a\"}\n"),
            path +
                ":2: has none of the keys messages, prompt, tokens (write {\"messages\": [...]}, {\"prompt\": "
                "\"...\"} or {\"tokens\": [...]})");
  EXPECT_EQ(refusal("{\"tokens\": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]}"),
            path +
                ":1: the prompt has 13 tokens, which leaves no room for an answer of 4 (data.row_tokens is 16: raise "
                "it, or lower sampling.max_tokens)");
  EXPECT_NE(refusal(R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})")
                .find("the last message is an answer"),
            std::string::npos);
  EXPECT_NE(refusal("{\"tokens\": [99]}").find("token 99 is not in the vocabulary"), std::string::npos);
  EXPECT_NE(refusal("{\"tokens\": []}").find("has no token"), std::string::npos);
  EXPECT_NE(refusal("\n").find("has no prompt"), std::string::npos);
}

}  // namespace
}  // namespace plumb
