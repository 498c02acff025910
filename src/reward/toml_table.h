// Reads one TOML table into a struct and reports what is wrong with it: file, line, key, value, what is allowed.
// Private to the room.
#pragma once
#include <toml++/toml.h>

#include <cstdint>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace plumb {

class TomlTable {
 public:
  // name: how errors call the table, "reward".
  TomlTable(const toml::table& table, std::string name, std::string file)
      : table_(table), name_(std::move(name)), file_(std::move(file)) {}

  // Each assigns the key's value if it is there and remembers that the key exists.
  void read(const char* key, bool& value);
  void read(const char* key, std::string& value, const std::vector<std::string>& choices = {});
  void read(const char* key, double& value, double min = -std::numeric_limits<double>::max(), bool above_min = false);
  void read(const char* key, int64_t& value, int64_t min, int64_t max);
  void read(const char* key, std::map<std::string, std::string>& value);
  void read(const char* key, std::map<std::string, double>& value);
  // A text, which becomes {"/bin/sh", "-c", text}, or a list of texts.
  void read_command(const char* key, std::vector<std::string>& value);

  const toml::node* find(const char* key);
  [[noreturn]] void refuse(const char* key, const std::string& allowed) const;
  [[noreturn]] void missing(const char* key, const std::string& fix) const;
  // Error: a key that nothing has asked for.
  void finish() const;

  // file:line of a key, or of the table if it is not there.
  std::string where(const char* key = nullptr) const;

 private:
  const toml::table& table_;
  std::string name_, file_;
  std::vector<std::string> known_;
};

// Dates and times become texts.
nlohmann::json toml_to_json(const toml::node& node);

}  // namespace plumb
