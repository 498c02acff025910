#include "serve/anthropic.h"

#include "protocol_testing.h"

namespace plumb::serve {
namespace {

using namespace protocol_testing;

constexpr MakeExchange kMake = anthropic_messages;

json body_of(const std::string& text, json more = json::object()) {
  json body = {{"model", "tiny"}, {"max_tokens", 100}, {"messages", {{{"role", "user"}, {"content", text}}}}};
  body.update(more);
  return body;
}
const json kThinking = {{"thinking", {{"type", "enabled"}, {"budget_tokens", 1024}}}};
const json kTools = {{"tools", {{{"name", "weather"}, {"input_schema", {{"type", "object"}}}}}}};
json both(json a, const json& b) {
  a.update(b);
  return a;
}

TEST(Messages, WholeAnswer) {
  const json got = run_whole(kMake, body_of("Hi"), events_of("Hello!"));
  // begin of sentence, User, "Hi", Assistant, think-close | "Hello!" and the end of sentence
  const size_t prompt = 4 + test_model().tokenizer.encode("Hi", false).size();
  const size_t answer = 1 + test_model().tokenizer.encode("Hello!", false).size();
  json expected = json::parse(R"({"id": "msg_", "type": "message", "role": "assistant", "model": "tiny",
    "content": [{"type": "text", "text": "Hello!"}], "stop_reason": "end_turn", "stop_sequence": null,
    "usage": {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
              "output_tokens_details": {"thinking_tokens": 0}}})");
  expected["usage"].update({{"input_tokens", prompt}, {"output_tokens", answer}});
  EXPECT_EQ(got, expected) << got.dump(1);
}

TEST(Messages, EventsOfThinkingTextAndCall) {
  const std::string text = "Hm.</think>So." + calls_text(call_text("weather", "city", "Rome"));
  const std::vector<json> events = run_stream(kMake, body_of("Rain?", both(kThinking, kTools)), events_of(text));
  std::string told, last;
  for (const json& e : events) {
    const std::string type = e["type"];
    if (type == "message_start") told += "start " + e["message"]["content"].dump();
    if (type == "content_block_start") told += "\n" + e["index"].dump() + " " + e["content_block"].dump();
    if (type == "content_block_stop") told += " stop";
    if (type == "message_delta") told += "\n" + e["delta"].dump();
    if (type == "message_stop") told += "\nend";
    const std::string kind = type == "content_block_delta" ? e["delta"]["type"].get<std::string>() : "";
    if (!kind.empty() && kind != last) told += " " + kind + ": ";
    for (const char* member : {"thinking", "signature", "text", "partial_json"})
      if (!kind.empty()) told += e["delta"].value(member, "");
    last = kind;
  }
  EXPECT_EQ(told, R"(start []
0 {"signature":"","thinking":"","type":"thinking"} thinking_delta: Hm. signature_delta: unsigned stop
1 {"text":"","type":"text"} text_delta: So. stop
2 {"id":"toolu_","input":{},"name":"weather","type":"tool_use"} input_json_delta: {"city": "Rome"} stop
{"stop_reason":"tool_use","stop_sequence":null}
end)");
}

// What a client puts together from a stream.
json message_of(const std::vector<json>& events) {
  json message;
  std::vector<std::string> inputs;
  for (const json& e : events) {
    const std::string type = e["type"];
    if (type == "message_start") message = e["message"];
    if (type == "content_block_start") {
      EXPECT_EQ(e["index"], message["content"].size());
      message["content"].push_back(e["content_block"]);
      inputs.emplace_back();
    }
    if (type == "content_block_delta") {
      EXPECT_EQ(e["index"], message["content"].size() - 1);
      json& block = message["content"].back();
      for (const char* member : {"text", "thinking", "signature"})
        if (e["delta"].contains(member))
          block[member] = block[member].get<std::string>() + e["delta"][member].get<std::string>();
      inputs.back() += e["delta"].value("partial_json", "");
    }
    if (type == "content_block_stop" && message["content"].back()["type"] == "tool_use") {
      if (inputs.back().empty()) continue;
      const json input = json::parse(inputs.back(), nullptr, false);
      message["content"].back()["input"] = input.is_object() ? input : json{{"arguments", inputs.back()}};
    }
    if (type == "message_delta") {
      message.update(e["delta"]);
      message["usage"].update(e["usage"]);
    }
  }
  EXPECT_EQ(events.back()["type"], "message_stop");
  return message;
}

TEST(Messages, EventsJoinedAreTheWholeForEveryCut) {
  for (size_t i = 0; i < kAnswers.size(); ++i) {
    for (const json& more : {kTools, both(kTools, kThinking)}) {
      for (Finish finish : {Finish::stop, Finish::length}) {
        if (kAnswers[i].empty() && finish == Finish::length) continue;  // has no token
        json content;
        for (uint64_t seed = 0; seed < 8; ++seed) {
          Random random(seed, i);
          const std::vector<Event> events = events_of(kAnswers[i], {finish}, [&] { return 1 + random.below(9); });
          const json whole = run_whole(kMake, body_of("?", more), events);
          EXPECT_EQ(message_of(run_stream(kMake, body_of("?", more), events)), whole) << kAnswers[i];
          if (seed == 0) content = whole["content"];
          EXPECT_EQ(whole["content"], content) << "depends on the cut: " << kAnswers[i];
        }
      }
    }
  }
}

TEST(Messages, EventsJoinedAreTheWholeForRandomTokens) {
  std::mt19937_64 random(1);
  const json body = body_of("?", both(kTools, kThinking));
  for (int i = 0; i < 300; ++i) {
    const std::vector<Event> events = openai_testing::answer(test_model(), openai_testing::random_answer(test_model(), random));
    EXPECT_EQ(message_of(run_stream(kMake, body, events)), run_whole(kMake, body, events)) << i;
  }
}

TEST(Messages, StopReasons) {
  const auto reason = [](const json& more, const std::vector<Event>& events) {
    const json got = run_whole(kMake, body_of("?", more), events);
    return got["stop_reason"].get<std::string>() + " " + got["stop_sequence"].dump();
  };
  EXPECT_EQ(reason(json::object(), events_of("a")), "end_turn null");
  EXPECT_EQ(reason(json::object(), events_of("a", {Finish::length})), "max_tokens null");
  EXPECT_EQ(reason({{"max_tokens", 100000}}, events_of("a", {Finish::length})), "model_context_window_exceeded null");
  EXPECT_EQ(reason({{"stop_sequences", {"XY"}}}, events_of("a", {Finish::stop, "XY"})), "stop_sequence \"XY\"");
  const std::string call = call_text("weather", "city", "x");
  EXPECT_EQ(reason(kTools, events_of(calls_text(call))), "tool_use null");
  EXPECT_EQ(reason(kTools, events_of(calls_text(call), {Finish::length})), "max_tokens null");
}

// Without parallel calls the answer ends behind its first one: by a stop string, whose text closes the call.
TEST(Messages, OneCallOnly) {
  const json body =
      body_of("?", both(kTools, {{"tool_choice", {{"type", "any"}, {"disable_parallel_tool_use", true}}}}));
  const std::vector<std::string> stops = kMake(body.dump(), test_model())->requests()[0].stop_strings;
  ASSERT_EQ(stops.size(), 1u);
  std::string call = call_text("weather", "city", "Rome");
  ASSERT_TRUE(call.ends_with(stops[0]));
  call.resize(call.size() - stops[0].size());
  const json got = run_whole(kMake, body, events_of(call, {Finish::stop, stops[0]}));
  EXPECT_EQ(got["content"], json::parse(R"([{"type": "tool_use", "id": "toolu_", "name": "weather",
                                             "input": {"city": "Rome"}}])"));
  EXPECT_EQ(got["stop_reason"], "tool_use");
  EXPECT_EQ(got["stop_sequence"], nullptr);
}

