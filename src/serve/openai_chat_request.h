// The body of POST /v1/chat/completions, read and checked. docs/api.md lists the fields.
#pragma once
#include "serve/chat_answer.h"
#include "serve/request_fields.h"

namespace plumb::serve {

struct ChatRequest {
  AnswerFields fields;  // fields.request is complete but for its key
  ChatPrompt prompt;
  bool logprobs = false;
};
// Error: ApiError.
ChatRequest read_chat_request(std::string_view body, const ServedModel& model);

// Thinking mode and effort as the clients of the various servers ask for them: `reasoning_effort` (OpenAI), `thinking`
// {type} (DeepSeek), `chat_template_kwargs` (vLLM); the later of these counts.
ChatOptions read_chat_options(const Fields& body, const ServedModel& model);

}  // namespace plumb::serve
