// What stands between a protocol and the engine. A protocol (OpenAI's chat, Anthropic's messages, ...) is a function
// that turns the body of a request into an Exchange: which answers the engine is to write, and how their tokens
// are said to the client. It knows nothing of sockets and threads; http.h knows nothing of protocols.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "config/model_config.h"
#include "rollout/adapters.h"
#include "rollout/engine.h"
#include "tokenizer/chat_encode.h"
#include "tokenizer/tokenizer.h"

namespace plumb::serve {

// A request that cannot be done as it stands. Each protocol writes it in the form that its clients read.
struct ApiError {
  int status = 400;     // HTTP: 400 malformed, 401 no key, 404 unknown model, 413 too large, 422 ..., 429 queue full
  std::string field;    // JSON path of the culprit ("messages[2].content"); may be empty
  std::string message;  // "field: what is wrong, with the offending value (the fix)"
  int retry_after = 0;  // seconds; > 0: sent as Retry-After
};

// What protocols may know of the model that is served. Constant after the start; shared by all connections.
struct ServedModel {
  std::string name;  // as clients name the base model; adapters are named by the registry
  ModelConfig config;
  Tokenizer tokenizer;
  ChatTokenizer chat_tokenizer;
  ChatOptions chat;  // what holds when a request does not say
  std::vector<int> stop_tokens;
  std::shared_ptr<AdapterRegistry> adapters;
  int64_t created = 0;         // seconds since 1970
  int max_positions = 0;       // prompt and answer together
  int default_tokens = 0;      // length of an answer when the request does not say; 0 = as long as it fits
  int max_choices = 0;         // n
  int max_logprobs = 0;        // top log-probabilities of a token
  bool strict_fields = false;  // unknown fields of a request are errors; otherwise ignored, as OpenAI's clients expect
};

// One request of a client in one protocol. All functions are called by one thread at a time, in this order:
// requests(), then begin(), token()... , end() if streams(), else token()..., whole().
class Exchange {
 public:
  virtual ~Exchange() = default;

  // What the engine is to do: one entry a choice. Called once.
  virtual std::vector<Request> requests() = 0;
  // Whether the client wants the answer as server-sent events.
  virtual bool streams() const = 0;

  // Takes what the engine made for a choice. Streaming: what to send for it, complete events with their empty lines;
  // may be empty. Otherwise the result is ignored.
  virtual std::string token(int choice, const Event& event) = 0;

  // Streaming: what to send before the first token, while nothing is to be said for a while, and after the last token.
  virtual std::string begin() = 0;
  virtual std::string keep_alive() = 0;
  virtual std::string end() = 0;

  // Not streaming: the body of the answer, after the last token of each choice.
  virtual nlohmann::json whole() = 0;
};

// body: as it came. The chat format shows tool definitions to the model as they were given, so each protocol reads the
// text itself (request_fields.h), in a way that keeps the order of members and the spelling of numbers. The model
// outlives the exchange. Errors: ApiError.
using MakeExchange = std::unique_ptr<Exchange> (*)(std::string_view body, const ServedModel& model);

}  // namespace plumb::serve
