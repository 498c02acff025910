#include "tokenizer/bpe_added.h"

#include <algorithm>

#include "tokenizer/unicode.h"

namespace plumb {
namespace {

uint64_t edge(uint32_t node, char byte) { return uint64_t{node} << 8 | static_cast<unsigned char>(byte); }

// `text` is UTF-8 and not empty.
char32_t last_character(std::string_view text) {
  size_t start = text.size() - 1;
  while ((static_cast<unsigned char>(text[start]) & 0xc0) == 0x80) --start;
  return first_utf8_unit(text.substr(start)).value;
}

size_t space_at_end(std::string_view text) {
  size_t length = 0;
  while (length < text.size()) {
    const char32_t c = last_character(text.substr(0, text.size() - length));
    if (!is_white_space(c)) break;
    std::string encoded;
    append_utf8(c, encoded);
    length += encoded.size();
  }
  return length;
}

size_t space_at_start(std::string_view text) {
  size_t length = 0;
  while (length < text.size()) {
    const Utf8Unit unit = first_utf8_unit(text.substr(length));
    if (!is_white_space(unit.value)) break;
    length += unit.length;
  }
  return length;
}

bool stands_alone(std::string_view before, std::string_view after) {
  return (before.empty() || !is_word_character(last_character(before))) &&
         (after.empty() || !is_word_character(first_utf8_unit(after).value));
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    uint32_t node = 0;
    for (const char byte : tokens_[i].content) {
      const auto [child, fresh] = children_.try_emplace(edge(node, byte), static_cast<uint32_t>(token_of_.size()));
      if (fresh) token_of_.push_back(-1);
      node = child->second;
    }
    token_of_[node] = static_cast<int32_t>(i);
    starts_[static_cast<unsigned char>(tokens_[i].content.front())] = true;
  }
}

const AddedToken* AddedTokenMatcher::longest_at(std::string_view text) const {
  uint32_t node = 0;
  const AddedToken* longest = nullptr;
  for (const char byte : text) {
    const auto child = children_.find(edge(node, byte));
    if (child == children_.end()) break;
    node = child->second;
    if (token_of_[node] >= 0) longest = &tokens_[token_of_[node]];
  }
  return longest;
}

void AddedTokenMatcher::split(std::string_view text, std::vector<Section>& sections) const {
  size_t done = 0;  // everything before is in a section
  for (size_t at = 0; at < text.size();) {
    const AddedToken* token = starts_[static_cast<unsigned char>(text[at])] ? longest_at(text.substr(at)) : nullptr;
    if (!token) {
      ++at;
      continue;
    }
    size_t start = at, stop = at + token->content.size();
    at = stop;  // also after a match that single_word refuses: a shorter token inside of it is not tried
    if (token->single_word && !stands_alone(text.substr(0, start), text.substr(stop))) continue;
    if (token->lstrip) start = std::max(done, start - space_at_end(text.substr(0, start)));
    if (token->rstrip) stop += space_at_start(text.substr(stop));
    if (start > done) sections.push_back({text.substr(done, start - done), -1});
    sections.push_back({text.substr(start, stop - start), token->id});
    done = stop;
  }
  if (done < text.size()) sections.push_back({text.substr(done), -1});
}

}  // namespace plumb
