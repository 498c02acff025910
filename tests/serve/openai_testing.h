// A served model without weights, answers made by hand, and what a client puts together from a stream.
#pragma once
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "serve/exchange.h"

namespace plumb::serve::openai_testing {

using nlohmann::json;

// The tokenizer and configuration of the embedded model; adapter "poet" has the versions 2 and 3.
inline ServedModel served_model() {
  const std::string folder = PLUMB_SOURCE_DIR "/assets/tiny";
  const Tokenizer tokenizer = Tokenizer::load(folder + "/tokenizer.json");
  ServedModel m{"tiny", load_model_config(folder), tokenizer, chat_tokenizer(tokenizer), {}, {1}, {}};
  m.adapters = std::make_shared<AdapterRegistry>(2);
  for (int i = 0; i < 3; ++i) m.adapters->publish("poet", std::make_shared<Adapter>());
  m.created = 1000;
  m.max_positions = 300;
  m.max_choices = 8;
  m.max_logprobs = 5;
  return m;
}

inline std::vector<int> ids_of(const ServedModel& m, const std::string& text) { return m.tokenizer.encode(text, true); }

// The tokens of an answer as the engine tells them: token i has the log-probability -(i + 1) / 8 and version 3. A stop
// token at the end stops; without one the answer ends for its length.
inline std::vector<Event> answer(const ServedModel& m, const std::vector<int>& ids) {
  std::vector<Event> events;
  for (int id : ids) {
    Event e;
    e.token.id = id;
    e.token.logprob = -static_cast<float>(events.size() + 1) / 8;
    e.token.adapter_version = 3;
    e.text = id == 1 ? "" : m.tokenizer.id_to_bytes(id);
    events.push_back(e);
  }
  events.back().finish = ids.back() == 1 ? Finish::stop : Finish::length;
  return events;
}
inline std::vector<Event> answer(const ServedModel& m, const std::string& text) { return answer(m, ids_of(m, text)); }

inline json whole(Exchange& exchange, const std::vector<std::vector<Event>>& answers) {
  for (size_t i = 0; i < answers.size(); ++i)
    for (const Event& e : answers[i]) exchange.token(static_cast<int>(i), e);
  return exchange.whole();
}

// The events of a stream; the last one, [DONE], is left out.
inline std::vector<json> events_of(const std::string& stream) {
  std::vector<json> out;
  size_t at = 0;
  while (at < stream.size()) {
    const size_t end = stream.find("\n\n", at);
    if (end == std::string::npos || stream.compare(at, 6, "data: ") != 0) {
      ADD_FAILURE() << "no event: " << stream.substr(at, 40);
      return out;
    }
    const std::string data = stream.substr(at + 6, end - at - 6);
    at = end + 2;
    if (data == "[DONE]") {
      EXPECT_EQ(at, stream.size());
      return out;
    }
    out.push_back(json::parse(data));
  }
  ADD_FAILURE() << "the stream does not end with [DONE]";
  return out;
}

// The choices take turns at random, as they do in the engine.
inline std::string stream(Exchange& exchange, const std::vector<std::vector<Event>>& answers, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  std::string out = exchange.begin();
  std::vector<size_t> next(answers.size());
  for (;;) {
    std::vector<size_t> open;
    for (size_t i = 0; i < answers.size(); ++i)
      if (next[i] < answers[i].size()) open.push_back(i);
    if (open.empty()) return out + exchange.end();
    const size_t i = open[random() % open.size()];
    out += exchange.token(static_cast<int>(i), answers[i][next[i]++]);
  }
}

// Pieces of answers, in any order: text, characters of several bytes, tags whole, broken and cut off.
inline std::vector<int> random_answer(const ServedModel& m, std::mt19937_64& random) {
  static const std::vector<std::string> pieces = {
      "Hello there",
      "\n\n",
      "\xE2\x82\xAC 5",
      "\xF0\x9F\x98\x80",
      "</think>",
      "<think>",
      " < 3",
      "\n\n<｜DSML｜tool_calls>\n",
      "<｜DSML｜invoke name=\"f\">\n",
      "</｜DSML｜invoke>",
      "</｜DSML｜tool_calls>",
      "<｜DSML｜parameter name=\"city\" string=\"true\">Oslo \"x\"</｜DSML｜parameter>\n",
      "<｜DSML｜parameter name=\"n\" string=\"false\">[1, 2]</｜DSML｜parameter>\n",
      "<｜DSML｜"};
  std::vector<int> ids;
  for (int n = 1 + random() % 8; n > 0; --n) {
    const std::string& piece = pieces[random() % pieces.size()];
    for (int id : ids_of(m, piece)) {
      ids.push_back(id);
      if (random() % 40 == 0) ids.push_back(16 + static_cast<int>(random() % 256));  // a byte that may be no character
    }
  }
  if (random() % 2) ids.push_back(1);
  return ids;
}

}  // namespace plumb::serve::openai_testing
