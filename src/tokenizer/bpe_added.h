// The added vocabulary of a tokenizer.json: tokens that are looked for in the text before it is cut into words.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace plumb {

struct AddedToken {
  int32_t id = -1;
  std::string content;
  bool special = false;      // decode may leave it out
  bool normalized = true;    // looked for after the tokens that are not (the normalizer itself is always empty here)
  bool lstrip = false;       // takes the white space before it as well
  bool rstrip = false;       // and after it
  bool single_word = false;  // no match beside a word character (\w)
};

struct Section {
  std::string_view text;
  int32_t added_id;  // -1: ordinary text
};

// Finds one set of added tokens: leftmost match, of those the longest, as Hugging Face does.
class AddedTokenMatcher {
 public:
  explicit AddedTokenMatcher(std::vector<AddedToken> tokens);
  // Appends the parts of `text` (UTF-8) in order.
  void split(std::string_view text, std::vector<Section>& sections) const;

 private:
  const AddedToken* longest_at(std::string_view text) const;  // null if no token starts here

  std::vector<AddedToken> tokens_;
  // A trie over bytes: (node * 256 + byte) -> node; node 0 is the root; token_of_[node] is an index into tokens_ or -1.
  std::unordered_map<uint64_t, uint32_t> children_;
  std::vector<int32_t> token_of_{-1};
  bool starts_[256] = {};  // bytes with which a token starts
};

}  // namespace plumb
