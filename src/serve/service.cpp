#include "serve/service.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "serve/auth.h"
#include "serve/exchange_answer.h"

namespace plumb::serve {
namespace {

// "application/json", whatever follows behind a semicolon.
bool is_json(std::string_view type) {
  type = type.substr(0, type.find(';'));
  while (type.ends_with(' ')) type.remove_suffix(1);
  std::string lower(type);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  return lower == "application/json";
}

}  // namespace

Service::Service(ServiceOptions options, const ServedModel& model, EngineThread& engine, Metrics& metrics,
                 const std::vector<ProtocolRoute>& protocols)
    : options_(std::move(options)), model_(model), engine_(engine), metrics_(metrics) {
  add_pages();
  add_models();
  add_protocols(protocols);
}

void Service::add_protocols(const std::vector<ProtocolRoute>& protocols) {
  for (const ProtocolRoute& p : protocols)
    routes_.push_back({"POST", p.path, [this, make = p.make](const HttpRequest& request, Wake wake) -> Answered {
                         return std::make_unique<ExchangeAnswer>(make(request.body, model_), error_form(request.path),
                                                                 engine_, std::move(wake));
                       }});
}

std::vector<const Service::Route*> Service::routes_of(const std::string& path) const {
  std::vector<const Route*> found;
  for (const Route& r : routes_)
    if (r.path == path || (r.path.size() > 1 && r.path.ends_with('/') && path.starts_with(r.path) && path != r.path))
      found.push_back(&r);
  return found;
}

Answered Service::not_found(const std::string& path) const {
  std::string list;
  for (const Route& r : routes_) list += fmt::format("{}{} {}", list.empty() ? "" : ", ", r.method, r.path);
  return error_reply(error_form(path), {404, "", fmt::format("there is nothing at {}; there is {}", path, list)});
}

HttpReply Service::error(const std::string& path, int status, const std::string& message) const {
  return error_reply(error_form(path), {status, "", message});
}

void Service::replied(const std::string& path, int status) {
  const auto routes = routes_of(path);
  metrics_.answered(routes.empty() ? "other" : routes[0]->path, status);
}

// Order: is there such a path, with this method, may this client, does the body look right. What a route throws is
// told in the client's form.
Answered Service::handle(HttpRequest request, Wake wake) {
  const std::string path = request.path;
  const ErrorForm form = error_form(path);
  const auto routes = routes_of(path);
  if (routes.empty()) return not_found(path);
  std::string allowed = "OPTIONS";
  const Route* route = nullptr;
  for (const Route* r : routes) {
    allowed += ", " + r->method + (r->method == "GET" ? ", HEAD" : "");
    if (r->method == request.method || (r->method == "GET" && request.method == "HEAD")) route = r;
  }
  if (request.method == "OPTIONS") return HttpReply{204, "", "", {{"Allow", allowed}}};
  if (!route) {
    HttpReply r = error_reply(
        form, {405, "", fmt::format("{} does not answer {}; it answers {}", path, request.method, allowed)});
    r.headers.emplace_back("Allow", allowed);
    return r;
  }
  if (!options_.keys.empty() && !route->open && !is_key(options_.keys, key_of(request)))
    return error_reply(form, {401, "",
                              key_of(request).empty() ? "no key (send the header Authorization: Bearer KEY)"
                                                      : "the key is not one of this server's"});
  // A page of another site may make a browser post plain text to a server on loopback, but not JSON.
  if (request.method == "POST" && !is_json(request.header("Content-Type")))
    return error_reply(
        form,
        {415, "", fmt::format("Content-Type is '{}' (send JSON as application/json)", request.header("Content-Type"))});
  try {
    return route->handle(request, std::move(wake));
  } catch (...) {
    return error_reply(form, error_of(std::current_exception()));
  }
}

}  // namespace plumb::serve
