#include "reward/reward_config.h"

#include <gmock/gmock.h>

#include "base/files.h"
#include "reward/reward_toml.h"
#include "reward/scorer.h"
#include "support/temp_path.h"
#include "testing.h"

namespace plumb {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

TEST(RewardConfig, ReadsEveryKind) {
  const auto rewards = parse_rewards(R"(
[model]
path = "ignored here"
[[reward]]
kind = "exact"
field = "solution"
of = "text"
ignore_case = true
[[reward]]
kind = "number"
weight = -2
tolerance = 0.5
[[reward]]
kind = "regex"
name = "format"
pattern = '^\d+$'
full = true
[[reward]]
kind = "length"
target = 10
unit = "words"
[[reward]]
kind = "choice"
rewards = { yes = 0.5, no = 0.75, maybe = 1 }
otherwise = -1
[[reward]]
kind = "json_schema"
of = "arguments"
tool = "f"
schema = { type = "object", required = ["x"], properties = { x = { type = "integer", maximum = 1.5 } } }
[[reward]]
kind = "tool_call"
any_order = true
[[reward]]
kind = "program"
command = "exec judge --fast"
processes = 4
time_limit = 0.5
environment = { A = "1" }
[[reward]]
kind = "program"
name = "second"
command = ["judge", "x"]
[[reward]]
kind = "http"
url = "http://localhost:8000/score"
headers = { Authorization = "token" }
)",
                                     "run.toml")
                           .rewards;
  ASSERT_EQ(rewards.size(), 10u);
  EXPECT_EQ(rewards[0].name, "exact");
  EXPECT_EQ(rewards[0].weight, 1);
  EXPECT_EQ(rewards[0].where, "run.toml:4");
  EXPECT_EQ(std::get<ExactKeys>(rewards[0].keys).field, "solution");
  EXPECT_EQ(std::get<ExactKeys>(rewards[0].keys).of, "text");
  EXPECT_TRUE(std::get<ExactKeys>(rewards[0].keys).ignore_case);
  EXPECT_EQ(rewards[1].weight, -2);
  EXPECT_EQ(std::get<NumberKeys>(rewards[1].keys).tolerance, 0.5);
  EXPECT_EQ(rewards[2].name, "format");
  EXPECT_EQ(std::get<RegexKeys>(rewards[2].keys).pattern, "^\\d+$");
  EXPECT_EQ(std::get<LengthKeys>(rewards[3].keys).scale, 10);  // the target
  EXPECT_EQ(std::get<LengthKeys>(rewards[3].keys).unit, "words");
  EXPECT_EQ(std::get<ChoiceKeys>(rewards[4].keys).rewards.at("maybe"), 1);
  EXPECT_EQ(std::get<ChoiceKeys>(rewards[4].keys).otherwise, -1);
  EXPECT_EQ(std::get<SchemaKeys>(rewards[5].keys).schema,
            nlohmann::json::parse(
                R"({"type":"object","required":["x"],"properties":{"x":{"type":"integer","maximum":1.5}}})"));
  EXPECT_TRUE(std::get<ToolCallKeys>(rewards[6].keys).any_order);
  const auto& program = std::get<ProgramKeys>(rewards[7].keys);
  EXPECT_EQ(program.command, (std::vector<std::string>{"/bin/sh", "-c", "exec judge --fast"}));
  EXPECT_EQ(program.processes, 4);
  EXPECT_EQ(program.time_limit, 0.5);
  EXPECT_EQ(program.environment.at("A"), "1");
  EXPECT_EQ(std::get<ProgramKeys>(rewards[8].keys).command, (std::vector<std::string>{"judge", "x"}));
  EXPECT_EQ(std::get<HttpKeys>(rewards[9].keys).headers.at("Authorization"), "token");
}

TEST(RewardConfig, Example) {
  const std::string path = PLUMB_SOURCE_DIR "/examples/rewards/rewards.toml";
  const auto rewards = parse_rewards(read_text(path), path).rewards;
  ASSERT_EQ(rewards.size(), 3u);
  EXPECT_EQ(rewards[1].name, "short");
  EXPECT_EQ(rewards[2].weight, 0.5);
}

TEST(RewardConfig, Schemas) {
  const auto schema_of = [](const std::string& key) {
    const auto rewards = parse_rewards("[[reward]]\nkind = \"json_schema\"\n" + key, "run.toml").rewards;
    return std::get<SchemaKeys>(rewards[0].keys).schema;
  };
  EXPECT_EQ(schema_of(R"(schema = '{"minimum": 2}')"), nlohmann::json({{"minimum", 2}}));
  const std::string path = testing::temp_path("schema.json");
  write_text(path, R"({"type": "string"})");
  EXPECT_EQ(schema_of("schema_file = '" + path + "'"), nlohmann::json({{"type", "string"}}));
  write_text(path, "no schema");
  EXPECT_EQ(error_of([&] { schema_of("schema_file = '" + path + "'"); }), path + ": is no JSON (write a JSON schema)");
  EXPECT_THAT(error_of([&] { schema_of("schema = '{'"); }),
              HasSubstr("run.toml:3: reward.schema = \"{\", must be a table"));
}

