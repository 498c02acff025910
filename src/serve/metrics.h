// Figures of the server in the text form of Prometheus, under the names that vLLM's dashboards use.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "rollout/engine.h"

namespace plumb::serve {

// Counts of values below rising bounds.
class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds);
  void observe(double value);
  // Appends name_bucket, name_sum and name_count. labels: `key="value"`, without braces.
  void write(std::string& out, std::string_view name, std::string_view labels) const;

 private:
  std::vector<double> bounds_;
  std::vector<int64_t> counts_;  // [bounds + 1]: the last one is for larger values
  double sum_ = 0;
};

// All functions may be called from any thread.
class Metrics {
 public:
  Metrics();
  // Of one choice: its prompt was read; its first token was made, so many seconds after it was asked for; a further
  // token, so many seconds after the one before; its end, so many seconds after it was asked for. reason: stop, length,
  // abort, error.
  void prompt_read(int64_t tokens);
  void first_token(double seconds);
  void next_token(double seconds);
  void finished(const std::string& reason, double seconds);
  void answered(const std::string& route, int status);  // an HTTP request

  std::string text(const EngineStats& engine, int connections, const std::string& model) const;

 private:
  mutable std::mutex mutex_;
  int64_t prompt_tokens_ = 0, generation_tokens_ = 0;
  std::map<std::string, int64_t> finished_;
  std::map<std::pair<std::string, int>, int64_t> answered_;
  Histogram first_token_, between_tokens_, latency_;
};

}  // namespace plumb::serve
