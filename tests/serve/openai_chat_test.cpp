#include "serve/openai_chat.h"

#include <gtest/gtest.h>

#include "serve/openai_testing.h"
#include "serve/request_fields.h"
#include "tokenizer/chat_format.h"

namespace plumb::serve {
namespace {

using nlohmann::json;
using openai_testing::answer, openai_testing::ids_of, openai_testing::served_model, openai_testing::stream,
    openai_testing::whole;

constexpr const char* kTools =
    R"("tools": [{"type": "function", "function": {"name": "weather", "parameters": {"z": 1.0, "a": 2}}},
                 {"type": "function", "function": {"name": "time"}}])";
constexpr const char* kCall =
    "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"weather\">\n"
    "<｜DSML｜parameter name=\"city\" string=\"true\">Oslo</｜DSML｜parameter>\n"
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>";

std::string body(const std::string& members, const std::string& messages = R"([{"role": "user", "content": "Hi"}])") {
  return R"({"model": "tiny", "messages": )" + messages + (members.empty() ? "" : ", " + members) + "}";
}

class OpenAiChat : public ::testing::Test {
 protected:
  ServedModel model_ = served_model();

  std::unique_ptr<Exchange> make(const std::string& members,
                                 const std::string& messages = R"([{"role": "user", "content": "Hi"}])") {
    return openai_chat(body(members, messages), model_);
  }
  std::string prompt_of(const std::string& members,
                        const std::string& messages = R"([{"role": "user", "content": "Hi"}])") {
    return model_.tokenizer.decode(make(members, messages)->requests()[0].prompt, false);
  }
  json choice_of(const std::string& members, const std::string& text) {
    return whole(*make(members), {answer(model_, text)})["choices"][0];
  }
};

// Takes out what differs from call to call, after a look at its form.
json without_ids(json message) {
  EXPECT_EQ(message["id"].get<std::string>().substr(0, 9), "chatcmpl-");
  message.erase("id");
  message.erase("created");
  for (json& choice : message["choices"])
    for (const char* part : {"message", "delta"})
      if (choice.contains(part) && choice[part].contains("tool_calls"))
        for (json& call : choice[part]["tool_calls"])
          if (call.contains("id")) {
            EXPECT_EQ(call["id"].get<std::string>().substr(0, 5), "call_");
            call.erase("id");
          }
  return message;
}

