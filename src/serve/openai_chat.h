// POST /v1/chat/completions (docs/api.md).
#pragma once
#include "serve/exchange.h"

namespace plumb::serve {

std::unique_ptr<Exchange> openai_chat(std::string_view body, const ServedModel& model);

}  // namespace plumb::serve
