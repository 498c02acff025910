#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "base/error.h"
#include "tokenizer/bpe.h"
#include "tokenizer/bpe_split.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/unicode.h"

namespace plumb {
namespace {

using nlohmann::json;
using Ids = std::vector<int32_t>;

std::string spelling(std::string_view bytes) {
  std::string out;
  for (const char b : bytes) append_utf8(byte_alphabet()[static_cast<unsigned char>(b)], out);
  return out;
}

// A tokenizer.json with the 256 bytes as tokens 0..255 and one token more a merge.
json small_file(const std::vector<std::pair<std::string, std::string>>& merges) {
  json vocab = json::object(), list = json::array();
  for (int b = 0; b < 256; ++b) vocab[spelling(std::string(1, static_cast<char>(b)))] = b;
  for (const auto& [left, right] : merges) {
    vocab.emplace(spelling(left + right), vocab.size());
    list.push_back({spelling(left), spelling(right)});
  }
  return {{"version", "1.0"},
          {"added_tokens", json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer",
           {{"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Split"}, {"pattern", {{"Regex", "\\s+(?!\\S)|\\s?[^\\s]+|\\s+"}}}, {"behavior", "Isolated"}},
              {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}}},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", list}}}};
}

void add_token(json& file, const std::string& content, json flags = json::object()) {
  json token = {{"id", 1000 + file["added_tokens"].size()},
                {"content", content},
                {"single_word", false},
                {"lstrip", false},
                {"rstrip", false},
                {"normalized", true},
                {"special", false}};
  token.update(flags);
  file["added_tokens"].push_back(token);
}

Tokenizer make(const json& file) { return Tokenizer::parse(file.dump(), "test.json"); }

std::string error_of(const json& file) {
  try {
    make(file);
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

// ---- UTF-8 and alphabets -------------------------------------------------------------------------

std::string lossy(std::string_view bytes) {
  std::string out;
  EXPECT_EQ(append_utf8_lossy(bytes, true, out), bytes.size());
  return out;
}

TEST(Unicode, InvalidBytesAreReplacedByMaximalParts) {
  const std::string r = "\uFFFD";
  // The examples of The Unicode Standard, tables 3-8 to 3-11.
  EXPECT_EQ(lossy("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"), r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(lossy("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"), r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(lossy("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42"), r + r + r + r + r + "A" + r + r + "B");
  EXPECT_EQ(lossy("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), r + r + r + r + "A");
  EXPECT_EQ(lossy("\xF0\x9F\x98"), r);
}

TEST(Unicode, EveryScalarIsReadBackAndNothingElseIsValid) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    std::string s;
    append_utf8(c, s);
    const bool surrogate = c >= 0xd800 && c < 0xe000;
    ASSERT_EQ(valid_utf8_length(s) == s.size(), !surrogate) << std::hex << static_cast<uint32_t>(c);
    if (!surrogate) {
      ASSERT_EQ(first_utf8_unit(s).value, c);
    }
  }
  EXPECT_EQ(valid_utf8_length("0123456789\x80"), 10u);
  EXPECT_EQ(valid_utf8_length("0123456789\xE2\x82"), 10u);
}

TEST(Unicode, ByteAlphabetIsTheOneOfGpt2) {
  EXPECT_EQ(spelling(" \n\t!~\x7f"), "\u0120\u010A\u0109!~\u0121");
  EXPECT_EQ(spelling("\xA0\xAD\xFF"), "\u0142\u0143\u00FF");
  for (int b = 0; b < 256; ++b) {
    const std::string byte(1, static_cast<char>(b));
    EXPECT_EQ(bytes_of_spelling(spelling(byte)), byte);
  }
  EXPECT_FALSE(bytes_of_spelling("<\uFF5CUser\uFF5C>"));
  EXPECT_FALSE(bytes_of_spelling("a b"));
}

// ---- Splitting -----------------------------------------------------------------------------------

std::vector<std::string> split(const std::string& pattern, std::string_view text) {
  std::vector<std::string_view> pieces;
  SplitPattern::regex(pattern, "test").split(text, pieces);
  return {pieces.begin(), pieces.end()};
}

TEST(Split, MatchesAndGapsTogetherAreTheText) {
  using List = std::vector<std::string>;
  EXPECT_EQ(split("\\p{N}{1,3}", "ab1234c"), (List{"ab", "123", "4", "c"}));
  EXPECT_EQ(split("\\s+(?!\\S)|\\s+", "a   b  "), (List{"a", "  ", " ", "b", "  "}));
  EXPECT_EQ(split("x", ""), List{});
}

TEST(Split, CharactersNewerThanUnicode14AndTheVowelSeparator) {
  using List = std::vector<std::string>;
  EXPECT_EQ(split("\\p{L}+", "1\U00016100\u1C891"), (List{"1", "\U00016100\u1C89", "1"}));  // letters of Unicode 16
  EXPECT_EQ(split("[^\\p{S}]+", "a\U0001CC00b"), (List{"a", "\U0001CC00", "b"}));           // a symbol of Unicode 16
  EXPECT_EQ(split("\\P{N}+", "\U00016D70x"), (List{"\U00016D70", "x"}));                    // a digit of Unicode 16
  EXPECT_EQ(split("\\s+", " \u180E\u3000"), (List{" ", "\u180E", "\u3000"}));  // U+180E is no space since Unicode 6.3
  EXPECT_EQ(split("[\\S]+", " \u180Ea\u3000"), (List{" ", "\u180Ea", "\u3000"}));
}

TEST(Split, RefusesWhatTheTwoEnginesReadDifferently) {
  for (const char* pattern : {"^a",       "a$",     ".",       "\\d",   "\\w+",    "\\bx",    "[[:alpha:]]",
                              "[a&&b]",   "(?i:a)", "(?<=a)b", "a{,3}", "a{1,2}+", "\\p{Lu}", "\\p{^L}",
                              "[\\P{L}]", "[a",     "[]a]",    "\\",    "a*",      "",        "(a"}) {
    EXPECT_THROW(split(pattern, "text"), Error) << pattern;
  }
}

// ---- Merging -------------------------------------------------------------------------------------

// The definition: apply the lowest rank, leftmost first, until nothing merges.
Ids merge_by_definition(const std::vector<Merge>& merges, Ids ids) {
  for (;;) {
    size_t best_rank = merges.size(), best_at = 0;
    for (size_t at = 0; at + 1 < ids.size(); ++at) {
      for (size_t rank = 0; rank < best_rank; ++rank) {
        if (merges[rank].left == ids[at] && merges[rank].right == ids[at + 1]) best_rank = rank, best_at = at;
      }
    }
    if (best_rank == merges.size()) return ids;
    ids[best_at] = merges[best_rank].result;
    ids.erase(ids.begin() + best_at + 1);
  }
}

TEST(Bpe, EqualsTheDefinitionForShortAndLongWords) {
  std::mt19937 random(7);
  BpeModel model;
  for (int b = 0; b < 256; ++b) model.byte_token[b] = b;
  // Ranks that do not follow the length of tokens, so that later merges can come before earlier ones.
  std::vector<Merge> merges;
  for (int32_t result = 256; result < 296; ++result) {
    const auto part = [&] {
      return random() % 3 ? 'a' + static_cast<int32_t>(random() % 3)
                          : 256 + static_cast<int32_t>(random() % (result - 255)) - 1;
    };
    const int32_t left = part(), right = part();
    const auto same = [&](const Merge& m) { return m.left == left && m.right == right; };
    if (left == 255 || right == 255 || std::ranges::any_of(merges, same)) continue;
    merges.push_back({left, right, result});
  }
  std::ranges::shuffle(merges, random);
  model.merges = MergeTable(merges);
  for (int round = 0; round < 3000; ++round) {
    std::string word(1 + random() % (round % 10 ? 60 : 200), 'a');
    for (char& c : word) c = static_cast<char>('a' + random() % 3);
    Ids ids;
    encode_word(model, word, ids);
    ASSERT_EQ(ids, merge_by_definition(merges, Ids(word.begin(), word.end()))) << word;
  }
}

TEST(Bpe, LongRunsTakeNoQuadraticTime) {
  // A quadratic method needs 10^12 steps here and meets the time limit of the test.
  const Tokenizer t = make(small_file({{"a", "a"}, {"aa", "aa"}, {" ", " "}}));
  for (const char c : {'a', 'b', ' ', '\n'}) {
    const std::string run(1'000'001, c);
    const Ids ids = t.encode(run, true);
    EXPECT_EQ(t.decode(ids, false), run);
    if (c == 'a') {
      EXPECT_EQ(ids.size(), 250'001u);
    }
  }
}

TEST(Bpe, BothSpellingsOfMergesAndIgnoreMerges) {
  json file = small_file({{"b", "c"}, {"a", "b"}, {"a", "bc"}});
  const Ids by_pairs = make(file).encode("abc ab", false);
  EXPECT_EQ(by_pairs, (Ids{258, ' ', 257}));
  for (json& merge : file["model"]["merges"]) merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  EXPECT_EQ(make(file).encode("abc ab", false), by_pairs);

  file = small_file({{"b", "c"}, {"a", "b"}});
  file["model"]["vocab"]["xyz"] = 258;  // no merges lead to it
  EXPECT_EQ(make(file).encode("xyz", false), (Ids{'x', 'y', 'z'}));
  file["model"]["ignore_merges"] = true;
  EXPECT_EQ(make(file).encode("xyz", false), Ids{258});
  EXPECT_EQ(make(file).encode("xyza", false), (Ids{'x', 'y', 'z', 'a'}));
  add_token(file, "xyz", {{"id", 258}});
  EXPECT_EQ(make(file).encode("xyz", true), Ids{258});
  EXPECT_EQ(make(file).encode("xyz", false), (Ids{'x', 'y', 'z'}));  // typed by a user
}

TEST(Bpe, ThreadsThatShareATokenizerGetTheSameIds) {
  const json file = small_file({{"a", "b"}, {"b", "a"}, {"ab", "a"}, {"c", "ab"}});
  const Tokenizer t = make(file);
  std::mt19937 random(3);
  std::string text;
  for (int i = 0; i < 200'000; ++i) text += " abc"[random() % 4];
  Ids expected;
  for (size_t at = 0; at < text.size(); at += 10'000) {  // by tokenizers that remember nothing from each other
    const Ids part = make(file).encode(text.substr(at, 10'000), false);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  std::vector<Ids> got(4);
  std::vector<std::jthread> threads;
  for (Ids& ids : got) {
    threads.emplace_back([&] {
      for (size_t at = 0; at < text.size(); at += 10'000) {
        const Ids part = t.encode(text.substr(at, 10'000), false);
        ids.insert(ids.end(), part.begin(), part.end());
      }
    });
  }
  threads.clear();
  for (const Ids& ids : got) EXPECT_EQ(ids, expected);
}

// ---- Added tokens --------------------------------------------------------------------------------

TEST(AddedTokens, AreFoundOnlyWhenAskedFor) {
  json file = small_file({});
  add_token(file, "<x>");
  add_token(file, "<x>>");
  add_token(file, "<s>", {{"special", true}, {"normalized", false}});
  const Tokenizer t = make(file);
  EXPECT_EQ(t.encode("a<x>b", true), (Ids{'a', 1000, 'b'}));
  EXPECT_EQ(t.encode("<x>>><x", true), (Ids{1001, '>', '<', 'x'}));
  EXPECT_EQ(t.encode("<s>", true), Ids{1002});
  EXPECT_EQ(t.encode("<x><s>", false), (Ids{'<', 'x', '>', '<', 's', '>'}));
  EXPECT_EQ(t.encode("", true), Ids{});
  EXPECT_EQ(t.decode({'a', 1002, 1000, 999, 5000, -1}, true), "a<x>");
  EXPECT_EQ(t.decode({'a', 1002, 1000}, false), "a<s><x>");
  EXPECT_EQ(t.token_to_id("<x>>"), 1001);
  EXPECT_EQ(t.token_to_id("nothing"), std::nullopt);
  EXPECT_EQ(t.id_to_token(1000), "<x>");
  EXPECT_THROW(t.id_to_token(999), Error);
  EXPECT_EQ(t.id_to_bytes(' '), " ");
  EXPECT_EQ(t.vocab_size(), 1003);
  EXPECT_TRUE(t.is_added(1000) && !t.is_special(1000) && t.is_special(1002) && !t.is_added('a'));
}

TEST(AddedTokens, FlagsDecideWhereTheyMatch) {
  json file = small_file({});
  add_token(file, "[l]", {{"lstrip", true}});
  add_token(file, "[r]", {{"rstrip", true}});
  add_token(file, "ww", {{"single_word", true}});
  add_token(file, "]<", {{"normalized", false}});
  const Tokenizer t = make(file);
  EXPECT_EQ(t.encode("a \u3000[l] b", true), (Ids{'a', 1000, ' ', 'b'}));
  EXPECT_EQ(t.encode("a [r] \u3000b", true), (Ids{'a', ' ', 1001, 'b'}));
  EXPECT_EQ(t.encode("[r]  [l]", true), (Ids{1001, 1000}));
  EXPECT_EQ(t.encode("ww-www_ww", true), (Ids{1002, '-', 'w', 'w', 'w', '_', 'w', 'w'}));
  EXPECT_EQ(t.encode("[l]<", true), (Ids{'[', 'l', 1003}));  // tokens that are not normalized come first
}

// ---- Streams -------------------------------------------------------------------------------------

TEST(StreamDecoder, GivesWholeCharactersAndTheTextOfDecode) {
  const Tokenizer t = make(small_file({}));
  std::mt19937 random(11);
  const std::string alphabet = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\xED\xA0\xC0\xFF";
  for (int round = 0; round < 5000; ++round) {
    Ids ids(random() % 12);
    for (int32_t& id : ids) id = static_cast<unsigned char>(alphabet[random() % alphabet.size()]);
    StreamDecoder stream(t, false);
    std::string text;
    for (const int32_t id : ids) {
      const std::string piece = stream.push(id);
      ASSERT_EQ(valid_utf8_length(piece), piece.size());
      text += piece;
    }
    text += stream.finish();
    ASSERT_EQ(text, t.decode(ids, false));
    ASSERT_EQ(stream.finish(), "");
  }
  using List = std::vector<std::string>;
  const auto pieces = [&](const Ids& ids) {
    StreamDecoder stream(t, false);
    List out;
    for (const int32_t id : ids) out.push_back(stream.push(id));
    out.push_back(stream.finish());
    return out;
  };
  EXPECT_EQ(pieces({0xE2, 0x82, 0xAC}), (List{"", "", "\u20AC", ""}));
  EXPECT_EQ(pieces({0xE2, 'a'}), (List{"", "\uFFFDa", ""}));
  EXPECT_EQ(pieces({0xF0, 0x9F}), (List{"", "", "\uFFFD"}));
}

// ---- Errors --------------------------------------------------------------------------------------

TEST(TokenizerErrors, NameTheKey) {
  const json good = small_file({{"a", "b"}});
  EXPECT_EQ(error_of(good), "no error");
  const auto expect = [&](const char* pointer, json value, const std::string& named) {
    json bad = good;
    bad[json::json_pointer(pointer)] = std::move(value);
    EXPECT_EQ(error_of(bad).find("test.json: " + named), 0u) << pointer << " gives: " << error_of(bad);
  };
  const std::string steps = "pre_tokenizer.pretokenizers";
  expect("/normalizer", {{"type", "NFC"}}, "normalizer.type");
  expect("/normalizer", {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}}}}, "normalizer.normalizers");
  expect("/truncation", {{"max_length", 3}}, "truncation");
  expect("/novelty", 1, "novelty");
  expect("/version", "2.0", "version");
  expect("/post_processor", {{"type", "TemplateProcessing"}}, "post_processor.type");
  expect("/decoder", nullptr, "decoder");
  expect("/pre_tokenizer", {{"type", "Whitespace"}}, "pre_tokenizer.type");
  expect("/pre_tokenizer/pretokenizers/0/behavior", "Removed", steps + "[0].behavior");
  expect("/pre_tokenizer/pretokenizers/0/invert", true, steps + "[0].invert");
  expect("/pre_tokenizer/pretokenizers/0/pattern/Regex", "(?i:a)", "pre_tokenizer");
  expect("/pre_tokenizer/pretokenizers/1/add_prefix_space", true, steps + "[1].add_prefix_space");
  expect("/pre_tokenizer/pretokenizers/1", good["pre_tokenizer"]["pretokenizers"][0], steps + "[1].type");
  expect("/model/type", "WordPiece", "model.type");
  expect("/model/dropout", 0.1, "model.dropout");
  expect("/model/end_of_word_suffix", "</w>", "model.end_of_word_suffix");
  expect("/model/byte_fallback", true, "model.byte_fallback");
  expect("/model/merges/0", {"a", "q"}, "model.merges[0]");
  expect("/model/merges/0", "a  b", "model.merges[0]");
  expect("/model/vocab/a", -1, "model.vocab.a");
  expect("/model/vocab/a", "1", "model.vocab.a");
  expect("/model/vocab/a", 98, "model.vocab");
  expect("/model", {{"vocab", json::object()}, {"merges", json::array()}}, "model.vocab");
  json added = good;
  add_token(added, "<x>");
  added["added_tokens"][0]["id"] = 3;
  EXPECT_NE(error_of(added).find("added_tokens[0]"), std::string::npos);
  added = good;
  add_token(added, "ab", {{"id", 256}, {"special", true}});
  EXPECT_NE(error_of(added).find("model.merges[0]"), std::string::npos);
  EXPECT_THROW(Tokenizer::parse("{", "test.json"), Error);
  EXPECT_THROW(Tokenizer::load("/nonexistent/tokenizer.json"), Error);
}

TEST(TokenizerErrors, TextThatIsNotUtf8NamesTheByte) {
  try {
    make(small_file({})).encode("abc\xFFz", true);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("byte 3"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace plumb