TEST(Messages, OmittedThinkingHasNoText) {
  json more = kThinking;
  more["thinking"]["display"] = "omitted";
  const json got = run_whole(kMake, body_of("?", more), events_of("Hm</think>Yes"));
  EXPECT_EQ(got["content"][0]["thinking"], "");
  EXPECT_EQ(got["content"][1]["text"], "Yes");
}

TEST(Messages, KeepAliveIsAPing) {
  const auto exchange = kMake(body_of("?").dump(), test_model());
  EXPECT_EQ(exchange->keep_alive(), "event: ping\ndata: {\"type\":\"ping\"}\n\n");
}

struct Prompt {
  const char *more, *prompt;  // more: members of the body beside max_tokens
};

TEST(Messages, MessagesBecomeThePrompt) {
  const Prompt table[] = {
      {R"("messages": [{"role": "user", "content": "Hi"}])",
       "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"},
      {R"("system": [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "B"}],
          "thinking": {"type": "adaptive"}, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])",
       "<｜begin▁of▁sentence｜>A\n\nB<｜User｜>Hi<｜Assistant｜><think>"},
      // The beginning of the answer
      {R"("messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The"}])",
       "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>The"},
      {R"("thinking": {"type": "enabled", "budget_tokens": 2000}, "messages": [{"role": "user", "content": "u"},
          {"role": "assistant", "content": [{"type": "thinking", "thinking": "r", "signature": "s"},
             {"type": "text", "text": "a"}, {"type": "tool_use", "id": "t1", "name": "f", "input": {"n": 1.50}}]},
          {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text",
             "text": "done"}]}, {"type": "text", "text": "and?"}]}])",
       "<｜begin▁of▁sentence｜><｜User｜>u<｜Assistant｜><think>r</think>a\n\n<｜DSML｜tool_calls>\n"
       "<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"n\" string=\"false\">1.5</｜DSML｜parameter>\n"
       "</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜><｜User｜><tool_result>done</tool_result>\n\nand?"
       "<｜Assistant｜><think>"},
  };
  for (const Prompt& p : table)
    EXPECT_EQ(prompt_of(kMake, std::string(R"({"max_tokens": 9, )") + p.more + "}"), p.prompt) << p.more;

  const std::string with_tools = R"({"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}],
      "tools": [{"input_schema": {"z": 1.0, "a": 2}, "name": "f", "description": "d"}], )";
  const std::string shown = "<｜begin▁of▁sentence｜>\n\n" + std::string(chat_format::kToolsBegin) +
                            R"({"name": "f", "description": "d", "parameters": {"z": 1.0, "a": 2}})" +
                            std::string(chat_format::kToolsEnd) + "<｜User｜>Hi<｜Assistant｜></think>";
  EXPECT_EQ(prompt_of(kMake, with_tools + R"("tool_choice": {"type": "auto"}})"), shown);
  EXPECT_EQ(prompt_of(kMake, with_tools + R"("tool_choice": {"type": "any"}})"), shown + "\n\n<｜DSML｜tool_calls>\n");
  EXPECT_EQ(prompt_of(kMake, with_tools + R"("tool_choice": {"type": "tool", "name": "f"}})"),
            shown + "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n");
  EXPECT_EQ(prompt_of(kMake, with_tools + R"("tool_choice": {"type": "none"}})"),
            "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>");
}

