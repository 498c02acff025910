// What serve and watch have in common: where to listen, who may ask.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "serve/http.h"

namespace CLI {
class App;
}

namespace plumb::cli {

struct NetworkArguments {
  serve::HttpOptions http;  // host, port, max_connections, max_body
  std::string keys_file, port_file;
  double grace = 10;  // seconds
};
void add_network_options(CLI::App& app, NetworkArguments& a);

// What the server is made with: `http` completed, the signals included.
serve::HttpOptions http_options(const NetworkArguments& a);
std::vector<std::string> read_keys(const NetworkArguments& a);  // none without --api-keys

// Tells people and --port-file where `what` is to be found; warns if everybody may ask.
void announce(const NetworkArguments& a, int port, const std::string& what);

}  // namespace plumb::cli
