#include "tokenizer/chat_render.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.h"
#include "tokenizer/chat_format.h"

namespace plumb {
namespace {

using namespace chat_format;

// ---- From messages to turns ----------------------------------------------------------------------------------------

struct Part {
  const std::string* call_id;  // null for text of the user
  std::string text;
};

// A message, or for users the messages and tool results that follow each other.
struct Turn {
  const Message* message;  // the first one
  int index;               // of that message
  ChatRole role;
  ChatTask task;
  std::vector<Part> parts;  // user
};

std::vector<Turn> join_user_messages(const std::vector<Message>& messages, int context) {
  std::vector<Turn> turns;
  for (int i = 0; i < static_cast<int>(messages.size()); ++i) {
    const Message& m = messages[i];
    bool result = m.role == ChatRole::tool;
    if (!result && m.role != ChatRole::user) {
      turns.push_back({&m, i, m.role, m.task, {}});
      continue;
    }
    Part part{result ? &m.call_id : nullptr, m.content};
    if (result) part.text = std::string(kResultOpen) + m.content + std::string(kResultClose);
    // A turn with a task is complete as far as the user is concerned. What is already encoded cannot be joined any
    // more.
    bool joins = !turns.empty() && turns.back().role == ChatRole::user &&
                 (result || turns.back().task == ChatTask::none) && i != context;
    if (!joins) turns.push_back({&m, i, ChatRole::user, ChatTask::none, {}});
    turns.back().parts.push_back(std::move(part));
    if (m.task != ChatTask::none) turns.back().task = m.task;
  }
  return turns;
}

// Results stand in the order of their calls; text between them stays where it is. An unknown call counts as the first.
void sort_results(std::vector<Turn>& turns) {
  std::map<std::string, int> order;
  for (Turn& turn : turns) {
    if (!turn.message->calls.empty()) {
      order.clear();
      for (size_t i = 0; i < turn.message->calls.size(); ++i) order[turn.message->calls[i].id] = static_cast<int>(i);
    }
    if (turn.role != ChatRole::user || order.empty()) continue;
    auto rank = [&](const Part& p) {
      auto it = order.find(*p.call_id);
      return it == order.end() ? 0 : it->second;
    };
    std::vector<Part> results;
    for (const Part& p : turn.parts)
      if (p.call_id) results.push_back(p);
    std::stable_sort(results.begin(), results.end(), [&](const Part& a, const Part& b) { return rank(a) < rank(b); });
    auto next = results.begin();
    for (Part& p : turn.parts)
      if (p.call_id) p = std::move(*next++);
  }
}

bool asks(const Turn& turn) { return turn.role == ChatRole::user || turn.role == ChatRole::developer; }

int last_question(const std::vector<Turn>& turns) {
  int k = static_cast<int>(turns.size()) - 1;
  while (k >= 0 && !asks(turns[k])) --k;
  return k;
}

// ---- From turns to pieces ------------------------------------------------------------------------------------------

class Writer {
 public:
  std::vector<ChatPiece> pieces;
  bool target = false;

  void control(std::string_view token) { pieces.push_back({std::string(token), true, target}); }

  void text(std::string_view s) {
    if (s.empty()) return;
    if (pieces.empty() || pieces.back().control || pieces.back().target != target) {
      pieces.push_back({"", false, target});
    }
    pieces.back().text += s;
  }

