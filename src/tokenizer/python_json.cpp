#include "tokenizer/python_json.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <unordered_map>

#include "base/error.h"
#include "tokenizer/unicode.h"

namespace plumb {
namespace {

constexpr int kMaxDepth = 500;  // below Python's own limit of 1000 calls, and far from the end of a thread's stack

class Parser {
 public:
  Parser(std::string_view text, const std::string& where) : text_(text), where_(where) {}

  Json document() {
    Json value = parse(0);
    skip_space();
    if (at_ < text_.size()) error("more text after the value");
    return value;
  }

 private:
  [[noreturn]] void error(const std::string& what) const {
    size_t line = 1, column = 1;
    for (size_t i = 0; i < at_ && i < text_.size(); ++i) {
      column = text_[i] == '\n' ? 1 : column + 1;
      line += text_[i] == '\n';
    }
    fail(where_, fmt::format("not valid JSON at {}:{}: {}", line, column, what), "correct the JSON text");
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool skip(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }
  void skip_space() {
    while (at_ < text_.size() && std::string_view(" \t\n\r").find(text_[at_]) != std::string_view::npos) ++at_;
  }

  Json parse(int depth) {
    if (depth > kMaxDepth) error(fmt::format("more than {} values inside each other", kMaxDepth));
    skip_space();
    Json v;
    switch (peek()) {
      case '{':
        return object(depth);
      case '[':
        return array(depth);
      case '"':
        return json_string(string());
      case 't':
      case 'f':
        v.kind = Json::Kind::boolean;
        v.boolean = peek() == 't';
        if (!skip(v.boolean ? "true" : "false")) error("a value expected");
        return v;
      case 'n':
        if (!skip("null")) error("a value expected");
        return v;
      default:
        return number();
    }
  }

  Json object(int depth) {
    Json v;
    v.kind = Json::Kind::object;
    std::unordered_map<std::string, size_t> place;
    ++at_;
    skip_space();
    if (skip("}")) return v;
    while (true) {
      skip_space();
      if (peek() != '"') error("a member name in double quotes expected");
      std::string key = string();
      skip_space();
      if (!skip(":")) error("':' expected after a member name");
      Json value = parse(depth + 1);
      auto [it, fresh] = place.emplace(key, v.members.size());
      if (fresh) {
        v.members.push_back({std::move(key), std::move(value)});
      } else {
        v.members[it->second].value = std::move(value);
      }
      skip_space();
      if (skip("}")) return v;
      if (!skip(",")) error("',' or '}' expected in an object");
    }
  }

  Json array(int depth) {
    Json v;
    v.kind = Json::Kind::array;
    ++at_;
    skip_space();
    if (skip("]")) return v;
    while (true) {
      v.items.push_back(parse(depth + 1));
      skip_space();
      if (skip("]")) return v;
      if (!skip(",")) error("',' or ']' expected in an array");
    }
  }

  Json number() {
    Json v;
    v.kind = Json::Kind::number;
    for (std::string_view word : {"NaN", "Infinity", "-Infinity"}) {
      if (skip(word)) {
        v.text = word;
        return v;
      }
    }
    size_t begin = at_;
    auto digits = [&] {
      size_t first = at_;
      while (peek() >= '0' && peek() <= '9') ++at_;
      return at_ - first;
    };
    skip("-");
    if (!skip("0") && digits() == 0) error("a value expected");
    if (size_t dot = at_; skip(".") && digits() == 0) at_ = dot;  // the digits before are the number, as in json.loads
    if (size_t exponent = at_; peek() == 'e' || peek() == 'E') {
      ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      if (digits() == 0) at_ = exponent;
    }
    v.text = text_.substr(begin, at_ - begin);
    return v;
  }

  uint32_t hex4() {
    uint32_t c = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      char h = peek();
      bool digit = h >= '0' && h <= '9', lower = h >= 'a' && h <= 'f', upper = h >= 'A' && h <= 'F';
      if (!digit && !lower && !upper) error("four hexadecimal digits expected after \\u");
      c = c * 16 + (digit ? h - '0' : lower ? h - 'a' + 10 : h - 'A' + 10);
    }
    return c;
  }

  void escape(std::string& out) {
    static constexpr std::string_view kNames = "\"\\/bfnrt", kValues = "\"\\/\b\f\n\r\t";
    char c = peek();
    if (size_t i = kNames.find(c); at_ < text_.size() && i != std::string_view::npos) {
      ++at_;
      out += kValues[i];
      return;
    }
    if (c != 'u') error("unknown escape in a string");
    ++at_;
    uint32_t unit = hex4();
    if (unit >= 0xD800 && unit < 0xDC00 && skip("\\u")) {
      uint32_t low = hex4();
      if (low < 0xDC00 || low > 0xDFFF) error("half of a surrogate pair in a string");
      unit = 0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00);
    } else if (unit >= 0xD800 && unit <= 0xDFFF) {
      error("half of a surrogate pair in a string");
    }
    append_utf8(unit, out);
  }

