#include "serve/responses.h"

#include <ctime>
#include <utility>

#include "serve/openai_parts.h"
#include "serve/responses_request.h"

namespace plumb::serve {
namespace {

using nlohmann::json;
using Kind = ChatEvent::Kind;

// A part of the answer. The last one is being written until it is closed.
struct Item {
  enum class Type { reasoning, message, call } type;
  std::string id, call_id, name;  // the latter two: call
  std::string text = {};          // reasoning, text or arguments
  json logprobs = json::array();  // message
  const char* status = "in_progress";
};

json part_json(const Item& item) {
  if (item.type == Item::Type::reasoning) return {{"type", "reasoning_text"}, {"text", item.text}};
  return {{"type", "output_text"}, {"text", item.text}, {"annotations", json::array()}, {"logprobs", item.logprobs}};
}

// content: whether the item has its text yet. It comes in as a content part, calls have no such.
json item_json(const Item& item, bool content) {
  json out = {{"id", item.id}, {"status", item.status}};
  if (item.type == Item::Type::call) {
    out.update({{"type", "function_call"}, {"call_id", item.call_id}, {"name", item.name}, {"arguments", item.text}});
    return out;
  }
  out["content"] = content ? json::array({part_json(item)}) : json::array();
  if (item.type == Item::Type::message) out.update({{"type", "message"}, {"role", "assistant"}});
  if (item.type == Item::Type::reasoning) out.update({{"type", "reasoning"}, {"summary", json::array()}});
  return out;
}

class Responses final : public Exchange {
 public:
  Responses(ResponsesRequest request, const ServedModel& model)
      : request_(std::move(request)),
        model_(model),
        answer_(request_.prompt, model, request_.fields.skip_special),
        id_(fresh_id("resp_")),
        created_(std::time(nullptr)) {}

  std::vector<Request> requests() override { return {request_.fields.request}; }
  bool streams() const override { return request_.fields.stream; }
  std::string keep_alive() override { return std::string(kCommentEvent); }

  std::string begin() override {
    emit("response.created", {{"response", response()}});
    emit("response.in_progress", {{"response", response()}});
    begin_answer();
    return std::exchange(out_, "");
  }

  std::string token(int, const Event& event) override {
    if (!streams() && tokens_.empty()) begin_answer();
    tokens_.push_back(event.token);
    unsaid_.push_back(event.token);
    const std::vector<ChatEvent> events = answer_.token(event);
    take(events);
    // Tokens are said with the text that they bring, maybe later; tokens of other things are said nowhere.
    if (!events.empty()) unsaid_.clear();
    return std::exchange(out_, "");
  }

  std::string end() override {
    emit(finish_ == "length" ? "response.incomplete" : "response.completed", {{"response", response()}});
    return std::exchange(out_, "");
  }

  json whole() override { return response(); }

 private:
  json response() const {
    json out = request_.echo;
    const bool cut = finish_ == "length";
    out.update({{"id", id_},
                {"object", "response"},
                {"created_at", created_},
                {"status", finish_.empty() ? "in_progress"
                           : cut           ? "incomplete"
                                           : "completed"},
                {"error", nullptr},
                {"incomplete_details", nullptr},
                {"output", json::array()},
                {"usage", nullptr}});
    if (cut) out["incomplete_details"] = {{"reason", "max_output_tokens"}};
    for (const Item& item : items_) out["output"].push_back(item_json(item, true));
    if (finish_.empty()) return out;
    const int64_t prompt = static_cast<int64_t>(request_.fields.request.prompt.size());
    const int64_t made = static_cast<int64_t>(tokens_.size());
    out["usage"] = {{"input_tokens", prompt},
                    {"input_tokens_details", {{"cached_tokens", 0}, {"cache_write_tokens", 0}}},
                    {"output_tokens", made},
                    {"output_tokens_details", {{"reasoning_tokens", answer_.reasoning_tokens()}}},
                    {"total_tokens", prompt + made}};
    if (request_.fields.return_token_ids) {
      out["prompt_token_ids"] = request_.fields.request.prompt;
      out["token_ids"] = token_ids_json(tokens_);
      out["adapter_versions"] = adapter_versions_json(tokens_);
    }
    return out;
  }

