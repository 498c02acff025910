// A file of JSON objects, one a line, each with the step that it belongs to; a resumed run goes on behind its step.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace plumb {

class JsonLines {
 public:
  // Keeps the lines of `path` up to `step` (0: none), drops later ones and a last line that is incomplete.
  JsonLines(std::string path, int64_t step);
  ~JsonLines();
  JsonLines(const JsonLines&) = delete;
  JsonLines& operator=(const JsonLines&) = delete;
  // An object with a key "step". Written at once: no reader sees half a line.
  void write(const nlohmann::ordered_json& line);

 private:
  std::string path_;
  int file_ = -1;
};

}  // namespace plumb
