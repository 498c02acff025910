#include "tokenizer/tokenizer.h"

#include <fmt/format.h>
#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>
#include <unordered_map>

#include "base/error.h"
#include "tokenizer/bpe.h"
#include "tokenizer/bpe_added.h"
#include "tokenizer/bpe_file.h"
#include "tokenizer/bpe_split.h"
#include "tokenizer/unicode.h"

namespace plumb {
namespace {

AddedTokenMatcher matcher_of(const std::vector<AddedToken>& all, bool normalized) {
  std::vector<AddedToken> chosen;
  std::ranges::copy_if(all, std::back_inserter(chosen),
                       [&](const AddedToken& t) { return t.normalized == normalized; });
  return AddedTokenMatcher(std::move(chosen));
}

std::string spelling_of_byte(int byte) {
  std::string letter;
  append_utf8(byte_alphabet()[byte], letter);
  return letter;
}

}  // namespace

struct Tokenizer::State {
  struct Token {
    std::string spelling, bytes;
    bool added = false, special = false;
  };
  std::string name;
  std::vector<Token> tokens;                            // by id
  std::unordered_map<std::string_view, int32_t> id_of;  // keys point into tokens
  std::vector<SplitPattern> splits;
  AddedTokenMatcher added_raw, added_normalized;
  BpeModel bpe;
  mutable WordCache cache;

  State(TokenizerFile file, std::string file_name);
  void encode_ordinary(std::string_view text, std::vector<int32_t>& ids) const;
};

Tokenizer::State::State(TokenizerFile file, std::string file_name)
    : name(std::move(file_name)),
      tokens(file.tokens.size()),
      added_raw(matcher_of(file.added, false)),
      added_normalized(matcher_of(file.added, true)) {
  for (size_t id = 0; id < tokens.size(); ++id) {
    Token& token = tokens[id];
    token.spelling = std::move(file.tokens[id]);
    if (token.spelling.empty()) continue;
    // A token with a character outside of the byte alphabet stands for its own text, as in Hugging Face's decoder.
    token.bytes = bytes_of_spelling(token.spelling).value_or(token.spelling);
    id_of.emplace(token.spelling, static_cast<int32_t>(id));
  }
  for (const AddedToken& added : file.added) {
    tokens[added.id].added = true;
    tokens[added.id].special = added.special;
  }
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = id_of.find(spelling_of_byte(byte));
    if (found == id_of.end() || found->second >= file.model_size) {
      fail(name + ": model.vocab",
           fmt::format("no token for the byte 0x{:02x}: texts that hold it would lose it", byte),
           "train the vocabulary with initial_alphabet = ByteLevel.alphabet()");
    }
    bpe.byte_token[byte] = found->second;
  }
  for (size_t rank = 0; rank < file.merges.size(); ++rank) {
    const Token& token = tokens[file.merges[rank].result];
    if (!token.special) continue;
    fail(fmt::format("{}: model.merges[{}]", name, rank),
         fmt::format("makes the special token {:?}, so that ordinary text could become it", token.spelling),
         "train the vocabulary on texts without control tokens");
  }
  bpe.merges = MergeTable(file.merges);
  if (file.ignore_merges) {
    // Without added tokens: a word that a user typed must not become one.
    for (int32_t id = 0; id < file.model_size; ++id) {
      if (!tokens[id].spelling.empty() && !tokens[id].added) bpe.whole_words.emplace(tokens[id].bytes, id);
    }
  }
  for (const SplitStep& step : file.splits) {
    const std::string where = name + ": pre_tokenizer";
    splits.push_back(step.is_regex ? SplitPattern::regex(step.pattern, where)
                                   : SplitPattern::literal(step.pattern, where));
  }
}

void Tokenizer::State::encode_ordinary(std::string_view text, std::vector<int32_t>& ids) const {
  std::vector<std::string_view> pieces{text}, finer;
  for (const SplitPattern& split : splits) {
    finer.clear();
    for (const std::string_view piece : pieces) split.split(piece, finer);
    pieces.swap(finer);
  }
  for (const std::string_view word : pieces) cache.encode(bpe, word, ids);
}

Tokenizer::Tokenizer(std::shared_ptr<const State> state) : state_(std::move(state)) {}

Tokenizer Tokenizer::load(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in || !text) fail(file.string(), "cannot be read", "a model folder holds tokenizer.json beside config.json");
  return parse(text.view(), file.string());
}

Tokenizer Tokenizer::parse(std::string_view json, const std::string& name) {
  return Tokenizer(std::make_shared<const State>(parse_tokenizer_file(json, name), name));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool with_added_tokens) const {
  if (const size_t valid = valid_utf8_length(text); valid < text.size()) {
    fail("text to encode", fmt::format("not UTF-8 at byte {} of {}", valid, text.size()), "convert the text to UTF-8");
  }
  std::vector<int32_t> ids;
  if (!with_added_tokens) {
    state_->encode_ordinary(text, ids);
    return ids;
  }
  std::vector<Section> sections, finer;
  state_->added_raw.split(text, sections);
  for (const Section& section : sections) {
    if (section.added_id >= 0) {
      finer.push_back(section);
    } else {
      state_->added_normalized.split(section.text, finer);
    }
  }
  for (const Section& section : finer) {
    if (section.added_id >= 0) {
      ids.push_back(section.added_id);
    } else {
      state_->encode_ordinary(section.text, ids);
    }
  }
  return ids;
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids, bool skip_special) const {
  std::string bytes, text;
  for (const int32_t id : ids) {
    if (!skip_special || !is_special(id)) bytes += id_to_bytes(id);
  }
  append_utf8_lossy(bytes, true, text);
  return text;
}

std::optional<int32_t> Tokenizer::token_to_id(std::string_view token) const {
  const auto found = state_->id_of.find(token);
  return found == state_->id_of.end() ? std::nullopt : std::optional(found->second);
}

const std::string& Tokenizer::id_to_token(int32_t id) const {
  if (id < 0 || id >= vocab_size() || state_->tokens[id].spelling.empty()) {
    fail(state_->name, fmt::format("no token has the id {}, vocabulary of {}", id, vocab_size()));
  }
  return state_->tokens[id].spelling;
}

const std::string& Tokenizer::id_to_bytes(int32_t id) const {
  static const std::string none;
  return id < 0 || id >= vocab_size() ? none : state_->tokens[id].bytes;
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(state_->tokens.size()); }
bool Tokenizer::is_added(int32_t id) const { return id >= 0 && id < vocab_size() && state_->tokens[id].added; }
bool Tokenizer::is_special(int32_t id) const { return id >= 0 && id < vocab_size() && state_->tokens[id].special; }

StreamDecoder::StreamDecoder(Tokenizer tokenizer, bool skip_special)
    : tokenizer_(std::move(tokenizer)), skip_special_(skip_special) {}

std::string StreamDecoder::push(int32_t id) {
  std::string text;
  if (skip_special_ && tokenizer_.is_special(id)) return text;
  pending_ += tokenizer_.id_to_bytes(id);
  pending_.erase(0, append_utf8_lossy(pending_, false, text));
  return text;
}

std::string StreamDecoder::finish() {
  std::string text;
  append_utf8_lossy(pending_, true, text);
  pending_.clear();
  return text;
}

}  // namespace plumb
