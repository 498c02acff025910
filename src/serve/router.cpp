#include "serve/router.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "serve/auth.h"
#include "serve/embedded.h"
#include "serve/errors.h"
#include "serve/request_fields.h"

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

void Router::add_file(const std::string& path, const std::string& name, const std::string& type, bool open) {
  if (const std::string_view text = embedded_file(name); !text.empty())
    add({"GET", path, [=](const HttpRequest&, Wake) { return HttpReply{200, type, std::string(text)}; }, open});
}

std::vector<const Route*> Router::routes_of(const std::string& path) const {
  std::vector<const Route*> found;
  for (const Route& r : routes_)
    if (r.path == path || (r.path.size() > 1 && r.path.ends_with('/') && path.starts_with(r.path) && path != r.path))
      found.push_back(&r);
  return found;
}

std::string Router::route_of(const std::string& path) const {
  const auto routes = routes_of(path);
  return routes.empty() ? "other" : routes[0]->path;
}

Answered Router::not_found(const std::string& path) const {
  std::string list;
  for (const Route& r : routes_) list += fmt::format("{}{} {}", list.empty() ? "" : ", ", r.method, r.path);
  return error_reply(error_form(path), {404, "", fmt::format("there is nothing at {}; there is {}", path, list)});
}

HttpReply Router::error(const std::string& path, int status, const std::string& message) const {
  return error_reply(error_form(path), {status, "", message});
}

// Order: is there such a path, with this method, may this client, does the body look right.
Answered Router::handle(const HttpRequest& request, Wake wake) const {
  const std::string& path = request.path;
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
  if (!keys_.empty() && !route->open && !is_key(keys_, key_of(request)))
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

// ---- Queries -------------------------------------------------------------------------------------------------------

std::string percent_decoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto hex = [&](size_t at) {
      const char c = at < text.size() ? text[at] : ' ';
      return c >= '0' && c <= '9'   ? c - '0'
             : c >= 'a' && c <= 'f' ? c - 'a' + 10
             : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                    : -1;
    };
    if (text[i] == '%' && hex(i + 1) >= 0 && hex(i + 2) >= 0) {
      out += static_cast<char>(hex(i + 1) * 16 + hex(i + 2));
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

Query::Query(std::string_view text) {
  const auto decoded = [](std::string_view part) {
    std::string plain(part);
    std::ranges::replace(plain, '+', ' ');  // as forms and URLSearchParams write a space
    return percent_decoded(plain);
  };
  while (!text.empty()) {
    const std::string_view pair = text.substr(0, text.find('&'));
    const size_t equals = pair.find('=');
    if (equals != std::string_view::npos)
      values_.emplace(decoded(pair.substr(0, equals)), decoded(pair.substr(equals + 1)));
    text.remove_prefix(std::min(text.size(), pair.size() + 1));
  }
}

const std::string* Query::find(const std::string& name) const {
  const auto it = values_.find(name);
  return it == values_.end() ? nullptr : &it->second;
}

const std::string& Query::need(const std::string& name) const {
  const std::string* value = find(name);
  if (!value || value->empty()) refuse(name, "is missing", fmt::format("add ?{}=... to the path", name));
  return *value;
}

int64_t Query::integer(const std::string& name, int64_t otherwise, int64_t least, int64_t most) const {
  const std::string* text = find(name);
  if (!text) return otherwise;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end != text->data() + text->size() || value < least || value > most)
    refuse(name, fmt::format("'{}' is no integer from {} to {}", *text, least, most), "send such a number");
  return value;
}

}  // namespace plumb::serve