  // Text of the format itself: the control tokens in it are meant as such.
  void format(std::string_view s) {
    while (!s.empty()) {
      size_t at = std::string_view::npos;
      std::string_view token;
      for (std::string_view t : {kThinkOpen, kThinkClose, kDsml})
        if (size_t found = s.find(t); found < at) at = found, token = t;
      text(s.substr(0, at));
      if (token.empty()) return;
      control(token);
      s.remove_prefix(at + token.size());
    }
  }
};

std::string_view effort_text(const ChatOptions& o) {
  bool preview = o.profile == EffortProfile::preview;
  const std::string& e = o.effort;
  if (e.empty() || e == (preview ? "high" : "low")) return "";
  if (e == "max") return preview ? kEffort1 : kEffort2;
  if (e == "high") return kEffort1;
  fail("reasoning_effort", fmt::format("\"{}\" does not exist in the {} profile", e, preview ? "preview" : "official"),
       preview ? "use high or max" : "use low, high or max");
}

std::string_view task_token(ChatTask task) {
  switch (task) {
    case ChatTask::action:
      return kAction;
    case ChatTask::query:
      return kQuery;
    case ChatTask::authority:
      return kAuthority;
    case ChatTask::domain:
      return kDomain;
    case ChatTask::title:
      return kTitle;
    case ChatTask::read_url:
      return kReadUrl;
    case ChatTask::none:
      break;
  }
  return "";
}

void write_tools_and_format(Writer& out, const Message& m) {
  if (!m.tools.empty()) {
    out.text(kJoiner);
    out.format(kToolsBegin);
    for (size_t i = 0; i < m.tools.size(); ++i) out.text((i ? "\n" : "") + python_dumps(m.tools[i]));
    out.text(kToolsEnd);
  }
  if (m.json_object) {
    out.text(kJoiner);
    out.text(kJsonObject);
  }
  if (m.schema) {
    out.text(kJoiner);
    out.text(kSchemaBegin);
    out.text(python_dumps(*m.schema));
  }
}

Json arguments_of(const ToolCall& call, const std::string& where, bool broken_as_text) {
  try {
    Json arguments = parse_json(call.arguments, where);
    if (arguments.is_object()) return arguments;
  } catch (const Error&) {
    if (!broken_as_text) throw;
  }
  if (!broken_as_text) fail(where, "the arguments are no JSON object", "give an object such as {}");
  Json wrapped;
  wrapped.kind = Json::Kind::object;
  wrapped.members.push_back({"arguments", json_string(call.arguments)});
  return wrapped;
}

void write_calls(Writer& out, const Turn& turn, const ChatOptions& options) {
  out.format(kCallsOpen);
  for (size_t i = 0; i < turn.message->calls.size(); ++i) {
    const ToolCall& call = turn.message->calls[i];
    if (i) out.text("\n");
    out.format(kInvokeBegin);
    out.text(call.name);
    out.text(kInvokeNamed);
    std::string where = fmt::format("messages[{}].tool_calls[{}].function.arguments", turn.index, i);
    Json arguments = arguments_of(call, where, options.broken_arguments_as_text);
    for (size_t k = 0; k < arguments.members.size(); ++k) {
      const auto& [key, value] = arguments.members[k];
      if (k) out.text("\n");
      out.format(kParameterBegin);
      out.text(key);
      out.text(kParameterNamed);
      out.text(value.is_string() ? "true" : "false");
      out.text(kParameterFlagged);
      out.text(value.is_string() ? value.text : python_dumps(value));
      out.format(kParameterClose);
    }
    out.format(kInvokeClose);
  }
  out.format(kCallsClose);
}

void write_user(Writer& out, const Turn& turn) {
  out.control(kUser);
  for (size_t i = 0; i < turn.parts.size(); ++i) {
    if (i) out.text(kJoiner);
    std::string_view text = turn.parts[i].text;
    // The caller of read_url puts this token and the URL into the text; here, and only here, its spelling counts.
    size_t at =
        turn.task == ChatTask::read_url && !turn.parts[i].call_id ? text.find(kExtractedUrl) : std::string::npos;
    out.text(text.substr(0, at));
    if (at == std::string_view::npos) continue;
    out.control(kExtractedUrl);
    out.text(text.substr(at + kExtractedUrl.size()));
  }
}

struct Rendering {
  std::vector<ChatPiece> pieces;
  bool models_turn;  // the text ends where the model goes on
};

class Renderer {
 public:
  Renderer(const std::vector<Message>& messages, const ChatOptions& options) : options_(options) {
    if (options.context != 0 && (options.context < 0 || options.context >= static_cast<int>(messages.size())))
      fail("context", fmt::format("{} of {} messages are said to be encoded already", options.context, messages.size()),
           "leave at least one message to write");
    turns_ = join_user_messages(messages, options.context);
    sort_results(turns_);
    thinking_ = options.mode == ThinkingMode::thinking;
    bool tools = std::any_of(messages.begin(), messages.end(), [](const Message& m) { return !m.tools.empty(); });
    drop_ = thinking_ && options.drop_thinking && !tools;
    if (drop_) {
      int question = last_question(turns_), index = question < 0 ? 0 : turns_[question].index;
      std::erase_if(turns_, [&](const Turn& t) { return t.role == ChatRole::developer && t.index < index; });
    }
    last_question_ = last_question(turns_);
  }

