#include "serve/openai_completions.h"

#include <fmt/format.h>

#include <ctime>
#include <utility>

#include "serve/openai_parts.h"

namespace plumb::serve {
namespace {

using nlohmann::json;

constexpr size_t kMostPrompts = 1024;

// ---- The request ---------------------------------------------------------------------------------------------------

struct CompletionRequest {
  AnswerFields fields;
  std::vector<Request> prompts;  // complete but for their keys
  bool echo = false;
  bool logprobs = false;
  bool prompt_logprobs = false;  // in vLLM's form, beside those of an echo
};

// A string, a list of token ids, or a list of either.
std::vector<std::vector<int>> read_prompts(const Fields& body, const ServedModel& model) {
  const std::string path = body.path("prompt");
  const Json& prompt = body.need("prompt");
  const auto one = [&](const Json& p, const std::string& at) {
    if (p.is_string()) {
      if (p.text.empty()) refuse(at, "is empty", "give a text or a list of token ids");
      return prompt_tokens(body, p.text, model);
    }
    if (!p.is_array()) refuse(at, fmt::format("is {}", kind_name(p.kind)), "give a string or a list of token ids");
    return token_ids_at(p, at, model.config.vocab_size);
  };
  const bool many = prompt.is_array() && !prompt.items.empty() && prompt.items[0].kind != Json::Kind::number;
  if (!many) return {one(prompt, path)};
  if (prompt.items.size() > kMostPrompts)
    refuse(path, fmt::format("has {} prompts", prompt.items.size()), fmt::format("give at most {}", kMostPrompts));
  std::vector<std::vector<int>> prompts;
  for (const Json& p : prompt.items) prompts.push_back(one(p, fmt::format("{}[{}]", path, prompts.size())));
  return prompts;
}

CompletionRequest read_request(std::string_view text, const ServedModel& model) {
  const Json json = parse_body(text);
  const Fields body(json);
  CompletionRequest out;
  out.fields = read_answer_fields(body, model, {"max_tokens"}, 0);
  Request& request = out.fields.request;
  out.echo = body.flag("echo", false);
  if (const std::optional<int64_t> top = body.integer("logprobs", 0, model.max_logprobs)) {
    out.logprobs = true;
    request.sampling.top_logprobs = static_cast<int>(*top);
  }
  out.prompt_logprobs = request.prompt_logprobs;
  request.prompt_logprobs |= out.echo && out.logprobs;
  if (out.echo && out.logprobs)
    request.prompt_top_logprobs = std::max(request.prompt_top_logprobs, request.sampling.top_logprobs);
  // The engine reads a prompt without answering only if something of the prompt is wanted.
  request.prompt_logprobs |= request.sampling.max_tokens == 0;
  if (body.integer("best_of", 1, model.max_choices).value_or(out.fields.choices) != out.fields.choices)
    refuse(body.path("best_of"), "differs from n", "leave it out: every answer that is made is returned");
  if (body.text("suffix").value_or("") != "")
    refuse(body.path("suffix"), "text between two texts is not made", "leave it out");
  body.ignore({"user", "request_id", "cache_salt", "spaces_between_special_tokens"});

  const std::vector<std::vector<int>> prompts = read_prompts(body, model);
  if (model.strict_fields) body.refuse_unknown();
  for (size_t i = 0; i < prompts.size(); ++i) {
    out.prompts.push_back(request);
    out.prompts.back().prompt = prompts[i];
    const std::string path = body.path("prompt");
    fit_length(out.prompts.back(), model, prompts.size() == 1 ? path : fmt::format("{}[{}]", path, i),
               out.fields.length_field);
  }
  return out;
}

// ---- The answer ----------------------------------------------------------------------------------------------------

// OpenAI's old form: parallel lists.
struct TextLogprobs {
  json tokens = json::array(), token_logprobs = json::array(), top_logprobs = json::array(),
       text_offset = json::array();
  json take() {
    json out = {{"tokens", std::move(tokens)},
                {"token_logprobs", std::move(token_logprobs)},
                {"top_logprobs", std::move(top_logprobs)},
                {"text_offset", std::move(text_offset)}};
    *this = {};
    return out;
  }
};

struct Choice {
  explicit Choice(const Request& r) : request(&r) {}

