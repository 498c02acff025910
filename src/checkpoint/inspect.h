// What a file or folder holds, and what is wrong with it.
#pragma once
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "config/model_config.h"

namespace plumb {

struct InspectedGroup {
  int64_t tensors = 0, parameters = 0, bytes = 0;  // scales count as bytes only
  std::map<std::string, int64_t> formats;          // "fp4" -> bytes, scales included
};

struct Inspection {
  std::string path;
  std::string kind;  // "checkpoint", "adapter" or "tensors" (no config.json)
  std::string layout;
  std::optional<ModelConfig> config;
  size_t files = 0;
  InspectedGroup total;
  std::vector<std::pair<std::string, InspectedGroup>> groups;  // by purpose; for bare tensors by dtype
  std::vector<std::string> extras;                             // recognised tensors that are not used
  std::vector<std::pair<std::string, std::string>>
      notes;                      // adapters: rank, alpha, targets; checkpoints: what is left out
  std::vector<Problem> problems;  // the first ones
  size_t problem_count = 0;
  bool deep = false;  // values were read, too
};

// path: folder of a checkpoint or an adapter, or one .safetensors file or index. What is wrong is collected in
// `problems`; only a path that holds nothing to inspect is an Error. Reads headers only: memory stays under 200 MB for
// any size. deep: also reads scales and unpacked values once and reports NaN and infinity, and expert ids out of range.
Inspection inspect(const std::string& path, bool deep = false);

std::string to_text(const Inspection& i);
nlohmann::ordered_json to_json(const Inspection& i);

// "284.33 B", "3.52 M", "812"; bytes as "159.61 GB".
std::string human_count(int64_t n);
std::string human_bytes(int64_t n);

}  // namespace plumb
