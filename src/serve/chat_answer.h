// What the protocols that talk in messages (chat completions, responses, Anthropic's messages) have in common: the
// conversation as a prompt, and the answer as reasoning, content and tool calls.
#pragma once
#include <string>
#include <vector>

#include "serve/exchange.h"
#include "tokenizer/chat_stream.h"

namespace plumb::serve {

// Whether the model is to call tools. A call is forced by its beginning, which is put at the end of the prompt: the
// model can only go on from there. `none` is the caller's business: it leaves the tools out of the messages.
struct ToolChoice {
  enum class Rule { automatic, required, named };
  Rule rule = Rule::automatic;
  std::string name;      // named: of the function
  bool parallel = true;  // false: the answer ends behind its first call. A named call is always the only one.
};

struct ChatPrompt {
  std::vector<int> tokens;
  ThinkingMode mode = ThinkingMode::chat;  // thinking: the answer begins inside the reasoning
  std::string begun;                       // the beginning of the answer that stands in the prompt
  std::string stop;                        // ends the answer behind its first call; empty: nothing does
};

// The prompt of a conversation; its `stop`, if any, belongs into the request's stop strings. Error: ApiError (the chat
// format cannot express it).
ChatPrompt chat_prompt(const std::vector<Message>& messages, const ChatOptions& options, const ToolChoice& choice,
                       const ServedModel& model);

// Takes the events of one answer apart. Texts are UTF-8: bytes that are not become U+FFFD, as in Tokenizer::decode.
class ChatAnswer {
 public:
  // The model must outlive the answer. skip_special: tokens with the flag `special` have no text.
  ChatAnswer(const ChatPrompt& prompt, const ServedModel& model, bool skip_special);

  // What the prompt already holds of the answer: the beginning of a forced call. To be taken first.
  std::vector<ChatEvent> begin();
  // The event with the answer's last token gives ChatEvent::finish as the last one.
  std::vector<ChatEvent> token(const Event& event);

  int reasoning_tokens() const { return reasoning_tokens_; }

 private:
  const ServedModel& model_;
  ChatStream stream_;
  std::string begun_, stop_;
  bool skip_special_, reasoning_;
  int reasoning_tokens_ = 0;
};

}  // namespace plumb::serve
