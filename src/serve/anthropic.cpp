#include "serve/anthropic.h"

#include <utility>

#include "serve/anthropic_request.h"
#include "serve/openai_parts.h"

namespace plumb::serve {
namespace {

using nlohmann::json;
using Kind = ChatEvent::Kind;

// Thinking blocks have a signature with which Anthropic's own server recognizes them when they come back. Here any is
// accepted; clients want to see one.
constexpr const char* kSignature = "unsigned";

struct Block {
  enum class Type { thinking, text, tool_use } type;
  std::string id, name;   // tool_use
  std::string text = {};  // thinking, text, or the JSON text of the input
};

// Arguments that are no JSON object (the call was cut off, or is malformed) become one argument `arguments`, as they do
// in the chat format when a client sends them back.
json input_of(const std::string& arguments) {
  if (arguments.empty()) return json::object();
  json input = json::parse(arguments, nullptr, false);
  return input.is_object() ? input : json{{"arguments", arguments}};
}

json block_json(const Block& block) {
  switch (block.type) {
    case Block::Type::thinking:
      return {{"type", "thinking"}, {"thinking", block.text}, {"signature", kSignature}};
    case Block::Type::text:
      return {{"type", "text"}, {"text", block.text}};
    case Block::Type::tool_use:
      return {{"type", "tool_use"}, {"id", block.id}, {"name", block.name}, {"input", input_of(block.text)}};
  }
  return nullptr;
}

// As a stream begins it: empty.
json begun_json(const Block& block) {
  json out = block_json(block);
  if (block.type == Block::Type::thinking) out["signature"] = "";
  if (block.type == Block::Type::tool_use) out["input"] = json::object();
  return out;
}

std::string typed_event(const json& data) {
  return "event: " + data["type"].get<std::string>() + "\n" + server_event(data);
}

class Messages final : public Exchange {
 public:
  Messages(MessagesRequest request, const ServedModel& model)
      : request_(std::move(request)),
        answer_(request_.prompt, model, request_.fields.skip_special),
        id_(fresh_id("msg_")) {}

  std::vector<Request> requests() override { return {request_.fields.request}; }
  bool streams() const override { return request_.fields.stream; }
  std::string keep_alive() override { return typed_event({{"type", "ping"}}); }

  std::string begin() override {
    emit({{"type", "message_start"}, {"message", message()}});
    begin_answer();
    return std::exchange(out_, "");
  }

  std::string token(int, const Event& event) override {
    if (!streams() && tokens_.empty()) begin_answer();
    tokens_.push_back(event.token);
    if (event.finish != Finish::none) set_stop(event);
    take(answer_.token(event));
    return std::exchange(out_, "");
  }

  std::string end() override {
    json delta = {{"stop_reason", stop_reason_}, {"stop_sequence", stop_sequence_}};
    json event = {{"type", "message_delta"}, {"delta", std::move(delta)}, {"usage", usage()}};
    add_tokens(event);
    emit(event);
    emit({{"type", "message_stop"}});
    return std::exchange(out_, "");
  }

  json whole() override {
    json out = message();
    add_tokens(out);
    return out;
  }

 private:
  json usage() const {
    return {{"input_tokens", request_.fields.request.prompt.size()},
            {"cache_creation_input_tokens", 0},
            {"cache_read_input_tokens", 0},
            {"output_tokens", tokens_.size()},
            {"output_tokens_details", {{"thinking_tokens", answer_.reasoning_tokens()}}}};
  }

  json message() const {
    json content = json::array();
    for (const Block& block : blocks_) content.push_back(block_json(block));
    return {{"id", id_},
            {"type", "message"},
            {"role", "assistant"},
            {"model", request_.fields.model.spelled},
            {"content", std::move(content)},
            {"stop_reason", stop_reason_},
            {"stop_sequence", stop_sequence_},
            {"usage", usage()}};
  }

