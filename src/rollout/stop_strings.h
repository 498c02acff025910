// The text of an answer that ends where a stop string begins. Tokens are held back while some of their text may turn
// out to belong to a stop string; matching is over bytes, so it does not matter how tokens cut the text.
#pragma once
#include <deque>
#include <string>
#include <vector>

#include "rollout/sampler.h"

namespace plumb {

struct TextToken {
  GeneratedToken token;
  std::string text;  // bytes that it adds to the answer
};

class AnswerText {
 public:
  // strings: none empty.
  explicit AnswerText(const std::vector<std::string>& strings = {});

  // Takes the next token; -> the tokens that are certain by now, in order. A stop string that `text` completes ends the
  // answer if may_end: then all tokens come, the text cut where the string begins, and nothing may be pushed any more.
  // Of several strings the one that is complete first counts; of those that end at the same byte, the longest.
  std::vector<TextToken> push(TextToken next, bool may_end);
  // What is held back: it belongs to the answer when that ends for another reason.
  std::vector<TextToken> rest();
  // The string that ended the answer; empty = none has.
  const std::string& stop_string() const { return stop_string_; }

 private:
  // Knuth-Morris-Pratt: border[i] = length of the longest proper prefix of the string that ends its first i bytes.
  struct Pattern {
    std::string string;
    std::vector<size_t> border;
    size_t matched = 0;  // of the string, at the end of the text so far
    bool advance(char byte);
  };
  void cut(size_t bytes);

  std::vector<Pattern> patterns_;
  std::deque<TextToken> held_;
  size_t held_bytes_ = 0;
  std::string stop_string_;
};

}  // namespace plumb
