// The texts that are made from the table of keys: config.toml, --help, docs/configuration.md.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "config/run_fields.h"

namespace plumb {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (unsigned char ch : text) {
    if (ch == '"' || ch == '\\') out += '\\';
    if (ch < 0x20 || ch == 0x7f)
      out += fmt::format("\\u{:04X}", ch);
    else
      out += static_cast<char>(ch);
  }
  return out + '"';
}

std::string number(double value) {
  std::string text = fmt::format("{}", value);
  // fmt writes 1e-04 where a reader expects 1e-4; both are TOML.
  if (size_t e = text.find("e-0"); e != std::string::npos) text.erase(e + 2, 1);
  return text;
}

std::string range_text(const Range& r) {
  if (std::isinf(r.max)) return "at least " + number(r.min);
  if (r.above_min) return fmt::format("greater than {} and at most {}", number(r.min), number(r.max));
  if (r.below_max) return fmt::format("at least {} and less than {}", number(r.min), number(r.max));
  return fmt::format("from {} to {}", number(r.min), number(r.max));
}

std::string choice_text(const std::vector<std::string>& choices) {
  std::string text;
  for (size_t i = 0; i < choices.size(); ++i)
    text += (i == 0 ? "" : i + 1 == choices.size() ? " or " : ", ") + (choices[i].empty() ? "\"\"" : choices[i]);
  return text;
}

// What holds if the key is not given.
std::string default_text(const Field& field, RunCommand command) {
  RunConfig config = default_run_config(command);
  const FieldRef ref = field.value(config);
  if (auto list = std::get_if<std::vector<std::string>*>(&ref); list && **list == field.choices) return "all of them";
  if (field.required) return "required";
  return toml_value(field, config);
}

std::string help_text(const Field& field) {
  return field.unit.empty() ? field.help : fmt::format("[{}] {}", field.unit, field.help);
}

std::string table_purpose(const std::string& table) {
  if (table == "pretrain") return "\n`plumb pretrain` only.\n";
  if (table == "lora") return "\n`plumb train`, `plumb dpo` and `plumb rl`.\n";
  if (table == "dpo") return "\n`plumb dpo` only.\n";
  if (table == "rl" || table == "distill" || table == "sampling" || table == "eval") return "\n`plumb rl` only.\n";
  return "";
}

}  // namespace

std::string expectation(const Field& field) {
  RunConfig config;
  const FieldRef ref = field.value(config);
  if (std::holds_alternative<bool*>(ref)) return "true or false";
  if (std::holds_alternative<int64_t*>(ref)) return "a whole number " + range_text(field.range);
  if (std::holds_alternative<double*>(ref)) return "a number " + range_text(field.range);
  if (std::holds_alternative<std::string*>(ref)) return field.choices.empty() ? "a text" : choice_text(field.choices);
  return "a list out of " + fmt::format("{}", fmt::join(field.choices, ", "));
}

std::string toml_value(const Field& field, const RunConfig& config) {
  RunConfig copy = config;
  const FieldRef ref = field.value(copy);
  if (auto flag = std::get_if<bool*>(&ref)) return **flag ? "true" : "false";
  if (auto whole = std::get_if<int64_t*>(&ref)) return std::to_string(**whole);
  if (auto real = std::get_if<double*>(&ref)) return number(**real);
  if (auto text = std::get_if<std::string*>(&ref)) return quoted(**text);
  std::string list;
  for (const std::string& item : *std::get<std::vector<std::string>*>(ref))
    list += (list.empty() ? "" : ", ") + quoted(item);
  return "[" + list + "]";
}

std::string to_toml(const RunConfig& config) {
  std::string out, table;
  for (const Field& field : run_fields()) {
    if (!field.belongs_to(config.command)) continue;
    if (field.table() != table) {
      out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", field.table());
      table = field.table();
    }
    out += fmt::format("{} = {}\n", field.name(), toml_value(field, config));
  }
  out += reward_tables(config);
  return out;
}

std::string describe_run_keys(RunCommand command) {
  size_t width = 0;
  for (const Field& field : run_fields()) width = std::max(width, field.key.size());
  std::string out;
  for (const Field& field : run_fields()) {
    if (!field.belongs_to(command)) continue;
    const std::string indent(width + 4, ' ');
    out += fmt::format("  {:<{}}  {}\n{}{}; default: {}\n", field.key, width, help_text(field), indent,
                       expectation(field), default_text(field, command));
  }
  return out;
}

std::string run_keys_as_markdown() {
  std::string out, table;
  for (const Field& field : run_fields()) {
    if (field.table() != table) {
      table = field.table();
      out += fmt::format("{}### [{}]\n{}\n| key | default | allowed | unit | meaning |\n|---|---|---|---|---|\n",
                         out.empty() ? "" : "\n", table, table_purpose(table));
    }
    std::string fallback = default_text(field, field.commands.front());
    for (RunCommand command : field.commands)
      if (const std::string other = default_text(field, command); other != default_text(field, field.commands.front()))
        fallback += fmt::format("; {}: {}", name(command), other);
    out += fmt::format("| `{}` | {} | {} | {} | {} |\n", field.name(), fallback, expectation(field), field.unit,
                       field.help);
  }
  return out;
}

}  // namespace plumb
