// The figures of a run: one JSON object a line in metrics.jsonl, and the same values as TensorBoard scalars.
// docs/metrics.md has the names.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "train/json_lines.h"
#include "train/tensorboard.h"

namespace plumb {

using Metrics = std::vector<std::pair<std::string, double>>;  // in the order in which they are written

class MetricsWriter {
 public:
  // Keeps the lines of `folder`/metrics.jsonl up to `step` (0: none) and drops later ones and a last line that is
  // incomplete; new lines are appended behind them.
  MetricsWriter(const std::string& folder, int64_t step);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;
  // {"step": 10, "time": 1790000000.123, "loss": ...}; each line is written at once.
  void write(int64_t step, const Metrics& values);

 private:
  JsonLines lines_;
  std::unique_ptr<EventFile> events_;
};

}  // namespace plumb
