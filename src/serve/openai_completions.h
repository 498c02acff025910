// POST /v1/completions (docs/api.md).
#pragma once
#include "serve/exchange.h"

namespace plumb::serve {

std::unique_ptr<Exchange> openai_completions(std::string_view body, const ServedModel& model);

}  // namespace plumb::serve
