// The training view alone, without a model: `plumb watch`.
#pragma once
#include <string>
#include <vector>

#include "serve/http.h"
#include "serve/router.h"
#include "serve/training.h"

namespace plumb::serve {

class TrainingServer {
 public:
  // Listens from now on. runs: see TrainingView. Errors: those of TrainingView and HttpServer.
  TrainingServer(const std::string& runs, std::vector<std::string> keys, const HttpOptions& options);

  int port() const { return http_.port(); }
  void run() { http_.run(); }    // until it is stopped, see HttpServer
  void stop() { http_.stop(); }  // any thread

 private:
  Router router_;
  TrainingView view_;
  HttpServer http_;
};

}  // namespace plumb::serve
