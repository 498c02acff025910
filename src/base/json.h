// Reading JSON that came from outside: one error with file, line and reason instead of nlohmann's exceptions.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace plumb {

// Keys keep their order; of duplicate keys the last value stays, as in Python.
nlohmann::ordered_json read_json_file(const std::string& path);

}  // namespace plumb
