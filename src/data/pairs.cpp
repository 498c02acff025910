#include "data/pairs.h"

#include <fmt/format.h>

#include <fstream>
#include <utility>

#include "base/error.h"
#include "data/line_parts.h"
#include "tokenizer/chat_encode.h"
#include "tokenizer/python_json.h"

namespace plumb {
namespace {

constexpr const char* kFormats =
    R"(write {"prompt": ..., "chosen": ..., "rejected": ...} with texts, lists of messages or lists of token ids, or )"
    R"({"chosen": [...], "rejected": [...]} with whole conversations)";

enum class Kind { text, messages, tokens };

Kind kind_of(const Json& value, const char* key, const std::string& where) {
  if (value.kind == Json::Kind::string) return Kind::text;
  if (value.kind != Json::Kind::array) fail(where, fmt::format("{} is {}", key, kind_name(value.kind)), kFormats);
  const bool numbers = !value.items.empty() && value.items[0].kind == Json::Kind::number;
  return numbers ? Kind::tokens : Kind::messages;
}

// One list behind the other.
Json joined(const Json& a, const Json& b) {
  Json all = a;
  all.items.insert(all.items.end(), b.items.begin(), b.items.end());
  return all;
}

size_t common_messages(const Json& a, const Json& b) {
  size_t n = 0;
  while (n < a.items.size() && n < b.items.size() && python_dumps(a.items[n]) == python_dumps(b.items[n])) ++n;
  return n;
}

class Reader {
 public:
  Reader(const Tokenizer* tokenizer, const DatasetOptions& options) : tokenizer_(tokenizer), options_(options) {
    if (tokenizer) chat_ = chat_tokenizer(*tokenizer);
  }

  void read(const std::string& text, const std::string& where, int line) {
    const Json json = parse_json(text, where);
    if (!json.is_object()) fail(where, fmt::format("is {}, not an object", kind_name(json.kind)), kFormats);
    for (const char* key : {"chosen", "rejected"})
      if (!json.find(key)) fail(where, fmt::format("has no key {}", key), kFormats);
    const Kind kind = kind_of(*json.find("chosen"), "chosen", where);
    for (const char* key : {"rejected", "prompt"})
      if (const Json* value = json.find(key); value && kind_of(*value, key, where) != kind)
        fail(where, fmt::format("{} and chosen are of different kinds", key), kFormats);
    if (!json.find("prompt") && kind != Kind::messages) fail(where, "has no key prompt", kFormats);
    PreferencePair pair;
    pair.line = line;
    if (kind == Kind::messages) {
      read_messages(json, where, pair);
    } else {
      pair.chosen = kind == Kind::text ? from_texts(json, "chosen", where) : from_tokens(json, "chosen", where);
      pair.rejected = kind == Kind::text ? from_texts(json, "rejected", where) : from_tokens(json, "rejected", where);
    }
    for (Sample* s : {&pair.chosen, &pair.rejected}) finish(*s, where, line);
    if (pair.chosen.trained() > 0 && pair.rejected.trained() > 0)
      data_.pairs.push_back(std::move(pair));
    else
      ++data_.left_out;
  }

  PairDataset take(const std::string& path, int lines) {
    if (data_.pairs.empty())
      fail(path, lines == 0 ? "is empty" : fmt::format("has {} pairs, but none with two answers that count", lines),
           lines == 0 ? kFormats : "raise data.row_tokens if the answers were cut off");
    return std::move(data_);
  }

 private:
  const Tokenizer& text(const std::string& where) const {
    if (!tokenizer_)
      fail(where, "needs a tokenizer", "put tokenizer.json into the model's folder, or give lists of token ids");
    return *tokenizer_;
  }

  static void append(Sample& sample, const std::vector<int32_t>& ids, uint8_t mask) {
    sample.tokens.insert(sample.tokens.end(), ids.begin(), ids.end());
    sample.mask.resize(sample.tokens.size(), mask);
  }

  // Prompt and answer are encoded apart, so that both answers have the same tokens in front of them.
  Sample from_texts(const Json& json, const char* answer, const std::string& where) const {
    Sample s;
    append(s, {options_.bos}, 0);
    append(s, text(where).encode(json.find("prompt")->text, false), 0);
    append(s, text(where).encode(json.find(answer)->text, false), 1);
    append(s, {options_.eos}, 1);
    return s;
  }

