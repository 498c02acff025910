// The protocols of the program, one line each.
#include "serve/anthropic.h"
#include "serve/openai_chat.h"
#include "serve/openai_completions.h"
#include "serve/responses.h"
#include "serve/service.h"

namespace plumb::serve {

const std::vector<ProtocolRoute>& protocol_routes() {
  static const std::vector<ProtocolRoute> routes = {{"/v1/chat/completions", openai_chat},
                                                    {"/v1/completions", openai_completions},
                                                    {"/v1/responses", openai_responses},
                                                    {"/v1/messages", anthropic_messages}};
  return routes;
}

}  // namespace plumb::serve
