#include "serve/metrics.h"

#include <fmt/format.h>

#include <algorithm>

namespace plumb::serve {
namespace {

std::string escaped(std::string_view label) {
  std::string out;
  for (char c : label) {
    if (c == '\\' || c == '"') out += '\\';
    c == '\n' ? out += "\\n" : out += c;
  }
  return out;
}

void describe(std::string& out, std::string_view name, std::string_view type, std::string_view help) {
  out += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
}

// One metric with one value.
void single(std::string& out, std::string_view name, std::string_view type, std::string_view help,
            std::string_view labels, double value) {
  describe(out, name, type, help);
  out += fmt::format("{}{{{}}} {}\n", name, labels, value);
}

double used(int free, int held) { return free + held > 0 ? static_cast<double>(held) / (free + held) : 0; }

}  // namespace

Histogram::Histogram(std::vector<double> bounds) : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}

void Histogram::observe(double value) {
  ++counts_[std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin()];
  sum_ += value;
}

void Histogram::write(std::string& out, std::string_view name, std::string_view labels) const {
  int64_t below = 0;
  for (size_t i = 0; i < counts_.size(); ++i) {
    below += counts_[i];
    const std::string bound = i < bounds_.size() ? fmt::format("{}", bounds_[i]) : "+Inf";
    out += fmt::format("{}_bucket{{{},le=\"{}\"}} {}\n", name, labels, bound, below);
  }
  out += fmt::format("{}_sum{{{}}} {}\n{}_count{{{}}} {}\n", name, labels, sum_, name, labels, below);
}

Metrics::Metrics()
    : first_token_({0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}),
      between_tokens_({0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5}),
      latency_({0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480}) {}

void Metrics::prompt_read(int64_t tokens) {
  const std::lock_guard lock(mutex_);
  prompt_tokens_ += tokens;
}

void Metrics::first_token(double seconds) {
  const std::lock_guard lock(mutex_);
  first_token_.observe(seconds);
  ++generation_tokens_;
}

void Metrics::next_token(double seconds) {
  const std::lock_guard lock(mutex_);
  between_tokens_.observe(seconds);
  ++generation_tokens_;
}

void Metrics::finished(const std::string& reason, double seconds) {
  const std::lock_guard lock(mutex_);
  ++finished_[reason];
  latency_.observe(seconds);
}

void Metrics::answered(const std::string& route, int status) {
  const std::lock_guard lock(mutex_);
  ++answered_[{route, status}];
}

std::string Metrics::text(const EngineStats& e, int connections, const std::string& model) const {
  const std::string label = "model_name=\"" + escaped(model) + "\"";
  const std::lock_guard lock(mutex_);
  std::string out;
  single(out, "vllm:num_requests_running", "gauge", "Answers in the cache.", label, e.running);
  single(out, "vllm:num_requests_waiting", "gauge", "Answers in the queue.", label, e.waiting);
  single(out, "vllm:kv_cache_usage_perc", "gauge", "Share of the entry pages that is held, 0 to 1.", label,
         used(e.free_entry_pages, e.held_entry_pages));
  single(out, "vllm:num_preemptions_total", "counter", "Answers put back into the queue for lack of pages.", label,
         static_cast<double>(e.preemptions));
  single(out, "vllm:prompt_tokens_total", "counter", "Prompt tokens of answers that have begun.", label,
         static_cast<double>(prompt_tokens_));
  single(out, "vllm:generation_tokens_total", "counter", "Tokens made.", label,
         static_cast<double>(generation_tokens_));
  single(out, "vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.", label,
         static_cast<double>(prompt_tokens_));
  single(out, "vllm:prefix_cache_hits_total", "counter", "Tokens whose rows came from the prefix cache.", label,
         static_cast<double>(e.prefix_hit_tokens));

  describe(out, "vllm:request_success_total", "counter", "Answers that ended, by reason.");
  for (const char* reason : {"stop", "length", "abort", "error"}) {
    const auto it = finished_.find(reason);
    out += fmt::format("vllm:request_success_total{{{},finished_reason=\"{}\"}} {}\n", label, reason,
                       it == finished_.end() ? 0 : it->second);
  }
  describe(out, "vllm:time_to_first_token_seconds", "histogram", "From the request to its first token.");
  first_token_.write(out, "vllm:time_to_first_token_seconds", label);
  describe(out, "vllm:inter_token_latency_seconds", "histogram", "From a token to the next one.");
  between_tokens_.write(out, "vllm:inter_token_latency_seconds", label);
  describe(out, "vllm:e2e_request_latency_seconds", "histogram", "From the request to its last token.");
  latency_.write(out, "vllm:e2e_request_latency_seconds", label);

  describe(out, "plumb:cache_pages", "gauge", "Pages of the cache by pool and state.");
  const auto pages = [&](const char* pool, const char* state, int count) {
    out += fmt::format("plumb:cache_pages{{{},pool=\"{}\",state=\"{}\"}} {}\n", label, pool, state, count);
  };
  pages("key", "free", e.free_key_pages);
  pages("key", "held", e.held_key_pages);
  pages("entry", "free", e.free_entry_pages);
  pages("entry", "held", e.held_entry_pages);
  single(out, "plumb:prefix_cache_pages", "gauge", "Pages in the prefix cache.", label, e.cached_pages);
  single(out, "plumb:engine_steps_total", "counter", "Forward passes.", label, static_cast<double>(e.steps));
  single(out, "plumb:engine_rows_total", "counter", "Rows of all forward passes.", label, static_cast<double>(e.rows));
  single(out, "plumb:decode_graphs", "gauge", "CUDA graphs of decoding steps that are kept.", label,
         e.decode_graphs.graphs);
  single(out, "plumb:decode_graph_bytes", "gauge", "Device memory of these graphs.", label,
         static_cast<double>(e.decode_graphs.bytes));
  single(out, "plumb:decode_graph_replays_total", "counter", "Forward passes that replayed a graph.", label,
         static_cast<double>(e.decode_graphs.replays));
  single(out, "plumb:connections", "gauge", "Open connections.", label, connections);
  describe(out, "plumb:http_requests_total", "counter", "HTTP requests by route and status.");
  for (const auto& [key, count] : answered_)
    out += fmt::format("plumb:http_requests_total{{route=\"{}\",status=\"{}\"}} {}\n", escaped(key.first), key.second,
                       count);
  return out;
}

}  // namespace plumb::serve
