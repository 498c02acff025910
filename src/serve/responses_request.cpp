#include "serve/responses_request.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace plumb::serve {
namespace {

using nlohmann::json;

// ---- Input items to messages ---------------------------------------------------------------------------------------

// A string, or a list of blocks whose texts are joined by an empty line. types: of the blocks that can be read.
std::string read_text(const Json& content, const std::string& path, const std::vector<std::string>& types) {
  if (content.is_string()) return content.text;
  std::string out;
  const std::vector<Json>& blocks = list_at(content, path);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Fields block(blocks[i], fmt::format("{}[{}]", path, i));
    const std::string& type = string_at(block.need("type"), block.path("type"));
    if (std::find(types.begin(), types.end(), type) == types.end())
      refuse(block.path("type"), fmt::format("\"{}\" cannot be read", type),
             fmt::format("this model reads text: use {}", fmt::join(types, ", ")));
    const char* member = type == "refusal" ? "refusal" : "text";
    if (i) out += "\n\n";
    out += string_at(block.need(member), block.path(member));
  }
  return out;
}

Message message_of(ChatRole role, std::string content) {
  Message m;
  m.role = role;
  m.content = std::move(content);
  return m;
}

// An answer came as several items: reasoning, text, calls. Together they are one turn of the assistant.
struct Conversation {
  std::vector<Message> messages;

  // The assistant's turn that goes on; a new one if there is none, or if what comes cannot stand behind what it holds.
  Message& turn(bool text, bool reasoning) {
    const bool open = !messages.empty() && messages.back().role == ChatRole::assistant;
    const bool fits = open && !(text && !messages.back().content.empty() && messages.back().calls.empty()) &&
                      !(reasoning && !(messages.back().content.empty() && messages.back().calls.empty()));
    if (!fits) messages.push_back(message_of(ChatRole::assistant, ""));
    return messages.back();
  }
  // The chat format puts nothing between system texts.
  void add_system(std::string text) {
    if (!messages.empty() && messages.back().role == ChatRole::system) {
      messages.back().content += "\n\n" + text;
    } else {
      messages.push_back(message_of(ChatRole::system, std::move(text)));
    }
  }
};

void add_message(Conversation& out, const Fields& item) {
  const std::string role = string_at(item.need("role"), item.path("role"));
  item.word("role", {"user", "assistant", "system", "developer"});
  const Json& content = item.need("content");
  const std::string path = item.path("content");
  if (role == "assistant") {
    std::string text = read_text(content, path, {"output_text", "refusal", "input_text", "text"});
    out.turn(true, false).content += text;
  } else if (role == "user") {
    out.messages.push_back(message_of(ChatRole::user, read_text(content, path, {"input_text", "text"})));
  } else {
    // What OpenAI calls developer is an instruction; the chat format's developer is another role (docs/chat.md).
    out.add_system(read_text(content, path, {"input_text", "text"}));
  }
}

void add_reasoning(Conversation& out, const Fields& item) {
  const Json *content = item.find("content"), *summary = item.find("summary");
  const bool whole = content && !(content->is_array() && content->items.empty());
  if (!whole && !summary) refuse(item.path("content"), "is missing", "give the reasoning's text");
  std::string text = whole ? read_text(*content, item.path("content"), {"reasoning_text", "text"})
                           : read_text(*summary, item.path("summary"), {"summary_text"});
  out.turn(false, true).reasoning += text;
}

void add_item(Conversation& out, const Json& json, const std::string& path) {
  const Fields item(json, path);
  const std::string type = item.text("type").value_or("message");
  if (type == "message") {
    add_message(out, item);
  } else if (type == "reasoning") {
    add_reasoning(out, item);
  } else if (type == "function_call") {
    ToolCall call{string_at(item.need("call_id"), item.path("call_id")),
                  string_at(item.need("name"), item.path("name")),
                  string_at(item.need("arguments"), item.path("arguments"))};
    out.turn(false, false).calls.push_back(std::move(call));
  } else if (type == "function_call_output") {
    Message m = message_of(ChatRole::tool,
                           read_text(item.need("output"), item.path("output"), {"input_text", "output_text", "text"}));
    m.call_id = string_at(item.need("call_id"), item.path("call_id"));
    out.messages.push_back(std::move(m));
  } else if (type == "item_reference") {
    refuse(item.path("type"), "\"item_reference\" names a stored item, and nothing is stored", "send the item itself");
  } else {
    refuse(item.path("type"), fmt::format("\"{}\" cannot be read", type),
           "use message, reasoning, function_call or function_call_output");
  }
}