  Sample from_tokens(const Json& json, const char* answer, const std::string& where) const {
    Sample s;
    append(s, read_token_ids(json, "prompt", where), 0);
    append(s, read_token_ids(json, answer, where), 1);
    return s;
  }

  void read_messages(const Json& json, const std::string& where, PreferencePair& pair) const {
    Json chosen = *json.find("chosen"), rejected = *json.find("rejected");
    size_t prompt = 0;  // messages
    if (const Json* shared = json.find("prompt")) {
      prompt = shared->items.size();
      chosen = joined(*shared, chosen), rejected = joined(*shared, rejected);
    } else {
      prompt = common_messages(chosen, rejected);
      if (prompt == chosen.items.size() || prompt == rejected.items.size())
        fail(where, "one conversation is the beginning of the other", "chosen and rejected differ in the last answer");
    }
    pair.chosen = from_messages(chosen, prompt, json, where);
    pair.rejected = from_messages(rejected, prompt, json, where);
  }

  Sample from_messages(const Json& list, size_t prompt, const Json& json, const std::string& where) const {
    text(where);
    try {
      std::vector<Message> messages = messages_from_json(list, json.find("tools"));
      const size_t answers = list.items.size() - prompt;  // counted from the end: tools may add a message in front
      for (size_t i = 0; i + answers < messages.size(); ++i) messages[i].trained = false;
      const ChatTokens ids = encode_for_training(messages, line_chat_options(json, options_.chat), chat_);
      Sample s;
      s.tokens.assign(ids.ids.begin(), ids.ids.end());
      s.mask = ids.mask;
      return s;
    } catch (const Error& e) {  // says which message; the line is known here
      fail(where, e.what());
    }
  }

  void finish(Sample& s, const std::string& where, int line) {
    check_vocabulary(s.tokens, options_.vocab_size, where);
    s.line = line;
    data_.longest = std::max<int64_t>(data_.longest, static_cast<int64_t>(s.tokens.size()));
    const auto limit = static_cast<size_t>(options_.row_tokens);
    if (s.tokens.size() > limit) {
      ++data_.truncated;
      s.tokens.resize(limit), s.mask.resize(limit);
    }
    if (!s.mask.empty()) s.mask[0] = 0;  // nothing predicts it
  }

  const Tokenizer* tokenizer_;
  const DatasetOptions& options_;
  ChatTokenizer chat_;
  PairDataset data_;
};

// A pair as one sample, for what is decided by tokens and masks alone. line: the pair's index.
std::vector<Sample> as_samples(const std::vector<PreferencePair>& pairs) {
  std::vector<Sample> samples;
  for (const PreferencePair& p : pairs) {
    Sample s = p.chosen;
    s.tokens.insert(s.tokens.end(), p.rejected.tokens.begin(), p.rejected.tokens.end());
    s.mask.insert(s.mask.end(), p.rejected.mask.begin(), p.rejected.mask.end());
    s.line = static_cast<int>(samples.size());
    samples.push_back(std::move(s));
  }
  return samples;
}

}  // namespace

PairDataset read_pairs(const std::string& path, const Tokenizer* tokenizer, const DatasetOptions& options) {
  std::ifstream in(path);
  if (!in) fail(path, "cannot be read", "check data.train and data.eval; paths start at the current folder");
  Reader reader(tokenizer, options);
  std::string line;
  int pairs = 0;
  for (int number = 1; std::getline(in, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    reader.read(line, fmt::format("{}:{}", path, number), number);
    ++pairs;
  }
  return reader.take(path, pairs);
}

std::vector<PreferencePair> hold_out(std::vector<PreferencePair>& pairs, double fraction, const std::string& path) {
  std::vector<Sample> kept = as_samples(pairs);
  const std::vector<Sample> held = hold_out(kept, fraction, path);
  const auto of = [&](const std::vector<Sample>& samples) {
    std::vector<PreferencePair> list;
    for (const Sample& s : samples) list.push_back(std::move(pairs[static_cast<size_t>(s.line)]));
    return list;
  };
  std::vector<PreferencePair> held_pairs = of(held);
  pairs = of(kept);
  return held_pairs;
}

uint64_t fingerprint(const std::vector<PreferencePair>& pairs) { return fingerprint(as_samples(pairs)); }

}  // namespace plumb
