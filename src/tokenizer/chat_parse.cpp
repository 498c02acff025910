#include "tokenizer/chat_parse.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>

#include "base/error.h"
#include "tokenizer/chat_format.h"

namespace plumb {
namespace {

using namespace chat_format;

constexpr std::string_view kBlock = "\n\n<｜DSML｜tool_calls";
constexpr std::string_view kBlockEnd = "</｜DSML｜tool_calls>";
constexpr std::string_view kInvoke = "<｜DSML｜invoke";
constexpr std::string_view kInvokeEnd = "</｜DSML｜invoke";
constexpr std::string_view kParameter = "<｜DSML｜parameter";

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  ParsedTurn turn(ThinkingMode mode) {
    ParsedTurn turn;
    if (mode == ThinkingMode::thinking) {
      turn.reasoning = until({kThinkClose, kBlock});
      if (stop_ != kThinkClose) error("the reasoning has no " + std::string(kThinkClose));
    }
    turn.content = until({kEnd, kBlock});
    if (stop_ == kBlock) {
      turn.calls = calls();
      if (!until({kEnd}).empty()) error("text after the block of calls");
    } else if (stop_.empty()) {
      error("the end-of-sentence token is missing");
    }
    if (at_ < text_.size()) error("text after the end-of-sentence token");
    for (std::string_view token : {kBegin, kEnd, kThinkOpen, kThinkClose, kDsml})
      for (const std::string* s : {&turn.reasoning, &turn.content})
        if (s->find(token) != std::string::npos) error(fmt::format("{} inside reasoning or content", token));
    return turn;
  }

 private:
  [[noreturn]] void error(const std::string& what) const {
    fail(fmt::format("assistant turn, byte {}", at_), what, "the text does not follow the chat format (docs/chat.md)");
  }

  // The text before the first of the marks, which is read too and kept in stop_; all the rest and an empty stop_
  // without one.
  std::string_view until(std::initializer_list<std::string_view> marks) {
    size_t found = text_.size();
    stop_ = "";
    for (std::string_view mark : marks)
      if (size_t i = text_.find(mark, at_); i < found) found = i, stop_ = mark;
    std::string_view before = text_.substr(at_, found - at_);
    at_ = found + stop_.size();
    return before;
  }

  std::vector<ToolCall> calls() {
    std::vector<ToolCall> calls;
    while (true) {
      if (until({kInvoke, kBlockEnd}) != ">\n") error("'>' and a line end expected between the tags of a block");
      if (stop_.empty()) error("the block of calls has no end");
      if (stop_ == kBlockEnd) break;
      calls.push_back(call());
    }
    if (calls.empty()) error("the block of calls is empty");
    return calls;
  }

  ToolCall call() {
    ToolCall call;
    std::string_view head = until({kParameter, kInvokeEnd});
    head.remove_prefix(std::min(head.size(), head.find_first_not_of(" \t\r\n\f\v")));
    bool named = head.starts_with("name=\"");
    head.remove_prefix(named ? 6 : 0);
    // A call without parameters has an empty line there, or not (released implementations differ).
    if (stop_ == kInvokeEnd && head.ends_with("\">\n\n")) head.remove_suffix(1);
    if (!named || !head.ends_with("\">\n")) error("<｜DSML｜invoke must go on with name=\"...\"> and a line end");
    call.name = head.substr(0, head.size() - 3);
    std::vector<std::string> names;
    call.arguments = "{";
    while (stop_ == kParameter) {
      if (!names.empty()) call.arguments += ", ";
      parameter(call.arguments, names);
      if (until({kParameter, kInvokeEnd}) != ">\n") error("'>' and a line end expected after a parameter");
    }
    if (stop_.empty()) error("the call has no end");
    call.arguments += "}";
    return call;
  }

  // Appends "name": value; ends after the closing tag without its '>'.
  void parameter(std::string& arguments, std::vector<std::string>& names) {
    std::string_view body = until({"/｜DSML｜parameter"});
    if (stop_.empty() || !body.ends_with("<")) error("the parameter has no end");
    body.remove_suffix(1);
    constexpr std::string_view kName = " name=\"", kTrue = "\" string=\"true\">", kFalse = "\" string=\"false\">";
    size_t is_string = body.find(kTrue, kName.size()), is_json = body.find(kFalse, kName.size());
    size_t end = std::min(is_string, is_json);
    if (!body.starts_with(kName) || end == std::string_view::npos)
      error("<｜DSML｜parameter must go on with name=\"...\" string=\"true|false\">");
    std::string name(body.substr(kName.size(), end - kName.size()));
    if (std::find(names.begin(), names.end(), name) != names.end()) error("parameter \"" + name + "\" is given twice");
    std::string_view value = body.substr(end + (is_string < is_json ? kTrue : kFalse).size());
    arguments += python_dumps(json_string(name)) + ": ";
    arguments += is_string < is_json ? python_dumps(json_string(std::string(value))) : std::string(value);
    names.push_back(std::move(name));
  }

  std::string_view text_, stop_;
  size_t at_ = 0;
};

}  // namespace

ParsedTurn parse_turn(std::string_view text, ThinkingMode mode) { return Parser(text).turn(mode); }

}  // namespace plumb