Conversation read_input(const Fields& body) {
  Conversation out;
  if (const auto instructions = body.text("instructions"); instructions && !instructions->empty())
    out.add_system(*instructions);
  const Json& input = body.need("input");
  const std::string path = body.path("input");
  if (input.is_string()) {
    out.messages.push_back(message_of(ChatRole::user, input.text));
    return out;
  }
  const std::vector<Json>& items = list_at(input, path);
  if (items.empty()) refuse(path, "is empty", "give a string or at least one item");
  for (size_t i = 0; i < items.size(); ++i) add_item(out, items[i], fmt::format("{}[{}]", path, i));
  return out;
}

// ---- Tools and the form of the answer ------------------------------------------------------------------------------

struct Tools {
  std::vector<Json> functions;  // that the model sees
  ToolChoice choice;
};

std::string name_of(const Json& function) { return function.find("name")->text; }

const Json* find_function(const std::vector<Json>& functions, const std::string& name) {
  for (const Json& f : functions)
    if (name_of(f) == name) return &f;
  return nullptr;
}

// {type: "function", name, description, parameters, strict}: to the model as it was given, without the type.
std::vector<Json> read_functions(const Fields& body) {
  std::vector<Json> out;
  const Json* tools = body.find("tools");
  if (!tools) return out;
  for (const Json& json : list_at(*tools, body.path("tools"))) {
    const Fields tool(json, fmt::format("{}[{}]", body.path("tools"), out.size()));
    const std::string& type = string_at(tool.need("type"), tool.path("type"));
    if (type != "function")
      refuse(tool.path("type"), fmt::format("\"{}\" is not possible", type),
             "only tools of type function are, which the client runs itself");
    string_at(tool.need("name"), tool.path("name"));
    Json function = json;
    std::erase_if(function.members, [](const JsonMember& m) { return m.key == "type" || m.value.is_null(); });
    out.push_back(std::move(function));
  }
  return out;
}

const Json& named_function(const Fields& choice, const std::vector<Json>& functions) {
  const std::string& name = string_at(choice.need("name"), choice.path("name"));
  const Json* function = find_function(functions, name);
  if (!function) refuse(choice.path("name"), fmt::format("\"{}\" is not among the tools", name), "give it in tools");
  return *function;
}

Tools read_tools(const Fields& body) {
  Tools out;
  out.functions = read_functions(body);
  out.choice.parallel = body.flag("parallel_tool_calls", true);
  const Json* json = body.find("tool_choice");
  if (!json) return out;
  std::string rule;
  if (json->is_string()) {
    rule = *body.word("tool_choice", {"none", "auto", "required"});
  } else {
    const Fields choice(*json, body.path("tool_choice"));
    const std::string type = choice.word("type", {"function", "allowed_tools"}).value_or("");
    if (type == "function") {
      out.choice.rule = ToolChoice::Rule::named;
      out.choice.name = name_of(named_function(choice, out.functions));
    } else if (type == "allowed_tools") {
      rule = choice.word("mode", {"auto", "required"}).value_or("auto");
      std::vector<Json> allowed;
      for (const Json& tool : list_at(choice.need("tools"), choice.path("tools")))
        allowed.push_back(
            named_function(Fields(tool, fmt::format("{}[{}]", choice.path("tools"), allowed.size())), out.functions));
      out.functions = std::move(allowed);
    } else {
      refuse(choice.path("type"), "is missing", "use function or allowed_tools");
    }
  }
  if (rule == "none") out.functions.clear();
  if (rule == "required") {
    if (out.functions.empty()) refuse(body.path("tool_choice"), "\"required\" without tools", "give tools");
    out.choice.rule = ToolChoice::Rule::required;
  }
  return out;
}

// text.format: it goes to the model with the instructions.
void read_format(const Fields& body, Message& system) {
  const Json* text = body.find("text");
  if (!text) return;
  const Fields fields(*text, body.path("text"));
  const Json* json = fields.find("format");
  if (!json) return;
  const Fields format(*json, fields.path("format"));
  const std::string type = format.word("type", {"text", "json_object", "json_schema"}).value_or("text");
  system.json_object = type == "json_object";
  if (type != "json_schema") return;
  system.schema = format.need("schema");
  if (!system.schema->is_object()) refuse(format.path("schema"), "is no object", "give a JSON schema");
}

ChatOptions read_options(const Fields& body, const ServedModel& model) {
  ChatOptions options = model.chat;
  options.broken_arguments_as_text = true;  // a call that was cut off may come back
  const Json* reasoning = body.find("reasoning");
  if (!reasoning) return options;
  const Fields fields(*reasoning, body.path("reasoning"));
  if (const auto effort = fields.word("effort", {"none", "minimal", "low", "medium", "high", "xhigh", "max"}))
    set_reasoning_effort(options, *effort);
  return options;
}

