// The table of routes, and what is checked before any of them: path, method, key, type of the body. A server of models
// (service.h) and one of training runs alone (training_server.h) fill it with different routes.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "serve/http.h"

namespace plumb::serve {

using Answered = std::variant<HttpReply, std::unique_ptr<Answer>>;

struct Route {
  std::string method, path;  // a path that ends with / stands for all that begin with it
  // What it throws is told in the client's form.
  std::function<Answered(const HttpRequest& request, Wake wake)> handle;
  bool open = false;  // needs no key
};

class Router {
 public:
  explicit Router(std::vector<std::string> keys) : keys_(std::move(keys)) {}  // no keys: none is asked for

  void add(Route route) { routes_.push_back(std::move(route)); }  // before the first request
  // GET of an embedded file (serve/embedded.h).
  void add_file(const std::string& path, const std::string& name, const std::string& type, bool open);

  // Any thread.
  Answered handle(const HttpRequest& request, Wake wake) const;
  HttpReply error(const std::string& path, int status, const std::string& message) const;
  std::string route_of(const std::string& path) const;  // path of the route that answers it, or "other"

 private:
  std::vector<const Route*> routes_of(const std::string& path) const;
  Answered not_found(const std::string& path) const;

  std::vector<std::string> keys_;
  std::vector<Route> routes_;
};

// What stands behind the question mark of a request: "run=a%20b&from=0". Of a name that occurs twice the first one
// counts; names that nobody asks for are ignored.
class Query {
 public:
  explicit Query(std::string_view text);
  // Errors (ApiError): missing, empty.
  const std::string& need(const std::string& name) const;
  // nullptr: not given.
  const std::string* find(const std::string& name) const;
  // Errors (ApiError): no integer, outside of the range.
  int64_t integer(const std::string& name, int64_t otherwise, int64_t least, int64_t most) const;

 private:
  std::map<std::string, std::string> values_;
};

std::string percent_decoded(std::string_view text);  // %41 -> A; what is no such code stays as it is

}  // namespace plumb::serve
