#include "train/metrics.h"

#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace plumb {

MetricsWriter::MetricsWriter(const std::string& folder, int64_t step) : lines_(folder + "/metrics.jsonl", step) {
  std::filesystem::create_directories(folder + "/tb");
  events_ = std::make_unique<EventFile>(folder + "/tb", step + 1);
}

MetricsWriter::~MetricsWriter() = default;

void MetricsWriter::write(int64_t step, const Metrics& values) {
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  const double seconds =
      static_cast<double>(std::chrono::duration_cast<std::chrono::milliseconds>(since_1970).count()) / 1000;
  nlohmann::ordered_json line;
  line["step"] = step;
  line["time"] = seconds;
  for (const auto& [name, value] : values) line[name] = value;
  lines_.write(line);
  events_->add_scalars(step, seconds, values);
}

}  // namespace plumb