// ---- The rest ------------------------------------------------------------------------------------------------------

void read_logprobs(const Fields& body, const ServedModel& model, ResponsesRequest& out) {
  const std::optional<int64_t> top = body.integer("top_logprobs", 0, model.max_logprobs);
  out.fields.request.sampling.top_logprobs = static_cast<int>(top.value_or(0));
  out.logprobs = top.value_or(0) > 0;
  const Json* include = body.find("include");
  if (!include) return;
  // The other names are of tools that do not exist here, or of reasoning.encrypted_content: it is given in plain text.
  for (const Json& name : list_at(*include, body.path("include")))
    out.logprobs |= string_at(name, body.path("include")) == "message.output_text.logprobs";
}

void refuse_what_cannot_be_done(const Fields& body, const AnswerFields& fields) {
  const std::string nothing = "responses are not stored";
  body.refuse_given("previous_response_id", nothing, "send the whole conversation as input");
  body.refuse_given("conversation", nothing, "send the whole conversation as input");
  body.refuse_given("store", nothing, "set it to false or leave it out");
  body.refuse_given("background", nothing, "wait for the response, or stream it");
  body.refuse_given("prompt", "there are no stored prompts", "send instructions and input");
  if (body.word("truncation", {"auto", "disabled"}) == "auto")
    refuse(body.path("truncation"), "\"auto\": nothing is left out of a conversation", "shorten the input yourself");
  if (fields.choices > 1) refuse(body.path("n"), "a response is one answer", "send several requests");
  if (fields.request.prompt_logprobs || fields.request.routed_experts)
    refuse(body.path(fields.request.prompt_logprobs ? "prompt_logprobs" : "return_routed_experts"),
           "a response has no place for it", "use /v1/chat/completions");
  body.ignore({"user", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
               "safety_identifier", "max_tool_calls", "moderation", "context_management", "access_programs"});
}

// For clients only: the spelling of numbers and the order of members do not matter.
json plain(const Json* value, json otherwise) {
  if (!value) return otherwise;
  json out = json::parse(python_dumps(*value), nullptr, false);
  return out.is_discarded() ? otherwise : out;  // NaN and Infinity, which JSON has not
}

json echo_of(const Fields& body, const AnswerFields& fields) {
  const SamplingParams& p = fields.request.sampling;
  json reasoning = {{"effort", nullptr}, {"summary", nullptr}}, text = {{"format", {{"type", "text"}}}};
  return {{"background", false},
          {"instructions", plain(body.find("instructions"), nullptr)},
          {"max_output_tokens", plain(body.find("max_output_tokens"), nullptr)},
          {"metadata", plain(body.find("metadata"), json::object())},
          {"model", fields.model.spelled},
          {"parallel_tool_calls", body.flag("parallel_tool_calls", true)},
          {"previous_response_id", nullptr},
          {"reasoning", plain(body.find("reasoning"), reasoning)},
          {"service_tier", "default"},
          {"store", false},
          {"temperature", p.temperature},
          {"text", plain(body.find("text"), text)},
          {"tool_choice", plain(body.find("tool_choice"), "auto")},
          {"tools", plain(body.find("tools"), json::array())},
          {"top_logprobs", p.top_logprobs},
          {"top_p", p.top_p},
          {"truncation", "disabled"},
          {"user", plain(body.find("user"), nullptr)}};
}

}  // namespace

ResponsesRequest read_responses_request(std::string_view text, const ServedModel& model) {
  const Json json = parse_body(text);
  const Fields body(json);
  ResponsesRequest out;
  out.fields = read_answer_fields(body, model, {"max_output_tokens"});
  read_logprobs(body, model, out);
  refuse_what_cannot_be_done(body, out.fields);

  Tools tools = read_tools(body);
  Message system = message_of(ChatRole::system, "");
  system.tools = std::move(tools.functions);
  read_format(body, system);
  std::vector<Message> messages = read_input(body).messages;
  if (!system.tools.empty() || system.schema || system.json_object) {
    if (messages.front().role == ChatRole::system) {
      system.content = messages.front().content;
      messages.front() = std::move(system);
    } else {
      messages.insert(messages.begin(), std::move(system));
    }
  }
  out.prompt = chat_prompt(messages, read_options(body, model), tools.choice, model);
  out.echo = echo_of(body, out.fields);
  if (model.strict_fields) body.refuse_unknown();

  Request& request = out.fields.request;
  request.prompt = out.prompt.tokens;
  if (!out.prompt.stop.empty()) request.stop_strings.push_back(out.prompt.stop);
  fit_length(request, model, body.path("input"), out.fields.length_field);
  return out;
}

}  // namespace plumb::serve
