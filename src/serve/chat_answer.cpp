#include "serve/chat_answer.h"

#include <utility>

#include "base/error.h"
#include "serve/request_fields.h"
#include "tokenizer/chat_format.h"
#include "tokenizer/unicode.h"

namespace plumb::serve {
namespace {

using namespace chat_format;

// The end of a call as a stop string. (An argument that spells it in ordinary text ends the call, too.)
constexpr std::string_view kEndOfCall = kInvokeClose.substr(1);

// Text of the format: the DSML words in it are control tokens.
void append_format(std::vector<ChatPiece>& pieces, std::string_view text) {
  for (size_t at; !text.empty(); text.remove_prefix(at)) {
    const bool mark = text.starts_with(kDsml);
    at = mark ? kDsml.size() : std::min(text.find(kDsml), text.size());
    pieces.push_back({std::string(text.substr(0, at)), mark, false});
  }
}

// The think tag of the last header says it, unless reasoning has been written behind it or a task token follows.
ThinkingMode mode_at_end(const std::vector<ChatPiece>& pieces) {
  for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece)
    if (piece->control) return piece->text == kThinkOpen ? ThinkingMode::thinking : ThinkingMode::chat;
  return ThinkingMode::chat;
}

void make_utf8(std::vector<ChatEvent>& events) {
  for (ChatEvent& e : events) {
    if (valid_utf8_length(e.text) == e.text.size()) continue;
    std::string text;
    append_utf8_lossy(e.text, true, text);
    e.text = std::move(text);
  }
}

}  // namespace

ChatPrompt chat_prompt(const std::vector<Message>& messages, const ChatOptions& options, const ToolChoice& choice,
                       const ServedModel& model) {
  try {
    ChatPrompt prompt;
    std::vector<ChatPiece> pieces = render_prompt(messages, options);
    prompt.mode = mode_at_end(pieces);
    if (choice.rule != ToolChoice::Rule::automatic) prompt.begun = kCallsOpen;
    if (choice.rule == ToolChoice::Rule::named)
      prompt.begun += std::string(kInvokeBegin) + choice.name + std::string(kInvokeNamed);
    if (choice.rule == ToolChoice::Rule::named || !choice.parallel) prompt.stop = kEndOfCall;
    append_format(pieces, prompt.begun);
    prompt.tokens = encode_pieces(pieces, model.chat_tokenizer).ids;
    return prompt;
  } catch (const Error& e) {
    throw api_error(e);
  }
}

ChatAnswer::ChatAnswer(const ChatPrompt& prompt, const ServedModel& model, bool skip_special)
    : model_(model),
      stream_(prompt.mode),
      begun_(prompt.begun),
      stop_(prompt.stop),
      skip_special_(skip_special),
      reasoning_(prompt.mode == ThinkingMode::thinking && begun_.empty()) {}

std::vector<ChatEvent> ChatAnswer::begin() { return stream_.feed_text(std::exchange(begun_, "")); }

std::vector<ChatEvent> ChatAnswer::token(const Event& event) {
  if (reasoning_) ++reasoning_tokens_;
  const int id = event.token.id;
  const bool silent = event.text.empty() || (skip_special_ && model_.tokenizer.is_special(id));
  std::vector<ChatEvent> events;
  const auto take = [&](std::vector<ChatEvent> more) {
    events.insert(events.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  };
  // A token that a stop string has cut is text.
  if (!silent)
    take(event.text == model_.tokenizer.id_to_bytes(id) ? stream_.feed_token(id, model_.chat_tokenizer)
                                                        : stream_.feed_text(event.text));
  // The model did write the end of its call.
  if (!event.stop_string.empty() && event.stop_string == stop_) take(stream_.feed_text(event.stop_string));
  if (event.finish != Finish::none) take(stream_.finish(event.finish == Finish::length));
  for (const ChatEvent& e : events) {
    const bool closes = e.kind == ChatEvent::Kind::markup && e.source.find(kThinkClose) != std::string::npos;
    if (closes || e.kind == ChatEvent::Kind::content || e.kind == ChatEvent::Kind::call_begin) reasoning_ = false;
  }
  make_utf8(events);
  return events;
}

}  // namespace plumb::serve