  const Request* request;
  TextStream stream;
  std::string text;
  TextLogprobs logprobs;
  std::vector<GeneratedToken> tokens;
  Finish finish = Finish::none;
  std::string stop_string;
  std::vector<float> prompt_logprobs;
  std::vector<std::vector<TokenLogprob>> prompt_top;
  bool started = false;
  int cached_tokens = 0;
  Tensor routed;
};

class Completions final : public Exchange {
 public:
  Completions(CompletionRequest request, const ServedModel& model)
      : request_(std::move(request)), model_(model), id_(fresh_id("cmpl-")), created_(std::time(nullptr)) {
    for (const Request& r : request_.prompts)
      for (int i = 0; i < fields().choices; ++i) choices_.emplace_back(r);
  }

  std::vector<Request> requests() override {
    std::vector<Request> out;
    for (const Request& r : request_.prompts)
      for (Request& one : one_each(r, fields().choices, out.size())) out.push_back(std::move(one));
    return out;
  }
  bool streams() const override { return fields().stream; }
  std::string begin() override { return ""; }
  std::string keep_alive() override { return std::string(kCommentEvent); }

  std::string token(int index, const Event& event) override {
    Choice& choice = choices_[index];
    const bool first = !std::exchange(choice.started, true);
    std::string text;
    if (first) {
      choice.cached_tokens = event.cached_tokens;
      choice.prompt_logprobs = event.prompt_logprobs;
      choice.prompt_top = event.prompt_top;
      if (request_.echo) text = take_prompt(choice);
    }
    const bool makes_token = event.token.id >= 0;  // otherwise the prompt was all that was asked for
    if (makes_token) {
      choice.tokens.push_back(event.token);
      text += take_token(choice, event);
    }
    if (event.finish != Finish::none) {
      text += choice.stream.finish();
      choice.finish = event.finish;
      choice.stop_string = event.stop_string;
      choice.routed = event.routed;
    }
    choice.text += text;
    const bool silent = text.empty() && !request_.logprobs && !fields().return_token_ids;
    if (!streams() || (silent && event.finish == Finish::none)) return "";

    json message = head();
    const std::span<const GeneratedToken> news(&event.token, makes_token ? 1 : 0);
    json out = choice_json(index, text, news);
    if (first) add_prompt(out, choice);
    message["choices"] = json::array({std::move(out)});
    if (fields().stream_usage) message["usage"] = nullptr;
    if (fields().continuous_usage) message["usage"] = usage_json(usage(), false);
    return server_event(message);
  }

  std::string end() override {
    std::string out;
    if (fields().stream_usage) {
      json message = head();
      message["choices"] = json::array();
      message["usage"] = usage_json(usage(), false);
      out = server_event(message);
    }
    return out + std::string(kLastEvent);
  }

  json whole() override {
    json message = head();
    message["choices"] = json::array();
    for (size_t i = 0; i < choices_.size(); ++i) {
      json out = choice_json(i, choices_[i].text, choices_[i].tokens);
      add_prompt(out, choices_[i]);
      message["choices"].push_back(std::move(out));
    }
    message["usage"] = usage_json(usage(), false);
    return message;
  }

 private:
  const AnswerFields& fields() const { return request_.fields; }
  json head() const {
    return {{"id", id_}, {"object", "text_completion"}, {"created", created_}, {"model", fields().model.spelled}};
  }

  // The text that `bytes` of a token make certain; notes the token's log-probability. top: null = not known.
  std::string take(Choice& choice, int id, std::string_view bytes, json logprob, json top) {
    TextLogprobs& l = choice.logprobs;
    if (request_.logprobs) {
      l.tokens.push_back(token_name(id, model_.tokenizer, fields().tokens_as_ids));
      l.token_logprobs.push_back(std::move(logprob));
      l.top_logprobs.push_back(std::move(top));
      l.text_offset.push_back(choice.stream.characters());
    }
    const bool hidden = fields().skip_special && model_.tokenizer.is_special(id);
    return choice.stream.push(hidden ? "" : bytes);
  }

