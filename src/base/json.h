// Reading JSON that came from outside: one error with file, line and reason instead of nlohmann's exceptions.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace plumb {

// where: the file name for the error. Duplicate keys keep the last value, as in Python.
nlohmann::ordered_json parse_json(std::string_view text, const std::string& where);
nlohmann::ordered_json read_json(const std::string& path);

}  // namespace plumb
