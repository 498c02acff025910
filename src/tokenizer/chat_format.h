// The literal parts of DeepSeek-V4's chat format. tests/golden/chat/constants.json holds the same strings, taken from
// the released encoder.
#pragma once
#include <string_view>

namespace plumb::chat_format {

// Control tokens by their spelling in the vocabulary.
inline constexpr std::string_view kBegin = "<｜begin▁of▁sentence｜>";
inline constexpr std::string_view kEnd = "<｜end▁of▁sentence｜>";
inline constexpr std::string_view kUser = "<｜User｜>";
inline constexpr std::string_view kAssistant = "<｜Assistant｜>";
inline constexpr std::string_view kThinkOpen = "<think>";
inline constexpr std::string_view kThinkClose = "</think>";
inline constexpr std::string_view kDsml = "｜DSML｜";  // stands between '<' or '</' and the rest of a tag
inline constexpr std::string_view kReminder = "<｜latest_reminder｜>";
inline constexpr std::string_view kAction = "<｜action｜>";
inline constexpr std::string_view kQuery = "<｜query｜>";
inline constexpr std::string_view kAuthority = "<｜authority｜>";
inline constexpr std::string_view kDomain = "<｜domain｜>";
inline constexpr std::string_view kTitle = "<｜title｜>";
inline constexpr std::string_view kReadUrl = "<｜read_url｜>";
inline constexpr std::string_view kExtractedUrl = "<｜extracted_url｜>";

inline constexpr std::string_view kJoiner = "\n\n";  // between parts of a turn and before each block below
inline constexpr std::string_view kToolsBegin =
    "## Tools\n\nYou have access to a set of tools to help answer the user's question. You can invoke tools by writing "
    "a "
    "\"<｜DSML｜tool_calls>\" block like the following:\n\n"
    "<｜DSML｜tool_calls>\n"
    "<｜DSML｜invoke name=\"$TOOL_NAME\">\n"
    "<｜DSML｜parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</｜DSML｜parameter>\n"
    "...\n"
    "</｜DSML｜invoke>\n"
    "<｜DSML｜invoke name=\"$TOOL_NAME2\">\n"
    "...\n"
    "</｜DSML｜invoke>\n"
    "</｜DSML｜tool_calls>\n\n"
    "String parameters should be specified as is and set `string=\"true\"`. For all other types (numbers, booleans, "
    "arrays, "
    "objects), pass the value in JSON format and set `string=\"false\"`.\n\n"
    "If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside "
    "<think>...</think> "
    "BEFORE any tool calls or final response.\n\n"
    "Otherwise, output directly after </think> with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n";
inline constexpr std::string_view kToolsEnd =
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n";
inline constexpr std::string_view kSchemaBegin =
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";
inline constexpr std::string_view kJsonObject =
    "You are a helpful assistant designed to output JSON.\n## Response Format:\n\nReply with JSON object ONLY.";

inline constexpr std::string_view kEffort1 =
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and "
    "rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n";
inline constexpr std::string_view kEffort2 =
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
    "cause "
    "rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no "
    "assumption remains unchecked and no error remains undiscovered.\n\n";

inline constexpr std::string_view kResultOpen = "<tool_result>";  // ordinary text, no token
inline constexpr std::string_view kResultClose = "</tool_result>";
inline constexpr std::string_view kCallsOpen = "\n\n<｜DSML｜tool_calls>\n";
inline constexpr std::string_view kCallsClose = "\n</｜DSML｜tool_calls>";
inline constexpr std::string_view kInvokeBegin = "<｜DSML｜invoke name=\"";
inline constexpr std::string_view kInvokeNamed = "\">\n";
inline constexpr std::string_view kInvokeClose = "\n</｜DSML｜invoke>";
inline constexpr std::string_view kParameterBegin = "<｜DSML｜parameter name=\"";
inline constexpr std::string_view kParameterNamed = "\" string=\"";
inline constexpr std::string_view kParameterFlagged = "\">";
inline constexpr std::string_view kParameterClose = "</｜DSML｜parameter>";

}  // namespace plumb::chat_format
