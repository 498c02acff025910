#include "cli/network.h"

#include <CLI/CLI.hpp>

#include "base/files.h"
#include "base/log.h"
#include "serve/auth.h"

namespace plumb::cli {

void add_network_options(CLI::App& app, NetworkArguments& a) {
  const std::string network = "Network";
  app.add_option("--host", a.http.host, "IP address to listen on; 0.0.0.0 or :: for all")->group(network);
  app.add_option("--port", a.http.port, "0 = the system picks one")->check(CLI::Range(0, 65535))->group(network);
  app.add_option("--port-file", a.port_file, "written with the port once the server listens")->group(network);
  app.add_option("--api-keys", a.keys_file, "file of keys, one a line; without it nobody is asked")->group(network);
  app.add_option("--max-connections", a.http.max_connections, "more are answered with 503")
      ->check(CLI::PositiveNumber)
      ->group(network);
  app.add_option("--grace", a.grace, "seconds for answers that are being written when the server is stopped")
      ->check(CLI::NonNegativeNumber)
      ->group(network);
}

serve::HttpOptions http_options(const NetworkArguments& a) {
  serve::HttpOptions http = a.http;
  http.grace = std::chrono::milliseconds(static_cast<int64_t>(a.grace * 1000));
  http.signals = true;
  return http;
}

std::vector<std::string> read_keys(const NetworkArguments& a) {
  return a.keys_file.empty() ? std::vector<std::string>() : serve::read_keys(a.keys_file);
}

void announce(const NetworkArguments& a, int port, const std::string& what) {
  const bool v6 = a.http.host.find(':') != std::string::npos;
  const std::string address = fmt::format("http://{}:{}", v6 ? "[" + a.http.host + "]" : a.http.host, port);
  if (a.keys_file.empty() && a.http.host != "127.0.0.1" && a.http.host != "::1")
    log_warning("{} is open to everybody who reaches it; --api-keys FILE asks for a key", address);
  if (!a.port_file.empty()) write_text(a.port_file, std::to_string(port) + "\n");
  log_info("serving {} at {}", what, address);
}

}  // namespace plumb::cli
