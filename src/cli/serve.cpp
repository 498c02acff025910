// plumb serve: the HTTP server.
#include "serve/server.h"

#include <sys/resource.h>

#include <algorithm>
#include <CLI/CLI.hpp>
#include <cstdio>
#include <ctime>
#include <filesystem>

#include "base/error.h"
#include "base/log.h"
#include "cli/commands.h"
#include "cli/network.h"
#include "cli/session.h"
#include "model/adapter_files.h"
#include "ops/device.h"
#include "rollout/cache_size.h"

namespace plumb::cli {
namespace {

struct Arguments {
  ModelArguments model;
  std::vector<std::string> adapters;  // NAME=DIR
  std::string served_name;
  NetworkArguments network;
  serve::ServerOptions server;
  size_t memory = 0;
  int max_queue = 2048, max_positions = 0, default_tokens = 0;
  int max_choices = 128, max_logprobs = 20;
  bool strict_fields = false;
  double timeout = 600, keep_alive = 10;
};

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

// As many open files as the system allows: each connection is one.
void raise_file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

std::string folder_name(const std::string& folder) {
  const std::filesystem::path path = std::filesystem::absolute(folder).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).filename().string();
}

std::shared_ptr<AdapterRegistry> load_adapters(const Arguments& a, const std::string& base, const ModelConfig& config) {
  auto registry = std::make_shared<AdapterRegistry>();
  for (const std::string& pair : a.adapters) {
    const size_t equals = pair.find('=');
    if (equals == 0 || equals == std::string::npos || equals + 1 == pair.size())
      throw UsageError("--adapter", "'" + pair + "' is not NAME=DIR",
                       "for example --adapter labels=runs/labels/adapter");
    const std::string name = pair.substr(0, equals);
    if (name == base) throw UsageError("--adapter", "'" + name + "' is the base model's name", "choose another one");
    registry->publish(name, load_adapter(pair.substr(equals + 1), config));
  }
  return registry;
}

serve::ServedModel served_model(const Arguments& a, const ModelSession& s) {
  const ModelConfig& config = s.weights->config();
  const std::string name = a.served_name.empty() ? folder_name(s.folder) : a.served_name;
  serve::ServedModel m{
      name, config, s.text(), chat_tokenizer(s.text()), s.chat, stop_tokens(s), load_adapters(a, name, config)};
  m.created = std::time(nullptr);
  m.max_positions = config.max_position_embeddings;
  if (a.max_positions > 0) m.max_positions = std::min(m.max_positions, a.max_positions);
  m.default_tokens = a.default_tokens;
  m.max_choices = a.max_choices, m.max_logprobs = a.max_logprobs;
  m.strict_fields = a.strict_fields;
  return m;
}

// A GPU gets a layer when it is first asked for. Now, so that what the kernels cannot take is said before anybody waits
// for an answer, and what the weights leave is known.
void load_layers(WeightStore& weights) {
  if (weights.space() == Space::host) return;
  for (int layer = 0; layer < weights.config().num_hidden_layers; ++layer) weights.acquire(layer);
}

// Of the cache, if nobody says: most of what the loaded weights leave of a GPU.
int64_t default_memory(Space space) {
  constexpr int64_t kGigabyte = int64_t{1} << 30, kForStep = 8 * kGigabyte;  // what a step computes in
  if (space == Space::host) return kGigabyte;
  return std::max(kGigabyte, (ops::free_device_memory() - kForStep) / 4 * 3);
}

void serve_model(Arguments& a) {
  raise_file_limit();
  const ModelSession s = open_model(a.model);
  serve::ServedModel model = served_model(a, s);
  serve::ServerOptions& o = a.server;
  o.engine.numerics = s.numerics;
  o.engine.tokenizer = s.tokenizer;
  load_layers(*s.weights);
  const Space space = s.weights->space();
  set_step_sizes(o.engine, space);
  fit_cache(o.engine, s.weights->config(), a.memory > 0 ? static_cast<int64_t>(a.memory) : default_memory(space),
            model.max_positions, space);
  o.queue.max_open = o.engine.max_running + a.max_queue;
  o.queue.timeout = milliseconds(a.timeout);
  o.http = http_options(a.network);
  o.http.quiet = milliseconds(a.keep_alive);
  o.service.version = kVersion;
  o.service.keys = read_keys(a.network);

  const std::string name = model.name;
  serve::Server server(*s.weights, std::move(model), o);
  announce(a.network, server.port(), name);
  server.run();
  log_info("stopped");
}

}  // namespace

