#include "config/run_config.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>

#include "base/error.h"
#include "config/nearest.h"
#include "config/run_fields.h"

namespace plumb {
namespace {

std::string position(const std::string& file, const toml::node& node) {
  return fmt::format("{}:{}", file, node.source().begin.line);
}

std::string did_you_mean(const std::string& name) { return name.empty() ? "" : "did you mean " + name + "?"; }

// A value as it could stand in the file.
std::string shown(const toml::node& value) {
  if (value.is_table()) return "a table";
  std::ostringstream out;
  out << toml::toml_formatter{value, toml::format_flags::none};
  return out.str();
}

// Top-level keys that the room of rewards reads.
constexpr const char* kRewardTables[] = {"reward", "environment"};

const std::string kOverride = "--set";  // the place of a value from the command line

// A wrong override is wrong use of the command line.
[[noreturn]] void stop(const std::string& where, const std::string& what, const std::string& fix = "") {
  if (where == kOverride) throw UsageError(where, what, fix);
  fail(where, what, fix);
}

// Assigns values to a configuration and remembers where each came from, for errors about several keys.
struct Reader {
  RunConfig config;
  std::map<std::string, std::string> origin;  // key -> "run.toml:3" or kOverride

  [[noreturn]] void refuse(const Field& field, const std::string& value, const std::string& where,
                           const std::string& fix = "") {
    stop(where, fmt::format("{} = {}, must be {}", field.key, value, expectation(field)), fix);
  }

  std::string checked_choice(const Field& field, const toml::node& node, const std::string& where) {
    const auto text = node.value_exact<std::string>();
    if (!text) refuse(field, shown(node), where);
    const std::vector<std::string>& choices = field.choices;
    if (!choices.empty() && std::ranges::find(choices, *text) == choices.end())
      refuse(field, shown(node), where, did_you_mean(nearest(*text, choices)));
    return *text;
  }

  double checked_number(const Field& field, const toml::node& node, const std::string& where) {
    const double value = *node.value<double>();
    const Range& r = field.range;
    const bool inside =
        (r.above_min ? value > r.min : value >= r.min) && (r.below_max ? value < r.max : value <= r.max);
    if (!inside) refuse(field, shown(node), where);
    return value;
  }

  std::vector<std::string> checked_list(const Field& field, const toml::node& node, const std::string& where) {
    if (!node.is_array()) refuse(field, shown(node), where);
    std::vector<std::string> items;
    for (const toml::node& item : *node.as_array()) {
      items.push_back(checked_choice(field, item, where));
      if (std::ranges::count(items, items.back()) > 1)
        stop(where, fmt::format("{} has {} twice", field.key, shown(item)));
    }
    return items;
  }

  void assign(const Field& field, const toml::node& node, const std::string& where) {
    if (!field.belongs_to(config.command))
      stop(where, fmt::format("{} is no key of plumb {}", field.key, name(config.command)),
           fmt::format("it belongs to plumb {}", name(field.commands.front())));
    const FieldRef ref = field.value(config);
    if (auto flag = std::get_if<bool*>(&ref)) {
      if (!node.is_boolean()) refuse(field, shown(node), where);
      **flag = *node.value<bool>();
    } else if (auto whole = std::get_if<int64_t*>(&ref)) {
      if (!node.is_integer()) refuse(field, shown(node), where);
      checked_number(field, node, where);
      **whole = *node.value<int64_t>();
    } else if (auto real = std::get_if<double*>(&ref)) {
      if (!node.is_number()) refuse(field, shown(node), where);
      **real = checked_number(field, node, where);
    } else if (auto text = std::get_if<std::string*>(&ref)) {
      **text = checked_choice(field, node, where);
    } else {
      *std::get<std::vector<std::string>*>(ref) = checked_list(field, node, where);
    }
    origin[field.key] = where;
  }

  const Field* find(const std::string& key) const {
    for (const Field& field : run_fields())
      if (field.key == key) return &field;
    return nullptr;
  }

