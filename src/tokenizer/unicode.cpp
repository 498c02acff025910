#include "tokenizer/unicode.h"

#include <algorithm>
#include <cstring>

namespace plumb {
namespace {

constexpr CodeRange white_space_ranges[] = {{0x09, 0x0d},     {0x20, 0x20},     {0x85, 0x85},     {0xa0, 0xa0},
                                            {0x1680, 0x1680}, {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f},
                                            {0x205f, 0x205f}, {0x3000, 0x3000}};

constexpr char32_t first_unprintable_letter = 0x100;

bool prints_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

size_t ascii_length(std::string_view text) {
  size_t n = 0;
  for (uint64_t word; n + sizeof word <= text.size(); n += sizeof word) {
    std::memcpy(&word, text.data() + n, sizeof word);
    if (word & 0x8080808080808080u) break;
  }
  while (n < text.size() && static_cast<unsigned char>(text[n]) < 0x80) ++n;
  return n;
}

}  // namespace

Utf8Unit first_utf8_unit(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {Utf8Unit::character, 1, lead};
  if (lead < 0xc2 || lead > 0xf4) return {Utf8Unit::invalid, 1, 0};
  const size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  // The second byte alone decides about overlong forms, surrogates and values above U+10FFFF.
  const unsigned low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  char32_t value = lead & (0x7fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Utf8Unit::incomplete, i, 0};
    const unsigned next = byte(i);
    if (i == 1 ? next < low || next > high : (next & 0xc0) != 0x80) return {Utf8Unit::invalid, i, 0};
    value = value << 6 | (next & 0x3f);
  }
  return {Utf8Unit::character, length, value};
}

size_t valid_utf8_length(std::string_view text) {
  size_t at = 0;
  while ((at += ascii_length(text.substr(at))) < text.size()) {
    const Utf8Unit unit = first_utf8_unit(text.substr(at));
    if (unit.kind != Utf8Unit::character) break;
    at += unit.length;
  }
  return at;
}

size_t append_utf8_lossy(std::string_view text, bool complete, std::string& out) {
  size_t at = 0;
  for (;;) {
    const size_t valid = valid_utf8_length(text.substr(at));
    out.append(text.substr(at, valid));
    at += valid;
    if (at == text.size()) return at;
    const Utf8Unit unit = first_utf8_unit(text.substr(at));
    if (unit.kind == Utf8Unit::incomplete && !complete) return at;
    append_utf8(0xfffd, out);
    at += unit.length;
  }
}

void append_utf8(char32_t c, std::string& out) {
  const auto put = [&](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (c < 0x80) return put(c);
  if (c < 0x800) {
    put(0xc0 | c >> 6);
  } else {
    if (c < 0x10000) {
      put(0xe0 | c >> 12);
    } else {
      put(0xf0 | c >> 18);
      put(0x80 | (c >> 12 & 0x3f));
    }
    put(0x80 | (c >> 6 & 0x3f));
  }
  put(0x80 | (c & 0x3f));
}

const std::array<char32_t, 256>& byte_alphabet() {
  static const std::array<char32_t, 256> alphabet = [] {
    std::array<char32_t, 256> letters{};
    char32_t next = first_unprintable_letter;
    for (int b = 0; b < 256; ++b) letters[b] = prints_itself(b) ? static_cast<char32_t>(b) : next++;
    return letters;
  }();
  return alphabet;
}

std::optional<std::string> bytes_of_spelling(std::string_view token) {
  static const auto byte_of = [] {
    std::array<int, first_unprintable_letter + 256> inverse;
    inverse.fill(-1);
    for (int b = 0; b < 256; ++b) inverse[byte_alphabet()[b]] = b;
    return inverse;
  }();
  std::string bytes;
  while (!token.empty()) {
    const Utf8Unit unit = first_utf8_unit(token);
    if (unit.kind != Utf8Unit::character || unit.value >= byte_of.size() || byte_of[unit.value] < 0) return {};
    bytes.push_back(static_cast<char>(byte_of[unit.value]));
    token.remove_prefix(unit.length);
  }
  return bytes;
}

std::span<const CodeRange> white_space() { return white_space_ranges; }

bool is_white_space(char32_t c) {
  return std::ranges::any_of(white_space_ranges, [c](CodeRange r) { return r.first <= c && c <= r.last; });
}

}  // namespace plumb
