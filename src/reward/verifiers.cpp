#include "reward/verifiers.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "base/error.h"
#include "reward/json_text.h"
#include "reward/pattern.h"

namespace plumb {
namespace {

const std::string& text_of(const Answer& answer, const std::string& of) {
  if (of == "reasoning") return answer.reasoning;
  return of == "text" ? answer.text : answer.content;
}

// The texts of which the answer may be one: a text, a number, true or false, or a list of these.
std::vector<std::string> expected_texts(const nlohmann::json& line, const std::string& field,
                                        const std::string& where) {
  const nlohmann::json& value = require_field(line, field, where);
  std::vector<std::string> texts;
  for (const nlohmann::json& item : value.is_array() ? value : nlohmann::json::array({value})) {
    if (item.is_structured() || item.is_null())
      fail(where, fmt::format("field {} is {}", field, shortened(json_line(value))),
           "it must be a text, a number, true or false, or a list of these");
    texts.push_back(item.is_string() ? item.get<std::string>() : item.dump());
  }
  if (texts.empty()) fail(where, fmt::format("field {} is an empty list", field), "no answer would be right");
  return texts;
}

bool same_text(std::string_view text, std::string_view wanted, bool ignore_case) {
  if (!ignore_case || text == wanted) return text == wanted;
  const Pattern pattern(std::string(wanted), {.full = true, .ignore_case = true, .literal = true}, "expected text");
  return pattern.find(text).has_value();
}

const std::string kSample = "dataset line";  // the place of a field when a sample is scored

class Exact : public Reward {
 public:
  explicit Exact(ExactKeys keys) : keys_(std::move(keys)) {}
  Score score(const RewardSample& sample) override {
    const std::string_view answer = trimmed(text_of(sample.answer, keys_.of));
    for (const std::string& wanted : expected_texts(sample.line, keys_.field, kSample))
      if (same_text(answer, trimmed(wanted), keys_.ignore_case)) return {.reward = 1};
    return {.reward = 0};
  }
  void check_line(const nlohmann::json& line, const std::string& where) const override {
    expected_texts(line, keys_.field, where);
  }

 private:
  ExactKeys keys_;
};

class Number : public Reward {
 public:
  explicit Number(NumberKeys keys) : keys_(std::move(keys)) {}
  Score score(const RewardSample& sample) override {
    const double wanted = expected(sample.line, kSample);
    const std::optional<double> found = last_number(text_of(sample.answer, keys_.of));
    const double allowed = keys_.tolerance + keys_.relative_tolerance * std::abs(wanted);
    return {.reward = found && std::abs(*found - wanted) <= allowed ? 1.0 : 0.0,
            .metrics = {{"has_number", found ? 1.0 : 0.0}}};
  }
  void check_line(const nlohmann::json& line, const std::string& where) const override { expected(line, where); }

 private:
  double expected(const nlohmann::json& line, const std::string& where) const {
    const nlohmann::json& value = require_field(line, keys_.field, where);
    std::optional<double> number;
    if (value.is_number()) number = value.get<double>();
    if (value.is_string()) number = last_number(value.get_ref<const std::string&>());
    if (!number)
      fail(where, fmt::format("field {} is {}", keys_.field, shortened(json_line(value))),
           "it must be a number or a text with one");
    return *number;
  }
  NumberKeys keys_;
};

class Regex : public Reward {
 public:
  Regex(RegexKeys keys, const std::string& where) : keys_(std::move(keys)) {
    if (!keys_.pattern.empty()) fixed_.emplace(keys_.pattern, options(), where);
  }
  Score score(const RewardSample& sample) override {
    const std::string& answer = text_of(sample.answer, keys_.of);
    const bool found =
        fixed_ ? fixed_->find(answer).has_value() : of_line(sample.line, kSample).find(answer).has_value();
    return {.reward = found ? 1.0 : 0.0};
  }
  void check_line(const nlohmann::json& line, const std::string& where) const override {
    if (!fixed_) of_line(line, where);
  }

