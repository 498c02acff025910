#include "reward/json_schema.h"

#include <gmock/gmock.h>

#include "reward/verifiers.h"
#include "testing.h"

namespace plumb {
namespace {

using nlohmann::json;
using testing::error_of;
using ::testing::HasSubstr;
using testing::sample_of;

struct Row {
  const char* schema;
  std::vector<const char*> valid, invalid;
};

// Each keyword, from the text of the draft (draft-handrews-json-schema-validation-01) and not from this program.
TEST(JsonSchema, EveryKeyword) {
  const std::vector<Row> rows = {
      {"true", {"1", "null"}, {}},
      {"false", {}, {"1", "null"}},
      {"{}", {"1", "[]"}, {}},
      {R"({"type":"integer"})", {"1", "1.0", "-3", "1e3"}, {"1.5", "\"1\"", "true", "null"}},
      {R"({"type":"number"})", {"1", "1.5"}, {"\"1\"", "false"}},
      {R"({"type":["string","null"]})", {"\"a\"", "null"}, {"1", "[]"}},
      {R"({"type":"object"})", {"{}"}, {"[]", "1"}},
      {R"({"enum":[1,"a",[2],{"b":null}]})", {"1", "1.0", "\"a\"", "[2]", "{\"b\":null}"}, {"2", "\"b\"", "[]", "{}"}},
      {R"({"const":{"a":[1]}})", {R"({"a":[1]})"}, {R"({"a":[2]})", "{}", "1"}},
      {R"({"const":false})", {"false"}, {"0", "null"}},
      {R"({"multipleOf":3})", {"9", "0", "-6", "\"x\""}, {"4", "1.5"}},
      {R"({"multipleOf":0.1})", {"0.3", "1.1", "7"}, {"0.35"}},
      {R"({"maximum":3,"minimum":-1})", {"3", "-1", "0.5", "\"9\""}, {"3.01", "-2"}},
      {R"({"exclusiveMaximum":3,"exclusiveMinimum":-1})", {"2.99", "0"}, {"3", "-1"}},
      {R"({"minLength":2,"maxLength":3})", {"\"ab\"", "\"\u00e4\u20ac\U0001F600\"", "5"}, {"\"a\"", "\"abcd\""}},
      {R"({"pattern":"b+c"})", {"\"abbcd\"", "1"}, {"\"ab\""}},
      {R"({"items":{"type":"integer"}})", {"[]", "[1,2]", "{}"}, {"[1,\"a\"]"}},
      {R"({"items":[{"type":"integer"},{"type":"string"}]})", {"[1,\"a\",null]", "[1]"}, {"[\"a\"]", "[1,2]"}},
      {R"({"items":[true],"additionalItems":{"type":"null"}})", {"[1,null]", "[5]"}, {"[1,2]"}},
      {R"({"items":{},"additionalItems":false})", {"[1,2,3]"}, {}},
      {R"({"additionalItems":false})", {"[1,2]"}, {}},
      {R"({"minItems":1,"maxItems":2})", {"[1]", "[1,2]", "{}"}, {"[]", "[1,2,3]"}},
      {R"({"uniqueItems":true})", {"[1,2]", "[1,true]", "[{\"a\":1},{\"a\":2}]"}, {"[1,2,1.0]", "[[3],[3]]"}},
      {R"({"uniqueItems":false})", {"[1,1]"}, {}},
      {R"({"contains":{"minimum":5}})", {"[1,6]", "{}"}, {"[]", "[1,2]"}},
      {R"({"minProperties":1,"maxProperties":2})", {R"({"a":1})", "[]"}, {"{}", R"({"a":1,"b":2,"c":3})"}},
      {R"({"required":["a","b"]})", {R"({"a":1,"b":null,"c":0})", "[]"}, {R"({"a":1})", "{}"}},
      {R"({"properties":{"a":{"type":"integer"},"b":false}})",
       {R"({"a":1})", R"({"c":1})"},
       {R"({"a":"x"})", R"({"b":1})"}},
      {R"({"patternProperties":{"^n_":{"type":"number"}}})", {R"({"n_a":1,"x":"y"})"}, {R"({"n_a":"y"})"}},
      {R"({"properties":{"a":{}},"patternProperties":{"^n_":{}},"additionalProperties":false})",
       {R"({"a":1,"n_b":2})"},
       {R"({"c":3})"}},
      {R"({"additionalProperties":{"type":"string"}})", {R"({"a":"b"})"}, {R"({"a":1})"}},
      {R"({"propertyNames":{"maxLength":2}})", {R"({"ab":1})"}, {R"({"abc":1})"}},
      {R"({"dependencies":{"a":["b"],"c":{"required":["d"]}}})",
       {"{}", R"({"a":1,"b":2})", R"({"c":1,"d":2})", R"({"b":1})"},
       {R"({"a":1})", R"({"c":1})"}},
      {R"({"allOf":[{"minimum":1},{"maximum":3}]})", {"2"}, {"0", "4"}},
      {R"({"anyOf":[{"type":"string"},{"minimum":3}]})", {"\"a\"", "4"}, {"1"}},
      {R"({"oneOf":[{"minimum":1},{"maximum":3}]})", {"0", "4"}, {"2"}},
      {R"({"not":{"type":"null"}})", {"1"}, {"null"}},
      {R"({"if":{"minimum":10},"then":{"multipleOf":10},"else":{"multipleOf":2}})", {"20", "4"}, {"15", "5"}},
      {R"({"if":{"minimum":10},"then":{"multipleOf":10}})", {"20", "5"}, {"15"}},
      {R"({"then":{"const":1},"else":{"const":1}})", {"2"}, {}},
      {R"({"type":"string","format":"date","title":"t","default":1,"x-own":[]})", {"\"no date\""}, {"1"}},
      {R"({"definitions":{"p":{"type":"integer"}},"items":{"$ref":"#/definitions/p"}})", {"[1]"}, {"[\"a\"]"}},
      {R"({"definitions":{"a/b c":{"type":"integer"}},"$ref":"#/definitions/a~1b%20c"})", {"1"}, {"\"a\""}},
      {R"({"definitions":{"p":true},"properties":{"a":{"$ref":"#/definitions/p","type":"string"}}})",
       {R"({"a":1})"},
       {}},
      // A tree: nodes with children of the same kind.
      {R"({"type":"object","required":["v"],"properties":{"v":{"type":"integer"},"c":{"items":{"$ref":"#"}}}})",
       {R"({"v":1,"c":[{"v":2,"c":[]},{"v":3}]})"},
       {R"({"v":1,"c":[{"v":2,"c":[{}]}]})"}},
  };
  for (const Row& row : rows) {
    const JsonSchema schema(json::parse(row.schema), "run.toml:1");
    for (const char* value : row.valid)
      EXPECT_EQ(schema.violation(json::parse(value)), std::nullopt) << row.schema << " " << value;
    for (const char* value : row.invalid)
      EXPECT_TRUE(schema.violation(json::parse(value))) << row.schema << " " << value;
  }
}

TEST(JsonSchema, SaysWhereAndWhy) {
  const JsonSchema schema(json::parse(R"({"properties":{"a/b":{"items":{"type":"string"}}},"required":["x"]})"), "s");
  EXPECT_EQ(schema.violation(json::parse(R"({"x":1,"a/b":["s",3]})")), R"(/a~1b/1: is number 3, must be "string")");
  EXPECT_EQ(schema.violation(json::object()), R"(/: has no member "x")");
}

TEST(JsonSchema, WrongSchemasAreRefused) {
  const std::vector<std::pair<const char*, const char*>> rows = {
      {"1", "schema /: is no schema"},
      {R"({"type":"text"})", "schema /type: must be one of"},
      {R"({"properties":{"a":{"minimum":"1"}}})", "schema /properties/a/minimum: must be a number"},
      {R"({"items":[{"maxLength":-1}]})", "schema /items/0/maxLength: must be a whole number from 0"},
      {R"({"multipleOf":0})", "schema /multipleOf: must be a number above 0"},
      {R"({"pattern":"("})", "run.toml:1: schema /pattern: pattern (: missing closing"},
      {R"({"patternProperties":{"[":{}}})", "pattern [: missing terminating ]"},
      {R"({"anyOf":[]})", "schema /anyOf: must be a list of schemas"},
      {R"({"required":"a"})", "schema /required: must be a list of texts"},
      {R"({"$ref":"#/definitions/none"})", "schema /$ref: points at nothing"},
      {R"({"$ref":"http://example.org/s.json"})", "schema /$ref: points at nothing"},
      {R"({"prefixItems":[{}]})", "schema /prefixItems: is a keyword of a later draft"},
      {R"({"not":{"dependentRequired":{}}})", "schema /not/dependentRequired: is a keyword of a later draft"},
  };
  for (const auto& [schema, reason] : rows)
    EXPECT_THAT(error_of([&] { JsonSchema(json::parse(schema), "run.toml:1"); }), HasSubstr(reason)) << schema;
}

TEST(JsonSchema, NothingIsEndless) {
  const JsonSchema circle(json::parse(R"({"allOf":[{"$ref":"#"}]})"), "s");
  EXPECT_THAT(error_of([&] { circle.violation(1); }), HasSubstr("refers to itself in a circle"));
  // Two ways to fail at every level: 2^60 of them.
  json doubling = {{"type", "object"},
                   {"anyOf", {{{"properties", {{"a", {{"$ref", "#"}}}}}}, {{"properties", {{"a", {{"$ref", "#"}}}}}}}}};
  json value = 1;
  for (int k = 0; k < 60; ++k) value = {{"a", value}};
  EXPECT_THAT(error_of([&] { JsonSchema(doubling, "s").violation(value); }), HasSubstr("given up after 200000 steps"));
  const JsonSchema evil(json::parse(R"({"pattern":"^(a+)+$"})"), "s");
  EXPECT_THROW(evil.violation(std::string(100, 'a') + "b"), Error);
}

TEST(SchemaReward, ContentAndArguments) {
  const json schema = json::parse(R"({"type":"object","required":["x"],"properties":{"x":{"type":"integer"}}})");
  const auto content = make_verifier(SchemaKeys{.schema = schema}, "run.toml:1");
  EXPECT_EQ(content->score(sample_of(R"( {"x": 1} )")).reward, 1);
  EXPECT_EQ(content->score(sample_of(R"({"x": "1"})")).reward, 0);
  EXPECT_EQ(content->score(sample_of(R"({"x": "1"})")).metrics.at("is_json"), 1);
  EXPECT_EQ(content->score(sample_of("```json\n{\"x\": 1}\n```")).metrics.at("is_json"), 0);
  EXPECT_EQ(content->score(sample_of(std::string(100'000, '['))).reward, 0);

  const auto arguments = make_verifier(SchemaKeys{.schema = schema, .of = "arguments", .tool = "f"}, "run.toml:1");
  RewardSample sample = sample_of(R"({"x": 1})");
  EXPECT_EQ(arguments->score(sample).reward, 0);  // no call
  sample.answer.calls = {{"1", "f", R"({"x": 1})"}, {"2", "g", "{}"}};
  EXPECT_EQ(arguments->score(sample).reward, 1);  // g is not asked about
  sample.answer.calls.push_back({"3", "f", "{}"});
  EXPECT_EQ(arguments->score(sample).reward, 0);  // all calls of f
}

}  // namespace
}  // namespace plumb
