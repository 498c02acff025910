#include "tokenizer/bpe_split.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include "base/error.h"
#include "tokenizer/unicode.h"

namespace plumb {
namespace {

std::string class_items(std::span<const CodeRange> ranges) {
  std::string items;
  for (const CodeRange r : ranges) {
    items += fmt::format("\\x{{{:x}}}", static_cast<uint32_t>(r.first));
    if (r.last > r.first) items += fmt::format("-\\x{{{:x}}}", static_cast<uint32_t>(r.last));
  }
  return items;
}

std::vector<CodeRange> complement(std::span<const CodeRange> ranges) {
  std::vector<CodeRange> gaps;
  char32_t next = 0;
  for (const CodeRange r : ranges) {
    if (r.first > next) gaps.push_back({next, r.first - 1});
    next = r.last + 1;
  }
  gaps.push_back({next, 0x10ffff});
  return gaps;
}

// One pass over the pattern that copies what both engines read alike.
class Translator {
 public:
  Translator(std::string_view pattern, const std::string& where) : in_(pattern), where_(where) {}

  std::string run() {
    while (at_ < in_.size()) {
      if (in_[at_] == '\\') {
        escape();
      } else if (in_class_) {
        class_member();
      } else {
        plain();
      }
    }
    if (in_class_) unsupported("a class that is not closed");
    return std::move(out_);
  }

 private:
  [[noreturn]] void unsupported(const std::string& what) const {
    fail(where_, fmt::format("pattern {}: {} at byte {} is not supported", in_, what, at_),
         "supported: literals, classes, \\p{L M N P S}, \\s, groups, lookaheads, alternatives, repetitions");
  }
  char peek(size_t ahead) const { return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0'; }
  void copy(size_t n) {
    out_ += in_.substr(at_, n);
    at_ += n;
  }

  void escape() {
    const char e = peek(1);
    if (e == 'p' || e == 'P') return category(e == 'P');
    if (e == 's' || e == 'S') {
      const bool negated = e == 'S';
      put_set(in_class_ && negated ? class_items(complement(white_space())) : class_items(white_space()), negated);
      at_ += 2;
      return;
    }
    const bool punctuation = e > ' ' && e < 0x7f && !std::isalnum(static_cast<unsigned char>(e));
    if (!punctuation && e != 'r' && e != 'n' && e != 't' && e != 'f') unsupported("this escape");
    copy(2);
  }

  // A set of characters as items of the surrounding class or as a class of its own.
  void put_set(const std::string& items, bool negated) {
    out_ += in_class_ ? items : (negated ? "[^" : "[") + items + "]";
  }

  void category(bool negated) {
    const char name = peek(3);
    const bool known = name != '\0' && std::string_view("LMNPS").find(name) != std::string_view::npos;
    if (peek(2) != '{' || peek(4) != '}' || !known) unsupported("this property");
    if (negated && in_class_) unsupported("\\P inside of a class");
    put_set(fmt::format("\\p{{{}}}", name) + class_items(assigned_since_unicode_14(name)), negated);
    at_ += 5;
  }

  void class_member() {
    if (in_[at_] == '[') unsupported("a class inside of a class");
    if (in_[at_] == '&' && peek(1) == '&') unsupported("an intersection of classes");
    if (in_[at_] == ']') in_class_ = false;
    copy(1);
  }

  void plain() {
    switch (in_[at_]) {
      case '^':
      case '$':
      case '.':
        unsupported("an anchor or dot");
      case '[':
        copy(peek(1) == '^' ? 2 : 1);
        if (peek(0) == ']') unsupported("an empty class");
        in_class_ = true;
        return;
      case '(':
        if (peek(1) == '?' && peek(2) != ':' && peek(2) != '!' && peek(2) != '=') unsupported("this kind of group");
        return copy(peek(1) == '?' ? 3 : 1);
      case '{':
        return repetition();
      default:
        copy(1);
    }
  }

  // {n}, {n,} and {n,m} only: {,m} is no repetition in PCRE2, and a + after the brace means possessive there alone.
  void repetition() {
    size_t n = 1;
    const auto digits = [&] {
      const size_t start = n;
      while (std::isdigit(static_cast<unsigned char>(peek(n)))) ++n;
      return n > start;
    };
    bool good = digits();
    if (good && peek(n) == ',') {
      ++n;
      digits();
    }
    good = good && peek(n) == '}' && peek(n + 1) != '+';
    if (!good) unsupported("this repetition");
    copy(n + 1);
  }

  std::string_view in_;
  const std::string& where_;
  std::string out_;
  size_t at_ = 0;
  bool in_class_ = false;
};

std::string pcre2_message(int code) {
  unsigned char text[256];
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

}  // namespace

std::string oniguruma_to_pcre2(std::string_view pattern, const std::string& where) {
  return Translator(pattern, where).run();
}

SplitPattern SplitPattern::regex(std::string_view oniguruma, const std::string& where) {
  return SplitPattern(oniguruma_to_pcre2(oniguruma, where), PCRE2_UCP, where);
}

SplitPattern SplitPattern::literal(std::string_view text, const std::string& where) {
  return SplitPattern(text, PCRE2_LITERAL, where);
}

SplitPattern::SplitPattern(std::string_view pcre2, unsigned options, const std::string& where) : where_(where) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pcre2.data()), pcre2.size(), options | PCRE2_UTF,
                                   &error, &offset, nullptr);
  if (!code) fail(where, fmt::format("pattern {}: {} at byte {}", pcre2, pcre2_message(error), offset));
  code_ = std::shared_ptr<const void>(code, [code](const void*) { pcre2_code_free(code); });
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // only speed depends on it
  uint32_t matches_empty = 0;
  pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &matches_empty);
  if (matches_empty || pcre2.empty()) fail(where, fmt::format("pattern {} matches the empty text", pcre2));
}

void SplitPattern::split(std::string_view text, std::vector<std::string_view>& pieces) const {
  const auto* code = static_cast<const pcre2_code*>(code_.get());
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(pcre2_match_data_create(1, nullptr),
                                                                                  &pcre2_match_data_free);
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const PCRE2_SIZE* span = pcre2_get_ovector_pointer(match.get());
  size_t done = 0;
  while (done < text.size()) {
    int rc = pcre2_match(code, subject, text.size(), done, PCRE2_NO_UTF_CHECK, match.get(), nullptr);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)  // the interpreter keeps its backtracking points on the heap
      rc = pcre2_match(code, subject, text.size(), done, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match.get(), nullptr);
    if (rc == PCRE2_ERROR_NOMATCH) break;
    if (rc < 0) fail(where_, fmt::format("text of {} bytes, at byte {}: {}", text.size(), done, pcre2_message(rc)));
    if (span[0] > done) pieces.push_back(text.substr(done, span[0] - done));
    pieces.push_back(text.substr(span[0], span[1] - span[0]));
    done = span[1];
  }
  if (done < text.size()) pieces.push_back(text.substr(done));
}

}  // namespace plumb