  Rendering render() {
    std::string_view effort = effort_text(options_);
    if (options_.context == 0) {
      if (options_.begin_of_sentence) out_.control(kBegin);
      if (thinking_ && !turns_.empty()) out_.text(effort);
    }
    for (int k = 0; k < static_cast<int>(turns_.size()); ++k) {
      if (turns_[k].index < options_.context) continue;
      write_turn(k);
      write_header_after(k);
    }
    return {std::move(out_.pieces), models_turn_};
  }

 private:
  void write_turn(int k) {
    const Turn& turn = turns_[k];
    const Message& m = *turn.message;
    switch (turn.role) {
      case ChatRole::system:
        out_.text(m.content);
        write_tools_and_format(out_, m);
        break;
      case ChatRole::developer:
        out_.control(kUser);
        out_.text(m.content);
        write_tools_and_format(out_, m);
        break;
      case ChatRole::latest_reminder:
        out_.control(kReminder);
        out_.text(m.content);
        break;
      case ChatRole::assistant:
        write_assistant(k);
        break;
      default:
        write_user(out_, turn);
        break;
    }
  }

  void write_assistant(int k) {
    const Message& m = *turns_[k].message;
    out_.target = m.trained;
    bool output_of_task = k > 0 && turns_[k - 1].task != ChatTask::none;
    if (thinking_ && !output_of_task && (!drop_ || k > last_question_)) {
      out_.text(m.reasoning);
      out_.control(kThinkClose);
    }
    out_.text(m.content);
    if (!m.calls.empty()) write_calls(out_, turns_[k], options_);
    if (!m.unfinished) out_.control(kEnd);
    out_.target = false;
    models_turn_ = m.unfinished;
  }

  // The assistant's header belongs to the turn before it: its think tag says whether the answer begins with reasoning.
  void write_header_after(int k) {
    bool last = k + 1 == static_cast<int>(turns_.size());
    if (!last && turns_[k + 1].role != ChatRole::assistant && turns_[k + 1].role != ChatRole::latest_reminder) return;
    ChatTask task = turns_[k].task;
    if (task == ChatTask::none && !asks(turns_[k])) return;
    if (task == ChatTask::none || task == ChatTask::action) {
      bool opens = thinking_ && (task == ChatTask::action || !drop_ || k >= last_question_);
      out_.control(kAssistant);
      out_.control(opens ? kThinkOpen : kThinkClose);
    }
    if (task != ChatTask::none) out_.control(task_token(task));
    models_turn_ = true;
  }

  const ChatOptions& options_;
  std::vector<Turn> turns_;
  bool thinking_, drop_;
  int last_question_;
  Writer out_;
  bool models_turn_ = false;
};

}  // namespace

std::vector<ChatPiece> render_chat(const std::vector<Message>& messages, const ChatOptions& options) {
  return Renderer(messages, options).render().pieces;
}

std::vector<ChatPiece> render_prompt(const std::vector<Message>& messages, const ChatOptions& options,
                                     bool start_call) {
  Rendering rendering = Renderer(messages, options).render();
  Writer out;
  out.pieces = std::move(rendering.pieces);
  for (ChatPiece& piece : out.pieces) piece.target = false;
  if (!rendering.models_turn) {
    out.control(kAssistant);
    out.control(options.mode == ThinkingMode::thinking ? kThinkOpen : kThinkClose);
  }
  if (start_call) out.format(kCallsOpen);
  return std::move(out.pieces);
}

std::string chat_text(const std::vector<ChatPiece>& pieces) {
  std::string text;
  for (const ChatPiece& piece : pieces) text += piece.text;
  return text;
}

}  // namespace plumb
