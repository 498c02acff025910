#include "data/prompts.h"

#include <fmt/format.h>

#include <fstream>

#include "base/error.h"
#include "base/hash.h"
#include "data/line_parts.h"
#include "tokenizer/chat_encode.h"

namespace plumb {
namespace {

constexpr const char* kFormats = R"(write {"messages": [...]}, {"prompt": "..."} or {"tokens": [...]})";

class Reader {
 public:
  Reader(const Tokenizer* tokenizer, const DatasetOptions& options) : tokenizer_(tokenizer), options_(options) {
    if (tokenizer) chat_ = chat_tokenizer(*tokenizer);
  }

  Prompt read(const std::string& text, const std::string& where) const {
    const Json json = parse_json(text, where);
    if (!json.is_object()) fail(where, fmt::format("is {}, not an object", kind_name(json.kind)), kFormats);
    Prompt p;
    p.line = text;
    p.chat = options_.chat;
    if (json.find("messages"))
      read_messages(json, where, p);
    else if (json.find("prompt"))
      read_text(json, where, p);
    else if (json.find("tokens"))
      p.tokens = read_token_ids(json, "tokens", where);
    else
      fail(where, "has none of the keys messages, prompt, tokens", kFormats);
    check_vocabulary(p.tokens, options_.vocab_size, where);
    if (p.tokens.empty()) fail(where, "has no token", kFormats);
    return p;
  }

 private:
  const Tokenizer& text(const std::string& where) const {
    if (!tokenizer_)
      fail(where, "needs a tokenizer", "put tokenizer.json into the model's folder, or give prompts as tokens");
    return *tokenizer_;
  }

  void read_messages(const Json& json, const std::string& where, Prompt& p) const {
    const Json& messages = require(json, "messages", Json::Kind::array, where, "messages");
    text(where);
    try {
      p.messages = messages_from_json(messages, json.find("tools"));
      p.chat = line_chat_options(json, options_.chat);
      const std::vector<int32_t> ids = encode_prompt(p.messages, p.chat, chat_);
      p.tokens.assign(ids.begin(), ids.end());
    } catch (const Error& e) {  // says which message; the line is known here
      fail(where, e.what());
    }
    if (!p.messages.empty() && p.messages.back().role == ChatRole::assistant && !p.messages.back().unfinished)
      fail(where, "the last message is an answer", "end with the message that is to be answered");
  }

  void read_text(const Json& json, const std::string& where, Prompt& p) const {
    p.tokens = {options_.bos};
    for (int32_t id : text(where).encode(require(json, "prompt", Json::Kind::string, where, "prompt").text, false))
      p.tokens.push_back(id);
  }

  const Tokenizer* tokenizer_;
  const DatasetOptions& options_;
  ChatTokenizer chat_;
};

}  // namespace

std::vector<Prompt> read_prompts(const std::string& path, const Tokenizer* tokenizer, const DatasetOptions& options,
                                 int answer_tokens) {
  std::ifstream in(path);
  if (!in) fail(path, "cannot be read", "check data.train and data.eval; paths start at the current folder");
  const Reader reader(tokenizer, options);
  std::vector<Prompt> prompts;
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = fmt::format("{}:{}", path, number);
    prompts.push_back(reader.read(line, where));
    prompts.back().number = number;
    const auto length = static_cast<int>(prompts.back().tokens.size());
    if (length + answer_tokens > options.row_tokens)
      fail(where,
           fmt::format("the prompt has {} tokens, which leaves no room for an answer of {}", length, answer_tokens),
           fmt::format("data.row_tokens is {}: raise it, or lower sampling.max_tokens", options.row_tokens));
  }
  if (prompts.empty()) fail(path, "has no prompt", kFormats);
  return prompts;
}

uint64_t fingerprint(const std::vector<Prompt>& prompts) {
  uint64_t h = fnv_start;
  for (const Prompt& p : prompts) h = hash_text(p.line, hash_bytes(p.tokens.data(), p.tokens.size() * sizeof(int), h));
  return h;
}

}  // namespace plumb
