// The routes that are no protocol: pages, health and figures; models, adapters and tokens.
#include <fmt/format.h>

#include "base/error.h"
#include "model/adapter_files.h"
#include "serve/anthropic.h"
#include "serve/openai_chat_request.h"
#include "serve/request_fields.h"
#include "serve/service.h"

namespace plumb::serve {
namespace {

using nlohmann::json;

HttpReply json_reply(const json& body) { return {200, "application/json", dump(body)}; }

json model_entry(const ServedModel& m, const std::string& id, const json& parent) {
  return {{"id", id},
          {"object", "model"},
          {"created", m.created},
          {"owned_by", "plumb"},
          {"root", m.name},
          {"parent", parent},
          {"max_model_len", m.max_positions}};
}

// The base model and the newest version of each adapter.
json model_entries(const ServedModel& m) {
  json list = json::array({model_entry(m, m.name, nullptr)});
  for (const AdapterRef& a : m.adapters->list()) {
    json entry = model_entry(m, a->name, m.name);
    entry["version"] = a->version;
    list.push_back(std::move(entry));
  }
  return list;
}

json one_model(const ServedModel& m, const std::string& id) {
  for (json& entry : model_entries(m))
    if (entry["id"] == id) return entry;
  throw ApiError{404, "model", fmt::format("model: '{}' is not served (GET /v1/models lists what is)", id)};
}

std::string required_text(const Fields& body, const char* name) {
  const std::string text = string_at(body.need(name), body.path(name));
  if (text.empty()) refuse(name, "is empty", "give a text");
  return text;
}

// ---- Adapters ------------------------------------------------------------------------------------------------------

// A name that is loaded already gets a new version; requests that follow the newest go on with it.
HttpReply load_adapter_reply(const ServedModel& m, const std::string& name, const std::string& path) {
  try {
    std::shared_ptr<const Adapter> adapter;
    try {
      adapter = load_adapter(path, m.config);
    } catch (const Error& e) {
      refuse("lora_path", e.what(), "");
    }
    const AdapterRef loaded = m.adapters->publish(name, std::move(adapter));
    return {200, "text/plain",
            fmt::format("Success: LoRA adapter '{}' added successfully as version {}.", name, loaded->version)};
  } catch (...) {
    return error_reply(ErrorForm::openai, error_of(std::current_exception()));
  }
}

HttpReply unload_adapter(const ServedModel& m, const HttpRequest& request) {
  const Json parsed = parse_body(request.body);
  const Fields body(parsed);
  const std::string name = required_text(body, "lora_name");
  if (!m.adapters->remove(name))
    refuse("lora_name", fmt::format("'{}' is not loaded", name), "GET /v1/models lists what is", 404);
  return {200, "text/plain", fmt::format("Success: LoRA adapter '{}' removed successfully.", name)};
}

// ---- Tokens --------------------------------------------------------------------------------------------------------

// {prompt} as a completion's prompt is read, or {messages, tools} as a chat's.
std::vector<int> tokens_of(const ServedModel& m, const Fields& body) {
  const Json *prompt = body.find("prompt"), *messages = body.find("messages");
  if ((prompt != nullptr) == (messages != nullptr))
    refuse("", "needs either prompt or messages", "give one of the two");
  if (prompt) return prompt_tokens(body, string_at(*prompt, "prompt"), m);
  return chat_prompt(messages_from_json(*messages, body.find("tools")), read_chat_options(body, m), {}, m).tokens;
}

json tokenize(const ServedModel& m, const HttpRequest& request) {
  const Json parsed = parse_body(request.body);
  const Fields body(parsed);
  read_model(body, m);
  const std::vector<int> ids = tokens_of(m, body);
  json strings;
  if (body.flag("return_token_strs", false)) {
    strings = json::array();
    for (int id : ids) strings.push_back(m.tokenizer.id_to_token(id));
  }
  return {{"count", ids.size()}, {"max_model_len", m.max_positions}, {"tokens", ids}, {"token_strs", strings}};
}

json detokenize(const ServedModel& m, const HttpRequest& request) {
  const Json parsed = parse_body(request.body);
  const Fields body(parsed);
  read_model(body, m);
  std::vector<int32_t> ids;
  for (int id : token_ids_at(body.need("tokens"), "tokens", m.config.vocab_size)) ids.push_back(id);
  return {{"prompt", m.tokenizer.decode(ids, false)}};
}

}  // namespace

void Service::add_pages() {
  router_.add_file("/", "page.html", "text/html; charset=utf-8", true);  // opened before it can be told a key
  router_.add_file("/openapi.json", "openapi.json", "application/json", true);

  const auto health = [this](const HttpRequest&, Wake) {
    const EngineStats e = engine_.stats();
    return json_reply(
        {{"status", "ok"},
         {"running", e.running},
         {"waiting", e.waiting},
         {"pages",
          {{"free", e.free_key_pages + e.free_entry_pages}, {"held", e.held_key_pages + e.held_entry_pages}}}});
  };
  router_.add({"GET", "/health", health, true});
  router_.add({"GET", "/version", [this](const HttpRequest&, Wake) {
                 return json_reply({{"version", options_.version}});
               }});
  router_.add({"GET", "/metrics", [this](const HttpRequest&, Wake) {
                 const HttpServer* s = server;
                 return HttpReply{200, "text/plain; version=0.0.4; charset=utf-8",
                                  metrics_.text(engine_.stats(), s ? s->connections() : 0, model_.name)};
               }});
}

void Service::add_models() {
  router_.add({"GET", "/v1/models", [this](const HttpRequest&, Wake) {
                 return json_reply({{"object", "list"}, {"data", model_entries(model_)}});
               }});
  router_.add({"GET", "/v1/models/", [this](const HttpRequest& r, Wake) {
                 return json_reply(one_model(model_, percent_decoded(r.path.substr(sizeof "/v1/models/" - 1))));
               }});
  const auto load = [this](const HttpRequest& r, Wake wake) -> Answered {
    const Json parsed = parse_body(r.body);
    const Fields body(parsed);
    const std::string name = required_text(body, "lora_name"), path = required_text(body, "lora_path");
    if (name == model_.name) refuse("lora_name", "'" + name + "' is the base model's name", "choose another one");
    return background_.answer([this, name, path] { return load_adapter_reply(model_, name, path); }, std::move(wake));
  };
  router_.add({"POST", "/v1/load_lora_adapter", load});
  router_.add(
      {"POST", "/v1/unload_lora_adapter", [this](const HttpRequest& r, Wake) { return unload_adapter(model_, r); }});
  router_.add({"POST", "/tokenize", [this](const HttpRequest& r, Wake) { return json_reply(tokenize(model_, r)); }});
  router_.add(
      {"POST", "/detokenize", [this](const HttpRequest& r, Wake) { return json_reply(detokenize(model_, r)); }});
  router_.add({"POST", "/v1/messages/count_tokens",
               [this](const HttpRequest& r, Wake) { return json_reply(anthropic_count_tokens(r.body, model_)); }});
}

}  // namespace plumb::serve
