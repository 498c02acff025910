#include "train/json_lines.h"

#include <fcntl.h>
#include <unistd.h>

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

JsonLines::JsonLines(std::string path, int64_t step) : path_(std::move(path)) {
  write_text(path_, lines_up_to(path_, step));
  file_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (file_ < 0) fail(path_, "cannot be written", "check the folder and its permissions");
}

JsonLines::~JsonLines() { ::close(file_); }

void JsonLines::write(const nlohmann::ordered_json& line) {
  // Text that a model wrote may end inside a character.
  const std::string text = line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  if (::write(file_, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    fail(path_, "cannot be written", "check that the disk is not full");
}

}  // namespace plumb
