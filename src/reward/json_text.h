// JSON that a model or a program wrote, which may be anything.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace plumb {

// Values inside values inside ...: more is refused, since comparing and writing a value take stack for each level.
inline constexpr int kJsonDepth = 200;

// One JSON value with nothing but white space around it. Nothing for what is none, for text that is not UTF-8, and for
// more than kJsonDepth levels.
std::optional<nlohmann::json> parse_json_text(std::string_view text);

// On one line, as UTF-8; bytes that are no UTF-8 become U+FFFD.
std::string json_line(const nlohmann::json& value);

// A value for a message: what it is, and what it says, cut off after `limit` bytes.
std::string shortened(std::string_view text, size_t limit = 200);

// The value that a dataset line has under `field`: the name of a key, or a JSON pointer if it begins with "/"
// ("/solution/value"). Null if there is none.
const nlohmann::json* find_field(const nlohmann::json& line, const std::string& field);
// Error: `where`, there is no such field.
const nlohmann::json& require_field(const nlohmann::json& line, const std::string& field, const std::string& where);

// Without the white space of ASCII around it.
std::string_view trimmed(std::string_view text);

}  // namespace plumb
