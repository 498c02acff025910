#include "rollout/stop_strings.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"

namespace plumb {

AnswerText::AnswerText(const std::vector<std::string>& strings) {
  for (const std::string& s : strings) {
    PLUMB_CHECK(!s.empty());
    Pattern p{s, {0, 0}, 0};
    for (size_t i = 1, k = 0; i < s.size(); ++i) {
      while (k > 0 && s[i] != s[k]) k = p.border[k];
      p.border.push_back(k += s[i] == s[k]);
    }
    patterns_.push_back(std::move(p));
  }
}

// true: the byte completes the string.
bool AnswerText::Pattern::advance(char byte) {
  if (matched == string.size()) matched = border[matched];
  while (matched > 0 && string[matched] != byte) matched = border[matched];
  matched += string[matched] == byte;
  return matched == string.size();
}

std::vector<TextToken> AnswerText::push(TextToken next, bool may_end) {
  PLUMB_CHECK(stop_string_.empty());
  const std::string text = next.text;
  held_.push_back(std::move(next));
  for (const char byte : text) {
    ++held_bytes_;
    for (Pattern& p : patterns_)
      if (p.advance(byte) && may_end && p.string.size() > stop_string_.size()) stop_string_ = p.string;
    if (stop_string_.empty()) continue;
    cut(held_bytes_ - stop_string_.size());
    return rest();
  }
  size_t open = 0;  // bytes at the end that may be the beginning of a stop string
  for (const Pattern& p : patterns_)
    open = std::max(open, p.matched < p.string.size() ? p.matched : p.border[p.matched]);
  std::vector<TextToken> certain;
  while (!held_.empty() && held_bytes_ - held_.front().text.size() >= open) {
    held_bytes_ -= held_.front().text.size();
    certain.push_back(std::move(held_.front()));
    held_.pop_front();
  }
  return certain;
}

std::vector<TextToken> AnswerText::rest() {
  std::vector<TextToken> all(std::make_move_iterator(held_.begin()), std::make_move_iterator(held_.end()));
  held_.clear(), held_bytes_ = 0;
  return all;
}

// Keeps the first `bytes` of the text that is held.
void AnswerText::cut(size_t bytes) {
  for (TextToken& t : held_) {
    t.text.resize(std::min(t.text.size(), bytes));
    bytes -= t.text.size();
  }
}

}  // namespace plumb
