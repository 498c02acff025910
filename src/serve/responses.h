// POST /v1/responses, OpenAI's newer form (docs/responses.md). Responses are not stored.
#pragma once
#include "serve/exchange.h"

namespace plumb::serve {

// Errors: ApiError.
std::unique_ptr<Exchange> openai_responses(std::string_view body, const ServedModel& model);

}  // namespace plumb::serve
