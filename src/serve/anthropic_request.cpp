#include "serve/anthropic_request.h"

#include <fmt/format.h>

#include <algorithm>

namespace plumb::serve {
namespace {

// ---- Messages ------------------------------------------------------------------------------------------------------

Message message_of(ChatRole role, std::string content) {
  Message m;
  m.role = role;
  m.content = std::move(content);
  return m;
}

std::string join(const std::string& a, const std::string& b) { return a.empty() || b.empty() ? a + b : a + "\n\n" + b; }

[[noreturn]] void refuse_block(const Fields& block, const std::string& type, const std::string& allowed) {
  refuse(block.path("type"), fmt::format("\"{}\" cannot be read here", type), "use " + allowed);
}

const std::string& type_of(const Fields& block) { return string_at(block.need("type"), block.path("type")); }
const std::string& text_of(const Fields& block, const char* member = "text") {
  return string_at(block.need(member), block.path(member));
}

// Calls `each` with every block of a content: a string is one text block.
template <class Each>
void for_each_block(const Json& content, const std::string& path, Each each) {
  if (content.is_string()) {
    Json block;
    block.kind = Json::Kind::object;
    block.members = {{"type", json_string("text")}, {"text", content}};
    each(Fields(block, path));
    return;
  }
  const std::vector<Json>& blocks = list_at(content, path);
  for (size_t i = 0; i < blocks.size(); ++i) each(Fields(blocks[i], fmt::format("{}[{}]", path, i)));
}

std::string read_text(const Json& content, const std::string& path) {
  std::string out;
  for_each_block(content, path, [&](const Fields& block) {
    if (type_of(block) != "text") refuse_block(block, type_of(block), "text: this model reads nothing else");
    out = join(out, text_of(block));
  });
  return out;
}

// Results of tools are messages of their own in the chat format; it puts them and the user's text into one turn.
void add_user(std::vector<Message>& out, const Json& content, const std::string& path) {
  for_each_block(content, path, [&](const Fields& block) {
    const std::string& type = type_of(block);
    if (type == "text") {
      out.push_back(message_of(ChatRole::user, text_of(block)));
    } else if (type == "tool_result") {
      const Json* result = block.find("content");
      Message m = message_of(ChatRole::tool, result ? read_text(*result, block.path("content")) : "");
      m.call_id = text_of(block, "tool_use_id");
      out.push_back(std::move(m));
    } else {
      refuse_block(block, type, "text or tool_result: this model reads nothing else");
    }
  });
}

void add_assistant(std::vector<Message>& out, const Json& content, const std::string& path) {
  if (out.empty() || out.back().role != ChatRole::assistant) out.push_back(message_of(ChatRole::assistant, ""));
  Message& m = out.back();
  for_each_block(content, path, [&](const Fields& block) {
    const std::string& type = type_of(block);
    if (type == "text") {
      m.content += text_of(block);
    } else if (type == "thinking") {
      m.reasoning += text_of(block, "thinking");
    } else if (type == "tool_use") {
      const Json& input = block.need("input");
      if (!input.is_object()) refuse(block.path("input"), "is no object", "give the arguments as an object");
      m.calls.push_back({text_of(block, "id"), text_of(block, "name"), python_dumps(input)});
    } else if (type != "redacted_thinking") {  // of another server: its text is not known
      refuse_block(block, type, "text, thinking or tool_use");
    }
  });
}

std::vector<Message> read_messages(const Fields& body) {
  std::vector<Message> out;
  const std::string path = body.path("messages");
  const std::vector<Json>& list = list_at(body.need("messages"), path);
  if (list.empty()) refuse(path, "is empty", "give at least one message");
  for (size_t i = 0; i < list.size(); ++i) {
    const Fields message(list[i], fmt::format("{}[{}]", path, i));
    const std::string& role = string_at(message.need("role"), message.path("role"));
    message.word("role", {"user", "assistant", "system"});
    const Json& content = message.need("content");
    const std::string at = message.path("content");
    if (role == "user") add_user(out, content, at);
    if (role == "assistant") add_assistant(out, content, at);
    if (role == "system") out.push_back(message_of(ChatRole::system, read_text(content, at)));
  }
  if (out.empty()) refuse(path, "hold nothing", "give at least one block");
  // A final message of the assistant is the beginning of the answer.
  if (out.back().role == ChatRole::assistant) {
    if (!out.back().calls.empty())
      refuse(fmt::format("{}[{}]", path, list.size() - 1), "ends with a tool_use",
             "give its result: a user message with a tool_result");
    out.back().unfinished = true;
  }
  return out;
}

// ---- Tools, thinking -----------------------------------------------------------------------------------------------

Json object_of(std::vector<JsonMember> members) {
  Json out;
  out.kind = Json::Kind::object;
  out.members = std::move(members);
  return out;
}

// {name, description, input_schema} as the function object that the chat format shows.
std::vector<Json> read_tools(const Fields& body) {
  std::vector<Json> out;
  const Json* tools = body.find("tools");
  if (!tools) return out;
  for (const Json& json : list_at(*tools, body.path("tools"))) {
    const Fields tool(json, fmt::format("{}[{}]", body.path("tools"), out.size()));
    if (const auto type = tool.text("type"); type && *type != "custom")
      refuse(tool.path("type"), fmt::format("\"{}\" is not possible", *type),
             "only tools of the client's own are: name, description, input_schema");
    std::vector<JsonMember> members = {{"name", json_string(text_of(tool, "name"))}};
    if (const Json* text = tool.find("description")) {
      string_at(*text, tool.path("description"));
      members.push_back({"description", *text});
    }
    const Json& schema = tool.need("input_schema");
    if (!schema.is_object()) refuse(tool.path("input_schema"), "is no object", "give a JSON schema");
    members.push_back({"parameters", schema});
    out.push_back(object_of(std::move(members)));
  }
  return out;
}

// Empties `functions` where the model is not to see them.
ToolChoice read_tool_choice(const Fields& body, std::vector<Json>& functions) {
  ToolChoice out;
  const Json* json = body.find("tool_choice");
  if (!json) return out;
  const Fields choice(*json, body.path("tool_choice"));
  const std::string type = choice.word("type", {"auto", "any", "tool", "none"}).value_or("auto");
  out.parallel = !choice.flag("disable_parallel_tool_use", false);
  if (type == "none") functions.clear();
  if (type == "any" || type == "tool") {
    if (functions.empty()) refuse(body.path("tool_choice"), fmt::format("\"{}\" without tools", type), "give tools");
    out.rule = ToolChoice::Rule::required;
  }
  if (type == "tool") {
    out.rule = ToolChoice::Rule::named;
    out.name = text_of(choice, "name");
    const bool known = std::any_of(functions.begin(), functions.end(),
                                   [&](const Json& f) { return f.find("name")->text == out.name; });
    if (!known) refuse(choice.path("name"), fmt::format("\"{}\" is not among the tools", out.name), "give it in tools");
  }
  return out;
}

// Who says nothing about thinking gets none: clients of this protocol do not expect thinking blocks unasked.
ChatOptions read_options(const Fields& body, const ServedModel& model) {
  ChatOptions options = model.chat;
  options.mode = ThinkingMode::chat;
  const Json* thinking = body.find("thinking");
  if (!thinking) return options;
  const Fields fields(*thinking, body.path("thinking"));
  fields.need("type");
  if (fields.word("type", {"enabled", "disabled", "adaptive", "between_tools"}) == "disabled") return options;
  options.mode = ThinkingMode::thinking;
  // The model has no notion of a budget: it is checked for its form only.
  fields.integer("budget_tokens", 1, INT32_MAX);
  const Json* config = body.find("output_config");
  if (!config) return options;
  const Fields output(*config, body.path("output_config"));
  if (const auto effort = output.word("effort", {"low", "medium", "high", "xhigh", "max"}))
    set_reasoning_effort(options, *effort);
  return options;
}

void read_format(const Fields& body, Message& system) {
  const Json* config = body.find("output_config");
  if (!config) return;
  const Fields output(*config, body.path("output_config"));
  const Json* json = output.find("format");
  if (!json) return;
  const Fields format(*json, output.path("format"));
  format.word("type", {"json_schema"});
  system.schema = format.need("schema");
  if (!system.schema->is_object()) refuse(format.path("schema"), "is no object", "give a JSON schema");
}

bool shows_thinking(const Fields& body) {
  const Json* thinking = body.find("thinking");
  return !thinking || Fields(*thinking, body.path("thinking")).word("display", {"summarized", "omitted"}) != "omitted";
}

std::vector<std::string> read_stop_sequences(const Fields& body) {
  constexpr size_t kMost = 64;
  std::vector<std::string> out;
  const Json* list = body.find("stop_sequences");
  if (!list) return out;
  const std::string path = body.path("stop_sequences");
  for (const Json& json : list_at(*list, path)) {
    const std::string at = fmt::format("{}[{}]", path, out.size());
    out.push_back(string_at(json, at));
    if (out.back().empty()) refuse(at, "is empty", "give at least one character");
  }
  if (out.size() > kMost)
    refuse(path, fmt::format("has {} strings", out.size()), fmt::format("give at most {}", kMost));
  return out;
}

}  // namespace

ChatPrompt read_messages_prompt(const Fields& body, const ServedModel& model) {
  Message system = message_of(ChatRole::system, "");
  if (const Json* text = body.find("system")) system.content = read_text(*text, body.path("system"));
  system.tools = read_tools(body);
  const ToolChoice choice = read_tool_choice(body, system.tools);
  read_format(body, system);
  std::vector<Message> messages = read_messages(body);
  if (!system.content.empty() || !system.tools.empty() || system.schema) messages.insert(messages.begin(), system);
  return chat_prompt(messages, read_options(body, model), choice, model);
}

MessagesRequest read_messages_request(std::string_view text, const ServedModel& model) {
  const Json json = parse_body(text);
  const Fields body(json);
  MessagesRequest out;
  body.need("max_tokens");
  out.fields = read_answer_fields(body, model, {"max_tokens"});
  if (out.fields.choices > 1) refuse(body.path("n"), "a message is one answer", "send several requests");
  if (out.fields.request.prompt_logprobs || out.fields.request.routed_experts)
    refuse(body.path(out.fields.request.prompt_logprobs ? "prompt_logprobs" : "return_routed_experts"),
           "a message has no place for it", "use /v1/chat/completions");
  body.refuse_given("mcp_servers", "this server calls no other", "call tools in the client");
  body.refuse_given("container", "nothing is run here", "leave it out");
  body.ignore({"metadata", "service_tier", "cache_control", "context_management", "inference_geo", "speed",
               "diagnostics", "user_profile_id", "workspace_id"});
  out.prompt = read_messages_prompt(body, model);
  out.show_thinking = shows_thinking(body);

  Request& request = out.fields.request;
  for (std::string& s : read_stop_sequences(body)) request.stop_strings.push_back(std::move(s));
  if (model.strict_fields) body.refuse_unknown();
  request.prompt = out.prompt.tokens;
  if (!out.prompt.stop.empty()) request.stop_strings.push_back(out.prompt.stop);
  // Clients ask for the most that their own models can write, whatever the context.
  const int64_t room = model.max_positions - static_cast<int64_t>(request.prompt.size());
  out.whole_context = request.sampling.max_tokens > room;
  if (out.whole_context) request.sampling.max_tokens = static_cast<int>(std::max<int64_t>(room, 1));
  fit_length(request, model, body.path("messages"), out.fields.length_field);
  return out;
}

}  // namespace plumb::serve
