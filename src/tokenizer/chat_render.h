// Writes a conversation the way DeepSeek-V4 was trained to read it (docs/chat.md has the rules).
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/chat_types.h"

namespace plumb {

// A stretch of the conversation's text. Text that a user, a tool or a model wrote is never control, even if it is
// spelled like a control token.
struct ChatPiece {
  std::string text;
  bool control;  // one token of the added vocabulary, spelled `text`; otherwise ordinary text
  bool target;   // the model is to produce it: an assistant turn after its header
};

// The conversation up to its last message. After a user turn the header of the assistant's turn follows; a conversation
// that ends with an assistant turn ends with its end-of-sentence token (the form of a training sample).
//
// Ordinary text is cut only by control tokens and where `target` changes.
//
// Error: effort unknown to the profile; arguments of a call that are no JSON object (see ChatOptions).
std::vector<ChatPiece> render_chat(const std::vector<Message>& messages, const ChatOptions& options);

// The same, always ending where the model is to speak: a header is added after a finished assistant turn, a final
// system message or an empty conversation. start_call also opens a block of tool calls, so that the model has to call a
// tool; give chat_format::kCallsOpen to the parser of the answer first.
std::vector<ChatPiece> render_prompt(const std::vector<Message>& messages, const ChatOptions& options,
                                     bool start_call = false);

std::string chat_text(const std::vector<ChatPiece>& pieces);

}  // namespace plumb