  // Names the nearest key of this command: the same name in another table, else the smallest edit distance.
  [[noreturn]] void unknown_key(const std::string& key, const std::string& where) const {
    const std::string leaf = key.substr(key.find_last_of('.') + 1);
    std::vector<std::string> keys;
    for (const Field& field : run_fields()) {
      if (!field.belongs_to(config.command)) continue;
      if (field.name() == leaf) stop(where, "there is no key " + key, did_you_mean(field.key));
      keys.push_back(field.key);
    }
    stop(where, "there is no key " + key, did_you_mean(nearest(key, keys)));
  }

  void read(const toml::table& table, const std::string& prefix, const std::string& file) {
    for (const auto& [k, node] : table) {
      const std::string key = prefix + std::string(k.str()), where = fmt::format("{}:{}", file, k.source().begin.line);
      if (const Field* field = find(key))
        assign(*field, node, where);
      else if (config.command == RunCommand::rl && std::ranges::count(kRewardTables, key))
        continue;  // read from the text by who gives rewards
      else if (node.is_table() && is_table(key))
        read(*node.as_table(), key + ".", file);
      else if (node.is_table())
        unknown_table(key, position(file, node));
      else
        unknown_key(key, where);
    }
  }

  static bool is_table(const std::string& name) {
    return std::ranges::any_of(run_fields(), [&](const Field& field) { return field.table() == name; });
  }

  [[noreturn]] static void unknown_table(const std::string& name, const std::string& where) {
    std::vector<std::string> tables;
    for (const Field& field : run_fields())
      if (tables.empty() || tables.back() != field.table()) tables.push_back(field.table());
    stop(where, fmt::format("there is no table [{}]", name), did_you_mean(nearest(name, tables)));
  }

  // "key=value". Texts need no quotes, lists no brackets: --set lora.targets=experts,kv_proj
  void override_with(const std::string& assignment) {
    const size_t equals = assignment.find('=');
    if (equals == std::string::npos)
      throw UsageError("--set " + assignment, "there is no value", "write --set table.key=value");
    const std::string key = assignment.substr(0, equals), text = assignment.substr(equals + 1), where = kOverride;
    const Field* field = find(key);
    if (!field) unknown_key(key, where);
    const FieldRef ref = field->value(config);
    const bool bare = text.empty() || (text[0] != '"' && text[0] != '\'' && text[0] != '[');
    if (bare && std::holds_alternative<std::string*>(ref)) return assign(*field, toml::value<std::string>(text), where);
    if (bare && std::holds_alternative<std::vector<std::string>*>(ref)) {
      toml::array items;
      std::istringstream in(text);
      for (std::string item; std::getline(in, item, ',');) items.push_back(item);
      return assign(*field, items, where);
    }
    try {
      const toml::table parsed = toml::parse("value = " + text);
      assign(*field, *parsed.get("value"), where);
    } catch (const toml::parse_error&) {
      refuse(*field, text, where);
    }
  }

  // The place of a key that was given, the file for one that was not.
  std::string where(const std::string& key, const std::string& file) const {
    auto it = origin.find(key);
    return it == origin.end() ? file : it->second;
  }

  void check_rl(const std::string& file) {
    if (config.command != RunCommand::rl) return;
    const RlKeys& rl = config.rl;
    if ((rl.kl_reference == "adapter") == rl.kl_ref_adapter_path.empty())
      stop(where("rl.kl_ref_adapter_path", file),
           "rl.kl_ref_adapter_path and rl.kl_reference = \"adapter\" belong together", "give both or neither");
    if (rl.truncated_importance_sampling > 0 && !rl.precalculate_logprobs)
      stop(where("rl.truncated_importance_sampling", file),
           "rl.truncated_importance_sampling does nothing while old log-probabilities are the recorded ones",
           "set rl.precalculate_logprobs = true, or leave it out");
    if (rl.loss == "gspo" && rl.importance_sampling_level != "token" && rl.importance_sampling_level != "sequence")
      stop(where("rl.importance_sampling_level", file), "gspo takes the ratio over sequences", "leave the key out");
    check_distill(file);
    if (config.sampling.max_tokens >= config.data.row_tokens)
      stop(where("sampling.max_tokens", file),
           fmt::format("sampling.max_tokens = {} leaves no room for a prompt in rows of {} tokens",
                       config.sampling.max_tokens, config.data.row_tokens),
           "raise data.row_tokens or lower sampling.max_tokens");
  }

