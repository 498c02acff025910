// The body of POST /v1/messages, read and checked (docs/messages.md).
#pragma once
#include "serve/chat_answer.h"
#include "serve/request_fields.h"

namespace plumb::serve {

struct MessagesRequest {
  AnswerFields fields;  // fields.request is complete but for its key
  ChatPrompt prompt;
  bool show_thinking = true;
  bool whole_context = false;  // max_tokens is more than fits: the answer may go on to the end of the context
};
// Error: ApiError.
MessagesRequest read_messages_request(std::string_view body, const ServedModel& model);

// The prompt of a body that may lack what only an answer needs.
ChatPrompt read_messages_prompt(const Fields& body, const ServedModel& model);

}  // namespace plumb::serve
