// plumb watch: curves and samples of training runs in the browser, without a model.
#include <CLI/CLI.hpp>

#include "base/log.h"
#include "cli/commands.h"
#include "cli/network.h"
#include "serve/training_server.h"

namespace plumb::cli {

std::function<void()> setup_watch(CLI::App& app) {
  struct Arguments {
    std::string folder;
    NetworkArguments network;
  };
  auto a = std::make_shared<Arguments>();
  a->network.http.port = 8001;
  app.add_option("folder", a->folder, "folder of a run (output.dir of its run file), or one that holds runs")
      ->required();
  add_network_options(app, a->network);
  app.footer("Runs that go on and finished ones, docs/watch.md. SIGINT and SIGTERM stop it.");
  return [a] {
    serve::TrainingServer server(a->folder, read_keys(a->network), http_options(a->network));
    announce(a->network, server.port(), "the runs of " + a->folder);
    server.run();
    log_info("stopped");
  };
}

}  // namespace plumb::cli
