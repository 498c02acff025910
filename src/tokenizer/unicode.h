// UTF-8, the byte alphabet of byte-level BPE, and the few sets of characters that a tokenizer.json relies on.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace plumb {

// What the first bytes of a non-empty text are (The Unicode Standard, section 3.9, tables 3-7 and 3-8).
struct Utf8Unit {
  enum Kind { character, invalid, incomplete } kind;  // incomplete: the text ends inside a possible character
  size_t length;                                      // bytes; if invalid, those of the maximal part to replace
  char32_t value;                                     // if a character
};
Utf8Unit first_utf8_unit(std::string_view text);

// Bytes before the first that is not UTF-8; text.size() if there is none.
size_t valid_utf8_length(std::string_view text);

// Appends text to out with U+FFFD for each invalid part. Bytes at the end that may be the start of a character are
// replaced too if `complete`, else left alone. Returns the number of bytes used.
size_t append_utf8_lossy(std::string_view text, bool complete, std::string& out);

void append_utf8(char32_t c, std::string& out);

// The alphabet in which byte-level BPE spells bytes with visible characters: printable Latin-1 stands for itself, the
// other 68 bytes are U+0100, U+0101, ... in order.
const std::array<char32_t, 256>& byte_alphabet();
// The bytes that a token spells; none if it holds a character outside of the alphabet.
std::optional<std::string> bytes_of_spelling(std::string_view token);

struct CodeRange {
  char32_t first, last;
};
// Property White_Space; no code point has joined it since 2014 (Unicode 6.3 removed U+180E).
std::span<const CodeRange> white_space();
bool is_white_space(char32_t c);
// \w of the regex library with which Hugging Face judges `single_word` (unicode_tables.cpp).
bool is_word_character(char32_t c);
// Members of general category L, M, N, P or S in Unicode 16 that were unassigned in Unicode 14. Error if another
// category.
std::span<const CodeRange> assigned_since_unicode_14(char category);

}  // namespace plumb
