// Regular expressions of PCRE2 on text that a model wrote: never endless, never out of stack, any bytes allowed.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace plumb {

// Steps after which a search is given up, some tenths of a second. A count, not a time, so that a sample has the same
// fate on every machine.
inline constexpr uint32_t kPatternSteps = 1'000'000;

struct PatternOptions {
  bool full = false;         // the whole text must match
  bool ignore_case = false;  // by Unicode's simple case folding
  bool literal = false;      // every character stands for itself
};

// UTF-8; a class like \w means ASCII unless the pattern begins with (*UCP). Bytes that are no UTF-8 match nothing.
class Pattern {
 public:
  // Error: `where`, what is wrong with the pattern, and at which byte.
  Pattern(const std::string& text, const PatternOptions& options, const std::string& where);

  struct Span {
    size_t begin = 0, end = 0;  // bytes
  };
  // The first match at or after byte `from`. Error: kPatternSteps were not enough.
  std::optional<Span> find(std::string_view text, size_t from = 0) const;

 private:
  std::shared_ptr<const void> code_;  // pcre2_code
  std::string text_;
};

}  // namespace plumb
