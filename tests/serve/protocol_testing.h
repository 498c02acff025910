// Protocols without an engine: a served model, and hand-made answers cut into tokens in different ways.
#pragma once
#include <gtest/gtest.h>

#include <regex>
#include <string>
#include <vector>

#include "base/philox.h"
#include "openai_testing.h"
#include "tokenizer/chat_format.h"

namespace plumb::serve::protocol_testing {

using nlohmann::json;

// That of openai_testing.h, with room for answers; what a request does not say is: no thinking.
inline const ServedModel& test_model() {
  static const ServedModel model = [] {
    ServedModel m = openai_testing::served_model();
    m.chat.mode = ThinkingMode::chat;
    m.chat.drop_thinking = false;
    m.max_positions = 4096;
    m.default_tokens = 64;
    return m;
  }();
  return model;
}

// A block of calls as the model writes it; parameters are strings.
inline std::string call_text(const std::string& name, const std::string& parameter, const std::string& value) {
  using namespace chat_format;
  return std::string(kInvokeBegin) + name + std::string(kInvokeNamed) + std::string(kParameterBegin) + parameter +
         std::string(kParameterNamed) + "true" + std::string(kParameterFlagged) + value + std::string(kParameterClose) +
         std::string(kInvokeClose);
}
inline std::string calls_text(const std::string& calls) {
  return std::string(chat_format::kCallsOpen) + calls + std::string(chat_format::kCallsClose);
}

// Answers of a model that thinks: empty, whole, with calls, cut off inside a call.
inline const std::vector<std::string> kAnswers = {
    "",
    "Plain text.",
    "Thought</think>\n\nText with ä, 漢字 and 🙂.",
    "</think>\n\n" + calls_text(call_text("weather", "city", "São \"Paulo\"\n")),
    "JSON</think>" +
        calls_text(std::string(chat_format::kInvokeBegin) + "weather" + std::string(chat_format::kInvokeNamed) +
                   "{\"city\": 1}" + std::string(chat_format::kInvokeClose)),
    "Two.</think>A" + calls_text(call_text("weather", "city", "Rome") + "\n" + call_text("weather", "city", "Oslo")) +
        "tail",
    "Cut</think>" + std::string(chat_format::kCallsOpen) + std::string(chat_format::kInvokeBegin) + "weather" +
        std::string(chat_format::kInvokeNamed) + std::string(chat_format::kParameterBegin) + "city",
};

struct Ending {
  Finish finish = Finish::stop;
  std::string stop_string = {};
};

// The events of an answer. Each `cut` gives the length of the next piece of text, which is encoded by itself; control
// tokens stay whole. A stopped answer ends with the end-of-sentence token, unless a stop string ended it.
template <class Cut>
std::vector<Event> events_of(const std::string& text, const Ending& ending, Cut cut) {
  const Tokenizer& tokenizer = test_model().tokenizer;
  std::vector<Event> events;
  const auto add = [&](int id, std::string bytes) {
    Event e;
    e.token.id = id;
    e.token.logprob = -0.125f * static_cast<float>(events.size() % 7);
    e.token.top = {{id, e.token.logprob}};
    e.text = std::move(bytes);
    events.push_back(std::move(e));
  };
  const auto add_ids = [&](std::string_view piece, bool control) {
    for (int id : tokenizer.encode(piece, control)) add(id, tokenizer.id_to_bytes(id));
  };
  for (std::string_view rest = text; !rest.empty();) {
    size_t length = std::min<size_t>(rest.size(), std::max<size_t>(1, cut()));
    for (std::string_view control : {chat_format::kDsml, chat_format::kThinkClose}) {
      if (rest.starts_with(control)) {
        add_ids(control, true);
        rest.remove_prefix(control.size());
        length = 0;
        break;
      }
      length = std::min(length, rest.find(control));
    }
    // Whole characters only: the tokenizer encodes text.
    while (length > 0 && length < rest.size() && (rest[length] & 0xC0) == 0x80) ++length;
    add_ids(rest.substr(0, length), false);
    rest.remove_prefix(length);
  }
  if (ending.finish == Finish::stop && ending.stop_string.empty()) add(1, "");
  events.back().finish = ending.finish;
  events.back().stop_string = ending.stop_string;
  return events;
}
inline std::vector<Event> events_of(const std::string& text, const Ending& ending = {}) {
  return events_of(text, ending, [&] { return text.size(); });
}

// Random parts of ids become "_".
inline std::string without_ids(std::string text) {
  return std::regex_replace(text, std::regex("\"(resp|msg|rs|fc|call|toolu)_[0-9a-f]+\""), "\"$1_\"");
}
inline json without_ids(const json& j) { return json::parse(without_ids(j.dump())); }

// The data of a stream's events. Every event is named by its type, and nothing stands between events.
inline std::vector<json> data_of(const std::string& stream) {
  static const std::regex event("event: ([a-z_.]+)\ndata: (.*)\n\n");
  std::vector<json> out;
  size_t end = 0;
  for (std::sregex_iterator it(stream.begin(), stream.end(), event), none; it != none; ++it) {
    EXPECT_EQ(static_cast<size_t>(it->position()), end);
    end = static_cast<size_t>(it->position() + it->length());
    out.push_back(json::parse((*it)[2].str()));
    EXPECT_EQ(out.back()["type"], (*it)[1].str());
  }
  EXPECT_EQ(end, stream.size()) << stream.substr(end);
  return out;
}

inline json run_whole(MakeExchange make, const json& body, const std::vector<Event>& events) {
  const auto exchange = make(body.dump(), test_model());
  EXPECT_FALSE(exchange->streams());
  EXPECT_EQ(exchange->requests().size(), 1u);
  for (const Event& e : events) exchange->token(0, e);
  return without_ids(exchange->whole());
}

inline std::vector<json> run_stream(MakeExchange make, json body, const std::vector<Event>& events) {
  body["stream"] = true;
  const auto exchange = make(body.dump(), test_model());
  EXPECT_TRUE(exchange->streams());
  EXPECT_EQ(exchange->requests().size(), 1u);
  std::string out = exchange->begin();
  for (const Event& e : events) out += exchange->token(0, e);
  out += exchange->end();
  return data_of(without_ids(out));
}

// The prompt that a body becomes, control tokens spelled out.
inline std::string prompt_of(MakeExchange make, const std::string& body) {
  const Request request = make(body, test_model())->requests().at(0);
  return test_model().tokenizer.decode({request.prompt.begin(), request.prompt.end()}, false);
}

inline ApiError refused(MakeExchange make, const std::string& body) {
  try {
    make(body, test_model());
  } catch (const ApiError& e) {
    return e;
  }
  ADD_FAILURE() << "accepted: " << body;
  return {};
}

// A request that must be refused: with this field, status 400 unless said, and this in the message.
struct Refused {
  const char *body, *field, *message;
  int status = 400;
};
inline void expect_refused(MakeExchange make, const std::vector<Refused>& table) {
  for (const Refused& r : table) {
    const ApiError e = refused(make, r.body);
    EXPECT_EQ(e.status, r.status) << r.body;
    EXPECT_EQ(e.field, r.field) << r.body << "\n" << e.message;
    EXPECT_NE(e.message.find(r.message), std::string::npos) << r.body << "\n" << e.message;
  }
}

}  // namespace plumb::serve::protocol_testing
