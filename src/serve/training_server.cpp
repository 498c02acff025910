#include "serve/training_server.h"

namespace plumb::serve {
namespace {

HttpOptions with_router(HttpOptions o, const Router& router) {
  o.error = [&router](const std::string& path, int status, const std::string& message) {
    return router.error(path, status, message);
  };
  return o;
}

}  // namespace

TrainingServer::TrainingServer(const std::string& runs, std::vector<std::string> keys, const HttpOptions& options)
    : router_(std::move(keys)),
      view_(runs, false),
      http_(with_router(options, router_),
            [this](const HttpRequest& request, Wake wake) { return router_.handle(request, std::move(wake)); }) {
  router_.add_file("/", "training.html", "text/html; charset=utf-8", true);
  router_.add({"GET", "/health",
               [](const HttpRequest&, Wake) {
                 return HttpReply{200, "application/json", R"({"status":"ok"})"};
               },
               true});
  view_.add_routes(router_);
}

}  // namespace plumb::serve
