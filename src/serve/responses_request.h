// The body of POST /v1/responses, read and checked (docs/responses.md).
#pragma once
#include "serve/chat_answer.h"
#include "serve/request_fields.h"

namespace plumb::serve {

struct ResponsesRequest {
  AnswerFields fields;  // fields.request is complete but for its key
  ChatPrompt prompt;
  bool logprobs = false;  // of the tokens of the text
  nlohmann::json echo;    // the members of a response that repeat the request
};
// Error: ApiError.
ResponsesRequest read_responses_request(std::string_view body, const ServedModel& model);

}  // namespace plumb::serve
