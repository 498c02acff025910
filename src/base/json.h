// Reading JSON that came from outside: one error with file, line and reason instead of nlohmann's exceptions.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace plumb {

// Keys in alphabetical order (finding one in an ordered_json takes time in proportion to their number, and an index of
// a checkpoint has 10^5); of duplicate keys the last value stays, as in Python.
nlohmann::json read_json_file(const std::string& path);

}  // namespace plumb
