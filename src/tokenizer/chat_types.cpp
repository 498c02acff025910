#include "tokenizer/chat_types.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "base/error.h"

namespace plumb {
namespace {

template <class Value>
using Names = std::span<const std::pair<std::string_view, Value>>;

constexpr std::pair<std::string_view, ChatRole> kRoles[] = {
    {"system", ChatRole::system}, {"developer", ChatRole::developer},
    {"user", ChatRole::user},     {"assistant", ChatRole::assistant},
    {"tool", ChatRole::tool},     {"latest_reminder", ChatRole::latest_reminder}};
constexpr std::pair<std::string_view, ChatTask> kTasks[] = {
    {"action", ChatTask::action}, {"query", ChatTask::query}, {"authority", ChatTask::authority},
    {"domain", ChatTask::domain}, {"title", ChatTask::title}, {"read_url", ChatTask::read_url}};
constexpr std::pair<std::string_view, ThinkingMode> kModes[] = {{"chat", ThinkingMode::chat},
                                                                {"thinking", ThinkingMode::thinking}};
constexpr std::pair<std::string_view, EffortProfile> kProfiles[] = {{"preview", EffortProfile::preview},
                                                                    {"official", EffortProfile::official}};

[[noreturn]] void wrong_type(const std::string& where, const Json& v, std::string_view expected) {
  fail(where, fmt::format("{} expected, {} found", expected, kind_name(v.kind)));
}

const Json& expect(const Json& v, Json::Kind kind, const std::string& where) {
  if (v.kind != kind) wrong_type(where, v, kind_name(kind));
  return v;
}

const std::string& string_at(const Json& v, const std::string& where) {
  return expect(v, Json::Kind::string, where).text;
}
bool bool_at(const Json& v, const std::string& where) { return expect(v, Json::Kind::boolean, where).boolean; }

template <class Value, size_t N>
Value name_at(const Json& v, const std::pair<std::string_view, Value> (&names)[N], const std::string& where) {
  const std::string& name = string_at(v, where);
  std::vector<std::string_view> allowed;
  for (const auto& [known, value] : names) {
    if (known == name) return value;
    allowed.push_back(known);
  }
  fail(where, fmt::format("\"{}\" is not known", name), fmt::format("use one of {}", fmt::join(allowed, ", ")));
}

void check_keys(const Json& object, std::span<const std::string_view> allowed, const std::string& where) {
  for (const JsonMember& m : object.members) {
    bool empty = m.value.is_null() || (m.value.is_array() && m.value.items.empty());
    if (empty || std::find(allowed.begin(), allowed.end(), m.key) != allowed.end()) continue;
    fail(where, fmt::format("unknown key \"{}\"", m.key), fmt::format("allowed: {}", fmt::join(allowed, ", ")));
  }
}

// Strings as they are, lists of blocks joined by an empty line, null as the empty string where the role allows it.
std::string content_at(const Json* v, ChatRole role, const std::string& where) {
  bool may_be_null = role == ChatRole::system || role == ChatRole::assistant;
  if (!v || v->is_null()) {
    if (!may_be_null)
      fail(where, "content is missing or null", "give a string; it may be empty for user and tool messages");
    return "";
  }
  if (v->is_string()) return v->text;
  if (!v->is_array()) wrong_type(where, *v, "a string or a list of blocks");
  std::string out;
  for (size_t i = 0; i < v->items.size(); ++i) {
    std::string block_where = fmt::format("{}[{}]", where, i);
    const Json& block = expect(v->items[i], Json::Kind::object, block_where);
    const Json* type = block.find("type");
    if (!type) fail(block_where, "the block has no type", "use {\"type\": \"text\", \"text\": ...}");
    const std::string& name = string_at(*type, block_where + ".type");
    const Json* text = block.find("text");
    if (i) out += "\n\n";
    if (name == "text") {
      if (!text) fail(block_where, "the text block has no text", "add the key text");
      out += string_at(*text, block_where + ".text");
    } else if (role == ChatRole::tool) {
      out += "[Unsupported " + name + "]";
    } else {
      fail(block_where, fmt::format("blocks of type \"{}\" cannot be written", name),
           "this model reads text blocks only");
    }
  }
  return out;
}

std::vector<ToolCall> calls_at(const Json& list, const std::string& where) {
  static constexpr std::string_view kKeys[] = {"id", "type", "function", "index"};
  static constexpr std::string_view kFunctionKeys[] = {"name", "arguments"};
  std::vector<ToolCall> calls;
  for (size_t i = 0; i < expect(list, Json::Kind::array, where).items.size(); ++i) {
    std::string call_where = fmt::format("{}[{}]", where, i), function_where = call_where + ".function";
    const Json& call = expect(list.items[i], Json::Kind::object, call_where);
    check_keys(call, kKeys, call_where);
    const Json* function = call.find("function");
    if (!function) fail(call_where, "the call has no function", "add {\"name\": ..., \"arguments\": \"{...}\"}");
    check_keys(expect(*function, Json::Kind::object, function_where), kFunctionKeys, function_where);
    const Json *id = call.find("id"), *name = function->find("name"), *arguments = function->find("arguments");
    if (!name || !arguments) fail(function_where, "name or arguments are missing", "give both");
    // Arguments are JSON text in OpenAI's form; some clients give the object itself.
    calls.push_back(
        {id && !id->is_null() ? string_at(*id, call_where + ".id") : "", string_at(*name, function_where + ".name"),
         arguments->is_object() ? python_dumps(*arguments) : string_at(*arguments, function_where + ".arguments")});
  }
  return calls;
}

std::vector<Json> tools_at(const Json& list, const std::string& where) {
  std::vector<Json> functions;
  for (size_t i = 0; i < expect(list, Json::Kind::array, where).items.size(); ++i) {
    std::string tool_where = fmt::format("{}[{}]", where, i);
    const Json& tool = expect(list.items[i], Json::Kind::object, tool_where);
    if (const Json* type = tool.find("type"); type && string_at(*type, tool_where + ".type") != "function")
      fail(tool_where, fmt::format("type \"{}\" is not known", type->text), "only tools of type function exist");
    const Json* function = tool.find("function");
    if (!function || !function->is_object()) fail(tool_where, "the tool has no function object", "add {\"name\": ...}");
    const Json* name = function->find("name");
    if (!name || !name->is_string()) fail(tool_where + ".function", "the function has no name", "add a name, a string");
    functions.push_back(*function);
  }
  return functions;
}

bool trained_at(const Json& weight, const std::string& where) {
  if (weight.kind == Json::Kind::number && (weight.text == "0" || weight.text == "1")) return weight.text == "1";
  fail(where, "weight must be 0 (not trained) or 1", "use 0 or 1");
}

void only_for(bool right_role, const std::string& where, std::string_view key, std::string_view roles) {
  if (!right_role) fail(where, fmt::format("{} is given", key), fmt::format("only {} messages have it", roles));
}

Message message_from_json(const Json& json, const std::string& where) {
  static constexpr std::string_view kKeys[] = {"role",   "content",      "reasoning_content", "reasoning", "tool_calls",
                                               "tools",  "tool_call_id", "response_format",   "task",      "wo_eos",
                                               "weight", "name"};
  expect(json, Json::Kind::object, where);
  check_keys(json, kKeys, where);
  auto present = [&](std::string_view key) -> const Json* {
    const Json* v = json.find(key);
    return v && !v->is_null() ? v : nullptr;
  };
  const Json* role = present("role");
  if (!role) fail(where, "the message has no role", "add one, for example \"user\"");
  Message m;
  m.role = name_at(*role, kRoles, where + ".role");
  bool assistant = m.role == ChatRole::assistant;
  m.content = content_at(json.find("content"), m.role, where + ".content");
  if (m.role == ChatRole::developer && m.content.empty())
    fail(where + ".content", "a developer message must not be empty", "give a text or use a system message");

  const Json *reasoning = present("reasoning_content"), *other = present("reasoning");
  if (reasoning && other && reasoning->text != other->text)
    fail(where, "reasoning and reasoning_content differ", "give one of them");
  if (!reasoning) reasoning = other;
  if (reasoning) m.reasoning = string_at(*reasoning, where + ".reasoning_content");
  only_for(assistant || m.reasoning.empty(), where, "reasoning_content", "assistant");
  if (const Json* v = present("tool_calls")) m.calls = calls_at(*v, where + ".tool_calls");
  only_for(assistant || m.calls.empty(), where, "tool_calls", "assistant");
  if (const Json* v = present("tool_call_id")) m.call_id = string_at(*v, where + ".tool_call_id");
  if (m.role == ChatRole::tool && !present("tool_call_id"))
    fail(where, "tool_call_id is missing", "name the call that this message answers");
  only_for(m.role == ChatRole::tool || m.call_id.empty(), where, "tool_call_id", "tool");

  if (const Json* v = present("tools")) m.tools = tools_at(*v, where + ".tools");
  if (const Json* v = present("response_format")) m.schema = expect(*v, Json::Kind::object, where + ".response_format");
  only_for(m.role == ChatRole::system || m.role == ChatRole::developer || !m.schema, where, "response_format",
           "system and developer");
  if (const Json* v = present("task")) m.task = name_at(*v, kTasks, where + ".task");
  if (const Json* v = present("wo_eos")) m.unfinished = bool_at(*v, where + ".wo_eos");
  only_for(assistant || !m.unfinished, where, "wo_eos", "assistant");
  if (const Json* v = present("weight")) m.trained = trained_at(*v, where + ".weight");
  return m;
}

Message& instruction_message(std::vector<Message>& messages) {
  bool first = !messages.empty() && (messages[0].role == ChatRole::system || messages[0].role == ChatRole::developer);
  if (!first) {
    Message system;
    system.role = ChatRole::system;
    messages.insert(messages.begin(), system);
  }
  return messages[0];
}

}  // namespace

std::vector<Message> messages_from_json(const Json& messages, const Json* tools) {
  std::vector<Message> out;
  for (const Json& m : expect(messages, Json::Kind::array, "messages").items)
    out.push_back(message_from_json(m, fmt::format("messages[{}]", out.size())));
  if (tools && !tools->is_null()) {
    std::vector<Json> functions = tools_at(*tools, "tools");
    if (!functions.empty()) instruction_message(out).tools = std::move(functions);
  }
  return out;
}

ChatOptions chat_options_from_json(const Json& json, const std::string& where, ChatOptions options) {
  static constexpr std::string_view kKeys[] = {"thinking_mode",    "drop_thinking",         "effort_profile",
                                               "reasoning_effort", "add_default_bos_token", "context"};
  expect(json, Json::Kind::object, where);
  check_keys(json, kKeys, where);
  for (const JsonMember& m : json.members) {
    if (m.value.is_null()) continue;
    std::string at = where + "." + m.key;
    if (m.key == "thinking_mode") options.mode = name_at(m.value, kModes, at);
    if (m.key == "drop_thinking") options.drop_thinking = bool_at(m.value, at);
    if (m.key == "effort_profile") options.profile = name_at(m.value, kProfiles, at);
    if (m.key == "reasoning_effort") options.effort = string_at(m.value, at);
    if (m.key == "add_default_bos_token") options.begin_of_sentence = bool_at(m.value, at);
    if (m.key == "context") {
      const std::string& digits = expect(m.value, Json::Kind::number, at).text;
      bool count = digits.size() < 9 && digits.find_first_not_of("0123456789") == std::string::npos;
      if (!count) fail(at, fmt::format("{} is no count of messages", digits), "give a whole number from 0");
      options.context = std::stoi(digits);
    }
  }
  return options;
}

void set_reasoning_effort(ChatOptions& options, std::string_view name) {
  struct Row {
    std::string_view name, preview, official;
  };
  // What the servers of each generation made of OpenAI's names: in April everything below xhigh had no text.
  static constexpr Row kRows[] = {{"minimal", "high", "low"}, {"low", "high", "low"},   {"medium", "high", "high"},
                                  {"high", "high", "high"},   {"xhigh", "max", "high"}, {"max", "max", "max"}};
  if (name == "none") {
    options.mode = ThinkingMode::chat;
    return;
  }
  for (const Row& row : kRows) {
    if (row.name != name) continue;
    options.mode = ThinkingMode::thinking;
    options.effort = options.profile == EffortProfile::preview ? row.preview : row.official;
    return;
  }
  fail("reasoning_effort", fmt::format("\"{}\" is not known", name),
       "use one of none, minimal, low, medium, high, xhigh, max");
}

void set_response_format(std::vector<Message>& messages, const Json& format) {
  const std::string where = "response_format";
  const Json* type = expect(format, Json::Kind::object, where).find("type");
  if (!type) fail(where, "type is missing", "use text, json_object or json_schema");
  const std::string& name = string_at(*type, where + ".type");
  if (name == "text") return;
  if (name == "json_object") {
    instruction_message(messages).json_object = true;
  } else if (name == "json_schema") {
    const Json* wrapper = format.find("json_schema");
    const Json* schema = wrapper ? wrapper->find("schema") : nullptr;
    if (!schema || !schema->is_object())
      fail(where, "json_schema.schema is missing or no object", "put the schema there");
    instruction_message(messages).schema = *schema;
  } else {
    fail(where + ".type", fmt::format("\"{}\" is not known", name), "use text, json_object or json_schema");
  }
}

}  // namespace plumb
