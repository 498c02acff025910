#include "serve/server.h"

namespace plumb::serve {
namespace {

HttpOptions with_service(HttpOptions o, Service& service) {
  o.error = [&service](const std::string& path, int status, const std::string& message) {
    return service.error(path, status, message);
  };
  o.replied = [&service](const std::string& path, int status) { service.replied(path, status); };
  return o;
}

}  // namespace

Server::Server(WeightStore& weights, ServedModel model, const ServerOptions& options,
               const std::vector<ProtocolRoute>& protocols)
    : model_(std::move(model)),
      engine_(std::make_unique<Engine>(weights, options.engine, model_.adapters), options.queue, metrics_),
      service_(options.service, model_, engine_, metrics_, protocols),
      http_(with_service(options.http, service_),
            [this](HttpRequest request, Wake wake) { return service_.handle(request, std::move(wake)); }) {
  service_.server = &http_;
}

}  // namespace plumb::serve
