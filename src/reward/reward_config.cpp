#include "reward/reward_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <functional>
#include <set>

#include "base/error.h"
#include "base/files.h"
#include "config/nearest.h"
#include "reward/json_text.h"
#include "reward/reward_toml.h"
#include "reward/toml_table.h"

namespace plumb {
namespace {

const std::vector<std::string> kTexts = {"content", "reasoning", "text"};

ExactKeys exact_keys(TomlTable& table) {
  ExactKeys keys;
  table.read("field", keys.field);
  table.read("of", keys.of, kTexts);
  table.read("ignore_case", keys.ignore_case);
  return keys;
}

NumberKeys number_keys(TomlTable& table) {
  NumberKeys keys;
  table.read("field", keys.field);
  table.read("of", keys.of, kTexts);
  table.read("tolerance", keys.tolerance, 0);
  table.read("relative_tolerance", keys.relative_tolerance, 0);
  return keys;
}

RegexKeys regex_keys(TomlTable& table) {
  RegexKeys keys;
  table.read("pattern", keys.pattern);
  table.read("field", keys.field);
  table.read("of", keys.of, kTexts);
  table.read("full", keys.full);
  table.read("ignore_case", keys.ignore_case);
  if (keys.pattern.empty() == keys.field.empty())
    fail(table.where(), "reward.pattern and reward.field: exactly one of them must be given",
         "pattern is the same for all samples, field names where the dataset's line has its own");
  return keys;
}

LengthKeys length_keys(TomlTable& table) {
  LengthKeys keys;
  if (!table.find("target")) table.missing("target", "give the wanted length");
  table.read("target", keys.target, 0, /*above_min=*/true);
  keys.scale = keys.target;
  table.read("scale", keys.scale, 0, /*above_min=*/true);
  table.read("of", keys.of, kTexts);
  table.read("unit", keys.unit, {"tokens", "characters", "words"});
  if (keys.unit == "tokens" && keys.of != "content")
    fail(table.where("of"), "reward.of counts in characters and words only",
         "unit = \"tokens\" counts all tokens that were sampled");
  return keys;
}

ChoiceKeys choice_keys(TomlTable& table) {
  ChoiceKeys keys;
  table.read("rewards", keys.rewards);
  table.read("otherwise", keys.otherwise);
  table.read("of", keys.of, kTexts);
  table.read("ignore_case", keys.ignore_case);
  if (keys.rewards.empty()) table.missing("rewards", "for example rewards = { yes = 0.5, no = 0.75, maybe = 1.0 }");
  return keys;
}

SchemaKeys schema_keys(TomlTable& table) {
  SchemaKeys keys;
  const toml::node* schema = table.find("schema");
  std::string path;
  table.read("schema_file", path);
  if ((schema != nullptr) == !path.empty())
    fail(table.where(), "reward.schema and reward.schema_file: exactly one of them must be given",
         "schema is a table or a text with JSON, schema_file a path");
  std::optional<nlohmann::json> value;
  if (!path.empty()) {
    value = parse_json_text(read_text(path));
    if (!value) fail(path, "is no JSON", "write a JSON schema");
  } else {
    value = schema->is_string() ? parse_json_text(*schema->value<std::string>()) : toml_to_json(*schema);
    if (!value || !(value->is_object() || value->is_boolean())) table.refuse("schema", "a table or a text with JSON");
  }
  keys.schema = std::move(*value);
  table.read("of", keys.of, {"content", "reasoning", "text", "arguments"});
  table.read("tool", keys.tool);
  if (!keys.tool.empty() && keys.of != "arguments")
    fail(table.where("tool"), "reward.tool needs reward.of = \"arguments\"");
  return keys;
}

ToolCallKeys tool_call_keys(TomlTable& table) {
  ToolCallKeys keys;
  table.read("field", keys.field);
  table.read("any_order", keys.any_order);
  table.read("name_reward", keys.name_reward);
  return keys;
}

ProgramKeys program_keys(TomlTable& table) {
  ProgramKeys keys;
  table.read_command("command", keys.command);
  table.read("directory", keys.directory);
  table.read("environment", keys.environment);
  table.read("processes", keys.processes, 1, 1024);
  table.read("time_limit", keys.time_limit, 0, /*above_min=*/true);
  table.read("start_limit", keys.start_limit, 0);
  table.read("retries", keys.retries, 0, 10);
  table.read("restart_delay", keys.restart_delay, 0);
  table.read("max_line", keys.max_line, 64, 1 << 30);
  return keys;
}

HttpKeys http_keys(TomlTable& table) {
  HttpKeys keys;
  if (!table.find("url")) table.missing("url", "for example url = \"http://127.0.0.1:8000/score\"");
  table.read("url", keys.url);
  if (keys.url.starts_with("https://"))
    fail(table.where("url"), fmt::format("reward.url = \"{}\": TLS is not spoken here", keys.url),
         "put a proxy that does between them, and give its http:// address");
  if (!keys.url.starts_with("http://")) table.refuse("url", "http://host[:port]/path");
  table.read("headers", keys.headers);
  table.read("time_limit", keys.time_limit, 0, /*above_min=*/true);
  table.read("retries", keys.retries, 0, 10);
  table.read("retry_delay", keys.retry_delay, 0);
  table.read("max_body", keys.max_body, 64, 1 << 30);
  return keys;
}

void read_keys(RewardConfig& config, TomlTable& table) {
  const std::vector<std::pair<std::string, std::function<void()>>> kinds = {
      {"exact", [&] { config.keys = exact_keys(table); }},
      {"number", [&] { config.keys = number_keys(table); }},
      {"regex", [&] { config.keys = regex_keys(table); }},
      {"length", [&] { config.keys = length_keys(table); }},
      {"choice", [&] { config.keys = choice_keys(table); }},
      {"json_schema", [&] { config.keys = schema_keys(table); }},
      {"tool_call", [&] { config.keys = tool_call_keys(table); }},
      {"program", [&] { config.keys = program_keys(table); }},
      {"http", [&] { config.keys = http_keys(table); }},
  };
  std::vector<std::string> names;
  for (const auto& [name, read] : kinds) {
    if (name == config.kind) return read();
    names.push_back(name);
  }
  table.refuse("kind", fmt::format("one of {}", fmt::join(names, ", ")));
}

RewardConfig read_reward(const toml::table& node, const std::string& file) {
  TomlTable table(node, "reward", file);
  RewardConfig config;
  config.where = table.where();
  if (!table.find("kind")) table.missing("kind", "for example kind = \"exact\"");
  table.read("kind", config.kind);
  config.name = config.kind;
  table.read("name", config.name);
  table.read("weight", config.weight);
  read_keys(config, table);
  table.finish();
  return config;
}

}  // namespace

std::vector<RewardConfig> parse_rewards(const toml::node& node, const std::string& file) {
  const toml::array* tables = node.as_array();
  const std::string where = fmt::format("{}:{}", file, node.source().begin.line);
  if (!tables || tables->empty()) fail(where, "reward must be a list of tables", "write [[reward]] above each");
  std::vector<RewardConfig> rewards;
  std::set<std::string> names;
  for (const toml::node& item : *tables) {
    if (!item.is_table()) fail(where, "reward must be a list of tables", "write [[reward]] above each");
    rewards.push_back(read_reward(*item.as_table(), file));
    const RewardConfig& last = rewards.back();
    if (last.name.empty() || !names.insert(last.name).second)
      fail(last.where, fmt::format("two rewards have the name \"{}\"", last.name), "give each a key name of its own");
  }
  return rewards;
}

ProgramKeys parse_environment(const toml::node& node, const std::string& file) {
  const toml::table* table = node.as_table();
  if (!table) fail(fmt::format("{}:{}", file, node.source().begin.line), "environment must be a table");
  TomlTable reader(*table, "environment", file);
  ProgramKeys keys = program_keys(reader);
  reader.finish();
  return keys;
}

RewardTables parse_rewards(const std::string& text, const std::string& file, bool may_be_absent) {
  try {
    const toml::table table = toml::parse(text, file);
    RewardTables tables;
    if (const toml::node* node = table.get("reward")) tables.rewards = parse_rewards(*node, file);
    if (const toml::node* node = table.get("environment")) tables.environment = parse_environment(*node, file);
    if (tables.rewards.empty() && !tables.environment && !may_be_absent)
      fail(file, "has no reward", "add a table [[reward]] or [environment], see docs/rewards.md");
    return tables;
  } catch (const toml::parse_error& e) {
    fail(fmt::format("{}:{}", file, e.source().begin.line), "not TOML: " + std::string(e.description()));
  }
}

}  // namespace plumb
