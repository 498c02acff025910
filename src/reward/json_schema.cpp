#include "reward/json_schema.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.h"
#include "reward/json_text.h"

namespace plumb {

using nlohmann::json;

namespace {

constexpr int kSteps = 200'000;         // of subschemas; some tenths of a second
constexpr int kDepth = 2 * kJsonDepth;  // schemas inside schemas; what goes deeper goes in a circle

enum class Shape {
  schema,
  schemas,
  schema_map,
  schema_or_schemas,
  dependencies,
  text,
  pattern,
  texts,
  number,
  positive,
  count,
  flag,
  types,
  list
};

const std::map<std::string, Shape>& shapes() {
  static const std::map<std::string, Shape> table = {
      {"type", Shape::types},
      {"enum", Shape::list},
      {"multipleOf", Shape::positive},
      {"maximum", Shape::number},
      {"exclusiveMaximum", Shape::number},
      {"minimum", Shape::number},
      {"exclusiveMinimum", Shape::number},
      {"maxLength", Shape::count},
      {"minLength", Shape::count},
      {"pattern", Shape::pattern},
      {"items", Shape::schema_or_schemas},
      {"additionalItems", Shape::schema},
      {"maxItems", Shape::count},
      {"minItems", Shape::count},
      {"uniqueItems", Shape::flag},
      {"contains", Shape::schema},
      {"maxProperties", Shape::count},
      {"minProperties", Shape::count},
      {"required", Shape::texts},
      {"properties", Shape::schema_map},
      {"patternProperties", Shape::schema_map},
      {"additionalProperties", Shape::schema},
      {"dependencies", Shape::dependencies},
      {"propertyNames", Shape::schema},
      {"if", Shape::schema},
      {"then", Shape::schema},
      {"else", Shape::schema},
      {"allOf", Shape::schemas},
      {"anyOf", Shape::schemas},
      {"oneOf", Shape::schemas},
      {"not", Shape::schema},
      {"definitions", Shape::schema_map},
      {"$defs", Shape::schema_map},  // of a later draft, but common, and harmless: only $ref looks there
      {"$ref", Shape::text},
  };
  return table;
}

const std::set<std::string> kLater = {"prefixItems",       "minContains",      "maxContains",
                                      "dependentRequired", "dependentSchemas", "unevaluatedProperties",
                                      "unevaluatedItems",  "$dynamicRef",      "$recursiveRef"};
const std::set<std::string> kTypes = {"null", "boolean", "object", "array", "number", "string", "integer"};

bool is_whole(const json& value) {
  if (value.is_number_integer()) return true;
  return value.is_number_float() && std::trunc(value.get<double>()) == value.get<double>();
}

bool has_type(const json& value, const std::string& type) {
  if (type == "integer") return is_whole(value);
  return type == (value.is_number() ? "number" : value.type_name());
}

// JSON pointers write ~ as ~0 and / as ~1.
std::string escaped(const std::string& key) {
  std::string out;
  for (char c : key) out += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
  return out;
}

// "#/a%20b" as the pointer "/a b".
std::string pointer_of(const std::string& ref) {
  std::string out;
  for (size_t k = 1; k < ref.size(); ++k) {
    if (ref[k] == '%' && k + 2 < ref.size() && isxdigit(ref[k + 1]) && isxdigit(ref[k + 2])) {
      out += static_cast<char>(std::stoi(ref.substr(k + 1, 2), nullptr, 16));
      k += 2;
    } else {
      out += ref[k];
    }
  }
  return out;
}

const json* find_ref(const json& root, const std::string& ref) {
  if (ref == "#") return &root;
  if (!ref.starts_with("#/")) return nullptr;
  return find_field(root, pointer_of(ref));
}

int64_t characters(const std::string& text) {
  return std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

bool is_multiple(double value, double of) {
  const double quotient = value / of;
  // 0.3 is a multiple of 0.1 although neither is exact: a quotient is whole up to its rounding.
  return std::abs(quotient - std::round(quotient)) <= 1e-12 * std::max(1.0, std::abs(quotient));
}

bool all_differ(const json& list) {
  std::vector<const json*> items;
  for (const json& item : list) items.push_back(&item);
  std::ranges::sort(items, [](const json* a, const json* b) { return *a < *b; });
  return std::ranges::adjacent_find(items, [](const json* a, const json* b) { return *a == *b; }) == items.end();
}

}  // namespace

// Looks at every subschema once, compiles the patterns, and refuses what is no draft 7.
class SchemaWalk {
 public:
  explicit SchemaWalk(JsonSchema& schema) : schema_(schema) {}

