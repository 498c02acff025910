#include "tokenizer/chat_stream.h"

#include <algorithm>
#include <utility>

#include "tokenizer/chat_format.h"
#include "tokenizer/unicode.h"

namespace plumb {
namespace {

using namespace chat_format;
using Kind = ChatEvent::Kind;

constexpr size_t kLongestWord = 32, kLongestName = 1000;  // bounds what is held back; tags have short words and names

bool is_delta(Kind k) {
  return k == Kind::reasoning || k == Kind::content || k == Kind::arguments || k == Kind::markup;
}

// Bytes at the end of s that begin a UTF-8 character without finishing it.
size_t unfinished_character(std::string_view s) {
  for (size_t n = 1; n <= std::min<size_t>(3, s.size()); ++n)
    if (first_utf8_unit(s.substr(s.size() - n)).kind == Utf8Unit::incomplete) return n;
  return 0;
}

}  // namespace

// <DSML word>, </DSML word>, <DSML invoke name="..."> or <DSML parameter name="..." string="true|false"> (DSML without
// a space behind it), as far as it has been read.
struct ChatStream::Tag {
  enum class State { partial, complete, failed };
  State state = State::partial;
  bool marked = false;   // the DSML token has been read
  bool closing = false;  // begins with "</"
  bool is_string = false;
  std::string word, name;
  size_t name_at = 0;   // in tag_: where the name begins; 0 if that has not been read
  size_t value_at = 0;  // parameter: where true or false begins

