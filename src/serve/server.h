// The whole server: a model, its engine, the routes and the network, put together.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "serve/engine_thread.h"
#include "serve/http.h"
#include "serve/service.h"

namespace plumb::serve {

struct ServerOptions {
  HttpOptions http;
  EngineOptions engine;
  EngineThreadOptions queue;
  ServiceOptions service;
};

class Server {
 public:
  // Listens from now on. The weights outlive the server. Errors: those of Engine and HttpServer.
  Server(WeightStore& weights, ServedModel model, const ServerOptions& options,
         const std::vector<ProtocolRoute>& protocols = protocol_routes());

  int port() const { return http_.port(); }
  void run() { http_.run(); }    // until it is stopped, see HttpServer
  void stop() { http_.stop(); }  // any thread
  EngineStats stats() const { return engine_.stats(); }

 private:
  // In this order: the engine outlives the answers that cancel what they hold when they are destroyed.
  const ServedModel model_;
  Metrics metrics_;
  EngineThread engine_;
  Service service_;
  HttpServer http_;
};

}  // namespace plumb::serve