std::function<void()> setup_serve(CLI::App& app) {
  auto a = std::make_shared<Arguments>();
  app.footer(
      "Speaks plain HTTP: leave TLS to a proxy in front of it. SIGINT and SIGTERM stop it after the answers that are\n"
      "being written. Routes: docs/serve.md.");
  add_model_options(app, a->model);
  app.remove_option(app.get_option("--adapter"));
  app.add_option("--adapter", a->adapters, "NAME=DIR: a LoRA adapter and the model name that it is asked for by");
  app.add_option("--served-model-name", a->served_name, "name of the base model (default: that of its folder)");

  app.add_option("--runs", a->server.service.runs,
                 "folder of training runs, or one run: /training shows their curves and samples");

  a->network.http.port = 8000;
  add_network_options(app, a->network);
  const std::string network = "Network";
  app.add_option("--max-body", a->network.http.max_body, "bytes of a request's body, also with a suffix: 32MB")
      ->transform(CLI::AsSizeValue(false))
      ->group(network);
  app.add_option("--keep-alive", a->keep_alive, "seconds of silence after which a stream says that it lives")
      ->check(CLI::PositiveNumber)
      ->group(network);

  auto& engine = a->server.engine;
  const std::string limits = "Engine and limits";
  engine.max_running = engine.prefill_chunk = 0;
  app.add_option("--memory", a->memory,
                 "bytes of the cache, also with a suffix: 8GB; 0 = 1GB, on a GPU most of what the weights leave")
      ->transform(CLI::AsSizeValue(false))
      ->group(limits);
  app.add_option("--max-running", engine.max_running, "answers that are written side by side, 0 = 16, on a GPU 256")
      ->check(CLI::Range(0, 4096))
      ->group(limits);
  app.add_option("--prefill-chunk", engine.prefill_chunk,
                 "prompt tokens of one request in a step, 0 = 256, on a GPU 1024")
      ->check(CLI::NonNegativeNumber)
      ->group(limits);
  app.add_option("--max-queue", a->max_queue, "answers that wait; more are refused with 429")
      ->check(CLI::NonNegativeNumber)
      ->group(limits);
  app.add_option("--max-model-len", a->max_positions, "tokens of prompt and answer together, 0 = as the model allows")
      ->check(CLI::NonNegativeNumber)
      ->group(limits);
  app.add_option("--default-max-tokens", a->default_tokens,
                 "tokens of an answer when the request does not say, 0 = as long as it fits")
      ->check(CLI::NonNegativeNumber)
      ->group(limits);
  app.add_option("--max-choices", a->max_choices, "answers to one request (n)")
      ->check(CLI::PositiveNumber)
      ->group(limits);
  app.add_option("--max-logprobs", a->max_logprobs, "likely tokens that a request may ask for with each token")
      ->check(CLI::NonNegativeNumber)
      ->group(limits);
  app.add_option("--timeout", a->timeout, "seconds for an answer, from its request; 0 = no limit")
      ->check(CLI::NonNegativeNumber)
      ->group(limits);
  app.add_flag("--strict-fields", a->strict_fields, "refuse requests with unknown fields instead of ignoring them")
      ->group(limits);
  return [a] { serve_model(*a); };
}

}  // namespace plumb::cli