TEST(RewardConfig, ErrorsNameLineAndKey) {
  const std::vector<std::pair<std::string, std::string>> rows = {
      {"x = 1", "run.toml: has no reward (add a table [[reward]]"},
      {"[reward]\nkind = 'exact'", "run.toml:1: reward must be a list of tables"},
      {"reward = []", "run.toml:1: reward must be a list of tables"},
      {"[[reward]]\nweight = 1", "run.toml:1: reward.kind is missing"},
      {"[[reward]]\nkind = 'exakt'", "run.toml:2: reward.kind = \"exakt\", must be one of exact, number, regex"},
      {"[[reward]]\nkind = 'exact'\nfeild = 'x'", "run.toml:3: there is no key reward.feild (did you mean field?)"},
      {"[[reward]]\nkind = 'exact'\ntarget = 1",
       "run.toml:3: there is no key reward.target (known are kind, name, weight"},
      {"[[reward]]\nkind = 'exact'\nweight = 'x'", "run.toml:3: reward.weight = \"x\", must be a number"},
      {"[[reward]]\nkind = 'exact'\nweight = nan", "run.toml:3: reward.weight = nan, must be a number"},
      {"[[reward]]\nkind = 'exact'\nof = 'all'", "reward.of = \"all\", must be one of content, reasoning, text"},
      {"[[reward]]\nkind = 'exact'\nignore_case = 1", "reward.ignore_case = 1, must be true or false"},
      {"[[reward]]\nkind = 'number'\ntolerance = -1", "reward.tolerance = -1, must be a number of at least 0"},
      {"[[reward]]\nkind = 'regex'", "run.toml:1: reward.pattern and reward.field: exactly one of them"},
      {"[[reward]]\nkind = 'length'", "run.toml:1: reward.target is missing"},
      {"[[reward]]\nkind = 'length'\ntarget = 0", "reward.target = 0, must be a number greater than 0"},
      {"[[reward]]\nkind = 'length'\ntarget = 5\nof = 'text'", "run.toml:4: reward.of counts in characters and words"},
      {"[[reward]]\nkind = 'choice'\nrewards = { a = 'b' }", "must be a table of numbers"},
      {"[[reward]]\nkind = 'choice'", "run.toml:1: reward.rewards is missing"},
      {"[[reward]]\nkind = 'json_schema'", "reward.schema and reward.schema_file: exactly one"},
      {"[[reward]]\nkind = 'program'", "run.toml:1: reward.command is missing"},
      {"[[reward]]\nkind = 'program'\ncommand = []", "reward.command = [], must be a list of texts"},
      {"[[reward]]\nkind = 'program'\ncommand = ['a', 1]", "must be a list of texts or one text for the shell"},
      {"[[reward]]\nkind = 'program'\ncommand = 'a'\nprocesses = 0",
       "run.toml:4: reward.processes = 0, must be a whole number"},
      {"[[reward]]\nkind = 'http'\nurl = 'https://x/'", "TLS is not spoken here (put a proxy"},
      {"[[reward]]\nkind = 'http'\nurl = 'x'", "reward.url = \"x\", must be http://host[:port]/path"},
      {"[[reward]]\nkind = 'exact'\n[[reward]]\nkind = 'exact'", "run.toml:3: two rewards have the name \"exact\""},
      {"[[reward]]\nkind = ", "run.toml:2: not TOML"},
  };
  for (const auto& [toml, reason] : rows)
    EXPECT_THAT(error_of([&] { parse_rewards(toml, "run.toml"); }), HasSubstr(reason)) << toml;
}

TEST(RewardConfig, Environment) {
  const std::string file = "run.toml";
  const toml::table table = toml::parse("[environment]\ncommand = 'x'\nprocesses = 3\n", file);
  EXPECT_EQ(parse_environment(*table.get("environment"), file).processes, 3);
  const toml::table wrong = toml::parse("[environment]\ncommand = 'x'\nproceses = 3\n", file);
  EXPECT_EQ(error_of([&] { parse_environment(*wrong.get("environment"), file); }),
            "run.toml:3: there is no key environment.proceses (did you mean processes?)");
}

TEST(RewardConfig, WrongPartsAreFoundWhenTheyAreMade) {
  const auto made = [](const std::string& toml) { Scorer(parse_rewards(toml, "run.toml").rewards); };
  EXPECT_THAT(error_of([&] { made("[[reward]]\nkind = 'regex'\npattern = '('"); }), HasSubstr("run.toml:1: pattern ("));
  EXPECT_THAT(error_of([&] { made("[[reward]]\nkind = 'json_schema'\nschema = { type = 'text' }"); }),
              HasSubstr("run.toml:1: schema /type"));
  EXPECT_THAT(error_of([&] { made("[[reward]]\nkind = 'program'\ncommand = ['no-such-program-here']"); }),
              HasSubstr("program no-such-program-here: cannot be started: No such file"));
  EXPECT_THAT(error_of([&] { made("[[reward]]\nkind = 'http'\nurl = 'http://:5/'"); }),
              HasSubstr("run.toml:1: url http://:5/"));
}

}  // namespace
}  // namespace plumb
