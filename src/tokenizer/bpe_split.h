// The `Split` pre-tokenizers of a tokenizer.json: cut a text at the matches of a pattern.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace plumb {

// The pattern of a tokenizer.json is written for Oniguruma (Ruby syntax, Unicode 16). This is the PCRE2 pattern that
// matches the same: \p{..} is completed by what PCRE2's older Unicode does not know yet, \s becomes the White_Space
// characters. Error (at `where`) for syntax whose meaning differs or was not compared: flags, anchors, dots, \d, \w,
// nested classes and so on.
std::string oniguruma_to_pcre2(std::string_view pattern, const std::string& where);

class SplitPattern {
 public:
  static SplitPattern regex(std::string_view oniguruma, const std::string& where);
  static SplitPattern literal(std::string_view text, const std::string& where);

  // Appends the matches in `text` and the gaps between them, in order ("behavior": "Isolated"); together they are the
  // text. The text ends where it ends: a lookahead does not see what follows it in a longer string. `text` must be
  // UTF-8.
  void split(std::string_view text, std::vector<std::string_view>& pieces) const;

 private:
  SplitPattern(std::string_view pcre2, unsigned options, const std::string& where);
  std::shared_ptr<const void> code_;  // pcre2_code, compiled to machine code where PCRE2 can
  std::string where_;
};

}  // namespace plumb
