// What the server answers to which path: the table of routes, and what is checked before any of them.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "serve/background.h"
#include "serve/engine_thread.h"
#include "serve/errors.h"
#include "serve/exchange.h"
#include "serve/http.h"
#include "serve/metrics.h"

namespace plumb::serve {

// A protocol: POST to this path makes an Exchange.
struct ProtocolRoute {
  std::string path;
  MakeExchange make;
};
// Those of the program (protocols.cpp).
const std::vector<ProtocolRoute>& protocol_routes();

struct ServiceOptions {
  std::string version;            // of the program
  std::vector<std::string> keys;  // empty: none is asked for
};

using Answered = std::variant<HttpReply, std::unique_ptr<Answer>>;

class Service {
 public:
  // All of them outlive the service.
  Service(ServiceOptions options, const ServedModel& model, EngineThread& engine, Metrics& metrics,
          const std::vector<ProtocolRoute>& protocols);

  // Any thread.
  Answered handle(HttpRequest request, Wake wake);
  HttpReply error(const std::string& path, int status, const std::string& message) const;
  void replied(const std::string& path, int status);  // counts it

  std::atomic<const HttpServer*> server = nullptr;  // for its figures; may stay nullptr

 private:
  using Handle = std::function<Answered(const HttpRequest& request, Wake wake)>;
  struct Route {
    std::string method, path;  // a path that ends with / stands for all that begin with it
    Handle handle;
    bool open = false;  // needs no key
  };

  void add_protocols(const std::vector<ProtocolRoute>& protocols);
  void add_pages();   // what people and monitors read
  void add_models();  // models, adapters, tokens
  std::vector<const Route*> routes_of(const std::string& path) const;
  Answered not_found(const std::string& path) const;

  ServiceOptions options_;
  const ServedModel& model_;
  EngineThread& engine_;
  Metrics& metrics_;
  std::vector<Route> routes_;
  Background background_;
};

}  // namespace plumb::serve
