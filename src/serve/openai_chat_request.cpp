#include "serve/openai_chat_request.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace plumb::serve {
namespace {

void set_thinking(ChatOptions& options, bool on) { options.mode = on ? ThinkingMode::thinking : ThinkingMode::chat; }

void set_effort(ChatOptions& options, const std::optional<std::string>& effort, const std::string& path) {
  if (!effort) return;
  try {
    set_reasoning_effort(options, *effort);
  } catch (const Error& e) {
    throw api_error(e, 400, path);
  }
}

// Names of functions in `tools`; their form is checked by messages_from_json.
std::vector<std::string> tool_names(const Json* tools) {
  std::vector<std::string> names;
  if (!tools) return names;
  for (const Json& tool : tools->items)
    if (const Json* function = tool.find("function"))
      if (const Json* name = function->find("name"); name && name->is_string()) names.push_back(name->text);
  return names;
}

struct ToolFields {
  const Json* tools = nullptr;  // null: the model sees none
  ToolChoice choice;
};

ToolFields read_tools(const Fields& body) {
  body.refuse_given("functions", "is an old form", "use tools");
  body.refuse_given("function_call", "is an old form", "use tool_choice");
  ToolFields out;
  out.tools = body.find("tools");
  if (out.tools) list_at(*out.tools, body.path("tools"));
  out.choice.parallel = body.flag("parallel_tool_calls", true);
  const Json* choice = body.find("tool_choice");
  if (!choice) return out;
  const std::string path = body.path("tool_choice");
  const std::vector<std::string> names = tool_names(out.tools);
  if (choice->is_string()) {
    const std::string rule = *body.word("tool_choice", {"none", "auto", "required"});
    if (rule == "none") out.tools = nullptr;
    if (rule == "required") out.choice.rule = ToolChoice::Rule::required;
    if (rule == "required" && names.empty()) refuse(path, "\"required\" without tools", "give tools, or \"auto\"");
    return out;
  }
  const Fields named(*choice, path);
  named.word("type", {"function"});
  const Fields function(named.need("function"), path + ".function");
  out.choice.rule = ToolChoice::Rule::named;
  out.choice.name = string_at(function.need("name"), path + ".function.name");
  if (std::find(names.begin(), names.end(), out.choice.name) == names.end())
    refuse(path + ".function.name", fmt::format("\"{}\" is not among the tools", out.choice.name),
           names.empty() ? "give it in tools" : fmt::format("use one of {}", fmt::join(names, ", ")));
  return out;
}

// Clients say in different places that the last message, an assistant's, is to be continued: `prefix` in the message
// (DeepSeek), `continue_final_message` (vLLM), `wo_eos` in the message (the chat format's own name).
Json mark_unfinished(const Fields& body, Json messages) {
  const bool goes_on = body.flag("continue_final_message", false);
  const std::string path = body.path("messages");
  if (list_at(messages, path).empty()) refuse(path, "is empty", "give at least one message");
  for (size_t i = 0; i < messages.items.size(); ++i) {
    Json& message = messages.items[i];
    const std::string at = fmt::format("{}[{}]", path, i);
    const Fields fields(message, at);
    const bool last = i + 1 == messages.items.size(), marked = fields.flag("prefix", false);
    std::erase_if(message.members, [](const JsonMember& m) { return m.key == "prefix"; });
    if (!marked && !(goes_on && last)) continue;
    const Json* role = message.find("role");
    const bool assistant = role && role->is_string() && role->text == "assistant";
    if (!last || !assistant)
      refuse(marked ? at + ".prefix" : body.path("continue_final_message"), "this message cannot be continued",
             "only an assistant message at the end can");
    Json yes;
    yes.kind = Json::Kind::boolean, yes.boolean = true;
    message.members.push_back({"wo_eos", yes});
  }
  return messages;
}

std::vector<Message> read_messages(const Fields& body, const Json* tools) {
  const Json messages = mark_unfinished(body, body.need("messages"));
  try {
    std::vector<Message> out = messages_from_json(messages, tools);
    if (const Json* format = body.find("response_format")) {
      const Fields fields(*format, body.path("response_format"));
      set_response_format(out, *format);
    }
    return out;
  } catch (const Error& e) {
    throw api_error(e);
  }
}

void read_logprobs(const Fields& body, const ServedModel& model, ChatRequest& out) {
  // Whoever asks for token ids trains on the answer and needs both.
  out.logprobs = body.flag("logprobs", out.fields.return_token_ids);
  const std::optional<int64_t> top = body.integer("top_logprobs", 0, model.max_logprobs);
  if (top && *top > 0 && !out.logprobs)
    refuse(body.path("top_logprobs"), "is given without logprobs", "set logprobs to true");
  out.fields.request.sampling.top_logprobs = static_cast<int>(top.value_or(0));
}

void refuse_what_cannot_be_done(const Fields& body) {
  const std::string free = "answers are not forced into a form";
  for (const char* name : {"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"})
    body.refuse_given(name, free, "use response_format, which tells the model");
  body.refuse_given("audio", "this model writes text only", "leave it out");
  body.refuse_given("web_search_options", "this server searches nothing", "leave it out");
  body.refuse_given("echo", "a chat has no text to repeat", "use /v1/completions");
  if (const Json* modalities = body.find("modalities"))
    for (const Json& m : list_at(*modalities, body.path("modalities")))
      if (string_at(m, body.path("modalities")) != "text")
        refuse(body.path("modalities"), fmt::format("\"{}\" is not possible", m.text), "use [\"text\"]");
  body.ignore({"user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "verbosity",
               "safety_identifier", "prediction", "moderation", "nvext", "add_generation_prompt", "request_id",
               "cache_salt", "include_reasoning", "spaces_between_special_tokens"});
}

}  // namespace

