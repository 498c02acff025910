// The table of keys of a run file. Private to the room.
#pragma once
#include <functional>
#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "config/run_config.h"

namespace plumb {

// Where a key's value lives; the alternative is the key's type.
using FieldRef = std::variant<bool*, int64_t*, double*, std::string*, std::vector<std::string>*>;

struct Range {
  double min = 0;
  double max = 0;          // may be infinite
  bool above_min = false;  // min itself is not allowed
  bool below_max = false;
};

struct Field {
  std::string key;  // "table.name"
  std::function<FieldRef(RunConfig&)> value;
  Range range = {};                       // numbers
  std::vector<std::string> choices = {};  // texts and lists; empty = any text
  bool required = false;                  // must be given and not be empty
  std::string unit = "";                  // "" = none
  std::string help = "";
  std::vector<RunCommand> commands = {RunCommand::train, RunCommand::dpo, RunCommand::rl, RunCommand::pretrain};

  std::string table() const { return key.substr(0, key.find('.')); }
  std::string name() const { return key.substr(key.find('.') + 1); }
  bool belongs_to(RunCommand command) const;
};

template <class Keys, class Value>
std::function<FieldRef(RunConfig&)> at(Keys RunConfig::*table, Value Keys::*member) {
  return [=](RunConfig& config) -> FieldRef { return &(config.*table.*member); };
}
inline Range from(double min, double max = std::numeric_limits<double>::infinity()) { return {.min = min, .max = max}; }
std::vector<Field> rl_fields();  // [rl], [distill], [sampling], [eval]

// In the order of the documentation, tables together.
const std::vector<Field>& run_fields();

const char* name(RunCommand command);

// What a value must be, to stand behind "must be": "a number greater than 0 and at most 1".
std::string expectation(const Field& field);

// The [[reward]] tables and [environment] of the run file as TOML; "" without any.
std::string reward_tables(const RunConfig& config);

// The value as TOML.
std::string toml_value(const Field& field, const RunConfig& config);

}  // namespace plumb