  std::string take_prompt(Choice& choice) {
    std::string text;
    const std::vector<int>& prompt = choice.request->prompt;
    for (size_t i = 0; i < prompt.size(); ++i) {
      const bool known = i > 0 && i <= choice.prompt_logprobs.size();
      json logprob, top;
      if (known) {
        const float value = choice.prompt_logprobs[i - 1];
        logprob = finite_logprob(value);
        std::span<const TokenLogprob> likely;
        if (i <= choice.prompt_top.size()) likely = choice.prompt_top[i - 1];
        top = top_json(likely, prompt[i], value);
      }
      text += take(choice, prompt[i], model_.tokenizer.id_to_bytes(prompt[i]), std::move(logprob), std::move(top));
    }
    return text;
  }

  std::string take_token(Choice& choice, const Event& event) {
    const GeneratedToken& t = event.token;
    return take(choice, t.id, event.text, finite_logprob(t.logprob), top_json(t.top, t.id, t.logprob));
  }

  // The most likely tokens and the token itself. Tokens that look alike share a name: the likelier one has it.
  json top_json(std::span<const TokenLogprob> top, int id, float logprob) const {
    json out = json::object();
    const auto add = [&](int i, float l) {
      out.emplace(token_name(i, model_.tokenizer, fields().tokens_as_ids), finite_logprob(l));
    };
    // More are there if prompt_logprobs asks for more.
    for (size_t k = 0; k < top.size() && static_cast<int>(k) < fields().request.sampling.top_logprobs; ++k)
      add(top[k].id, top[k].logprob);
    add(id, logprob);
    return out;
  }

  json choice_json(size_t index, const std::string& text, std::span<const GeneratedToken> tokens) {
    Choice& choice = choices_[index];
    json out = {{"index", index}, {"text", text}, {"logprobs", nullptr}, {"finish_reason", nullptr}};
    if (request_.logprobs) out["logprobs"] = choice.logprobs.take();
    if (fields().return_token_ids) {
      out["token_ids"] = token_ids_json(tokens);
      out["adapter_versions"] = adapter_versions_json(tokens);
    }
    if (choice.finish == Finish::none) return out;
    out["finish_reason"] = choice.finish == Finish::length ? "length" : "stop";
    out["stop_reason"] = choice.stop_string.empty() ? json(nullptr) : json(choice.stop_string);
    if (fields().request.routed_experts)
      add_routed_experts(out, choice.routed, choice.request->prompt.size(), choice.tokens.size());
    return out;
  }

  void add_prompt(json& out, const Choice& choice) const {
    if (fields().return_token_ids) out["prompt_token_ids"] = choice.request->prompt;
    if (request_.prompt_logprobs)
      out["prompt_logprobs"] =
          prompt_logprobs_json(choice.request->prompt, choice.prompt_logprobs, choice.prompt_top, model_.tokenizer);
  }

  Usage usage() const {
    Usage usage;
    for (const Request& r : request_.prompts) usage.prompt += static_cast<int64_t>(r.prompt.size());
    // The further answers to a prompt find what the first has left.
    for (size_t i = 0; i < choices_.size(); i += fields().choices) usage.cached += choices_[i].cached_tokens;
    for (const Choice& choice : choices_) usage.answer += static_cast<int64_t>(choice.tokens.size());
    return usage;
  }

  CompletionRequest request_;
  const ServedModel& model_;
  std::string id_;
  int64_t created_;
  std::vector<Choice> choices_;
};

}  // namespace

std::unique_ptr<Exchange> openai_completions(std::string_view body, const ServedModel& model) {
  return std::make_unique<Completions>(read_request(body, model), model);
}

}  // namespace plumb::serve
