#include "serve/request_fields.h"

#include <gtest/gtest.h>

#include "serve/errors.h"
#include "serve/openai_chat.h"
#include "serve/openai_completions.h"
#include "serve/openai_testing.h"

namespace plumb::serve {
namespace {

using nlohmann::json;
using openai_testing::served_model;

const ServedModel& model() {
  static const ServedModel m = served_model();
  return m;
}

ApiError error_of(MakeExchange make, const std::string& body, const ServedModel& m = model()) {
  try {
    make(body, m);
  } catch (const ApiError& e) {
    return e;
  }
  ADD_FAILURE() << "accepted: " << body;
  return {};
}

// Members of a request that is right otherwise.
std::string chat(const std::string& members) {
  return R"({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}])" +
         (members.empty() ? "" : ", " + members) + "}";
}
std::string completion(const std::string& members) {
  return R"({"prompt": "Hi")" + (members.empty() ? "" : ", " + members) + "}";
}

Request request_of(MakeExchange make, const std::string& body, size_t choice = 0) {
  return make(body, model())->requests().at(choice);
}

struct Wrong {
  const char* members;
  const char* field;
  const char* part;  // of the message: the value or the fix
  int status = 400;
};

// Fields of both routes.
const Wrong kWrong[] = {
    {R"("temperature": -1)", "temperature", "from 0 to 100"},
    {R"("temperature": "hot")", "temperature", "\"hot\" is a string"},
    {R"("temperature": NaN)", "temperature", "NaN"},
    {R"("temperature": 1e999)", "temperature", "from 0 to 100"},
    {R"("top_p": 0)", "top_p", "to 1"},
    {R"("top_p": 1.5)", "top_p", "1.5"},
    {R"("top_k": -2)", "top_k", "-2"},
    {R"("top_k": 1.5)", "top_k", "whole number"},
    {R"("min_p": 2)", "min_p", "2"},
    {R"("seed": 9223372036854775808)", "seed", "9223372036854775808"},
    {R"("seed": "x")", "seed", "string"},
    {R"("stop": 5)", "stop", "list"},
    {R"("stop": ["a", 5])", "stop[1]", "give a string"},
    {R"("stop": [""])", "stop", "0 bytes"},
    {R"("stop_token_ids": [1280])", "stop_token_ids[0]", "0 to 1279"},
    {R"("max_tokens": -1)", "max_tokens", "-1"},
    {R"("max_tokens": 400)", "max_tokens", "at most 2"},
    {R"("max_tokens": 3, "min_tokens": 4)", "min_tokens", "lower it"},
    {R"("min_tokens": -1)", "min_tokens", "-1"},
    {R"("ignore_eos": 1)", "ignore_eos", "true or false"},
    {R"("logit_bias": [1])", "logit_bias", "an object"},
    {R"("logit_bias": {"x": 1})", "logit_bias.x", "0 to 1279"},
    {R"("logit_bias": {"1280": 1})", "logit_bias.1280", "0 to 1279"},
    {R"("logit_bias": {"5": 101})", "logit_bias.5", "101"},
    {R"("presence_penalty": 2.5)", "presence_penalty", "-2 to 2"},
    {R"("frequency_penalty": -3)", "frequency_penalty", "-2 to 2"},
    {R"("repetition_penalty": 0)", "repetition_penalty", "give a number"},
    {R"("n": 0)", "n", "1 to 8"},
    {R"("n": 9)", "n", "1 to 8"},
    {R"("priority": "high")", "priority", "string"},
    {R"("prompt_logprobs": 6)", "prompt_logprobs", "0 to 5"},
    {R"("skip_special_tokens": "no")", "skip_special_tokens", "true or false"},
    {R"("return_token_ids": 0)", "return_token_ids", "true or false"},
    {R"("return_tokens_as_token_ids": {})", "return_tokens_as_token_ids", "true or false"},
    {R"("return_routed_experts": 3)", "return_routed_experts", "true or false"},
    {R"("stream": "yes")", "stream", "true or false"},
    {R"("stream_options": {"include_usage": true})", "stream_options", "set stream to true"},
    {R"("stream": true, "stream_options": {"include_usage": 1})", "stream_options.include_usage", "true or false"},
    {R"("stream": true, "stream_options": [])", "stream_options", "an object"},
    {R"("use_beam_search": true)", "use_beam_search", "leave it out"},
    {R"("include_stop_str_in_output": true)", "include_stop_str_in_output", "leave it out"},
    {R"("model": "huge")", "model", "use one of tiny, poet", 404},
    {R"("model": "poet@1")", "model", "2", 404},
    {R"("model": "poet@x")", "model", "number of a version", 404},
    {R"("model": "tiny@1")", "model", "use one of", 404},
    {R"("model": 5)", "model", "give a string"},
};

const Wrong kWrongChat[] = {
    {R"("max_completion_tokens": 0)", "max_completion_tokens", "1 to"},
    {R"("max_completion_tokens": 500, "max_tokens": 5)", "max_completion_tokens", "500"},
    {R"("top_logprobs": 2)", "top_logprobs", "set logprobs"},
    {R"("logprobs": true, "top_logprobs": 6)", "top_logprobs", "0 to 5"},
    {R"("logprobs": 5)", "logprobs", "true or false"},
    {R"("tool_choice": "required")", "tool_choice", "give tools"},
    {R"("tool_choice": "sometimes")", "tool_choice", "none, auto, required"},
    {R"("tool_choice": {"type": "function"})", "tool_choice.function", "add it"},
    {R"("tool_choice": {"type": "custom", "function": {"name": "f"}})", "tool_choice.type", "function"},
    {R"("tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [{"type": "function", "function": {"name": "f"}}])",
     "tool_choice.function.name", "use one of f"},
    {R"("tools": [{"type": "retrieval"}])", "tools[0]", "function"},
    {R"("tools": {})", "tools", "give a list"},
    {R"("functions": [{"name": "f"}])", "functions", "use tools"},
    {R"("response_format": {"type": "xml"})", "response_format.type", "json_schema"},
    {R"("response_format": "json")", "response_format", "an object"},
    {R"("reasoning_effort": "huge")", "reasoning_effort", "minimal"},
    {R"("thinking": {"type": "maybe"})", "thinking.type", "enabled, disabled"},
    {R"("chat_template_kwargs": {"thinking": "on"})", "chat_template_kwargs.thinking", "true or false"},
    {R"("chat_template_kwargs": {"reasoning_effort": "huge"})", "chat_template_kwargs.reasoning_effort", "minimal"},
    {R"("chat_template_kwargs": {"thinking_mode": "deep"})", "chat_template_kwargs.thinking_mode", "chat, thinking"},
    {R"("continue_final_message": true)", "continue_final_message", "assistant"},
    {R"("guided_json": {"type": "object"})", "guided_json", "response_format"},
    {R"("modalities": ["text", "audio"])", "modalities", "[\"text\"]"},
    {R"("echo": true)", "echo", "/v1/completions"},
};

const Wrong kWrongCompletion[] = {
    {R"("logprobs": 6)", "logprobs", "0 to 5"},     {R"("logprobs": true)", "logprobs", "whole number"},
    {R"("best_of": 2)", "best_of", "leave it out"}, {R"("suffix": "end")", "suffix", "leave it out"},
    {R"("echo": "yes")", "echo", "true or false"},
};

// What is said of the prompt itself.
const Wrong kWrongPrompt[] = {
    {R"({})", "prompt", "add it"},
    {R"({"prompt": 5})", "prompt", "list of token ids"},
    {R"({"prompt": ""})", "prompt", "give a text"},
    {R"({"prompt": []})", "prompt", "at least one"},
    {R"({"prompt": [[1], []]})", "prompt[1]", "at least one"},
    {R"({"prompt": [1, "a"]})", "prompt[1]", "whole number"},
    {R"({"prompt": ["a", true]})", "prompt[1]", "list of token ids"},
    {R"({"prompt": [5, 1280]})", "prompt[1]", "0 to 1279"},
    {R"({"prompt": [[5], [-1]]})", "prompt[1][0]", "0 to 1279"},
};
const Wrong kWrongMessages[] = {
    {R"({})", "messages", "add it"},
    {R"({"messages": []})", "messages", "at least one"},
    {R"({"messages": "Hi"})", "messages", "list"},
    {R"({"messages": ["Hi"]})", "messages[0]", "an object"},
    {R"({"messages": [{"content": "Hi"}]})", "messages[0]", "role"},
    {R"({"messages": [{"role": "king", "content": "Hi"}]})", "messages[0].role", "user"},
    {R"({"messages": [{"role": "user"}]})", "messages[0].content", "string"},
    {R"({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})", "messages[0].content[0]", "text"},
    {R"({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]})", "messages[1]",
     "tool_call_id"},
    {R"({"messages": [{"role": "user", "content": "a", "prefix": true}]})", "messages[0].prefix", "assistant"},
};

void expect_refused(MakeExchange make, const std::string& body, const Wrong& wrong) {
  const ApiError e = error_of(make, body);
  EXPECT_EQ(e.status, wrong.status) << body;
  EXPECT_EQ(e.field, wrong.field) << body;
  EXPECT_EQ(e.message.find(wrong.field), 0u) << e.message;
  EXPECT_NE(e.message.find(wrong.part), std::string::npos) << body << "\n" << e.message;
  EXPECT_NE(e.message.find('('), std::string::npos) << "says no fix: " << e.message;
  const json said = error_body(ErrorForm::openai, e);
  EXPECT_EQ(said["error"]["param"], wrong.field);
  EXPECT_EQ(said["error"]["message"], e.message);
  EXPECT_EQ(said["error"]["code"], wrong.status == 404 ? json("model_not_found") : json(nullptr));
}

TEST(RequestFields, EachWrongFieldIsNamedWithItsFix) {
  for (const Wrong& w : kWrong) {
    expect_refused(openai_completions, completion(w.members), w);
    // A second "model" in the same body counts, as in Python.
    expect_refused(openai_chat, chat(w.members), w);
  }
  for (const Wrong& w : kWrongChat) expect_refused(openai_chat, chat(w.members), w);
  for (const Wrong& w : kWrongCompletion) expect_refused(openai_completions, completion(w.members), w);
  for (const Wrong& w : kWrongPrompt) expect_refused(openai_completions, w.members, w);
  for (const Wrong& w : kWrongMessages) expect_refused(openai_chat, w.members, w);
}

TEST(RequestFields, WhatIsNoJsonObjectIsRefusedWithThePlace) {
  EXPECT_NE(error_of(openai_chat, "{\n\"model\": }").message.find("2:"), std::string::npos);
  EXPECT_NE(error_of(openai_chat, "[1]").message.find("an array"), std::string::npos);
  EXPECT_NE(error_of(openai_chat, "").message.find("body"), std::string::npos);
  EXPECT_NE(error_of(openai_chat, "{\"a\": \"\xFF\"}").message.find("UTF-8"), std::string::npos);
  EXPECT_EQ(error_of(openai_chat, "[1]").field, "");
}

TEST(RequestFields, UnknownFieldsAreIgnoredUnlessStrict) {
  const std::string typo = chat(R"("temprature": 0.5, "user": "me", "metadata": {"a": "b"})");
  EXPECT_EQ(request_of(openai_chat, typo).sampling.temperature, 1);
  ServedModel strict = served_model();
  strict.strict_fields = true;
  const ApiError e = error_of(openai_chat, typo, strict);
  EXPECT_EQ(e.field, "temprature");
  EXPECT_NE(e.message.find("did you mean temperature?"), std::string::npos) << e.message;
  EXPECT_EQ(error_of(openai_completions, completion(R"("foo": 1)"), strict).field, "foo");
  openai_chat(chat(R"("user": "me", "tool_choice": "auto", "top_k": 3)"), strict);
}

TEST(RequestFields, SamplingFieldsReachTheEngine) {
  const Request r = request_of(openai_chat, chat(R"("model": "poet@2", "temperature": 0.25, "top_p": 0.5, "top_k": -1,
      "min_p": 0.125, "seed": -3, "stop": ["a", "b"], "stop_token_ids": [7], "max_tokens": 9.0, "min_tokens": 2,
      "logit_bias": {"5": -100, "6": 1.5}, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.25,
      "priority": 4, "logprobs": true, "top_logprobs": 3, "prompt_logprobs": 2, "return_routed_experts": true)"));
  EXPECT_EQ(r.adapter, "poet");
  EXPECT_EQ(r.adapter_version, 2);
  EXPECT_EQ(r.sampling.temperature, 0.25f);
  EXPECT_EQ(r.sampling.top_p, 0.5f);
  EXPECT_EQ(r.sampling.top_k, 0);
  EXPECT_EQ(r.sampling.min_p, 0.125f);
  EXPECT_EQ(r.sampling.seed, static_cast<uint64_t>(-3));
  EXPECT_EQ(r.stop_strings, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(r.sampling.stop_tokens, (std::vector<int>{1, 7}));
  EXPECT_EQ(r.sampling.max_tokens, 9);
  EXPECT_EQ(r.sampling.min_tokens, 2);
  EXPECT_EQ(r.sampling.logit_bias, (std::vector<std::pair<int, float>>{{5, -100.f}, {6, 1.5f}}));
  EXPECT_EQ(r.sampling.presence_penalty, 1);
  EXPECT_EQ(r.sampling.frequency_penalty, -1);
  EXPECT_EQ(r.sampling.repetition_penalty, 1.25f);
  EXPECT_EQ(r.priority, -4);  // the engine takes high numbers first, the API low ones
  EXPECT_EQ(r.sampling.top_logprobs, 3);
  EXPECT_TRUE(r.prompt_logprobs);
  EXPECT_EQ(r.prompt_top_logprobs, 2);
  EXPECT_TRUE(r.routed_experts);
}

TEST(RequestFields, DefaultsAreThoseOfTheModel) {
  const Request r = request_of(openai_completions, completion(R"("temperature": null, "stop": null)"));
  EXPECT_EQ(r.adapter, "");
  EXPECT_EQ(r.sampling.temperature, 1);
  EXPECT_EQ(r.sampling.stop_tokens, std::vector<int>{1});
  EXPECT_EQ(r.sampling.max_tokens, model().max_positions - static_cast<int>(r.prompt.size()));
  EXPECT_FALSE(r.prompt_logprobs);
  EXPECT_TRUE(request_of(openai_completions, completion(R"("ignore_eos": true)")).sampling.stop_tokens.empty());
  ServedModel brief = served_model();
  brief.default_tokens = 12;
  EXPECT_EQ(openai_chat(chat(""), brief)->requests()[0].sampling.max_tokens, 12);
  EXPECT_EQ(request_of(openai_completions, completion(R"("model": "poet")")).adapter_version, std::nullopt);
}

TEST(RequestFields, AnAdapterMayHaveAnAtSignInItsName) {
  const ServedModel m = served_model();
  m.adapters->publish("run@7", std::make_shared<Adapter>());
  EXPECT_EQ(openai_completions(completion(R"("model": "run@7")"), m)->requests()[0].adapter, "run@7");
  EXPECT_EQ(openai_completions(completion(R"("model": "run@7@1")"), m)->requests()[0].adapter_version, 1);
}

TEST(RequestFields, ChoicesDifferInTheirKeyAndSeedsRepeat) {
  const std::string seeded = chat(R"("n": 3, "seed": 5)"), fresh = chat("");
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(request_of(openai_chat, seeded, i).key, i);
    EXPECT_EQ(request_of(openai_chat, seeded, i).sampling.seed, 5u);
  }
  // 2^-64 is the chance that this fails though all is right.
  EXPECT_NE(request_of(openai_chat, fresh).sampling.seed, request_of(openai_chat, fresh).sampling.seed);
}

TEST(RequestFields, PromptAndAnswerFitIntoTheModel) {
  const auto prompt = [](int n, const std::string& rest) {
    return R"({"prompt": )" + json(std::vector<int>(n, 20)).dump() + rest + "}";
  };
  EXPECT_EQ(request_of(openai_completions, prompt(299, "")).sampling.max_tokens, 1);
  EXPECT_EQ(request_of(openai_completions, prompt(290, R"(, "max_tokens": 10)")).sampling.max_tokens, 10);
  EXPECT_EQ(error_of(openai_completions, prompt(290, R"(, "max_tokens": 11)")).field, "max_tokens");
  EXPECT_EQ(error_of(openai_completions, prompt(300, "")).field, "prompt");
  EXPECT_EQ(request_of(openai_completions, prompt(300, R"(, "max_tokens": 0, "echo": true)")).sampling.max_tokens, 0);
  EXPECT_EQ(error_of(openai_completions, prompt(301, R"(, "max_tokens": 0)")).field, "prompt");
}

}  // namespace
}  // namespace plumb::serve
