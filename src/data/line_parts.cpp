#include "data/line_parts.h"

#include <fmt/format.h>

#include <charconv>

#include "base/error.h"

namespace plumb {

const Json& require(const Json& line, const char* key, Json::Kind kind, const std::string& where,
                    const std::string& format) {
  const Json* value = line.find(key);
  if (!value) fail(where, fmt::format("has no key {}", key), fmt::format("every line of format {} has it", format));
  if (value->kind != kind)
    fail(where, fmt::format("{} is {}", key, kind_name(value->kind)),
         fmt::format("it must be {}", kind == Json::Kind::string ? "a text" : "a list"));
  return *value;
}

// The whole number that a JSON value spells, or -1: the caller's error names the value.
int whole_number(const Json& value) {
  int number = -1;
  const std::string& text = value.text;
  if (value.kind != Json::Kind::number) return -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? number : -1;
}

std::vector<int> read_token_ids(const Json& line, const char* key, const std::string& where) {
  std::vector<int> tokens;
  for (const Json& value : require(line, key, Json::Kind::array, where, key).items) {
    const int id = whole_number(value);
    if (id < 0) fail(where, fmt::format("{} holds {}", key, python_dumps(value)), "token ids are whole numbers from 0");
    tokens.push_back(id);
  }
  return tokens;
}

void check_vocabulary(const std::vector<int>& tokens, int vocab_size, const std::string& where) {
  for (int id : tokens)
    if (id >= vocab_size)
      fail(where, fmt::format("token {} is not in the vocabulary", id),
           fmt::format("the model has the tokens 0 to {}", vocab_size - 1));
}

ChatOptions line_chat_options(const Json& line, const ChatOptions& base) {
  Json own;
  own.kind = Json::Kind::object;
  if (const Json* mode = line.find("thinking_mode")) own.members.push_back({"thinking_mode", *mode});
  return chat_options_from_json(own, "the line", base);
}

}  // namespace plumb
