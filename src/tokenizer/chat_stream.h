// Takes an answer apart while the model writes it: reasoning, content, tool calls. Never fails and never loses text:
// whatever the model writes appears in exactly one event, in order. docs/chat.md says what happens to malformed calls.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/chat_encode.h"
#include "tokenizer/chat_parse.h"

namespace plumb {

struct ChatEvent {
  enum class Kind {
    reasoning,   // text: more reasoning
    content,     // text: more of the answer
    call_begin,  // text: the function's name
    arguments,   // text: more of the JSON text of the arguments of the call begun last
    call_end,
    markup,  // tags, and line ends that belong to them: nothing for a client
    finish   // text: "stop", "length" or "tool_calls"; the last event
  };
  Kind kind;
  std::string text;
  std::string source;  // the stretch of the answer that this event stands for; all sources joined are the answer
};

// The events do not depend on how the answer was cut into feeds, apart from the number of pieces that texts of one kind
// come in. `text` of events is cut between characters only (as far as the answer is UTF-8).
class ChatStream {
 public:
  // thinking: the answer begins inside the reasoning, after the think-open tag of the prompt.
  explicit ChatStream(ThinkingMode mode);

  // Text in which the spelling of a tag counts as the tag.
  std::vector<ChatEvent> feed_text(std::string_view text);
  // Tokens: only the control tokens count, their characters spelled by other tokens stay text. The end-of-sentence
  // token is not to be fed. `tokenizer` must outlive the call only.
  std::vector<ChatEvent> feed_token(int32_t id, const ChatTokenizer& tokenizer);
  // hit_limit: the engine stopped because of a limit on length. Nothing may be fed afterwards.
  std::vector<ChatEvent> finish(bool hit_limit);

 private:
  // A byte of the answer, or one of the two control tokens.
  using Symbol = char16_t;
  static constexpr Symbol kDsmlSymbol = 256, kCloseSymbol = 257;

  enum class Stage {
    reasoning,
    content,
    block,      // among the calls
    call,       // inside a call, among its parameters
    value,      // inside a parameter
    broken,     // inside a call whose parameters cannot be told apart: the rest goes into its arguments as it is
    afterwards  // behind the block: all is content
  };
  struct Tag;

  void step(Symbol s);
  Tag read_tag() const;                    // tag_ as a tag
  bool could_stand(const Tag& tag) const;  // in this stage
  void give_up_tag();
  void take_tag(const Tag& tag);
  void take_closing_tag(const Tag& tag, const std::string& source);
  void end_call(std::string_view source);
  void text(Symbol s);
  void enter(Stage stage);
  void keep_held();
  void drop_held();
  static std::string spell(std::u16string_view symbols);
  void emit(ChatEvent::Kind kind, std::string_view text, std::string_view source);
  std::vector<ChatEvent> take_events(bool all);

  Stage stage_;
  std::string spelled_;  // bytes fed as text that may be the beginning of a control token
  std::u16string tag_;   // what may be a tag, from its '<' on
  std::string held_;     // white space that is dropped if a tag follows
  bool blank_ = true;    // nothing but white space since the stage began
  bool call_open_ = false, string_value_ = false;
  int calls_ = 0, parameters_ = 0;
  std::vector<ChatEvent> events_;
};

// The whole answer from its events: what a client would have put together. An unfinished call is among the calls.
ParsedTurn collect(const std::vector<ChatEvent>& events);

}  // namespace plumb