  std::string string() {
    std::string out;
    ++at_;
    while (true) {
      if (at_ >= text_.size()) error("the text ends inside a string");
      unsigned char c = text_[at_];
      if (c == '"') {
        ++at_;
        return out;
      }
      if (c < 0x20) error("a control character in a string must be escaped");
      if (c == '\\') {
        ++at_;
        escape(out);
        continue;
      }
      Utf8Unit unit = first_utf8_unit(text_.substr(at_));
      if (unit.kind != Utf8Unit::character) error("a string is not UTF-8");
      out.append(text_, at_, unit.length);
      at_ += unit.length;
    }
  }

  std::string_view text_;
  const std::string& where_;
  size_t at_ = 0;
};

// float.__repr__: the shortest digits that give the same double back; scientific from 1e16 and below 1e-4.
std::string python_repr(double x) {
  if (std::isnan(x)) return "NaN";
  if (std::isinf(x)) return x < 0 ? "-Infinity" : "Infinity";
  std::array<char, 64> buffer;
  char* end = std::to_chars(buffer.data(), buffer.data() + buffer.size() - 1, x, std::chars_format::scientific).ptr;
  *end = '\0';
  std::string_view s(buffer.data(), end - buffer.data());
  std::string sign = s[0] == '-' ? "-" : "";
  s.remove_prefix(sign.size());
  size_t e = s.find('e');
  std::string digits(s.substr(0, 1));
  if (e > 2) digits += s.substr(2, e - 2);
  int exponent = std::atoi(s.data() + e + 1), count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    std::string fraction = count > 1 ? "." + digits.substr(1) : "";
    return fmt::format("{}{}{}e{}{:02}", sign, digits[0], fraction, exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0) return sign + "0." + std::string(-exponent - 1, '0') + digits;
  if (count <= exponent + 1) return sign + digits + std::string(exponent + 1 - count, '0') + ".0";
  return sign + digits.substr(0, exponent + 1) + "." + digits.substr(exponent + 1);
}

std::string python_number(const std::string& spelling) {
  if (spelling == "-0") return "0";  // an int in Python
  if (spelling.find_first_of(".eEN") == std::string::npos && spelling.find('I') == std::string::npos) return spelling;
  return python_repr(
      std::strtod(spelling.c_str(), nullptr));  // strtod and not from_chars: overflow must become infinity
}

void dump(std::string& out, const Json& v) {
  auto quoted = [&](const std::string& s) {
    out += '"';
    append_json_escaped(out, s);
    out += '"';
  };
  switch (v.kind) {
    case Json::Kind::null:
      out += "null";
      break;
    case Json::Kind::boolean:
      out += v.boolean ? "true" : "false";
      break;
    case Json::Kind::number:
      out += python_number(v.text);
      break;
    case Json::Kind::string:
      quoted(v.text);
      break;
    case Json::Kind::array:
      out += '[';
      for (size_t i = 0; i < v.items.size(); ++i) {
        if (i) out += ", ";
        dump(out, v.items[i]);
      }
      out += ']';
      break;
    case Json::Kind::object:
      out += '{';
      for (size_t i = 0; i < v.members.size(); ++i) {
        if (i) out += ", ";
        quoted(v.members[i].key);
        out += ": ";
        dump(out, v.members[i].value);
      }
      out += '}';
      break;
  }
}

}  // namespace

const Json* Json::find(std::string_view key) const {
  for (const JsonMember& m : members)
    if (m.key == key) return &m.value;
  return nullptr;
}

Json json_string(std::string value) {
  Json v;
  v.kind = Json::Kind::string;
  v.text = std::move(value);
  return v;
}

Json parse_json(std::string_view text, const std::string& where) { return Parser(text, where).document(); }

std::string python_dumps(const Json& value) {
  std::string out;
  dump(out, value);
  return out;
}

void append_json_escaped(std::string& out, std::string_view s) {
  for (char c : s) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
        } else {
          out += c;
        }
    }
  }
}

const char* kind_name(Json::Kind kind) {
  switch (kind) {
    case Json::Kind::null:
      return "null";
    case Json::Kind::boolean:
      return "a boolean";
    case Json::Kind::number:
      return "a number";
    case Json::Kind::string:
      return "a string";
    case Json::Kind::array:
      return "an array";
    case Json::Kind::object:
      return "an object";
  }
  return "";
}

}  // namespace plumb
