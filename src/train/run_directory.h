// The folder of a run: config.toml (resolved), metrics.jsonl, tb/, log.txt, checkpoints/step_000010/...
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/run_config.h"

namespace plumb {

struct RunDirectory {
  std::string path;
  std::optional<int64_t> resume;  // step of the checkpoint to go on from
  std::shared_ptr<void> lock;     // held while the run lives
};

// Creates the folder or opens an existing one, directs the log to its log.txt and writes config.toml. What differs from
// an earlier config.toml is logged. Errors: another run uses the folder; output.resume = "never" and there is a
// checkpoint already.
RunDirectory open_run_directory(const RunConfig& config);

// "train.steps: 10 -> 20" for every key whose value differs.
std::vector<std::string> config_changes(const RunConfig& before, const RunConfig& after);

}  // namespace plumb
