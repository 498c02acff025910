// Routes, errors and answers of a whole server over real sockets.
#include "serve/server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>

#include "checkpoint/adapter.h"
#include "model/adapter_files.h"
#include "serve/serving.h"
#include "support/temp_path.h"
#include "support/tiny_model.h"

namespace plumb {
namespace {

using nlohmann::json;
using testing::Client;
using testing::Reply;
using testing::Serving;

const char* kPlain = R"({"prompt": [5, 6, 7], "max_tokens": 6})";
const char* kStream = R"({"prompt": [5, 6, 7], "max_tokens": 6, "stream": true})";
const char* kEndless = R"({"prompt": [5, 6, 7], "max_tokens": 4000, "stream": true})";

json error_of(const Reply& r) { return json::parse(r.body).at("error"); }

// Waits until nothing runs; -> pages that are held then.
int held_pages(const Serving& s) {
  json health;
  do health = json::parse(s.ask("GET", "/health").body);
  while (health["running"].get<int>() + health["waiting"].get<int>() > 0);
  return health["pages"]["held"];
}

// The value of a metric. name: as in the text, with all labels behind that of the model.
double metric(const Serving& s, std::string name, const std::string& labels = "") {
  name += "{model_name=\"tiny\"" + labels + "} ";
  const std::string text = s.ask("GET", "/metrics").body;
  const size_t at = text.find("\n" + name);
  EXPECT_NE(at, std::string::npos) << name;
  return at == std::string::npos ? -1 : std::stod(text.substr(at + 1 + name.size()));
}

// ---- Answers -------------------------------------------------------------------------------------------------------

TEST(Server, StreamHasTheTokensOfTheWholeAnswer) {
  Serving s;
  const Reply whole = s.ask("POST", "/plain", kPlain), stream = s.ask("POST", "/plain", kStream);
  ASSERT_EQ(whole.status, 200);
  ASSERT_EQ(stream.status, 200);
  EXPECT_EQ(stream.headers.at("content-type"), "text/event-stream");
  std::string expected = "data: begin\n\n";
  for (int id : json::parse(whole.body)["tokens"][0].get<std::vector<int>>())
    expected += "data: 0:" + std::to_string(id) + "\n\n";
  EXPECT_EQ(stream.body, expected + "data: end\n\n");
}

TEST(Server, EveryChoiceIsAnswered) {
  Serving s;
  const json tokens =
      json::parse(s.ask("POST", "/plain", R"({"prompt": [5], "n": 5, "max_tokens": 3})").body)["tokens"];
  ASSERT_EQ(tokens.size(), 5u);
  for (const json& choice : tokens) EXPECT_EQ(choice.size(), 3u);
}

TEST(Server, ErrorBeforeTheStreamHasItsStatusAndField) {
  Serving s;
  const Reply r = s.ask("POST", "/plain", R"({"prompt": [5], "max_tokens": 100000, "stream": true})");
  EXPECT_EQ(r.status, 400);
  EXPECT_EQ(error_of(r)["param"], "max_tokens");
  EXPECT_EQ(error_of(r)["type"], "invalid_request_error");
}

TEST(Server, ErrorWithinTheStreamIsAnEvent) {
  serve::ServerOptions o = Serving::default_options();
  std::atomic<bool> broken = false;
  o.engine.edit_plan = [&](SequencePlan&) {
    if (broken.exchange(false)) throw std::runtime_error("planted");
  };
  Serving s(o);
  Client c(s.port());
  c.request("POST", "/plain", kEndless);
  EXPECT_EQ(c.read_head().status, 200);
  broken = true;
  std::string body;
  for (auto chunk = c.read_chunk(); chunk && !chunk->empty(); chunk = c.read_chunk()) body += *chunk;
  const size_t at = body.find("data: {\"error\"");
  ASSERT_NE(at, std::string::npos) << body;
  EXPECT_EQ(json::parse(body.substr(at + 6))["error"]["type"], "server_error");
  EXPECT_EQ(body.find("data: end"), std::string::npos);
  EXPECT_EQ(s.ask("POST", "/plain", kPlain).status, 200);
}

TEST(Server, ClientThatLeavesFreesItsPages) {
  Serving s;
  {
    Client streaming(s.port()), waiting(s.port());
    streaming.request("POST", "/plain", kEndless);
    waiting.request("POST", "/plain", R"({"prompt": [5], "max_tokens": 4000, "n": 3})");
    streaming.read_head();
    streaming.read_chunk();
  }
  while (metric(s, "vllm:request_success_total", ",finished_reason=\"abort\"") < 4) {
  }
  EXPECT_EQ(held_pages(s), 0);
}

TEST(Server, FullQueueIs429WithRetryAfter) {
  serve::ServerOptions o = Serving::default_options();
  o.queue.max_open = 1;
  Serving s(o);
  Client busy(s.port());
  busy.request("POST", "/plain", kEndless);
  busy.read_head();
  const Reply r = s.ask("POST", "/plain", kPlain);
  EXPECT_EQ(r.status, 429);
  EXPECT_GE(std::stoi(r.headers.at("retry-after")), 1);
  EXPECT_EQ(error_of(r)["type"], "rate_limit_error");
}

TEST(Server, StopEndsStreamsAfterTheGrace) {
  serve::ServerOptions o = Serving::default_options();
  o.http.grace = std::chrono::milliseconds(1);
  Serving s(o);
  Client c(s.port());
  c.request("POST", "/plain", kEndless);
  c.read_head();
  s.stop();
  c.read_to_end();
}

// ---- Checks in front of the routes ---------------------------------------------------------------------------------

TEST(Server, UnknownPathListsTheRoutes) {
  Serving s;
  const Reply r = s.ask("GET", "/v1/unknown");
  EXPECT_EQ(r.status, 404);
  for (const char* path : {"GET /health", "POST /plain", "POST /tokenize"})
    EXPECT_NE(error_of(r)["message"].get<std::string>().find(path), std::string::npos) << path;
  const json anthropic = json::parse(s.ask("GET", "/v1/messages/unknown").body);
  EXPECT_EQ(anthropic["type"], "error");
  EXPECT_EQ(anthropic["error"]["type"], "not_found_error");
}

TEST(Server, WrongMethodSaysWhichAreRight) {
  Serving s;
  const Reply r = s.ask("DELETE", "/health");
  EXPECT_EQ(r.status, 405);
  EXPECT_EQ(r.headers.at("allow"), "OPTIONS, GET, HEAD");
  const Reply options = s.ask("OPTIONS", "/plain");
  EXPECT_EQ(options.status, 204);
  EXPECT_EQ(options.headers.at("allow"), "OPTIONS, POST");
  EXPECT_EQ(options.headers.count("access-control-allow-origin"), 0u);
  EXPECT_EQ(s.ask("HEAD", "/health").status, 200);
}

TEST(Server, KeysOpenEverythingButHealth) {
  serve::ServerOptions o = Serving::default_options();
  o.service.keys = {"secret", "other"};
  Serving s(o);
  EXPECT_EQ(s.ask("GET", "/health").status, 200);
  for (const char* path : {"/v1/models", "/metrics", "/version"}) {
    const Reply none = s.ask("GET", path), wrong = s.ask("GET", path, "", "Authorization: Bearer secre\r\n");
    EXPECT_EQ(none.status, 401) << path;
    EXPECT_EQ(none.headers.at("www-authenticate"), "Bearer");
    EXPECT_EQ(wrong.status, 401) << path;
    EXPECT_EQ(s.ask("GET", path, "", "Authorization: Bearer secret\r\n").status, 200) << path;
    EXPECT_EQ(s.ask("GET", path, "", "x-api-key: other\r\n").status, 200) << path;
  }
  EXPECT_EQ(s.ask("POST", "/plain", kPlain).status, 401);
}

TEST(Server, BodyMustBeAnObjectOfJson) {
  Serving s;
  const std::string deep(100'000, '[');
  for (const std::string& body : {std::string("{"), std::string("[1]"), std::string("{\"prompt\": [1], \xff}"), deep}) {
    const Reply r = s.ask("POST", "/plain", body);
    EXPECT_EQ(r.status, 400);
    EXPECT_EQ(error_of(r)["type"], "invalid_request_error");
  }
  Client c(s.port());
  c.send("POST /plain HTTP/1.1\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}");
  EXPECT_EQ(c.read_reply().status, 415);
  c.send("POST /plain HTTP/1.1\r\nContent-Type: Application/JSON; charset=utf-8\r\nContent-Length: 2\r\n\r\n{}");
  EXPECT_EQ(c.read_reply().status, 400);  // no prompt
}

TEST(Server, BodyOverTheLimitIs413InTheFormOfThePath) {
  serve::ServerOptions o = Serving::default_options();
  o.http.max_body = 100;
  Serving s(o);
  const std::string body(101, ' ');
  EXPECT_EQ(error_of(s.ask("POST", "/plain", body))["type"], "invalid_request_error");
  EXPECT_EQ(error_of(s.ask("POST", "/v1/messages", body))["type"], "request_too_large");
}

// ---- Routes --------------------------------------------------------------------------------------------------------

TEST(Server, HealthVersionAndModels) {
  Serving s;
  EXPECT_EQ(json::parse(s.ask("GET", "/health").body)["status"], "ok");
  EXPECT_EQ(json::parse(s.ask("GET", "/version").body)["version"], "test");
  const json models = json::parse(s.ask("GET", "/v1/models").body);
  ASSERT_EQ(models["data"].size(), 1u);
  EXPECT_EQ(models["data"][0]["id"], "tiny");
  EXPECT_EQ(models["data"][0]["max_model_len"], 4096);
  EXPECT_EQ(models["data"][0]["parent"], nullptr);
  EXPECT_EQ(json::parse(s.ask("GET", "/v1/models/t%69ny").body)["id"], "tiny");
  EXPECT_EQ(s.ask("GET", "/v1/models/other").status, 404);
}

TEST(Server, AdaptersAreLoadedReplacedAndUnloaded) {
  Serving s;
  const ModelConfig& config = testing::embedded_model().model;
  const std::string folder = testing::temp_path("adapter");
  write_adapter(folder, stored_from(*testing::random_adapter(config, 2, 5), config, "tiny"), config,
                AdapterLayout::peft);
  const std::string load = json{{"lora_name", "mine"}, {"lora_path", folder}}.dump();
  const std::string ask = R"({"prompt": [5, 6, 7], "max_tokens": 6, "adapter": "mine"})";
  EXPECT_EQ(s.ask("POST", "/plain", ask).status, 400);
  const Reply loaded = s.ask("POST", "/v1/load_lora_adapter", load);
  ASSERT_EQ(loaded.status, 200) << loaded.body;
  const json entry = json::parse(s.ask("GET", "/v1/models").body)["data"][1];
  EXPECT_EQ(entry["id"], "mine");
  EXPECT_EQ(entry["parent"], "tiny");
  const Reply adapted = s.ask("POST", "/plain", ask);
  EXPECT_EQ(adapted.status, 200);
  EXPECT_NE(adapted.body, s.ask("POST", "/plain", kPlain).body);

  EXPECT_EQ(s.ask("POST", "/v1/load_lora_adapter", load).status, 200);
  EXPECT_EQ(json::parse(s.ask("GET", "/v1/models/mine").body)["version"], 2);
  EXPECT_EQ(s.ask("POST", "/v1/unload_lora_adapter", R"({"lora_name": "mine"})").status, 200);
  EXPECT_EQ(s.ask("POST", "/v1/unload_lora_adapter", R"({"lora_name": "mine"})").status, 404);
  EXPECT_EQ(s.ask("GET", "/v1/models/mine").status, 404);

  const Reply absent = s.ask("POST", "/v1/load_lora_adapter", R"({"lora_name": "x", "lora_path": "/nowhere"})");
  EXPECT_EQ(absent.status, 400);
  EXPECT_EQ(error_of(absent)["param"], "lora_path");
  EXPECT_EQ(error_of(s.ask("POST", "/v1/load_lora_adapter", R"({"lora_name": "x"})"))["param"], "lora_path");
  EXPECT_EQ(s.ask("POST", "/v1/load_lora_adapter", R"({"lora_name": "tiny", "lora_path": "/"})").status, 400);
  std::filesystem::remove_all(folder);
}

TEST(Server, TokenizeAndBack) {
  Serving s;
  const auto ask = [&](const char* path, const json& body) {
    return json::parse(s.ask("POST", path, body.dump()).body);
  };
  const json bare = ask("/tokenize", {{"prompt", "Hello, world"}, {"add_special_tokens", false}});
  const json full = ask("/tokenize", {{"prompt", "Hello, world"}, {"return_token_strs", true}});
  EXPECT_EQ(bare["count"], bare["tokens"].size());
  EXPECT_EQ(bare["token_strs"], nullptr);
  EXPECT_EQ(full["count"], bare["count"].get<int>() + 1);
  EXPECT_EQ(full["tokens"][0], 0);  // begin of sentence
  EXPECT_EQ(full["token_strs"].size(), full["tokens"].size());
  EXPECT_EQ(full["max_model_len"], 4096);
  EXPECT_EQ(ask("/detokenize", {{"tokens", bare["tokens"]}})["prompt"], "Hello, world");

  const json chat = ask("/tokenize", {{"messages", json::array({{{"role", "user"}, {"content", "Hello, world"}}})}});
  const auto text = ask("/detokenize", {{"tokens", chat["tokens"]}})["prompt"].get<std::string>();
  EXPECT_NE(text.find("Hello, world"), std::string::npos);
  EXPECT_NE(text.find("Assistant"), std::string::npos);

  EXPECT_EQ(ask("/tokenize", {{"prompt", "a"}, {"messages", json::array()}})["error"]["type"], "invalid_request_error");
  EXPECT_EQ(ask("/detokenize", {{"tokens", {1 << 20}}})["error"]["param"], "tokens[0]");
}

TEST(Server, MetricsCountRequestsAndTokens) {
  Serving s;
  for (int i = 0; i < 3; ++i) s.ask("POST", "/plain", kPlain);
  EXPECT_EQ(metric(s, "vllm:prompt_tokens_total"), 9);
  EXPECT_EQ(metric(s, "vllm:generation_tokens_total"), 18);
  EXPECT_EQ(metric(s, "vllm:time_to_first_token_seconds_count"), 3);
  EXPECT_EQ(metric(s, "vllm:e2e_request_latency_seconds_count"), 3);
  EXPECT_EQ(metric(s, "vllm:request_success_total", ",finished_reason=\"length\""), 3);
  EXPECT_EQ(metric(s, "vllm:num_requests_running"), 0);
}

}  // namespace
}  // namespace plumb
