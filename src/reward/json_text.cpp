#include "reward/json_text.h"

#include <fmt/format.h>

#include "base/error.h"

namespace plumb {
namespace {

// Brackets that are open at once, those inside of strings left out.
int depth_of(std::string_view text) {
  int depth = 0, deepest = 0;
  bool quoted = false;
  for (size_t k = 0; k < text.size(); ++k) {
    const char c = text[k];
    if (quoted) {
      if (c == '\\') ++k;
      if (c == '"') quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

}  // namespace

std::optional<nlohmann::json> parse_json_text(std::string_view text) {
  if (depth_of(text) > kJsonDepth) return std::nullopt;
  nlohmann::json value = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) return std::nullopt;
  return value;
}

std::string json_line(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string shortened(std::string_view text, size_t limit) {
  std::string out;
  for (char c : text.substr(0, limit)) out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  if (text.size() <= limit) return out;
  while (!out.empty() && (static_cast<unsigned char>(text[out.size()]) & 0xC0) == 0x80) out.pop_back();
  return out + fmt::format("... ({} bytes)", text.size());
}

const nlohmann::json* find_field(const nlohmann::json& line, const std::string& field) {
  if (field.empty() || field[0] != '/') {
    const auto found = line.find(field);
    return found == line.end() ? nullptr : &*found;
  }
  try {
    const nlohmann::json::json_pointer pointer(field);
    return line.contains(pointer) ? &line.at(pointer) : nullptr;
  } catch (const nlohmann::json::exception&) {
    return nullptr;  // a pointer that is not well-formed names nothing
  }
}

const nlohmann::json& require_field(const nlohmann::json& line, const std::string& field, const std::string& where) {
  const nlohmann::json* value = find_field(line, field);
  if (!value) fail(where, fmt::format("has no field {}", field), "the reward compares the answer with it");
  return *value;
}

std::string_view trimmed(std::string_view text) {
  constexpr const char* kSpace = " \t\n\v\f\r";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

}  // namespace plumb