TEST_F(OpenAiChat, AWholeAnswer) {
  // 13 tokens: L et Ġme Ġsee . </think> ĊĊ Hi Ġ and the three bytes of the euro sign, end of sentence.
  const auto exchange = make("");
  EXPECT_FALSE(exchange->streams());
  std::vector<Event> events = answer(model_, "Let me see.</think>\n\nHi €<｜end▁of▁sentence｜>");
  events[0].cached_tokens = 4;
  const json got = without_ids(whole(*exchange, {events}));
  const json expected = json::parse(R"({
    "object": "chat.completion", "model": "tiny",
    "choices": [{"index": 0, "finish_reason": "stop", "stop_reason": null, "logprobs": null,
      "message": {"role": "assistant", "content": "Hi €", "reasoning_content": "Let me see.", "refusal": null}}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 13, "total_tokens": 18,
      "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 6}}})");
  EXPECT_EQ(got, expected) << got.dump(1);
}

TEST_F(OpenAiChat, AStreamedAnswer) {
  const auto exchange =
      make(R"("stream": true, "stream_options": {"include_usage": true}, "chat_template_kwargs": {"thinking": false})");
  EXPECT_TRUE(exchange->streams());
  EXPECT_EQ(exchange->keep_alive()[0], ':');  // a comment for clients
  std::vector<json> got = openai_testing::events_of(stream(*exchange, {answer(model_, "Hello there")}));
  for (json& event : got) {
    event = without_ids(event);
    EXPECT_EQ(event["object"], "chat.completion.chunk");
    event.erase("object"), event.erase("model");
  }
  const auto delta = [](const char* text, const char* finish) {
    json choice = {
        {"index", 0}, {"delta", json::parse(text)}, {"logprobs", nullptr}, {"finish_reason", json::parse(finish)}};
    if (finish[0] == '"') choice["stop_reason"] = nullptr;
    return json{{"choices", json::array({choice})}, {"usage", nullptr}};
  };
  ASSERT_EQ(got.size(), 5u);
  EXPECT_EQ(got[0], delta(R"({"role": "assistant", "content": ""})", "null"));
  EXPECT_EQ(got[1], delta(R"({"content": "Hello"})", "null"));
  EXPECT_EQ(got[2], delta(R"({"content": " there"})", "null"));
  EXPECT_EQ(got[3], delta("{}", "\"length\""));
  EXPECT_EQ(got[4]["choices"], json::array());
  EXPECT_EQ(got[4]["usage"]["completion_tokens"], 2);
}

TEST_F(OpenAiChat, ToolCalls) {
  const json got = choice_of(kTools, std::string("Hm.</think>") + kCall);
  EXPECT_EQ(got["finish_reason"], "tool_calls");
  EXPECT_EQ(got["message"]["content"], nullptr);
  EXPECT_EQ(got["message"]["reasoning_content"], "Hm.");
  ASSERT_EQ(got["message"]["tool_calls"].size(), 1u);
  const json& call = got["message"]["tool_calls"][0];
  EXPECT_EQ(call["type"], "function");
  EXPECT_EQ(call["function"]["name"], "weather");
  EXPECT_EQ(call["function"]["arguments"], R"({"city": "Oslo"})");
}

TEST_F(OpenAiChat, ThePromptShowsToolsAsTheyWereGiven) {
  const std::string prompt = prompt_of(kTools);
  EXPECT_NE(prompt.find(R"({"name": "weather", "parameters": {"z": 1.0, "a": 2}})"), std::string::npos) << prompt;
  EXPECT_EQ(prompt_of(std::string(kTools) + R"(, "tool_choice": "none")").find("weather"), std::string::npos);
}

TEST_F(OpenAiChat, RequiredCallsAreBegunInThePrompt) {
  const std::string fields = std::string(kTools) + R"(, "tool_choice": "required", "thinking": {"type": "disabled"})";
  const std::string prompt = prompt_of(fields), opening(chat_format::kCallsOpen);
  EXPECT_EQ(prompt.substr(prompt.size() - opening.size()), opening);
  const std::string rest = std::string(kCall).substr(opening.size());
  EXPECT_EQ(choice_of(fields, rest)["message"]["tool_calls"][0]["function"]["arguments"], R"({"city": "Oslo"})");
}

TEST_F(OpenAiChat, ANamedCallIsTheOnlyOne) {
  const std::string fields =
      std::string(kTools) + R"(, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "stop": "!")";
  const auto exchange = make(fields + R"(, "stream": true)");
  const Request request = exchange->requests()[0];
  const std::string prompt = model_.tokenizer.decode(request.prompt, false),
                    opening = "<｜DSML｜invoke name=\"weather\">\n";
  EXPECT_EQ(prompt.substr(prompt.size() - opening.size()), opening);
  EXPECT_EQ(request.stop_strings, (std::vector<std::string>{"!", "</｜DSML｜invoke>"}));

  // The engine ends the answer in front of the stop string.
  std::vector<Event> events =
      answer(model_, "<｜DSML｜parameter name=\"city\" string=\"true\">Oslo</｜DSML｜parameter>\n");
  events.back().finish = Finish::stop;
  events.back().stop_string = "</｜DSML｜invoke>";
  const json got = whole(*make(fields), {events})["choices"][0];
  EXPECT_EQ(got["finish_reason"], "tool_calls");
  EXPECT_EQ(got["stop_reason"], nullptr);
  EXPECT_EQ(got["message"]["tool_calls"][0]["function"]["name"], "weather");
  EXPECT_EQ(got["message"]["tool_calls"][0]["function"]["arguments"], R"({"city": "Oslo"})");
  // A stream tells the name before the first token.
  EXPECT_NE(exchange->begin().find("\"name\":\"weather\""), std::string::npos);
}

TEST_F(OpenAiChat, WithoutParallelCallsTheFirstIsTheLast) {
  EXPECT_EQ(make(std::string(kTools) + R"(, "parallel_tool_calls": false)")->requests()[0].stop_strings,
            std::vector<std::string>{"</｜DSML｜invoke>"});
}

TEST_F(OpenAiChat, ModesAndEfforts) {
  const auto header = [&](const std::string& members) {
    const std::string prompt = prompt_of(members), user = "<｜User｜>Hi<｜Assistant｜>";
    return prompt.substr(prompt.find(user) + user.size());
  };
  const auto has_effort = [&](const std::string& members) {
    return prompt_of(members).find("Absolute maximum") != std::string::npos;
  };
  EXPECT_EQ(header(""), "<think>");
  for (const char* off :
       {R"("reasoning_effort": "none")", R"("thinking": {"type": "disabled"})",
        R"("chat_template_kwargs": {"thinking": false})", R"("chat_template_kwargs": {"enable_thinking": false})",
        R"("chat_template_kwargs": {"thinking_mode": "chat"})",
        R"("reasoning_effort": "max", "thinking": {"type": "disabled"})"})
    EXPECT_EQ(header(off), "</think>") << off;
  EXPECT_FALSE(has_effort(R"("reasoning_effort": "high")"));
  EXPECT_TRUE(has_effort(R"("reasoning_effort": "max")"));
  EXPECT_TRUE(
      has_effort(R"("chat_template_kwargs": {"reasoning_effort": "max", "preserve_thinking": true, "other": 1})"));
  const char* history =
      R"([{"role": "user", "content": "a"}, {"role": "assistant", "reasoning_content": "why", "content": "b"},
                            {"role": "user", "content": "c"}])";
  EXPECT_EQ(prompt_of("", history).find("why"), std::string::npos);
  EXPECT_NE(prompt_of(R"("chat_template_kwargs": {"preserve_thinking": true})", history).find("why"),
            std::string::npos);
}

