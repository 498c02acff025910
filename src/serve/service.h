// What the server of a model answers to which path.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "serve/background.h"
#include "serve/engine_thread.h"
#include "serve/errors.h"
#include "serve/exchange.h"
#include "serve/http.h"
#include "serve/metrics.h"
#include "serve/router.h"
#include "serve/training.h"

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
  std::string runs;               // folder whose runs the training view shows; "" = none
};

class Service {
 public:
  // All of them outlive the service.
  Service(ServiceOptions options, const ServedModel& model, EngineThread& engine, Metrics& metrics,
          const std::vector<ProtocolRoute>& protocols);

  // Any thread.
  Answered handle(const HttpRequest& request, Wake wake) { return router_.handle(request, std::move(wake)); }
  HttpReply error(const std::string& path, int status, const std::string& message) const {
    return router_.error(path, status, message);
  }
  void replied(const std::string& path, int status);  // counts it

  std::atomic<const HttpServer*> server = nullptr;  // for its figures; may stay nullptr

 private:
  void add_protocols(const std::vector<ProtocolRoute>& protocols);
  void add_pages();   // what people and monitors read
  void add_models();  // models, adapters, tokens

  ServiceOptions options_;
  const ServedModel& model_;
  EngineThread& engine_;
  Metrics& metrics_;
  Router router_;
  Background background_;
  TrainingView training_;
};

}  // namespace plumb::serve