 private:
  PatternOptions options() const { return {.full = keys_.full, .ignore_case = keys_.ignore_case}; }
  Pattern of_line(const nlohmann::json& line, const std::string& where) const {
    const nlohmann::json& value = require_field(line, keys_.field, where);
    if (!value.is_string())
      fail(where, fmt::format("field {} is {}", keys_.field, shortened(json_line(value))), "it must be a text");
    return Pattern(value.get<std::string>(), options(), where);
  }
  RegexKeys keys_;
  std::optional<Pattern> fixed_;
};

int64_t count_characters(std::string_view text) {  // code points of UTF-8: all bytes but the continuations
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

int64_t count_words(std::string_view text) {
  int64_t words = 0;
  for (text = trimmed(text); !text.empty(); ++words)
    text = trimmed(text.substr(std::min(text.find_first_of(" \t\n\v\f\r"), text.size())));
  return words;
}

class Length : public Reward {
 public:
  explicit Length(LengthKeys keys) : keys_(std::move(keys)) {}
  Score score(const RewardSample& sample) override {
    const std::string& text = text_of(sample.answer, keys_.of);
    int64_t length = sample.answer.tokens;
    if (keys_.unit == "characters") length = count_characters(text);
    if (keys_.unit == "words") length = count_words(text);
    const double error = std::abs(static_cast<double>(length) - keys_.target);
    return {.reward = -error / keys_.scale,
            .metrics = {{"length", static_cast<double>(length)}, {"absolute_error", error}}};
  }

 private:
  LengthKeys keys_;
};

class Choice : public Reward {
 public:
  explicit Choice(ChoiceKeys keys) : keys_(std::move(keys)) {}
  Score score(const RewardSample& sample) override {
    const std::string_view answer = trimmed(text_of(sample.answer, keys_.of));
    for (const auto& [text, reward] : keys_.rewards)
      if (same_text(answer, text, keys_.ignore_case)) return {.reward = reward, .metrics = {{"chosen", 1}}};
    return {.reward = keys_.otherwise, .metrics = {{"chosen", 0}}};
  }

 private:
  ChoiceKeys keys_;
};

}  // namespace

std::optional<double> last_number(std::string_view text) {
  static const Pattern number(
      "(?:(?<![\\w.)\\]])(?:[-+]|\\x{2212}))?(?<![\\w.])"               // a sign that is one, a beginning that is one
      "(?:(?:\\d{1,3}(?:,\\d{3})+(?!,?\\d)|\\d+)(?:\\.\\d+)?|\\.\\d+)"  // 1,234 or 1234, then .5; or .5
      "(?:[eE][-+]?\\d+)?",
      {}, "number");
  std::optional<Pattern::Span> last;
  for (auto span = number.find(text); span; span = number.find(text, span->end)) last = span;
  if (!last) return std::nullopt;
  std::string digits;
  for (size_t k = last->begin; k < last->end; ++k) {
    const char c = text[k];
    if (static_cast<unsigned char>(c) >= 0x80) {  // U+2212 is the only such character that matches, three bytes
      digits += '-';
      k += 2;
    } else if (c != ',' && c != '+') {
      digits += c;
    } else if (c == '+' && !digits.empty()) {  // of an exponent
      digits += c;
    }
  }
  double value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::unique_ptr<Reward> make_verifier(const ExactKeys& keys) { return std::make_unique<Exact>(keys); }
std::unique_ptr<Reward> make_verifier(const NumberKeys& keys) { return std::make_unique<Number>(keys); }
std::unique_ptr<Reward> make_verifier(const LengthKeys& keys) { return std::make_unique<Length>(keys); }
std::unique_ptr<Reward> make_verifier(const ChoiceKeys& keys) { return std::make_unique<Choice>(keys); }
std::unique_ptr<Reward> make_verifier(const RegexKeys& keys, const std::string& where) {
  return std::make_unique<Regex>(keys, where);
}

}  // namespace plumb
