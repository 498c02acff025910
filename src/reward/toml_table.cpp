#include "reward/toml_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "base/error.h"
#include "config/nearest.h"

namespace plumb {
namespace {

// A value as it could stand in the file.
std::string shown(const toml::node& value) {
  std::ostringstream out;
  out << toml::toml_formatter{value, toml::format_flags::none};
  std::string text = out.str();
  std::ranges::replace(text, '\n', ' ');
  return text;
}

}  // namespace

std::string TomlTable::where(const char* key) const {
  const toml::node* node = key ? table_.get(key) : nullptr;
  return fmt::format("{}:{}", file_, (node ? node->source() : table_.source()).begin.line);
}

const toml::node* TomlTable::find(const char* key) {
  if (std::ranges::find(known_, key) == known_.end()) known_.push_back(key);
  return table_.get(key);
}

void TomlTable::refuse(const char* key, const std::string& allowed) const {
  fail(where(key), fmt::format("{}.{} = {}, must be {}", name_, key, shown(*table_.get(key)), allowed));
}

void TomlTable::missing(const char* key, const std::string& fix) const {
  fail(where(), fmt::format("{}.{} is missing", name_, key), fix);
}

void TomlTable::read(const char* key, bool& value) {
  const toml::node* node = find(key);
  if (!node) return;
  if (!node->is_boolean()) refuse(key, "true or false");
  value = *node->value<bool>();
}

void TomlTable::read(const char* key, std::string& value, const std::vector<std::string>& choices) {
  const toml::node* node = find(key);
  if (!node) return;
  const bool allowed = node->is_string() &&
                       (choices.empty() || std::ranges::find(choices, *node->value<std::string>()) != choices.end());
  if (!allowed) refuse(key, choices.empty() ? "a text" : fmt::format("one of {}", fmt::join(choices, ", ")));
  value = *node->value<std::string>();
}

void TomlTable::read(const char* key, double& value, double min, bool above_min) {
  const toml::node* node = find(key);
  if (!node) return;
  const double number = node->is_number() ? *node->value<double>() : NAN;
  if (!std::isfinite(number) || number < min || (above_min && number == min))
    refuse(key, min == -std::numeric_limits<double>::max()
                    ? "a number"
                    : fmt::format("a number {} {}", above_min ? "greater than" : "of at least", min));
  value = number;
}

void TomlTable::read(const char* key, int64_t& value, int64_t min, int64_t max) {
  const toml::node* node = find(key);
  if (!node) return;
  const int64_t number = node->is_integer() ? *node->value<int64_t>() : min - 1;
  if (number < min || number > max) refuse(key, fmt::format("a whole number from {} to {}", min, max));
  value = number;
}

void TomlTable::read(const char* key, std::map<std::string, std::string>& value) {
  const toml::node* node = find(key);
  if (!node) return;
  if (!node->is_table()) refuse(key, "a table of texts");
  for (const auto& [name, item] : *node->as_table()) {
    if (!item.is_string()) refuse(key, "a table of texts");
    value[std::string(name.str())] = *item.value<std::string>();
  }
}

void TomlTable::read(const char* key, std::map<std::string, double>& value) {
  const toml::node* node = find(key);
  if (!node) return;
  if (!node->is_table()) refuse(key, "a table of numbers");
  for (const auto& [name, item] : *node->as_table()) {
    if (!item.is_number() || !std::isfinite(*item.value<double>())) refuse(key, "a table of numbers");
    value[std::string(name.str())] = *item.value<double>();
  }
}

void TomlTable::read_command(const char* key, std::vector<std::string>& value) {
  const toml::node* node = find(key);
  if (!node) missing(key, "give a list of texts or one text for the shell");
  value.clear();
  if (node->is_string()) {
    value = {"/bin/sh", "-c", *node->value<std::string>()};
  } else if (node->is_array()) {
    for (const toml::node& item : *node->as_array()) {
      if (!item.is_string()) refuse(key, "a list of texts or one text for the shell");
      value.push_back(*item.value<std::string>());
    }
  }
  if (value.empty() || value.back().empty()) refuse(key, "a list of texts or one text for the shell");
}

void TomlTable::finish() const {
  for (const auto& [k, node] : table_) {
    const std::string key(k.str());
    if (std::ranges::find(known_, key) != known_.end()) continue;
    const std::string close = nearest(key, known_);
    fail(fmt::format("{}:{}", file_, k.source().begin.line), fmt::format("there is no key {}.{}", name_, key),
         close.empty() ? fmt::format("known are {}", fmt::join(known_, ", ")) : fmt::format("did you mean {}?", close));
  }
}

nlohmann::json toml_to_json(const toml::node& node) {
  if (node.is_string()) return *node.value<std::string>();
  if (node.is_boolean()) return *node.value<bool>();
  if (node.is_integer()) return *node.value<int64_t>();
  if (node.is_floating_point()) return *node.value<double>();
  if (const toml::array* array = node.as_array()) {
    nlohmann::json list = nlohmann::json::array();
    for (const toml::node& item : *array) list.push_back(toml_to_json(item));
    return list;
  }
  if (const toml::table* table = node.as_table()) {
    nlohmann::json object = nlohmann::json::object();
    for (const auto& [key, item] : *table) object[std::string(key.str())] = toml_to_json(item);
    return object;
  }
  return shown(node);
}

}  // namespace plumb