TEST(Messages, CountTokens) {
  const std::string body = R"({"model": "tiny", "system": "S", "messages": [{"role": "user", "content": "Hi there"}]})";
  const json counted = anthropic_count_tokens(body, test_model());
  json whole = json::parse(body);
  whole["max_tokens"] = 1;
  EXPECT_EQ(counted, (json{{"input_tokens", kMake(whole.dump(), test_model())->requests()[0].prompt.size()}}));
}

TEST(Messages, RequestsThatCannotBeDoneNameTheField) {
  expect_refused(kMake, {{R"({"messages": []})", "max_tokens", "missing"},
                         {R"({"max_tokens": 0})", "max_tokens", "0"},
                         {R"({"max_tokens": 9})", "messages", "missing"},
                         {R"({"max_tokens": 9, "messages": []})", "messages", "empty"},
                         {R"({"max_tokens": 9, "model": "claude"})", "model", "tiny", 404}});
  const std::pair<const char*, Refused> with_message[] = {
      {R"({"role": "user", "content": "x"}], "top_p": 2)", {"", "top_p", "2"}},
      {R"({"role": "user", "content": "x"}], "stop_sequences": [""])", {"", "stop_sequences[0]", "empty"}},
      {R"({"role": "user", "content": "x"}], "stop_sequences": "x")", {"", "stop_sequences", "list"}},
      {R"({"role": "user", "content": "x"}], "system": [{"type": "image"}])", {"", "system[0].type", "image"}},
      {R"({"role": "user", "content": "x"}], "thinking": {"type": "on"})", {"", "thinking.type", "adaptive"}},
      {R"({"role": "user", "content": "x"}], "thinking": {})", {"", "thinking.type", "missing"}},
      {R"({"role": "user", "content": "x"}], "tools": [{"name": "f"}])", {"", "tools[0].input_schema", "missing"}},
      {R"({"role": "user", "content": "x"}], "tools": [{"type": "bash_20250124", "name": "bash"}])",
       {"", "tools[0].type", "bash"}},
      {R"({"role": "user", "content": "x"}], "tool_choice": {"type": "any"})", {"", "tool_choice", "without tools"}},
      {R"({"role": "user", "content": "x"}], "mcp_servers": [{}])", {"", "mcp_servers", "client"}},
      {R"({"role": "tool", "content": "x"}])", {"", "messages[0].role", "tool"}},
      {R"({"role": "user"}])", {"", "messages[0].content", "missing"}},
      {R"({"role": "user", "content": [{"type": "image"}]}])", {"", "messages[0].content[0].type", "image"}},
      {R"({"role": "user", "content": [{"type": "tool_result"}]}])",
       {"", "messages[0].content[0].tool_use_id", "missing"}},
      {R"({"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}])",
       {"", "messages[0]", "tool_result"}},
      {R"({"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": "{}"}]}])",
       {"", "messages[0].content[0].input", "object"}}};
  for (const auto& [rest, expected] : with_message) {
    const std::string body = R"({"max_tokens": 9, "messages": [)" + std::string(rest) + "}";
    expect_refused(kMake, {{body.c_str(), expected.field, expected.message}});
  }
}

}  // namespace
}  // namespace plumb::serve
