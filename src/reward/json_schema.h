// JSON Schema, draft 7, for values that a model wrote: there are limits on the steps of a pattern, on those of a
// validation and on its depth, so that no value can hang or overflow it.
//
// All keywords of the draft's core and validation vocabulary. $ref may point anywhere inside of the schema ("#/..."),
// not outside of it. Annotations (title, default, format, contentMediaType, ...) are not judged. Keywords that came
// with later drafts are errors, since ignoring them would accept what the author meant to refuse.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "reward/pattern.h"

namespace plumb {

class JsonSchema {
 public:
  // Error: `where`, the place in the schema, what its keyword must be.
  JsonSchema(nlohmann::json schema, const std::string& where);

  // The first reason why the value is not valid, with its place: "/items/3: is a number, must be string". Nothing if it
  // is valid. Error: too many steps (200,000 subschemas), or references that lead in a circle.
  std::optional<std::string> violation(const nlohmann::json& value) const;

 private:
  friend class SchemaCheck;
  friend class SchemaWalk;
  nlohmann::json schema_;
  std::string where_;
  std::map<std::string, Pattern> patterns_;  // by their text
};

}  // namespace plumb