  void check_distill(const std::string& file) {
    const DistillKeys& d = config.distill;
    if (d.coefficient > 0) {
      if (config.rl.loss == "none" && config.rl.kl_penalty_coef > 0)
        stop(where("rl.kl_penalty_coef", file), "rl.kl_penalty_coef shapes advantages, and rl.loss = \"none\" has none",
             "leave one of them out");
      return;
    }
    if (config.rl.loss == "none")
      stop(where("rl.loss", file), "rl.loss = \"none\" leaves nothing to train",
           "set distill.coefficient, or choose a policy loss");
    if (!d.teacher_model.empty() || !d.teacher_adapter.empty()) {
      const std::string key = d.teacher_model.empty() ? "distill.teacher_adapter" : "distill.teacher_model";
      stop(where(key, file), key + " does nothing while distill.coefficient is 0",
           "set distill.coefficient, 1 to begin with, or leave the key out");
    }
  }

  void check(const std::string& file) {
    for (const Field& field : run_fields()) {
      if (!field.required || !field.belongs_to(config.command)) continue;
      const std::string value = toml_value(field, config);
      if (value != "\"\"" && value != "[]") continue;
      const char* problem = origin.count(field.key) ? "is empty" : "is missing";
      stop(where(field.key, file), fmt::format("{} {}", field.key, problem), field.help);
    }
    const DataKeys& data = config.data;
    if (!data.eval.empty() && data.eval_fraction > 0)
      stop(where("data.eval_fraction", file), "data.eval and data.eval_fraction are both given", "keep one of them");
    if (data.effort_profile == "preview" && data.reasoning_effort == "low")
      stop(where("data.reasoning_effort", file),
           "data.reasoning_effort = \"low\" does not exist in the profile preview",
           "take high or max, or data.effort_profile = \"official\"");
    check_rl(file);
    const TrainKeys& train = config.train;
    if (train.steps > 0 && train.warmup_steps > train.steps)
      stop(where("train.warmup_steps", file),
           fmt::format("train.warmup_steps = {} is greater than train.steps = {}", train.warmup_steps, train.steps));
  }
};

}  // namespace

std::string reward_tables(const RunConfig& config) {
  if (config.command != RunCommand::rl || config.text.empty()) return "";
  toml::table all = toml::parse(config.text, config.file), kept;
  for (const char* name : kRewardTables)
    if (const toml::node* node = all.get(name)) kept.insert(name, *node);
  if (kept.empty()) return "";
  std::ostringstream out;
  out << "\n" << toml::toml_formatter{kept} << "\n";
  return out.str();
}

RunConfig parse_run_config(RunCommand command, const std::string& text, const std::string& file,
                           const std::vector<std::string>& overrides) {
  Reader reader{default_run_config(command), {}};
  reader.config.file = file, reader.config.text = text;
  try {
    reader.read(toml::parse(text, file), "", file);
  } catch (const toml::parse_error& e) {
    fail(fmt::format("{}:{}", file, e.source().begin.line), "not TOML: " + std::string(e.description()));
  }
  for (const std::string& assignment : overrides) reader.override_with(assignment);
  reader.check(file);
  return reader.config;
}

RunConfig load_run_config(RunCommand command, const std::string& file, const std::vector<std::string>& overrides) {
  std::ifstream in(file);
  std::ostringstream text;
  if (!in || !(text << in.rdbuf())) fail(file, "cannot be read", "give a run file, see docs/configuration.md");
  return parse_run_config(command, text.str(), file, overrides);
}

}  // namespace plumb