  Tag& becomes(State s) {
    state = s;
    return *this;
  }
};

ChatStream::ChatStream(ThinkingMode mode)
    : stage_(mode == ThinkingMode::thinking ? Stage::reasoning : Stage::content) {}

// ---- Feeding -------------------------------------------------------------------------------------------------------

std::vector<ChatEvent> ChatStream::feed_text(std::string_view text) {
  spelled_ += text;
  std::string_view rest = spelled_;
  while (!rest.empty()) {
    bool wait = false;
    size_t taken = 0;
    for (auto [mark, symbol] : {std::pair{kDsml, kDsmlSymbol}, std::pair{kThinkClose, kCloseSymbol}}) {
      if (rest.starts_with(mark)) {
        step(symbol);
        taken = mark.size();
      }
      wait |= mark.starts_with(rest) && mark.size() > rest.size();
    }
    if (wait) break;
    if (taken == 0) {
      step(static_cast<unsigned char>(rest[0]));
      taken = 1;
    }
    rest.remove_prefix(taken);
  }
  spelled_ = std::string(rest);
  return take_events(false);
}

std::vector<ChatEvent> ChatStream::feed_token(int32_t id, const ChatTokenizer& tokenizer) {
  for (unsigned char c : std::exchange(spelled_, "")) step(c);
  if (id == tokenizer.token_to_id(kDsml)) {
    step(kDsmlSymbol);
  } else if (id == tokenizer.token_to_id(kThinkClose)) {
    step(kCloseSymbol);
  } else {
    for (unsigned char c : tokenizer.id_to_bytes(id)) step(c);
  }
  return take_events(false);
}

std::vector<ChatEvent> ChatStream::finish(bool hit_limit) {
  for (unsigned char c : std::exchange(spelled_, "")) step(c);
  while (!tag_.empty()) {
    // A tag that was cut off is still a tag where one could have stood, except that a parameter's name goes into the
    // arguments: they have to be seen to be incomplete.
    Tag tag = read_tag();
    bool named_parameter = stage_ == Stage::call && tag.name_at > 0 && tag.word == "parameter";
    if (tag.marked && could_stand(tag) && !named_parameter) {
      drop_held();
      emit(Kind::markup, "", spell(tag_));
      tag_.clear();
    } else {
      give_up_tag();
    }
  }
  bool prose = stage_ == Stage::reasoning || stage_ == Stage::content;
  if (prose && !blank_) {
    keep_held();
  } else {
    drop_held();
  }
  if (call_open_) emit(Kind::call_end, "", "");
  emit(Kind::finish, hit_limit ? "length" : calls_ > 0 ? "tool_calls" : "stop", "");
  return take_events(true);
}

// ---- Recognizing tags ----------------------------------------------------------------------------------------------

void ChatStream::step(Symbol s) {
  if (tag_.empty() && (s != '<' || stage_ == Stage::afterwards)) {
    text(s);
    return;
  }
  tag_ += s;
  Tag tag = read_tag();
  if (tag.state == Tag::State::partial) return;
  if (tag.state == Tag::State::complete && could_stand(tag)) {
    take_tag(tag);
  } else {
    give_up_tag();
  }
}

ChatStream::Tag ChatStream::read_tag() const {
  using State = Tag::State;
  constexpr std::u16string_view kName = u" name=\"", kFlag = u"\" string=\"", kTrue = u"true\">", kFalse = u"false\">";
  Tag tag;
  std::u16string_view rest = tag_;
  rest.remove_prefix(1);
  if (rest.empty()) return tag;
  tag.closing = rest[0] == '/';
  if (tag.closing) rest.remove_prefix(1);
  if (rest.empty()) return tag;
  tag.marked = rest[0] == kDsmlSymbol;
  if (!tag.marked) return tag.becomes(State::failed);
  rest.remove_prefix(1);
  while (!rest.empty() && (rest[0] == '_' || (rest[0] >= 'a' && rest[0] <= 'z')) && tag.word.size() < kLongestWord) {
    tag.word += static_cast<char>(rest[0]);
    rest.remove_prefix(1);
  }
  if (rest.empty()) return tag;
  bool parameter = tag.word == "parameter", has_name = !tag.closing && (tag.word == "invoke" || parameter);
  if (!has_name) return tag.becomes(rest[0] == '>' && !tag.word.empty() ? State::complete : State::failed);

  if (!rest.starts_with(kName)) return tag.becomes(kName.starts_with(rest) ? State::partial : State::failed);
  rest.remove_prefix(kName.size());
  tag.name_at = tag_.size() - rest.size();
  size_t end = rest.find(parameter ? kFlag : u"\">");
  std::u16string_view name = rest.substr(0, end);
  // Names of functions are words, names of parameters may be anything.
  bool plain = std::all_of(name.begin(), name.end(), [&](Symbol s) { return s < 256 && (parameter || s != '\n'); });
  if (!plain || name.size() > kLongestName) return tag.becomes(State::failed);
  if (end == std::u16string_view::npos) return tag;
  tag.name = spell(name);
  if (!parameter) return tag.becomes(State::complete);

  rest.remove_prefix(end + kFlag.size());
  tag.value_at = tag_.size() - rest.size();
  tag.is_string = rest == kTrue;
  if (rest == kTrue || rest == kFalse) return tag.becomes(State::complete);
  return tag.becomes(kTrue.starts_with(rest) || kFalse.starts_with(rest) ? State::partial : State::failed);
}

bool ChatStream::could_stand(const Tag& tag) const {
  switch (stage_) {
    case Stage::reasoning:
    case Stage::content:
      return !tag.closing && tag.word != "parameter";
    case Stage::block:
      return tag.closing || tag.word != "parameter";
    case Stage::call:
      return true;
    case Stage::value:
      return tag.closing;
    case Stage::broken:
      return !tag.closing && tag.word == "invoke";
    case Stage::afterwards:
      return false;
  }
  return false;
}

// What looked like a tag is none: its '<' is text, and another tag may begin behind it.
void ChatStream::give_up_tag() {
  Tag tag = read_tag();
  std::u16string symbols = std::exchange(tag_, u"");
  size_t done = 1;
  if (stage_ == Stage::call && tag.name_at > 0 && tag.word == "parameter") {
    drop_held();
    std::string begun = parameters_++ == 0 ? "{\"" : ", \"";
    if (tag.value_at > 0) {
      append_json_escaped(begun, tag.name);
      begun += "\": ";
    }
    done = tag.value_at > 0 ? tag.value_at : tag.name_at;
    emit(Kind::arguments, begun, spell(symbols.substr(0, done)));
    enter(Stage::broken);
  } else {
    text(symbols[0]);
  }
  for (size_t i = done; i < symbols.size(); ++i) step(symbols[i]);
}

// ---- Acting on tags and text ---------------------------------------------------------------------------------------

void ChatStream::take_tag(const Tag& tag) {
  std::string source = spell(std::exchange(tag_, u""));
  drop_held();
  if (tag.closing) {
    take_closing_tag(tag, source);
  } else if (tag.word == "invoke") {
    if (call_open_) end_call("");
    emit(Kind::call_begin, tag.name, source);
    call_open_ = true;
    ++calls_;
    parameters_ = 0;
    enter(Stage::call);
  } else if (tag.word == "parameter") {
    std::string begun = parameters_++ == 0 ? "{\"" : ", \"";
    append_json_escaped(begun, tag.name);
    begun += tag.is_string ? "\": \"" : "\": ";
    emit(Kind::arguments, begun, source);
    string_value_ = tag.is_string;
    enter(Stage::value);
  } else {
    emit(Kind::markup, "", source);
    if (stage_ != Stage::call) enter(Stage::block);
  }
}

void ChatStream::take_closing_tag(const Tag& tag, const std::string& source) {
  if (stage_ == Stage::value) {
    bool own = tag.word == "parameter";
    emit(Kind::arguments, string_value_ ? "\"" : "", own ? source : "");
    enter(Stage::call);
    if (own) return;
  }
  if (tag.word == "parameter" || (tag.word == "invoke" && !call_open_)) {
    emit(Kind::markup, "", source);
  } else if (tag.word == "invoke") {
    end_call(source);
    enter(Stage::block);
  } else {
    if (call_open_) end_call("");
    emit(Kind::markup, "", source);
    enter(Stage::afterwards);
  }
}

// The arguments of a broken call stay as they are: a bracket could make them look complete.
void ChatStream::end_call(std::string_view source) {
  if (stage_ != Stage::broken) emit(Kind::arguments, parameters_ > 0 ? "}" : "{}", source);
  emit(Kind::call_end, "", "");
  call_open_ = false;
}

void ChatStream::text(Symbol s) {
  std::string source = spell({&s, 1});
  if (stage_ == Stage::value || stage_ == Stage::broken) {
    std::string escaped;
    if (stage_ == Stage::value && string_value_) append_json_escaped(escaped, source);
    emit(Kind::arguments, escaped.empty() ? source : escaped, source);
    return;
  }
  bool prose = stage_ == Stage::reasoning || stage_ == Stage::content;
  bool space = s == '\n' || (!prose && (s == ' ' || s == '\t' || s == '\r'));
  if (space && (blank_ || stage_ != Stage::afterwards)) {
    held_ += static_cast<char>(s);
    return;
  }
  bool closes = prose && s == kCloseSymbol;
  if ((blank_ && stage_ != Stage::afterwards) || (closes && stage_ == Stage::reasoning)) {
    drop_held();
  } else {
    keep_held();
  }
  if (closes) {
    emit(Kind::markup, "", source);
    if (stage_ == Stage::reasoning) enter(Stage::content);
    return;
  }
  emit(stage_ == Stage::reasoning ? Kind::reasoning : Kind::content, source, source);
  blank_ = false;
}

void ChatStream::enter(Stage stage) {
  stage_ = stage;
  blank_ = true;
}

void ChatStream::drop_held() {
  emit(Kind::markup, "", held_);
  held_.clear();
}

void ChatStream::keep_held() {
  emit(stage_ == Stage::reasoning ? Kind::reasoning : Kind::content, held_, held_);
  held_.clear();
}

std::string ChatStream::spell(std::u16string_view symbols) {
  std::string s;
  for (Symbol c : symbols) {
    if (c == kDsmlSymbol) {
      s += kDsml;
    } else if (c == kCloseSymbol) {
      s += kThinkClose;
    } else {
      s += static_cast<char>(c);
    }
  }
  return s;
}

// ---- Events --------------------------------------------------------------------------------------------------------

void ChatStream::emit(Kind kind, std::string_view text, std::string_view source) {
  if (is_delta(kind) && text.empty()) kind = Kind::markup;
  if (kind == Kind::markup && source.empty()) return;
  if (is_delta(kind) && !events_.empty() && events_.back().kind == kind) {
    events_.back().text += text;
    events_.back().source += source;
  } else {
    events_.push_back({kind, std::string(text), std::string(source)});
  }
}

// Holds back the beginning of a character, which is the same bytes in text and source.
std::vector<ChatEvent> ChatStream::take_events(bool all) {
  std::vector<ChatEvent> taken = std::exchange(events_, {});
  if (all || taken.empty() || !is_delta(taken.back().kind)) return taken;
  ChatEvent& last = taken.back();
  if (size_t n = unfinished_character(last.text)) {
    std::string tail = last.text.substr(last.text.size() - n);
    events_.push_back({last.kind, tail, tail});
    last.text.resize(last.text.size() - n);
    last.source.resize(last.source.size() - n);
    if (last.source.empty()) taken.pop_back();
  }
  return taken;
}

ParsedTurn collect(const std::vector<ChatEvent>& events) {
  ParsedTurn turn;
  for (const ChatEvent& e : events) {
    if (e.kind == Kind::reasoning) turn.reasoning += e.text;
    if (e.kind == Kind::content) turn.content += e.text;
    if (e.kind == Kind::call_begin) turn.calls.push_back({"", e.text, ""});
    if (e.kind == Kind::arguments) turn.calls.back().arguments += e.text;
  }
  return turn;
}

}  // namespace plumb
