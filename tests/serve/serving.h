// A server over the embedded model on a port that the system picks, and the simplest protocol there can be.
#pragma once
#include <memory>
#include <string>
#include <thread>

#include "checkpoint/checkpoint.h"
#include "model/weights.h"
#include "serve/client.h"
#include "serve/request_fields.h"
#include "serve/server.h"

namespace plumb::testing {

// {"prompt": [ids], "max_tokens": n, "n": choices, "stream": bool} -> {"tokens": [[ids] a choice]} or events
// "data: CHOICE:ID".
class PlainExchange : public serve::Exchange {
 public:
  PlainExchange(std::string_view body, const serve::ServedModel& model) {
    const Json parsed = serve::parse_body(body);
    const serve::Fields fields(parsed);
    request_.prompt = serve::token_ids_at(fields.need("prompt"), "prompt", model.config.vocab_size);
    request_.sampling.max_tokens = static_cast<int>(fields.integer("max_tokens", 1, 1 << 30).value_or(4));
    request_.sampling.seed = 7;
    request_.adapter = fields.text("adapter").value_or("");
    choices_ = static_cast<int>(fields.integer("n", 1, 1 << 20).value_or(1));
    stream_ = fields.flag("stream", false);
    tokens_.resize(choices_);
  }
  std::vector<Request> requests() override { return serve::one_each(request_, choices_); }
  bool streams() const override { return stream_; }
  std::string token(int choice, const Event& event) override {
    tokens_[choice].push_back(event.token.id);
    return "data: " + std::to_string(choice) + ":" + std::to_string(event.token.id) + "\n\n";
  }
  std::string begin() override { return "data: begin\n\n"; }
  std::string keep_alive() override { return ": wait\n\n"; }
  std::string end() override { return "data: end\n\n"; }
  nlohmann::json whole() override { return {{"tokens", tokens_}}; }

  static std::unique_ptr<serve::Exchange> make(std::string_view body, const serve::ServedModel& model) {
    return std::make_unique<PlainExchange>(body, model);
  }

 private:
  Request request_;
  int choices_ = 1;
  bool stream_ = false;
  std::vector<std::vector<int>> tokens_;
};

inline ResidentWeights& embedded_model() {
  static const auto weights = load_weights(Checkpoint::open(PLUMB_SOURCE_DIR "/assets/tiny"));
  return *weights;
}

class Serving {
 public:
  explicit Serving(serve::ServerOptions options = default_options(), WeightStore& weights = embedded_model())
      : server_(weights, model(weights.config()), options, {{"/plain", PlainExchange::make}}),
        thread_([this] { server_.run(); }) {}
  ~Serving() { stop(); }
  void stop() {
    server_.stop();
    if (thread_.joinable()) thread_.join();
  }

  int port() const { return server_.port(); }
  serve::Server& server() { return server_; }
  Reply ask(const std::string& method, const std::string& path, const std::string& body = "",
            const std::string& headers = "") const {
    Client c(port());
    c.request(method, path, body, headers);
    return c.read_reply(method == "HEAD");
  }

  static serve::ServerOptions default_options() {
    serve::ServerOptions o;
    o.engine.numerics = Numerics::fp32;
    o.engine.max_running = 8;
    o.engine.key_pages = 16;
    o.engine.entry_pages = 64;
    o.service.version = "test";
    return o;
  }

 private:
  static serve::ServedModel model(const ModelConfig& config) {
    Tokenizer tokenizer = Tokenizer::load(PLUMB_SOURCE_DIR "/assets/tiny/tokenizer.json");
    ChatTokenizer chat = chat_tokenizer(tokenizer);
    serve::ServedModel m{
        "tiny", config, tokenizer, chat, {}, {config.eos_token_id}, std::make_shared<AdapterRegistry>()};
    m.created = 1'700'000'000;
    m.max_positions = config.max_position_embeddings;
    m.max_choices = 8, m.max_logprobs = 5;
    return m;
  }

  serve::Server server_;
  std::thread thread_;
};

}  // namespace plumb::testing