  void emit(const char* type, json data) {
    if (!streams()) return;
    data["type"] = type;
    data["sequence_number"] = sequence_++;
    out_ += "event: " + std::string(type) + "\n" + server_event(data);
  }
  // An event of the item that is being written.
  void emit_item(const char* type, json data) {
    data["output_index"] = items_.size() - 1;
    data["item_id"] = items_.back().id;
    if (items_.back().type != Item::Type::call) data["content_index"] = 0;
    emit(type, std::move(data));
  }

  void begin_answer() { take(answer_.begin()); }

  void take(const std::vector<ChatEvent>& events) {
    for (const ChatEvent& e : events) {
      switch (e.kind) {
        case Kind::reasoning:
          open(Item::Type::reasoning);
          add_text(e.text);
          break;
        case Kind::content:
          if (open_ && items_.back().type == Item::Type::call) {
            held_text_ += e.text;
            break;
          }
          open(Item::Type::message);
          add_text(e.text);
          break;
        case Kind::call_begin:
          close();
          open(Item::Type::call, e.text);
          break;
        case Kind::arguments:
          add_text(e.text);
          break;
        case Kind::call_end:
          close();
          if (held_text_.empty()) break;
          unsaid_.clear();
          open(Item::Type::message);
          add_text(std::exchange(held_text_, ""));
          break;
        case Kind::finish:
          finish_ = e.text;
          close();
          break;
        case Kind::markup:
          break;
      }
    }
  }

  void open(Item::Type type, const std::string& name = "") {
    if (open_ && items_.back().type == type) return;
    close();
    const char* prefix = type == Item::Type::reasoning ? "rs_" : type == Item::Type::message ? "msg_" : "fc_";
    items_.push_back({type, fresh_id(prefix), type == Item::Type::call ? fresh_id("call_") : "", name});
    open_ = true;
    emit("response.output_item.added",
         {{"output_index", items_.size() - 1}, {"item", item_json(items_.back(), false)}});
    if (type != Item::Type::call) emit_item("response.content_part.added", {{"part", part_json(items_.back())}});
  }

  void add_text(const std::string& text) {
    Item& item = items_.back();
    item.text += text;
    switch (item.type) {
      case Item::Type::reasoning:
        emit_item("response.reasoning_text.delta", {{"delta", text}});
        break;
      case Item::Type::call:
        emit_item("response.function_call_arguments.delta", {{"delta", text}});
        break;
      case Item::Type::message: {
        json logprobs = json::array();
        if (request_.logprobs)
          logprobs = chat_logprobs(unsaid_, model_.tokenizer, request_.fields.tokens_as_ids)["content"];
        unsaid_.clear();
        item.logprobs.insert(item.logprobs.end(), logprobs.begin(), logprobs.end());
        emit_item("response.output_text.delta", {{"delta", text}, {"logprobs", std::move(logprobs)}});
        break;
      }
    }
  }

  void close() {
    if (!open_) return;
    Item& item = items_.back();
    // The arguments of a call that was cut off never get their closing bracket.
    const bool cut = item.type == Item::Type::call ? !json::accept(item.text) : finish_ == "length";
    item.status = cut ? "incomplete" : "completed";
    switch (item.type) {
      case Item::Type::reasoning:
        emit_item("response.reasoning_text.done", {{"text", item.text}});
        break;
      case Item::Type::message:
        emit_item("response.output_text.done", {{"text", item.text}, {"logprobs", item.logprobs}});
        break;
      case Item::Type::call:
        emit_item("response.function_call_arguments.done", {{"arguments", item.text}, {"name", item.name}});
        break;
    }
    if (item.type != Item::Type::call) emit_item("response.content_part.done", {{"part", part_json(item)}});
    emit("response.output_item.done", {{"output_index", items_.size() - 1}, {"item", item_json(item, true)}});
    open_ = false;
  }

  ResponsesRequest request_;
  const ServedModel& model_;
  ChatAnswer answer_;
  std::string id_;
  int64_t created_;
  std::vector<Item> items_;
  bool open_ = false;      // the last item is being written
  std::string held_text_;  // written inside a call, between its parameters: comes behind it
  std::vector<GeneratedToken> tokens_;
  std::vector<GeneratedToken> unsaid_;  // tokens since the last text
  std::string finish_;                  // "stop", "length" or "tool_calls" once the answer is complete
  int64_t sequence_ = 0;
  std::string out_;  // events to send
};

}  // namespace

std::unique_ptr<Exchange> openai_responses(std::string_view body, const ServedModel& model) {
  return std::make_unique<Responses>(read_responses_request(body, model), model);
}

}  // namespace plumb::serve
