// A conversation in OpenAI's form and how it is to be written for DeepSeek-V4 (docs/chat.md).
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/python_json.h"

namespace plumb {

enum class ChatRole { system, developer, user, assistant, tool, latest_reminder };
// Short side jobs of the chat product; the message after it is the job's output.
enum class ChatTask { none, action, query, authority, domain, title, read_url };

struct ToolCall {
  std::string id;         // invented by the caller; it is not part of the text that the model sees
  std::string name;       // of the function
  std::string arguments;  // JSON text of an object
};

struct Message {
  ChatRole role = ChatRole::user;
  std::string content;  // null and absent content are empty; lists of blocks are joined (see messages_from_json)
  ChatTask task = ChatTask::none;

  // Assistant
  std::string reasoning;
  std::vector<ToolCall> calls;
  bool unfinished = false;  // no end-of-sentence token: the model goes on from here
  bool trained = true;      // its tokens count in the mask of encode_for_training

  // Tool
  std::string call_id;  // the call that it answers

  // System and developer
  std::vector<Json> tools;     // function objects, as given
  std::optional<Json> schema;  // response format, as given
  bool json_object = false;    // response format "any JSON object"
};

enum class ThinkingMode { chat, thinking };

// The effort texts of a generation of checkpoints: preview (April 2026) or official (0731 and later).
enum class EffortProfile { preview, official };

struct ChatOptions {
  ThinkingMode mode = ThinkingMode::thinking;
  // Forget the reasoning of turns before the last user turn, unless a message carries tools.
  bool drop_thinking = true;
  EffortProfile profile = EffortProfile::preview;
  std::string effort;  // preview: high, max; official: low, high, max; empty: the first of these, which has no text
  bool begin_of_sentence = true;
  // Arguments that are no JSON object are written as one parameter "arguments" instead of being an error.
  bool broken_arguments_as_text = false;
  // The first `context` messages are already encoded: they decide about the rest but are not written.
  int context = 0;
};

// Reads the `messages` list of a request and the `tools` list (null if there is none). Tools go to the first message if
// that is a system or developer message, else to an empty system message that is put in front.
//
// Keys: role, content, reasoning_content (or reasoning), tool_calls, tool_call_id, tools, response_format, task,
// wo_eos, weight (0: not trained), name (ignored: the format has no place for it). Unknown keys with null or an empty
// list are ignored, since OpenAI's client sends such for what it does not use. Content may be a list: text blocks are
// joined by an empty line; other blocks of a tool message become "[Unsupported TYPE]", elsewhere they are an error.
// Error: names the message and the key, says what is allowed.
std::vector<Message> messages_from_json(const Json& messages, const Json* tools = nullptr);

// Reads {thinking_mode, drop_thinking, effort_profile, reasoning_effort, add_default_bos_token, context}; what is
// absent or null keeps its value in `base`. Unknown keys are errors. `where` names the object in errors.
ChatOptions chat_options_from_json(const Json& json, const std::string& where, ChatOptions base = {});

// OpenAI's `reasoning_effort` (none, minimal, low, medium, high, xhigh, max) as this profile's mode and effort.
void set_reasoning_effort(ChatOptions& options, std::string_view name);

// OpenAI's `response_format` ({"type": "text" | "json_object" | "json_schema", ...}), given to the first message like
// tools.
void set_response_format(std::vector<Message>& messages, const Json& format);

}  // namespace plumb
