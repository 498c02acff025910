#include "serve/openai_chat.h"

#include <ctime>
#include <utility>

#include "serve/openai_chat_request.h"
#include "serve/openai_parts.h"

namespace plumb::serve {
namespace {

using nlohmann::json;
using Kind = ChatEvent::Kind;

struct Choice {
  explicit Choice(ChatAnswer a) : answer(std::move(a)) {}

  ChatAnswer answer;
  ParsedTurn turn;  // so far; calls have their ids
  std::vector<GeneratedToken> tokens;
  std::string finish, stop_string;
  int cached_tokens = 0;
  std::vector<float> prompt_logprobs;
  std::vector<std::vector<TokenLogprob>> prompt_top;
  Tensor routed;
};

json call_json(const ToolCall& call) {
  return {{"id", call.id}, {"type", "function"}, {"function", {{"name", call.name}, {"arguments", call.arguments}}}};
}

// Adds an event to the turn. Returns what a streamed choice says for it: null if nothing.
json take_event(Choice& choice, const ChatEvent& event) {
  ParsedTurn& turn = choice.turn;
  switch (event.kind) {
    case Kind::reasoning:
      turn.reasoning += event.text;
      return {{"reasoning_content", event.text}};
    case Kind::content:
      turn.content += event.text;
      return {{"content", event.text}};
    case Kind::call_begin: {
      turn.calls.push_back({fresh_id("call_"), event.text, ""});
      json call = call_json(turn.calls.back());
      call["index"] = turn.calls.size() - 1;
      return {{"tool_calls", json::array({call})}};
    }
    case Kind::arguments:
      turn.calls.back().arguments += event.text;
      return {
          {"tool_calls", json::array({{{"index", turn.calls.size() - 1}, {"function", {{"arguments", event.text}}}}})}};
    case Kind::finish:
      choice.finish = event.text;
      return nullptr;
    case Kind::call_end:
    case Kind::markup:
      break;
  }
  return nullptr;
}

class Chat final : public Exchange {
 public:
  Chat(ChatRequest request, const ServedModel& model)
      : request_(std::move(request)), model_(model), id_(fresh_id("chatcmpl-")), created_(std::time(nullptr)) {
    for (int i = 0; i < fields().choices; ++i)
      choices_.emplace_back(ChatAnswer(request_.prompt, model, fields().skip_special));
  }

  std::vector<Request> requests() override { return one_each(fields().request, fields().choices); }
  bool streams() const override { return fields().stream; }
  std::string keep_alive() override { return std::string(kCommentEvent); }

  std::string begin() override {
    std::string out;
    for (int i = 0; i < fields().choices; ++i) {
      json first = chunk(i, {{"role", "assistant"}, {"content", ""}});
      if (fields().return_token_ids) first["prompt_token_ids"] = fields().request.prompt;
      out += server_event(first);
      for (const json& delta : take_begun(i)) out += server_event(chunk(i, delta));
    }
    return out;
  }

  std::string token(int index, const Event& event) override {
    Choice& choice = choices_[index];
    if (!streams() && choice.tokens.empty()) take_begun(index);
    choice.tokens.push_back(event.token);
    if (choice.tokens.size() == 1) {
      choice.cached_tokens = event.cached_tokens;
      choice.prompt_logprobs = event.prompt_logprobs;
      choice.prompt_top = event.prompt_top;
    }
    if (event.finish != Finish::none) choice.routed = event.routed, choice.stop_string = event.stop_string;
    std::vector<json> deltas = take(choice, choice.answer.token(event));
    if (!streams()) return "";

    // What belongs to the token itself is said once, with the first thing that is said for it.
    if (event.finish != Finish::none || (deltas.empty() && (request_.logprobs || fields().return_token_ids)))
      deltas.push_back(json::object());
    std::string out;
    for (size_t i = 0; i < deltas.size(); ++i) {
      json message = chunk(index, std::move(deltas[i]));
      if (i == 0) add_token(message, choice, event);
      if (i + 1 == deltas.size() && event.finish != Finish::none) finish(message["choices"][0], choice);
      out += server_event(message);
    }
    return out;
  }

  std::string end() override {
    std::string out;
    if (fields().stream_usage) {
      json message = head("chat.completion.chunk");
      message["choices"] = json::array();
      message["usage"] = usage_json(usage(), true);
      out = server_event(message);
    }
    return out + std::string(kLastEvent);
  }

