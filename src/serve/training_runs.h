// What the files of a run say, as JSON for the training view: the run at a glance, its figures and its warnings from
// some place on. docs/watch.md has the members.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "serve/training_folder.h"

namespace plumb::serve {

// {run, command, state, step, total_steps, started, updated, age_seconds, has_samples, latest}
nlohmann::json run_at_a_glance(const OpenFile& run, const std::string& name);

// Where the reader is in a file: the identity and `next` of the reply before; {"", 0} at first.
struct Place {
  std::string file;
  uint64_t from = 0;
};

// {file, from, next, more, skipped, lines}: lines of metrics.jsonl from the place on, up to about a megabyte. `from` is
// 0 if the file is another one than before or the place is not where a line begins: then the reader starts over.
// skipped: lines that are no object with an integer "step".
nlohmann::json metrics_from(const OpenFile& run, const Place& place);

// The same of log.txt: its warnings and errors, {time, level, message}.
nlohmann::json warnings_from(const OpenFile& run, const Place& place);

// The members of an object that are numbers. Other ones may be anything, also nested so deeply that writing them would
// exhaust the stack.
nlohmann::json numbers_of(const nlohmann::json& object);

// A value of the run's config.toml: value_in(text, "model", "path"). Strings without their quotes; "" if it is not
// there. Reads what to_toml (config/run_config.h) writes, without refusing the keys of other versions.
std::string value_in(const std::string& toml, const std::string& table, const std::string& key);
std::string config_text(const OpenFile& run);  // "" if there is none

}  // namespace plumb::serve