ChatOptions read_chat_options(const Fields& body, const ServedModel& model) {
  ChatOptions options = model.chat;
  set_effort(options, body.text("reasoning_effort"), body.path("reasoning_effort"));
  if (const Json* thinking = body.find("thinking")) {
    const Fields fields(*thinking, body.path("thinking"));
    if (const auto type = fields.word("type", {"enabled", "disabled"})) set_thinking(options, *type == "enabled");
  }
  const Json* kwargs = body.find("chat_template_kwargs");
  if (!kwargs) return options;
  // Other names are for other models' templates.
  const Fields fields(*kwargs, body.path("chat_template_kwargs"));
  set_effort(options, fields.text("reasoning_effort"), fields.path("reasoning_effort"));
  if (const auto mode = fields.word("thinking_mode", {"chat", "thinking"})) set_thinking(options, *mode == "thinking");
  for (const char* name : {"enable_thinking", "thinking"})
    if (fields.find(name)) set_thinking(options, fields.flag(name, false));
  options.drop_thinking = fields.flag("drop_thinking", options.drop_thinking);
  options.drop_thinking = !fields.flag("preserve_thinking", !options.drop_thinking);
  return options;
}

ChatRequest read_chat_request(std::string_view text, const ServedModel& model) {
  const Json json = parse_body(text);
  const Fields body(json);
  ChatRequest out;
  out.fields = read_answer_fields(body, model, {"max_completion_tokens", "max_tokens"});
  read_logprobs(body, model, out);
  refuse_what_cannot_be_done(body);
  const ToolFields tools = read_tools(body);
  const std::vector<Message> messages = read_messages(body, tools.tools);
  out.prompt = chat_prompt(messages, read_chat_options(body, model), tools.choice, model);
  if (model.strict_fields) body.refuse_unknown();

  Request& request = out.fields.request;
  request.prompt = out.prompt.tokens;
  if (!out.prompt.stop.empty()) request.stop_strings.push_back(out.prompt.stop);
  fit_length(request, model, body.path("messages"), out.fields.length_field);
  return out;
}

}  // namespace plumb::serve