  void add_tokens(json& out) const {
    if (!request_.fields.return_token_ids) return;
    out["prompt_token_ids"] = request_.fields.request.prompt;
    out["token_ids"] = token_ids_json(tokens_);
    out["adapter_versions"] = adapter_versions_json(tokens_);
  }

  // Why the answer ended; "end_turn" becomes "tool_use" if it has a call.
  void set_stop(const Event& event) {
    if (event.finish == Finish::length) {
      stop_reason_ = request_.whole_context ? "model_context_window_exceeded" : "max_tokens";
    } else if (!event.stop_string.empty() && event.stop_string != request_.prompt.stop) {
      stop_reason_ = "stop_sequence";
      stop_sequence_ = event.stop_string;
    } else {
      stop_reason_ = "end_turn";
    }
  }

  void emit(const json& data) {
    if (streams()) out_ += typed_event(data);
  }

  void begin_answer() { take(answer_.begin()); }

  void take(const std::vector<ChatEvent>& events) {
    for (const ChatEvent& e : events) {
      switch (e.kind) {
        case Kind::reasoning:
          open(Block::Type::thinking);
          if (request_.show_thinking) add("thinking_delta", "thinking", e.text);
          break;
        case Kind::content:
          if (open_ && blocks_.back().type == Block::Type::tool_use) {
            held_text_ += e.text;
          } else {
            add_text(e.text);
          }
          break;
        case Kind::call_begin:
          close();
          open(Block::Type::tool_use, e.text);
          break;
        case Kind::arguments:
          add("input_json_delta", "partial_json", e.text);
          break;
        case Kind::call_end:
          close();
          if (!held_text_.empty()) add_text(std::exchange(held_text_, ""));
          break;
        case Kind::finish:
          close();
          if (e.text == "tool_calls" && stop_reason_ == "end_turn") stop_reason_ = "tool_use";
          break;
        case Kind::markup:
          break;
      }
    }
  }

  void open(Block::Type type, const std::string& name = "") {
    if (open_ && blocks_.back().type == type) return;
    close();
    blocks_.push_back({type, type == Block::Type::tool_use ? fresh_id("toolu_") : "", name});
    open_ = true;
    emit({{"type", "content_block_start"},
          {"index", blocks_.size() - 1},
          {"content_block", begun_json(blocks_.back())}});
  }

  void emit_delta(const char* type, const char* member, const std::string& text) {
    emit({{"type", "content_block_delta"}, {"index", blocks_.size() - 1}, {"delta", {{"type", type}, {member, text}}}});
  }

  void add(const char* type, const char* member, const std::string& text) {
    blocks_.back().text += text;
    emit_delta(type, member, text);
  }

  void add_text(const std::string& text) {
    open(Block::Type::text);
    add("text_delta", "text", text);
  }

  void close() {
    if (!open_) return;
    if (blocks_.back().type == Block::Type::thinking) emit_delta("signature_delta", "signature", kSignature);
    emit({{"type", "content_block_stop"}, {"index", blocks_.size() - 1}});
    open_ = false;
  }

  MessagesRequest request_;
  ChatAnswer answer_;
  std::string id_;
  std::vector<Block> blocks_;
  bool open_ = false;      // the last block is being written
  std::string held_text_;  // written inside a call, between its parameters: comes behind it
  std::vector<GeneratedToken> tokens_;
  json stop_reason_, stop_sequence_;  // null: still being written; no such
  std::string out_;                   // events to send
};

}  // namespace

std::unique_ptr<Exchange> anthropic_messages(std::string_view body, const ServedModel& model) {
  return std::make_unique<Messages>(read_messages_request(body, model), model);
}

json anthropic_count_tokens(std::string_view text, const ServedModel& model) {
  const Json json = parse_body(text);
  const Fields body(json);
  read_model(body, model);
  return {{"input_tokens", read_messages_prompt(body, model).tokens.size()}};
}

}  // namespace plumb::serve
