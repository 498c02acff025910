#include "train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/files.h"

namespace plumb {
namespace {

std::string lines_up_to(const std::string& path, int64_t step) {
  std::string kept;
  if (step == 0 || !std::filesystem::exists(path)) return kept;
  std::istringstream in(read_text(path));
  for (std::string line; std::getline(in, line);) {
    const auto json = nlohmann::json::parse(line, nullptr, false);
    if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer()) continue;
    if (json["step"].get<int64_t>() <= step) kept += line + "\n";
  }
  return kept;
}

}  // namespace

MetricsWriter::MetricsWriter(const std::string& folder, int64_t step) : path_(folder + "/metrics.jsonl") {
  write_text(path_, lines_up_to(path_, step));
  file_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (file_ < 0) fail(path_, "cannot be written", "check the folder and its permissions");
  std::filesystem::create_directories(folder + "/tb");
  events_ = std::make_unique<EventFile>(folder + "/tb", step + 1);
}

MetricsWriter::~MetricsWriter() { ::close(file_); }

void MetricsWriter::write(int64_t step, const Metrics& values) {
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  const double seconds =
      static_cast<double>(std::chrono::duration_cast<std::chrono::milliseconds>(since_1970).count()) / 1000;
  nlohmann::ordered_json line;
  line["step"] = step;
  line["time"] = seconds;
  for (const auto& [name, value] : values) line[name] = value;
  const std::string text = line.dump() + "\n";
  if (::write(file_, text.data(), text.size()) != static_cast<ssize_t>(text.size()))  // one call: no half lines
    fail(path_, "cannot be written", "check that the disk is not full");
  events_->add_scalars(step, seconds, values);
}

}  // namespace plumb
