// JSON as Python's json module reads and writes it. The chat format of DeepSeek-V4 was defined by a Python encoder, so
// tool definitions and arguments must come out with the bytes of json.dumps(value, ensure_ascii=False): numbers keep
// their exact value, members their order. General JSON libraries turn 1.0 into 1, 10^30 into a double, or sort the
// members.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace plumb {

struct JsonMember;

struct Json {
  enum class Kind { null, boolean, number, string, array, object };
  Kind kind = Kind::null;
  bool boolean = false;
  std::string text;  // string: its UTF-8 value; number: its spelling in the source
  std::vector<Json> items;
  std::vector<JsonMember> members;  // keys differ; a repeated key keeps its first place and takes the last value

  bool is_null() const { return kind == Kind::null; }
  bool is_string() const { return kind == Kind::string; }
  bool is_array() const { return kind == Kind::array; }
  bool is_object() const { return kind == Kind::object; }
  const Json* find(std::string_view key) const;  // null if this is no object or has no such member
};

struct JsonMember {
  std::string key;
  Json value;
};

Json json_string(std::string value);

// Reads one JSON value with nothing but white space around it. Accepts what json.loads accepts, which is JSON plus NaN,
// Infinity and -Infinity. Throws Error with `where` and line:column for anything else, for text that is not UTF-8 or
// has half of a surrogate pair (no UTF-8 spelling exists), and for more than 500 nested values.
Json parse_json(std::string_view text, const std::string& where);

// json.dumps(value, ensure_ascii=False): ", " and ": " between, floats by Python's repr.
std::string python_dumps(const Json& value);

// Appends s as json.dumps writes the inside of a string, without the quotes. Works byte by byte, so that a string may
// be given in parts.
void append_json_escaped(std::string& out, std::string_view s);

// The JSON type for error messages: "null", "a number", "an object", ...
const char* kind_name(Json::Kind kind);

}  // namespace plumb