  void walk(const json& node, const std::string& at) {
    if (node.is_boolean()) return;
    if (!node.is_object()) refuse(at, "is no schema", "a schema is an object, true or false");
    if (node.contains("$ref")) {  // what stands beside it does not count
      const json& ref = node["$ref"];
      if (!ref.is_string() || !find_ref(schema_.schema_, ref.get<std::string>()))
        refuse(at + "/$ref", "points at nothing inside of this schema", "write \"#\" or \"#/definitions/NAME\"");
    }
    for (const auto& [key, value] : node.items()) {
      const std::string place = at + "/" + escaped(key);
      if (kLater.contains(key)) refuse(place, "is a keyword of a later draft than 7", "write it with those of draft 7");
      if (const auto shape = shapes().find(key); shape != shapes().end()) check(shape->second, key, value, place);
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& at, const std::string& what, const std::string& fix = "") {
    fail(schema_.where_, fmt::format("schema {}: {}", at.empty() ? "/" : at, what), fix);
  }

  void walk_all(const json& nodes, const std::string& at) {
    for (size_t k = 0; k < nodes.size(); ++k) walk(nodes[k], fmt::format("{}/{}", at, k));
  }

  void walk_map(const std::string& key, const json& value, const std::string& at) {
    if (!value.is_object()) refuse(at, "must be an object of schemas");
    for (const auto& [name, node] : value.items()) {
      if (key == "patternProperties") add_pattern(name, at);
      const bool names = key == "dependencies" && node.is_array();
      names ? check(Shape::texts, key, node, at + "/" + escaped(name)) : walk(node, at + "/" + escaped(name));
    }
  }

  void add_pattern(const std::string& text, const std::string& at) {
    if (!schema_.patterns_.contains(text))
      schema_.patterns_.emplace(text, Pattern(text, {}, fmt::format("{}: schema {}", schema_.where_, at)));
  }

  void check(Shape shape, const std::string& key, const json& value, const std::string& at) {
    const bool texts = value.is_array() && std::ranges::all_of(value, [](const json& v) { return v.is_string(); });
    switch (shape) {
      case Shape::schema:
        return walk(value, at);
      case Shape::schemas:
        if (!value.is_array() || value.empty()) refuse(at, "must be a list of schemas");
        return walk_all(value, at);
      case Shape::schema_or_schemas:
        return value.is_array() ? walk_all(value, at) : walk(value, at);
      case Shape::schema_map:
      case Shape::dependencies:
        return walk_map(key, value, at);
      case Shape::pattern:
        if (!value.is_string()) refuse(at, "must be a text");
        return add_pattern(value, at);
      case Shape::types:
        for (const json& type : value.is_array() ? value : json::array({value}))
          if (!type.is_string() || !kTypes.contains(type))
            refuse(at, fmt::format("must be one of {} or a list of these", fmt::join(kTypes, ", ")));
        return;
      case Shape::text:
        return value.is_string() ? void() : refuse(at, "must be a text");
      case Shape::texts:
        return texts ? void() : refuse(at, "must be a list of texts");
      case Shape::list:
        return value.is_array() ? void() : refuse(at, "must be a list");
      case Shape::flag:
        return value.is_boolean() ? void() : refuse(at, "must be true or false");
      case Shape::number:
        return value.is_number() ? void() : refuse(at, "must be a number");
      case Shape::positive:
        return value.is_number() && value > 0 ? void() : refuse(at, "must be a number above 0");
      case Shape::count:
        return is_whole(value) && value >= 0 ? void() : refuse(at, "must be a whole number from 0");
    }
  }

  JsonSchema& schema_;
};

// One validation. check() of a subschema is true or leaves the first reason in `reason`.
class SchemaCheck {
 public:
  explicit SchemaCheck(const JsonSchema& schema) : schema_(schema) {}
  std::string reason;

