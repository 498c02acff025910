#include "serve/service.h"

#include "serve/exchange_answer.h"

namespace plumb::serve {

Service::Service(ServiceOptions options, const ServedModel& model, EngineThread& engine, Metrics& metrics,
                 const std::vector<ProtocolRoute>& protocols)
    : options_(std::move(options)),
      model_(model),
      engine_(engine),
      metrics_(metrics),
      router_(options_.keys),
      training_(options_.runs, true) {
  add_pages();
  add_models();
  training_.add_routes(router_);
  add_protocols(protocols);
}

void Service::add_protocols(const std::vector<ProtocolRoute>& protocols) {
  for (const ProtocolRoute& p : protocols)
    router_.add({"POST", p.path, [this, make = p.make](const HttpRequest& request, Wake wake) -> Answered {
                   return std::make_unique<ExchangeAnswer>(make(request.body, model_), error_form(request.path),
                                                           engine_, std::move(wake));
                 }});
}

void Service::replied(const std::string& path, int status) { metrics_.answered(router_.route_of(path), status); }

}  // namespace plumb::serve