TEST_F(OpenAiChat, ResponseFormatsAreShownToTheModel) {
  EXPECT_NE(
      prompt_of(
          R"("response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "a": 1}}})")
          .find(R"({"type": "object", "a": 1})"),
      std::string::npos);
  EXPECT_NE(prompt_of(R"("response_format": {"type": "json_object"})").find("JSON object ONLY"), std::string::npos);
}

TEST_F(OpenAiChat, AnUnfinishedAnswerGoesOn) {
  const std::string begin =
      R"([{"role": "user", "content": "Hi"}, {"role": "assistant", "reasoning_content": "Hm.", "content": "Hello")";
  for (const auto& [members, messages] :
       {std::pair<std::string, std::string>{R"("continue_final_message": true)", begin + "}]"},
        {"", begin + R"(, "prefix": true}])"},
        {"", begin + R"(, "wo_eos": true}])"}}) {
    const std::string prompt = prompt_of(members, messages), end = "<think>Hm.</think>Hello";
    EXPECT_EQ(prompt.substr(prompt.size() - end.size()), end);
    const json got = whole(*make(members, messages), {answer(model_, " there")})["choices"][0]["message"];
    EXPECT_EQ(got["content"], " there");
    EXPECT_FALSE(got.contains("reasoning_content"));
  }
}

