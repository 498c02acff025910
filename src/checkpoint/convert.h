// Between checkpoint layouts and weight formats.
#pragma once
#include <string>
#include <vector>

#include "checkpoint/stream.h"

namespace plumb {

struct ConvertReport : WriteReport {
  Layout from = Layout::released;
  std::vector<std::string> copied_files;  // tokenizer and the like
};

// Reads the checkpoint folder `in`, writes the new folder `out` (whole or not at all): weights, config.json and a copy
// of the other small files. Quantised weights are re-encoded only if the format changes; a change to a format that
// holds all values and back is exact. Memory: under 1 GB whatever the model. Errors: those of Checkpoint, a full disk,
// `out` exists.
ConvertReport convert_checkpoint(const std::string& in, const std::string& out, const WriteOptions& options);

}  // namespace plumb