  bool check(const json& s, const json& v, const std::string& at) {
    if (s.is_boolean()) return s.get<bool>() || no(at, "is not allowed");
    if (++steps_ > kSteps || depth_ > kDepth)
      fail(schema_.where_,
           depth_ > kDepth ? "the schema refers to itself in a circle"
                           : fmt::format("validation was given up after {} steps", kSteps),
           "simplify the schema");
    ++depth_;
    const bool valid = s.contains("$ref") ? check(*find_ref(schema_.schema_, s["$ref"]), v, at)
                                          : general(s, v, at) && typed(s, v, at) && combined(s, v, at);
    --depth_;
    return valid;
  }

 private:
  bool no(const std::string& at, const std::string& what) {
    reason = fmt::format("{}: {}", at.empty() ? "/" : at, what);
    return false;
  }

  // Calls test(value of the keyword) if the schema has it.
  template <class Test>
  static bool keyword(const json& s, const char* key, Test test) {
    const auto found = s.find(key);
    return found == s.end() || test(*found);
  }

  // Whether v is valid, without leaving a reason.
  bool quietly(const json& s, const json& v, const std::string& at) {
    const std::string kept = reason;
    const bool valid = check(s, v, at);
    reason = kept;
    return valid;
  }

  bool general(const json& s, const json& v, const std::string& at) {
    return keyword(s, "type",
                   [&](const json& types) {
                     for (const json& type : types.is_array() ? types : json::array({types}))
                       if (has_type(v, type)) return true;
                     return no(at, fmt::format("is {} {}, must be {}", v.is_number() ? "number" : v.type_name(),
                                               shortened(json_line(v), 60), types.dump()));
                   }) &&
           keyword(s, "enum",
                   [&](const json& list) {
                     return std::ranges::find(list, v) != list.end() ||
                            no(at, fmt::format("is {}, must be one of {}", shortened(json_line(v), 60),
                                               shortened(json_line(list))));
                   }) &&
           keyword(s, "const", [&](const json& wanted) {
             return v == wanted ||
                    no(at, fmt::format("is {}, must be {}", shortened(json_line(v), 60), shortened(json_line(wanted))));
           });
  }

  bool typed(const json& s, const json& v, const std::string& at) {
    if (v.is_number()) return number(s, v, at);
    if (v.is_string()) return text(s, v.get_ref<const std::string&>(), at);
    if (v.is_array()) return list(s, v, at);
    return !v.is_object() || object(s, v, at);
  }

  bool number(const json& s, const json& v, const std::string& at) {
    const auto bound = [&](const char* key, auto holds, const char* word) {
      return keyword(s, key, [&](const json& b) {
        return holds(v, b) || no(at, fmt::format("is {}, must be {} {}", v.dump(), word, b.dump()));
      });
    };
    return bound("maximum", std::less_equal<json>(), "at most") &&
           bound("minimum", std::greater_equal<json>(), "at least") &&
           bound("exclusiveMaximum", std::less<json>(), "less than") &&
           bound("exclusiveMinimum", std::greater<json>(), "greater than") &&
           bound(
               "multipleOf",
               [](const json& a, const json& b) {
                 return a.is_number_integer() && b.is_number_integer() ? a.get<int64_t>() % b.get<int64_t>() == 0
                                                                       : is_multiple(a.get<double>(), b.get<double>());
               },
               "a multiple of");
  }

  // The keywords that bound a count of something.
  bool counted(const json& s, const char* least, const char* most, int64_t count, const char* what,
               const std::string& at) {
    return keyword(s, least,
                   [&](const json& n) {
                     return count >= n.get<int64_t>() ||
                            no(at, fmt::format("has {} {}, must have at least {}", count, what, n.get<int64_t>()));
                   }) &&
           keyword(s, most, [&](const json& n) {
             return count <= n.get<int64_t>() ||
                    no(at, fmt::format("has {} {}, must have at most {}", count, what, n.get<int64_t>()));
           });
  }

  bool text(const json& s, const std::string& v, const std::string& at) {
    return counted(s, "minLength", "maxLength", characters(v), "characters", at) &&
           keyword(s, "pattern", [&](const json& pattern) {
             return schema_.patterns_.at(pattern).find(v) || no(at, "does not match " + pattern.get<std::string>());
           });
  }