TEST_F(OpenAiChat, LogprobsOfEachTokenInAllDigits) {
  std::vector<Event> events = answer(model_, "Hello €");
  events[0].token.logprob = -0.1f;
  events[0].token.top = {{569, -0.1f}, {7, -2.5f}};
  const std::string off = R"("logprobs": true, "top_logprobs": 2, "thinking": {"type": "disabled"})";
  const json got = whole(*make(off), {events})["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(got.size(), 5u);  // Hello, space, three bytes
  EXPECT_EQ(got[0],
            json::parse(R"({"token": "Hello", "bytes": [72, 101, 108, 108, 111], "logprob": -0.10000000149011612,
    "top_logprobs": [{"token": " there", "bytes": [32, 116, 104, 101, 114, 101], "logprob": -0.10000000149011612},
                     {"token": "｜DSML｜", "bytes": [239, 189, 156, 68, 83, 77, 76, 239, 189, 156], "logprob": -2.5}]})"));
  EXPECT_EQ(got[2]["token"], "\uFFFD");
  EXPECT_EQ(got[2]["bytes"], json({0xE2}));
  EXPECT_EQ(got[4]["logprob"], -0.625);
  const json ids =
      whole(*make(off + R"(, "return_tokens_as_token_ids": true)"), {events})["choices"][0]["logprobs"]["content"];
  EXPECT_EQ(ids[0]["token"], "token_id:541");
  EXPECT_EQ(ids[0]["top_logprobs"][1]["token"], "token_id:7");
}

TEST_F(OpenAiChat, WhatTrainingLoopsAskFor) {
  const auto exchange = make(R"("return_token_ids": true, "prompt_logprobs": 1, "return_routed_experts": true)");
  const std::vector<int> prompt = exchange->requests()[0].prompt;
  ASSERT_EQ(prompt.size(), 5u);
  std::vector<Event> events = answer(model_, std::vector<int>{541, 1});
  events[0].prompt_logprobs = {-1, -2, -3, -4};
  events[0].prompt_top = {{{prompt[1], -1}}, {{17, -0.5}}, {{17, -0.5}}, {{17, -0.5}}};
  std::vector<int32_t> routed(6 * 2 * 3);
  for (size_t i = 0; i < routed.size(); ++i) routed[i] = static_cast<int32_t>(i);
  events[1].routed = Tensor::of<int32_t>(routed, {6, 2, 3});
  const json got = whole(*exchange, {events}), &choice = got["choices"][0];
  EXPECT_EQ(got["prompt_token_ids"], json(prompt));
  EXPECT_EQ(choice["token_ids"], json({541, 1}));
  EXPECT_EQ(choice["adapter_versions"], json({3, 3}));
  EXPECT_EQ(choice["logprobs"]["content"].size(), 2u);  // with the ids, unless refused
  EXPECT_EQ(got["prompt_logprobs"].size(), prompt.size());
  EXPECT_EQ(got["prompt_logprobs"][0], nullptr);
  EXPECT_EQ(got["prompt_logprobs"][1][std::to_string(prompt[1])]["rank"], 1);
  EXPECT_EQ(got["prompt_logprobs"][2]["17"]["logprob"], -0.5);
  EXPECT_EQ(got["prompt_logprobs"][2][std::to_string(prompt[2])],
            json({{"logprob", -2}, {"rank", nullptr}, {"decoded_token", model_.tokenizer.decode({prompt[2]}, false)}}));
  EXPECT_EQ(choice["prompt_routed_experts"].size(), prompt.size());
  EXPECT_EQ(choice["prompt_routed_experts"][1], json({{6, 7, 8}, {9, 10, 11}}));
  EXPECT_EQ(choice["routed_experts"], json({{{30, 31, 32}, {33, 34, 35}}, {{-1, -1, -1}, {-1, -1, -1}}}));
  EXPECT_EQ(whole(*make(R"("return_token_ids": true, "logprobs": false)"),
                  {answer(model_, "Hello")})["choices"][0]["logprobs"],
            nullptr);
}

TEST_F(OpenAiChat, TextThatAStopStringCutIsText) {
  std::vector<Event> events = answer(model_, "Hello there");
  events[1].text = " th";
  events[1].finish = Finish::stop;
  events[1].stop_string = "ere";
  const json got = whole(*make(R"("stop": "ere", "thinking": {"type": "disabled"})"), {events})["choices"][0];
  EXPECT_EQ(got["message"]["content"], "Hello th");
  EXPECT_EQ(got["finish_reason"], "stop");
  EXPECT_EQ(got["stop_reason"], "ere");
}

TEST_F(OpenAiChat, SpecialTokensHaveTextOnlyOnRequest) {
  const std::vector<Event> events = answer(model_, std::vector<int>{541, 2, 569});
  const std::string off = R"("thinking": {"type": "disabled"})";
  EXPECT_EQ(whole(*make(off), {events})["choices"][0]["message"]["content"], "Hello there");
  EXPECT_EQ(whole(*make(off + R"(, "skip_special_tokens": false)"), {events})["choices"][0]["message"]["content"],
            "Hello<｜▁pad▁｜> there");
}

// What a client makes of a stream: texts appended, calls by their index, lists joined.
struct Joined {
  json message = {{"role", nullptr}, {"content", ""}};
  json logprobs = json::array(), token_ids = json::array(), finish = nullptr;
};

void append(json& object, const char* key, const json& delta) {
  if (!delta.contains(key)) return;
  object[key] = object.value(key, "") + delta[key].get<std::string>();
}

std::vector<Joined> join(const std::vector<json>& events, size_t choices, json& usage) {
  std::vector<Joined> out(choices);
  for (const json& event : events) {
    if (!event["usage"].is_null()) usage = event["usage"];
    for (const json& choice : event["choices"]) {
      Joined& j = out[choice["index"].get<size_t>()];
      EXPECT_EQ(j.finish, nullptr) << "something comes after the end";
      const json& delta = choice["delta"];
      if (delta.contains("role")) j.message["role"] = delta["role"];
      append(j.message, "content", delta);
      append(j.message, "reasoning_content", delta);
      for (const json& call : delta.value("tool_calls", json::array())) {
        const size_t index = call["index"];
        json& calls = j.message["tool_calls"];
        if (index == calls.size())
          calls.push_back({{"type", call["type"]}, {"function", {{"name", call["function"]["name"]}}}});
        append(calls[index]["function"], "arguments", call["function"]);
      }
      if (!choice["logprobs"].is_null())
        for (const json& l : choice["logprobs"]["content"]) j.logprobs.push_back(l);
      for (const json& id : choice.value("token_ids", json::array())) j.token_ids.push_back(id);
      j.finish = choice["finish_reason"];
    }
  }
  return out;
}

TEST_F(OpenAiChat, StreamedPiecesJoinedAreTheWholeAnswer) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    const size_t n = 1 + random() % 4;
    std::vector<std::vector<Event>> answers;
    for (size_t i = 0; i < n; ++i) answers.push_back(answer(model_, openai_testing::random_answer(model_, random)));
    std::string fields = "\"n\": " + std::to_string(n) + ", " + kTools;
    if (random() % 2) fields += R"(, "thinking": {"type": "disabled"})";
    if (random() % 3 == 0) fields += R"(, "tool_choice": "required")";
    if (random() % 2) fields += R"(, "return_token_ids": true)";
    const json expected = whole(*make(fields), answers);
    const auto exchange = make(fields + R"(, "stream": true, "stream_options": {"include_usage": true})");
    json usage;
    const std::vector<Joined> got = join(openai_testing::events_of(stream(*exchange, answers, round)), n, usage);
    EXPECT_EQ(usage, expected["usage"]);
    for (size_t i = 0; i < n; ++i) {
      const json& choice = expected["choices"][i];
      json message = choice["message"];
      message.erase("refusal");
      if (message["content"].is_null()) message["content"] = "";
      if (message.contains("tool_calls"))
        for (json& call : message["tool_calls"]) call.erase("id");
      EXPECT_EQ(got[i].message, message);
      EXPECT_EQ(got[i].finish, choice["finish_reason"]);
      if (choice["logprobs"].is_null()) {
        EXPECT_EQ(got[i].logprobs, json::array());
      } else {
        EXPECT_EQ(got[i].logprobs, choice["logprobs"]["content"]);
        EXPECT_EQ(got[i].token_ids, choice["token_ids"]);
      }
    }
    if (HasFailure()) FAIL() << "in round " << round;
  }
}

}  // namespace
}  // namespace plumb::serve
