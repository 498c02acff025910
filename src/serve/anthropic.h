// POST /v1/messages and /v1/messages/count_tokens, Anthropic's protocol (docs/messages.md).
#pragma once
#include "serve/exchange.h"

namespace plumb::serve {

std::unique_ptr<Exchange> anthropic_messages(std::string_view body, const ServedModel& model);

// {"input_tokens": n} for the body of count_tokens. Error: ApiError.
nlohmann::json anthropic_count_tokens(std::string_view body, const ServedModel& model);

}  // namespace plumb::serve
