#include "serve/responses.h"

#include "protocol_testing.h"

namespace plumb::serve {
namespace {

using namespace protocol_testing;

constexpr MakeExchange kMake = openai_responses;

const json kWeather = {
    {"type", "function"}, {"name", "weather"}, {"description", "Of a city"}, {"parameters", {{"type", "object"}}}};

std::vector<std::string> types_of(const std::vector<json>& events) {
  std::vector<std::string> types;
  for (const json& e : events) {
    const std::string type = e["type"].get<std::string>().substr(9);  // "response."
    if (types.empty() || types.back() != type) types.push_back(type);
  }
  return types;
}

TEST(Responses, WholeAnswer) {
  json got = run_whole(kMake, {{"model", "tiny"}, {"input", "Hi"}, {"temperature", 0.5}}, events_of("Hello!"));
  EXPECT_GT(got["created_at"].get<double>(), 1.7e9);
  got.erase("created_at");
  // begin of sentence, User, "H", "i", Assistant, think-close | "Hello!" and the end of sentence
  const int64_t prompt = got["usage"]["input_tokens"], answer = got["usage"]["output_tokens"];
  EXPECT_EQ(prompt, static_cast<int64_t>(4 + test_model().tokenizer.encode("Hi", false).size()));
  EXPECT_EQ(answer, static_cast<int64_t>(1 + test_model().tokenizer.encode("Hello!", false).size()));
  const json expected = json::parse(R"({
    "id": "resp_", "object": "response", "status": "completed", "error": null, "incomplete_details": null,
    "background": false, "instructions": null, "max_output_tokens": null, "metadata": {}, "model": "tiny",
    "output": [{"id": "msg_", "type": "message", "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}]}],
    "parallel_tool_calls": true, "previous_response_id": null, "reasoning": {"effort": null, "summary": null},
    "service_tier": "default", "store": false, "temperature": 0.5, "text": {"format": {"type": "text"}},
    "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled", "user": null})");
  json rest = got;
  rest.erase("usage");
  EXPECT_EQ(rest, expected) << rest.dump(1);
  EXPECT_EQ(got["usage"], json::parse(R"({"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens_details": {"reasoning_tokens": 0}, "input_tokens": )" +
                                      std::to_string(prompt) + R"(, "output_tokens": )" + std::to_string(answer) +
                                      R"(, "total_tokens": )" + std::to_string(prompt + answer) + "}"));
}

TEST(Responses, EventsOfReasoningTextAndCall) {
  const json body = {{"input", "Rain?"}, {"reasoning", {{"effort", "high"}}}, {"tools", {kWeather}}};
  const std::string text = "Hm.</think>Let me see." + calls_text(call_text("weather", "city", "Rome"));
  const std::vector<json> events = run_stream(kMake, body, events_of(text));
  for (size_t i = 0; i < events.size(); ++i) EXPECT_EQ(events[i]["sequence_number"], i);
  EXPECT_EQ(types_of(events),
            (std::vector<std::string>{
                "created", "in_progress",                                                                  //
                "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",  //
                "content_part.done", "output_item.done",                                                   //
                "output_item.added", "content_part.added", "output_text.delta", "output_text.done",        //
                "content_part.done", "output_item.done",                                                   //
                "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
                "output_item.done", "completed"}));
  const json& last = events.back()["response"];
  EXPECT_EQ(last["status"], "completed");
  EXPECT_GT(last["usage"]["output_tokens_details"]["reasoning_tokens"], 1);
  EXPECT_EQ(last["output"], json::parse(R"([
    {"id": "rs_", "type": "reasoning", "status": "completed", "summary": [],
     "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"id": "msg_", "type": "message", "role": "assistant", "status": "completed",
     "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]},
    {"id": "fc_", "type": "function_call", "status": "completed", "call_id": "call_", "name": "weather",
     "arguments": "{\"city\": \"Rome\"}"}])"))
      << last["output"].dump(1);
}

// What a client puts together from the events of an item.
json items_of(const std::vector<json>& events) {
  json items = json::array();
  for (const json& e : events) {
    const std::string type = e["type"];
    if (type == "response.output_item.added") items.push_back(e["item"]);
    if (!e.contains("output_index")) continue;
    EXPECT_EQ(e["output_index"], items.size() - 1);
    json& item = items.back();
    EXPECT_EQ(e.value("item_id", item["id"]), item["id"]);
    if (type == "response.content_part.added") item["content"].push_back(e["part"]);
    if (type == "response.function_call_arguments.delta") {
      item["arguments"] = item["arguments"].get<std::string>() + e["delta"].get<std::string>();
    } else if (e.contains("delta")) {
      json& part = item["content"][e["content_index"].get<size_t>()];
      part["text"] = part["text"].get<std::string>() + e["delta"].get<std::string>();
      if (e.contains("logprobs"))
        part["logprobs"].insert(part["logprobs"].end(), e["logprobs"].begin(), e["logprobs"].end());
    }
    if (type == "response.output_item.done") {
      item["status"] = e["item"]["status"];
      EXPECT_EQ(item, e["item"]);
    }
  }
  return items;
}

TEST(Responses, EventsJoinedAreTheWholeForEveryCut) {
  for (size_t i = 0; i < kAnswers.size(); ++i) {
    for (const char* effort : {"none", "high"}) {
      const json body = {{"input", "?"},
                         {"tools", {kWeather}},
                         {"reasoning", {{"effort", effort}}},
                         {"include", {"message.output_text.logprobs"}}};
      for (Finish finish : {Finish::stop, Finish::length}) {
        if (kAnswers[i].empty() && finish == Finish::length) continue;  // has no token
        json texts;
        for (uint64_t seed = 0; seed < 8; ++seed) {
          Random random(seed, i);
          const std::vector<Event> events = events_of(kAnswers[i], {finish}, [&] { return 1 + random.below(9); });
          json whole = run_whole(kMake, body, events);
          const std::vector<json> stream = run_stream(kMake, body, events);
          json last = stream.back()["response"];
          whole.erase("created_at"), last.erase("created_at");
          EXPECT_EQ(last, whole);
          EXPECT_EQ(items_of(stream), whole["output"]) << kAnswers[i];
          EXPECT_EQ(stream.back()["type"], finish == Finish::length ? "response.incomplete" : "response.completed");
          for (json& item : whole["output"])
            if (item.contains("content")) item["content"][0].erase("logprobs");
          if (seed == 0) texts = whole["output"];
          EXPECT_EQ(whole["output"], texts) << "depends on the cut: " << kAnswers[i];
        }
      }
    }
  }
}

TEST(Responses, EventsJoinedAreTheWholeForRandomTokens) {
  std::mt19937_64 random(1);
  const json body = {{"input", "?"}, {"tools", {kWeather}}, {"reasoning", {{"effort", "high"}}}};
  for (int i = 0; i < 300; ++i) {
    const std::vector<Event> events = openai_testing::answer(test_model(), openai_testing::random_answer(test_model(), random));
    const std::vector<json> stream = run_stream(kMake, body, events);
    EXPECT_EQ(items_of(stream), run_whole(kMake, body, events)["output"]) << i;
  }
}

TEST(Responses, LengthEndsTheResponseAndItsLastItem) {
  const json got = run_whole(kMake, {{"input", "?"}, {"max_output_tokens", 3}}, events_of("abc", {Finish::length}));
  EXPECT_EQ(got["status"], "incomplete");
  EXPECT_EQ(got["incomplete_details"]["reason"], "max_output_tokens");
  EXPECT_EQ(got["output"][0]["status"], "incomplete");
  EXPECT_EQ(got["max_output_tokens"], 3);
}

TEST(Responses, LogprobsAreThoseOfTheTextsTokens) {
  const json body = {{"input", "?"}, {"reasoning", {{"effort", "high"}}}, {"top_logprobs", 1}, {"tools", {kWeather}}};
  const std::string answer = "Hm</think>\n\nSo it is." + calls_text(call_text("weather", "city", "x"));
  const std::vector<Event> events = events_of(answer, {}, [] { return 1; });
  const json got = run_whole(kMake, body, events);
  std::string text;
  for (const json& token : got["output"][1]["content"][0]["logprobs"]) {
    text += token["token"].get<std::string>();
    EXPECT_EQ(token["top_logprobs"].size(), 1u);
    EXPECT_LE(token["logprob"], 0.0);
  }
  EXPECT_EQ(text, "\n\nSo it is.");  // with the line ends that the format drops
}

TEST(Responses, TokenIdsOnRequest) {
  const std::vector<Event> events = events_of("Hello!");
  const json got = run_whole(kMake, {{"input", "Hi"}, {"return_token_ids", true}}, events);
  EXPECT_EQ(got["prompt_token_ids"].size(), got["usage"]["input_tokens"]);
  ASSERT_EQ(got["token_ids"].size(), events.size());
  for (size_t i = 0; i < events.size(); ++i) EXPECT_EQ(got["token_ids"][i], events[i].token.id);
}

struct Prompt {
  const char *body, *prompt;
};

TEST(Responses, InputBecomesThePrompt) {
  const std::string tools_begin(chat_format::kToolsBegin), tools_end(chat_format::kToolsEnd);
  const Prompt table[] = {
      {R"({"input": "Hi"})", "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"},
      {R"({"input": "Hi", "instructions": "Be brief.", "reasoning": {"effort": "high"}})",
       "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜><think>"},
      {R"({"instructions": "A", "input": [{"role": "developer", "content": "B"}, {"role": "user", "content":
          [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}]}]})",
       "<｜begin▁of▁sentence｜>A\n\nB<｜User｜>x\n\ny<｜Assistant｜></think>"},
      // An answer of several items is one turn; two messages are two.
      {R"({"input": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]})",
       "<｜begin▁of▁sentence｜><｜User｜>u<｜Assistant｜></think>a<｜end▁of▁sentence｜><｜User｜>v<｜Assistant｜></"
       "think>"},
      {R"({"input": [{"role": "user", "content": "u"},
          {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
          {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
          {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"n\": 1.50}"},
          {"type": "function_call_output", "call_id": "c1", "output": "done"}], "reasoning": {"effort": "high"}})",
       "<｜begin▁of▁sentence｜><｜User｜>u<｜Assistant｜><think>r</think>a\n\n<｜DSML｜tool_calls>\n"
       "<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"n\" string=\"false\">1.5</｜DSML｜parameter>\n"
       "</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜><｜User｜><tool_result>done</tool_result>"
       "<｜Assistant｜><think>"},
  };
  for (const Prompt& p : table) EXPECT_EQ(prompt_of(kMake, p.body), p.prompt) << p.body;

  // Tools as they were given, without the type; a required call is begun in the prompt.
  const std::string with_tools =
      R"({"input": "Hi", "tools": [{"type": "function", "strict": true, "name": "f", "parameters": {"z": 1.0, "a": 2}}],)";
  const std::string shown = "<｜begin▁of▁sentence｜>\n\n" + tools_begin +
                            R"({"strict": true, "name": "f", "parameters": {"z": 1.0, "a": 2}})" + tools_end +
                            "<｜User｜>Hi<｜Assistant｜></think>";
  EXPECT_EQ(prompt_of(kMake, with_tools + R"("tool_choice": "auto"})"), shown);
  EXPECT_EQ(prompt_of(kMake, with_tools + R"("tool_choice": "required"})"), shown + "\n\n<｜DSML｜tool_calls>\n");
  EXPECT_EQ(prompt_of(kMake, with_tools + R"("tool_choice": {"type": "function", "name": "f"}})"),
            shown + "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n");
  EXPECT_EQ(prompt_of(kMake, with_tools + R"("tool_choice": {"type": "allowed_tools", "mode": "required",
            "tools": [{"type": "function", "name": "f"}]}})"),
            shown + "\n\n<｜DSML｜tool_calls>\n");
  EXPECT_EQ(prompt_of(kMake, with_tools + R"("tool_choice": "none"})"),
            "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>");
  EXPECT_EQ(prompt_of(kMake, R"({"input": "Hi", "instructions": "I", "text": {"format": {"type": "json_schema",
            "name": "n", "schema": {"type": "object"}}}})"),
            "<｜begin▁of▁sentence｜>I\n\n" + std::string(chat_format::kSchemaBegin) +
                "{\"type\": \"object\"}<｜User｜>Hi<｜Assistant｜></think>");
}

