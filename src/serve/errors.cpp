#include "serve/errors.h"

#include "base/error.h"

namespace plumb::serve {
namespace {

using nlohmann::json;

const char* openai_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 429:
      return "rate_limit_error";
    default:
      return status < 500 ? "invalid_request_error" : "server_error";
  }
}

json openai_code(const ApiError& e) {
  if (e.status == 401) return "invalid_api_key";
  if (e.status == 404) return e.field == "model" ? "model_not_found" : "not_found";
  if (e.status == 429) return "rate_limit_exceeded";
  return nullptr;
}

const char* anthropic_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    case 504:
      return "timeout_error";
    default:
      return status < 500 ? "invalid_request_error" : "api_error";
  }
}

}  // namespace

ErrorForm error_form(std::string_view path) {
  return path.starts_with("/v1/messages") ? ErrorForm::anthropic : ErrorForm::openai;
}

std::string dump(const json& j) { return j.dump(-1, ' ', false, json::error_handler_t::replace); }

json error_body(ErrorForm form, const ApiError& e) {
  if (form == ErrorForm::anthropic) {
    return {{"type", "error"}, {"error", {{"type", anthropic_type(e.status)}, {"message", e.message}}}};
  }
  json error = {{"message", e.message}, {"type", openai_type(e.status)}, {"param", nullptr}, {"code", openai_code(e)}};
  if (!e.field.empty()) error["param"] = e.field;
  return {{"error", std::move(error)}};
}

HttpReply error_reply(ErrorForm form, const ApiError& e) {
  HttpReply r{e.status};
  r.body = dump(error_body(form, e));
  if (e.retry_after > 0) r.headers.emplace_back("Retry-After", std::to_string(e.retry_after));
  if (e.status == 401) r.headers.emplace_back("WWW-Authenticate", "Bearer");
  return r;
}

std::string error_event(ErrorForm form, const ApiError& e) {
  const char* name = form == ErrorForm::anthropic ? "event: error\n" : "";
  return name + ("data: " + dump(error_body(form, e))) + "\n\n";
}

ApiError error_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const ApiError& e) {
    return e;
  } catch (const QueueFull& e) {
    return {429, "", e.what(), 1};
  } catch (const Error& e) {
    return {400, e.where(), e.what()};
  } catch (const std::exception& e) {
    return {500, "", std::string("the server failed: ") + e.what()};
  }
}

}  // namespace plumb::serve
