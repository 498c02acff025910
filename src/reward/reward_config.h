// The rewards of a run file: [[reward]] tables and the [environment] table, see docs/rewards.md. One struct a kind, its
// members named as the keys; defaults are the initial values below. Times are in seconds.
#pragma once
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace plumb {

// Which text of the answer is judged: content, reasoning or text (all that was sampled).
struct ExactKeys {
  std::string field = "answer";
  std::string of = "content";
  bool ignore_case = false;
};

struct NumberKeys {
  std::string field = "answer";
  std::string of = "content";
  double tolerance = 1e-6;        // absolute
  double relative_tolerance = 0;  // of the expected number
};

struct RegexKeys {
  std::string pattern = {};  // this one or the one in `field`
  std::string field = {};
  std::string of = "content";
  bool full = false;
  bool ignore_case = false;
};

struct LengthKeys {
  double target = 0;
  double scale = 0;  // 0 = target
  std::string of = "content";
  std::string unit = "tokens";  // tokens, characters, words
};

struct ChoiceKeys {
  std::map<std::string, double> rewards = {};
  double otherwise = 0;
  std::string of = "content";
  bool ignore_case = false;
};

struct SchemaKeys {
  nlohmann::json schema = {};
  std::string of = "content";  // content, reasoning, text, arguments
  std::string tool = {};       // with arguments: only calls of this function; "" = all
};

struct ToolCallKeys {
  std::string field = "tool_call";
  bool any_order = false;
  double name_reward = 0;  // if only the names are right
};

struct ProgramKeys {
  std::vector<std::string> command = {};  // a text in the file is run by /bin/sh -c
  std::string directory = {};             // "" = where plumb runs
  std::map<std::string, std::string> environment = {};
  int64_t processes = 1;
  double time_limit = 10;      // of a request
  double start_limit = 30;     // more for the first request of a process
  int64_t retries = 1;         // in a fresh process, after a crash
  double restart_delay = 0.1;  // doubled with each crash in a row, at most 10
  int64_t max_line = 1 << 20;  // bytes of an answer
};

struct HttpKeys {
  std::string url = {};  // http://host[:port]/path
  std::map<std::string, std::string> headers = {};
  double time_limit = 10;      // of an attempt
  int64_t retries = 2;         // after a lost connection or a status of 500 and above
  double retry_delay = 0.2;    // doubled with each retry
  int64_t max_body = 1 << 20;  // bytes of an answer
};

struct RewardConfig {
  std::string kind;
  std::string name;  // of its metric; "" in the file = the kind. No two are equal.
  double weight = 1;
  std::variant<ExactKeys, NumberKeys, RegexKeys, LengthKeys, ChoiceKeys, SchemaKeys, ToolCallKeys, ProgramKeys,
               HttpKeys>
      keys;
  std::string where;  // file:line of the table, for errors
};

// What a run file says about rewards.
struct RewardTables {
  std::vector<RewardConfig> rewards;
  std::optional<ProgramKeys> environment;
};

// Reads the [[reward]] tables and [environment] of a TOML text and nothing else of it. Errors name file and line, the
// key and what is allowed; an unknown key, the nearest known one; neither of both, unless they may be absent.
RewardTables parse_rewards(const std::string& toml, const std::string& file, bool may_be_absent = false);

}  // namespace plumb
