#include "reward/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include "base/error.h"

namespace plumb {
namespace {

constexpr uint32_t kHeapKib = 64 * 1024;  // PCRE2 keeps its backtracking points there, not on the stack

std::string message(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

}  // namespace

Pattern::Pattern(const std::string& text, const PatternOptions& options, const std::string& where) : text_(text) {
  uint32_t flags = PCRE2_UTF | PCRE2_MATCH_INVALID_UTF;
  if (options.full) flags |= PCRE2_ANCHORED | PCRE2_ENDANCHORED;
  if (options.ignore_case) flags |= PCRE2_CASELESS;
  if (options.literal) flags |= PCRE2_LITERAL;
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), flags, &error, &offset, nullptr);
  if (!code)
    fail(where, fmt::format("pattern {}: {} at byte {}", text, message(error), offset),
         "write a regular expression as PCRE2 and Perl know it");
  code_ = std::shared_ptr<const void>(code, [code](const void*) { pcre2_code_free(code); });
}

std::optional<Pattern::Span> Pattern::find(std::string_view text, size_t from) const {
  const auto* code = static_cast<const pcre2_code*>(code_.get());
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(pcre2_match_data_create(1, nullptr),
                                                                                  &pcre2_match_data_free);
  const std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> limits(
      pcre2_match_context_create(nullptr), &pcre2_match_context_free);
  pcre2_set_match_limit(limits.get(), kPatternSteps);
  pcre2_set_heap_limit(limits.get(), kHeapKib);
  // Interpreted, not compiled to machine code: that counts its steps differently on every processor.
  const int found =
      pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from, 0, match.get(), limits.get());
  if (found == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (found < 0)
    fail("pattern " + text_,
         fmt::format("the search in an answer of {} bytes was given up: {}", text.size(), message(found)),
         "write it so that it needs less backtracking, for example with possessive quantifiers");
  const PCRE2_SIZE* span = pcre2_get_ovector_pointer(match.get());
  return Span{span[0], span[1]};
}

}  // namespace plumb