TEST(Responses, AForcedCallBeginsWithItsName) {
  const json body = {
      {"input", "?"}, {"tools", {kWeather}}, {"tool_choice", {{"type", "function"}, {"name", "weather"}}}};
  using namespace chat_format;
  const std::string rest = std::string(kParameterBegin) + "city" + std::string(kParameterNamed) + "true" +
                           std::string(kParameterFlagged) + "Rome" + std::string(kParameterClose);
  const auto exchange = kMake(body.dump(), test_model());
  ASSERT_EQ(exchange->requests()[0].stop_strings.size(), 1u);
  const std::string stop = kMake(body.dump(), test_model())->requests()[0].stop_strings[0];
  const json got = run_whole(kMake, body, events_of(rest, {Finish::stop, stop}));
  ASSERT_EQ(got["output"].size(), 1u);
  EXPECT_EQ(got["output"][0]["name"], "weather");
  EXPECT_EQ(got["output"][0]["arguments"], "{\"city\": \"Rome\"}");
  EXPECT_EQ(got["output"][0]["status"], "completed");
}

TEST(Responses, RequestsThatCannotBeDoneNameTheField) {
  expect_refused(
      kMake,
      {{"[]", "", "JSON object"},
       {"{", "", "body"},
       {"{}", "input", "missing"},
       {R"({"input": 3})", "input", "list"},
       {R"({"input": []})", "input", "empty"},
       {R"({"input": "x", "model": "other"})", "model", "tiny", 404},
       {R"({"input": "x", "temperature": -1})", "temperature", "-1"},
       {R"({"input": "x", "max_output_tokens": 0})", "max_output_tokens", "0"},
       {R"({"input": "x", "max_output_tokens": 5000})", "max_output_tokens", "4096"},
       {R"({"input": "x", "previous_response_id": "resp_1"})", "previous_response_id", "not stored"},
       {R"({"input": "x", "store": true})", "store", "not stored"},
       {R"({"input": "x", "background": true})", "background", "stream"},
       {R"({"input": "x", "truncation": "auto"})", "truncation", "shorten"},
       {R"({"input": "x", "n": 2})", "n", "one answer"},
       {R"({"input": "x", "prompt_logprobs": 1})", "prompt_logprobs", "/v1/chat/completions"},
       {R"({"input": "x", "top_logprobs": 6})", "top_logprobs", "6"},
       {R"({"input": "x", "reasoning": {"effort": "huge"}})", "reasoning.effort", "minimal"},
       {R"({"input": "x", "text": {"format": {"type": "xml"}}})", "text.format.type", "json_schema"},
       {R"({"input": "x", "text": {"format": {"type": "json_schema", "schema": 1}}})", "text.format.schema", "object"},
       {R"({"input": "x", "tools": [{"type": "web_search"}]})", "tools[0].type", "web_search"},
       {R"({"input": "x", "tools": [{"type": "function"}]})", "tools[0].name", "missing"},
       {R"({"input": "x", "tool_choice": "required"})", "tool_choice", "without tools"},
       {R"({"input": "x", "tool_choice": "maybe"})", "tool_choice", "maybe"},
       {R"({"input": "x", "tool_choice": {"type": "function", "name": "f"}})", "tool_choice.name", "\"f\""},
       {R"({"input": "x", "tool_choice": {"name": "f"}})", "tool_choice.type", "missing"},
       {R"({"input": [{"role": "tool", "content": "x"}]})", "input[0].role", "tool"},
       {R"({"input": [{"role": "user"}]})", "input[0].content", "missing"},
       {R"({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]})",
        "input[0].content[0].type", "input_image"},
       {R"({"input": ["x"]})", "input[0]", "object"},
       {R"({"input": [{"type": "item_reference", "id": "x"}]})", "input[0].type", "stored"},
       {R"({"input": [{"type": "computer_call"}]})", "input[0].type", "computer_call"},
       {R"({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]})", "input[0].call_id", "missing"},
       {R"({"input": [{"type": "function_call_output", "call_id": "c"}]})", "input[0].output", "missing"}});
}

}  // namespace
}  // namespace plumb::serve