  bool list(const json& s, const json& v, const std::string& at) {
    if (!counted(s, "minItems", "maxItems", static_cast<int64_t>(v.size()), "items", at)) return false;
    if (s.value("uniqueItems", false) && !all_differ(v)) return no(at, "has an item twice");
    for (size_t k = 0; k < v.size(); ++k) {
      const std::string place = fmt::format("{}/{}", at, k);
      const bool valid = keyword(s, "items", [&](const json& items) {
        if (!items.is_array()) return check(items, v[k], place);
        if (k < items.size()) return check(items[k], v[k], place);
        return keyword(s, "additionalItems", [&](const json& rest) { return check(rest, v[k], place); });
      });
      if (!valid) return false;
    }
    return keyword(s, "contains", [&](const json& one) {
      return std::ranges::any_of(v, [&](const json& item) { return quietly(one, item, at); }) ||
             no(at, "has no item that is valid under contains");
    });
  }

  bool object(const json& s, const json& v, const std::string& at) {
    return counted(s, "minProperties", "maxProperties", static_cast<int64_t>(v.size()), "members", at) &&
           keyword(s, "required",
                   [&](const json& names) {
                     for (const json& name : names)
                       if (!v.contains(name)) return no(at, fmt::format("has no member {}", name.dump()));
                     return true;
                   }) &&
           keyword(s, "dependencies", [&](const json& all) { return dependencies(all, v, at); }) && members(s, v, at);
  }

  bool dependencies(const json& all, const json& v, const std::string& at) {
    for (const auto& [name, needs] : all.items()) {
      if (!v.contains(name)) continue;
      if (!needs.is_array()) {
        if (!check(needs, v, at)) return false;
        continue;
      }
      for (const json& other : needs)
        if (!v.contains(other)) return no(at, fmt::format("has \"{}\" and no member {}", name, other.dump()));
    }
    return true;
  }

  bool members(const json& s, const json& v, const std::string& at) {
    for (const auto& [name, value] : v.items()) {
      const std::string place = at + "/" + escaped(name);
      bool known = false;
      const bool valid =
          keyword(s, "propertyNames", [&](const json& names) { return check(names, json(name), place); }) &&
          keyword(s, "properties",
                  [&](const json& all) {
                    if (!all.contains(name)) return true;
                    known = true;
                    return check(all[name], value, place);
                  }) &&
          keyword(s, "patternProperties", [&](const json& all) {
            for (const auto& [pattern, one] : all.items()) {
              if (!schema_.patterns_.at(pattern).find(name)) continue;
              known = true;
              if (!check(one, value, place)) return false;
            }
            return true;
          });
      if (!valid) return false;
      if (!known && !keyword(s, "additionalProperties", [&](const json& rest) { return check(rest, value, place); }))
        return false;
    }
    return true;
  }

  bool combined(const json& s, const json& v, const std::string& at) {
    return keyword(s, "allOf",
                   [&](const json& all) {
                     return std::ranges::all_of(all, [&](const json& one) { return check(one, v, at); });
                   }) &&
           keyword(s, "anyOf",
                   [&](const json& any) {
                     return std::ranges::any_of(any, [&](const json& one) { return quietly(one, v, at); }) ||
                            no(at, "is valid under no schema of anyOf");
                   }) &&
           keyword(s, "oneOf",
                   [&](const json& one) {
                     const auto valid = std::ranges::count_if(one, [&](const json& o) { return quietly(o, v, at); });
                     return valid == 1 || no(at, fmt::format("is valid under {} schemas of oneOf, must be 1", valid));
                   }) &&
           keyword(s, "not",
                   [&](const json& other) { return !quietly(other, v, at) || no(at, "is valid under not"); }) &&
           keyword(s, "if", [&](const json& condition) {
             const char* branch = quietly(condition, v, at) ? "then" : "else";
             return keyword(s, branch, [&](const json& one) { return check(one, v, at); });
           });
  }

  const JsonSchema& schema_;
  int steps_ = 0, depth_ = 0;
};

JsonSchema::JsonSchema(json schema, const std::string& where) : schema_(std::move(schema)), where_(where) {
  SchemaWalk(*this).walk(schema_, "");
}

std::optional<std::string> JsonSchema::violation(const json& value) const {
  SchemaCheck check(*this);
  if (check.check(schema_, value, "")) return std::nullopt;
  return check.reason;
}

}  // namespace plumb
