// ApiError in the forms that clients read.
#pragma once
#include <exception>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "serve/exchange.h"
#include "serve/http.h"

namespace plumb::serve {

enum class ErrorForm {
  openai,    // {"error": {"message", "type", "param", "code"}}
  anthropic  // {"type": "error", "error": {"type", "message"}}
};
ErrorForm error_form(std::string_view path);  // of a route

nlohmann::json error_body(ErrorForm form, const ApiError& error);
HttpReply error_reply(ErrorForm form, const ApiError& error);
// The same inside a stream that has begun: one server-sent event.
std::string error_event(ErrorForm form, const ApiError& error);

// What an exception tells the client: an ApiError itself; an Error of the program is the request's fault (400: its
// place becomes the field); anything else is the server's (500).
ApiError error_of(const std::exception_ptr& thrown);

// Text of JSON for the wire; broken UTF-8 becomes U+FFFD.
std::string dump(const nlohmann::json& json);

}  // namespace plumb::serve