  json whole() override {
    json message = head("chat.completion");
    message["choices"] = json::array();
    for (size_t i = 0; i < choices_.size(); ++i) message["choices"].push_back(whole_choice(i));
    message["usage"] = usage_json(usage(), true);
    if (fields().return_token_ids) message["prompt_token_ids"] = fields().request.prompt;
    if (fields().request.prompt_logprobs) message["prompt_logprobs"] = prompt_logprobs(choices_[0]);
    return message;
  }

 private:
  const AnswerFields& fields() const { return request_.fields; }

  json head(const char* object) const {
    return {{"id", id_}, {"object", object}, {"created", created_}, {"model", fields().model.spelled}};
  }

  json chunk(int index, json delta) const {
    json message = head("chat.completion.chunk");
    message["choices"] = json::array(
        {{{"index", index}, {"delta", std::move(delta)}, {"logprobs", nullptr}, {"finish_reason", nullptr}}});
    if (fields().stream_usage) message["usage"] = nullptr;
    if (fields().continuous_usage) message["usage"] = usage_json(usage(), true);
    return message;
  }

  std::vector<json> take(Choice& choice, const std::vector<ChatEvent>& events) {
    std::vector<json> deltas;
    for (const ChatEvent& e : events)
      if (json delta = take_event(choice, e); !delta.is_null()) deltas.push_back(std::move(delta));
    return deltas;
  }
  std::vector<json> take_begun(int index) { return take(choices_[index], choices_[index].answer.begin()); }

  void add_token(json& message, const Choice& choice, const Event& event) const {
    json& out = message["choices"][0];
    const std::span<const GeneratedToken> token(&event.token, 1);
    if (request_.logprobs) out["logprobs"] = chat_logprobs(token, model_.tokenizer, fields().tokens_as_ids);
    if (fields().return_token_ids) {
      out["token_ids"] = token_ids_json(token);
      out["adapter_versions"] = adapter_versions_json(token);
    }
    if (fields().request.prompt_logprobs && choice.tokens.size() == 1)
      message["prompt_logprobs"] = prompt_logprobs(choice);
  }

  void finish(json& out, const Choice& choice) const {
    out["finish_reason"] = choice.finish;
    const bool asked = !choice.stop_string.empty() && choice.stop_string != request_.prompt.stop;
    out["stop_reason"] = asked ? json(choice.stop_string) : json(nullptr);
    if (fields().request.routed_experts)
      add_routed_experts(out, choice.routed, fields().request.prompt.size(), choice.tokens.size());
  }

  json whole_choice(size_t index) const {
    const Choice& choice = choices_[index];
    const ParsedTurn& turn = choice.turn;
    json message = {{"role", "assistant"}, {"content", turn.content}, {"refusal", nullptr}};
    if (turn.content.empty() && !turn.calls.empty()) message["content"] = nullptr;
    if (!turn.reasoning.empty()) message["reasoning_content"] = turn.reasoning;
    for (const ToolCall& call : turn.calls) message["tool_calls"].push_back(call_json(call));
    json out = {{"index", index}, {"message", std::move(message)}, {"logprobs", nullptr}};
    if (request_.logprobs) out["logprobs"] = chat_logprobs(choice.tokens, model_.tokenizer, fields().tokens_as_ids);
    if (fields().return_token_ids) {
      out["token_ids"] = token_ids_json(choice.tokens);
      out["adapter_versions"] = adapter_versions_json(choice.tokens);
    }
    finish(out, choice);
    return out;
  }

  json prompt_logprobs(const Choice& choice) const {
    return prompt_logprobs_json(fields().request.prompt, choice.prompt_logprobs, choice.prompt_top, model_.tokenizer);
  }

  Usage usage() const {
    Usage usage;
    usage.prompt = static_cast<int64_t>(fields().request.prompt.size());
    usage.cached = choices_[0].cached_tokens;  // the further ones find what the first has left
    for (const Choice& choice : choices_) {
      usage.answer += static_cast<int64_t>(choice.tokens.size());
      usage.reasoning += choice.answer.reasoning_tokens();
    }
    return usage;
  }

  ChatRequest request_;
  const ServedModel& model_;
  std::string id_;
  int64_t created_;
  std::vector<Choice> choices_;
};

}  // namespace

std::unique_ptr<Exchange> openai_chat(std::string_view body, const ServedModel& model) {
  return std::make_unique<Chat>(read_chat_request(body, model), model);
}

}  // namespace plumb::serve
