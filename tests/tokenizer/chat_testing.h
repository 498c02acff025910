// Shared by the chat tests: golden data, a tokenizer of bytes, random texts.
#pragma once
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "tokenizer/chat_encode.h"
#include "tokenizer/chat_format.h"

namespace plumb::chat_testing {

using Golden = nlohmann::ordered_json;

inline const Golden& golden(const std::string& name) {
  static std::map<std::string, Golden> loaded;
  auto it = loaded.find(name);
  if (it == loaded.end()) {
    std::string path = std::string(PLUMB_SOURCE_DIR) + "/tests/golden/chat/" + name + ".json";
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot read " + path);
    it = loaded.emplace(name, Golden::parse(file)).first;
  }
  return it->second;
}

inline Json json(const Golden& g) { return parse_json(g.dump(), "golden"); }

// Every byte is a token of its own; control tokens follow from 256.
inline ChatTokenizer byte_tokenizer() {
  using namespace chat_format;
  static const std::vector<std::string> controls = {
      std::string(kBegin),      std::string(kEnd),       std::string(kUser),    std::string(kAssistant),
      std::string(kThinkClose), std::string(kThinkOpen), std::string(kDsml),    std::string(kReminder),
      std::string(kQuery),      std::string(kTitle),     std::string(kReadUrl), std::string(kExtractedUrl)};
  ChatTokenizer t;
  t.encode_text = [](std::string_view s) {
    std::vector<int32_t> ids;
    for (unsigned char c : s) ids.push_back(c);
    return ids;
  };
  t.token_to_id = [](std::string_view s) -> std::optional<int32_t> {
    for (size_t i = 0; i < controls.size(); ++i)
      if (controls[i] == s) return static_cast<int32_t>(256 + i);
    return std::nullopt;
  };
  t.id_to_bytes = [](int32_t id) {
    return id < 256 ? std::string(1, static_cast<char>(id)) : controls.at(static_cast<size_t>(id - 256));
  };
  return t;
}

inline std::string decode(const std::vector<int32_t>& ids) {
  ChatTokenizer t = byte_tokenizer();
  std::string s;
  for (int32_t id : ids) s += t.id_to_bytes(id);
  return s;
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int below(int n) { return static_cast<int>(engine_() % static_cast<uint64_t>(n)); }
  bool flip() { return below(2) == 0; }
  const std::string& pick(const std::vector<std::string>& from) { return from[below(static_cast<int>(from.size()))]; }
  std::string join(const std::vector<std::string>& from, int most) {
    std::string s;
    for (int n = below(most + 1); n > 0; --n) s += pick(from);
    return s;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace plumb::chat_testing
