#include "serve/openai_completions.h"

#include <gtest/gtest.h>

#include "serve/openai_testing.h"
#include "serve/request_fields.h"

namespace plumb::serve {
namespace {

using nlohmann::json;
using openai_testing::answer, openai_testing::ids_of, openai_testing::served_model, openai_testing::stream,
    openai_testing::whole;

class OpenAiCompletions : public ::testing::Test {
 protected:
  ServedModel model_ = served_model();

  std::unique_ptr<Exchange> make(const std::string& members) { return openai_completions("{" + members + "}", model_); }
  std::vector<std::vector<int>> prompts_of(const std::string& members) {
    std::vector<std::vector<int>> out;
    for (const Request& r : make(members)->requests()) out.push_back(r.prompt);
    return out;
  }
};

TEST_F(OpenAiCompletions, AWholeAnswer) {
  json got = whole(*make(R"("model": "poet@3", "prompt": "Hi")"), {answer(model_, "Hello there<｜end▁of▁sentence｜>")});
  EXPECT_EQ(got["id"].get<std::string>().substr(0, 5), "cmpl-");
  got.erase("id");
  got.erase("created");
  EXPECT_EQ(got, json::parse(R"({"object": "text_completion", "model": "poet@3",
    "choices": [{"index": 0, "text": "Hello there", "logprobs": null, "finish_reason": "stop", "stop_reason": null}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}}})"))
      << got.dump(1);
}

TEST_F(OpenAiCompletions, PromptsInAllForms) {
  using Lists = std::vector<std::vector<int>>;
  std::vector<int> hi = ids_of(model_, "Hi there"), control = ids_of(model_, "<｜begin▁of▁sentence｜><｜User｜>Hi");
  EXPECT_EQ(prompts_of(R"("prompt": "Hi there", "add_special_tokens": false)"), Lists{hi});
  hi.insert(hi.begin(), 0);
  EXPECT_EQ(prompts_of(R"("prompt": "Hi there")"), Lists{hi});
  EXPECT_EQ(prompts_of(R"("prompt": ["Hi there"])"), Lists{hi});
  EXPECT_EQ(prompts_of(R"("prompt": [5, 6.0, 7])"), (Lists{{5, 6, 7}}));
  // A raw prompt may spell control tokens; begin of sentence is not doubled.
  EXPECT_EQ(control[1], 3);
  EXPECT_EQ(prompts_of(R"("prompt": ["Hi there", [5, 6], "<｜begin▁of▁sentence｜><｜User｜>Hi"])"),
            (Lists{hi, {5, 6}, control}));
  EXPECT_EQ(prompts_of(R"("prompt": [[5], [6]], "n": 2)"), (Lists{{5}, {5}, {6}, {6}}));
}

TEST_F(OpenAiCompletions, EveryAnswerHasItsOwnKey) {
  const std::vector<Request> requests = make(R"("prompt": ["a", "a"], "n": 2, "seed": 1)")->requests();
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(requests[i].key, i);
}

TEST_F(OpenAiCompletions, EchoAndLogprobsInTheOldForm) {
  // Token 236 is the first byte of the euro sign: no character yet, so what follows begins at the same place.
  const auto exchange = make(R"("prompt": [541, 236, 174, 240], "echo": true, "logprobs": 1, "max_tokens": 2)");
  const Request request = exchange->requests()[0];
  EXPECT_TRUE(request.prompt_logprobs);
  EXPECT_EQ(request.prompt_top_logprobs, 1);
  std::vector<Event> events = answer(model_, std::vector<int>{121, 569});
  events[0].prompt_logprobs = {-1, -2, -3};
  events[0].prompt_top = {{{541, -0.5}}, {{174, -2}}, {{17, -0.25}}};
  events[0].token.top = {{121, -0.125f}};
  events[1].token.top = {{541, -0.1f}};
  // 236 174 240 121 spell a space and a euro sign: 0x20 E2 82 AC.
  const json choice = whole(*exchange, {events})["choices"][0];
  EXPECT_EQ(choice["text"], "Hello € there");
  const json& l = choice["logprobs"];
  EXPECT_EQ(l["tokens"], json::parse(R"(["Hello", " ", "�", "�", "�", " there"])"));
  EXPECT_EQ(l["token_logprobs"], json::parse("[null, -1, -2, -3, -0.125, -0.25]"));
  EXPECT_EQ(l["text_offset"], json({0, 5, 6, 6, 6, 7}));
  EXPECT_EQ(l["top_logprobs"][0], nullptr);
  EXPECT_EQ(l["top_logprobs"][1], json({{"Hello", -0.5}, {" ", -1}}));
  EXPECT_EQ(l["top_logprobs"][5], json({{"Hello", -0.10000000149011612}, {" there", -0.25}}));
  EXPECT_FALSE(choice.contains("prompt_logprobs"));
}

TEST_F(OpenAiCompletions, APromptIsScoredWithoutAnAnswer) {
  const auto exchange = make(R"("prompt": [541, 569], "echo": true, "logprobs": 0, "max_tokens": 0)");
  EXPECT_EQ(exchange->requests()[0].sampling.max_tokens, 0);
  Event only;
  only.token.id = -1;
  only.finish = Finish::length;
  only.prompt_logprobs = {-1.5};
  const json got = whole(*exchange, {{only}}), &choice = got["choices"][0];
  EXPECT_EQ(choice["text"], "Hello there");
  EXPECT_EQ(choice["finish_reason"], "length");
  EXPECT_EQ(choice["logprobs"]["token_logprobs"], json::parse("[null, -1.5]"));
  EXPECT_EQ(choice["logprobs"]["top_logprobs"][1], json({{" there", -1.5}}));
  EXPECT_EQ(got["usage"]["completion_tokens"], 0);
  EXPECT_TRUE(
      make(R"("prompt": "Hi", "max_tokens": 0)")->requests()[0].prompt_logprobs);  // else the engine has no work
}

TEST_F(OpenAiCompletions, WhatTrainingLoopsAskFor) {
  const auto exchange =
      make(R"("prompt": [541, 569], "return_token_ids": true, "prompt_logprobs": 0, "return_routed_experts": true)");
  std::vector<Event> events = answer(model_, std::vector<int>{541});
  events[0].prompt_logprobs = {-1.5};
  events[0].routed = Tensor::of<int32_t>({1, 2}, {2, 1, 1});
  const json choice = whole(*exchange, {events})["choices"][0];
  EXPECT_EQ(choice["prompt_token_ids"], json({541, 569}));
  EXPECT_EQ(choice["token_ids"], json({541}));
  EXPECT_EQ(choice["adapter_versions"], json({3}));
  EXPECT_EQ(choice["prompt_logprobs"][1]["569"]["logprob"], -1.5);
  EXPECT_EQ(choice["prompt_routed_experts"], json::parse("[[[1]], [[2]]]"));
  EXPECT_EQ(choice["routed_experts"], json::parse("[[[-1]]]"));
}

TEST_F(OpenAiCompletions, SpecialTokensHaveTextOnlyOnRequest) {
  const std::vector<Event> events = answer(model_, std::vector<int>{541, 2, 569});
  EXPECT_EQ(whole(*make(R"("prompt": "Hi")"), {events})["choices"][0]["text"], "Hello there");
  EXPECT_EQ(whole(*make(R"("prompt": "Hi", "skip_special_tokens": false)"), {events})["choices"][0]["text"],
            "Hello<｜▁pad▁｜> there");
}

TEST_F(OpenAiCompletions, StreamedPiecesJoinedAreTheWholeAnswer) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 300; ++round) {
    const size_t prompts = 1 + random() % 2, n = 1 + random() % 3;
    std::vector<std::vector<Event>> answers;
    for (size_t i = 0; i < prompts * n; ++i) {
      answers.push_back(answer(model_, openai_testing::random_answer(model_, random)));
      answers[i][0].prompt_logprobs = {-3};
    }
    std::string fields =
        "\"n\": " + std::to_string(n) + ", \"prompt\": " + (prompts == 1 ? "[541, 569]" : "[[541, 569], [541, 236]]");
    if (random() % 2) fields += R"(, "echo": true)";
    if (random() % 2) fields += R"(, "logprobs": 0)";
    if (random() % 2) fields += R"(, "return_token_ids": true)";
    const json expected = whole(*make(fields), answers);
    const auto exchange = make(fields + R"(, "stream": true, "stream_options": {"include_usage": true})");
    const std::vector<json> events = openai_testing::events_of(stream(*exchange, answers, round));
    EXPECT_EQ(events.back()["usage"], expected["usage"]);
    json got = json::array();
    for (size_t i = 0; i < prompts * n; ++i) got.push_back(nullptr);
    for (const json& event : events)
      for (const json& piece : event["choices"]) {
        json& choice = got[piece["index"].get<size_t>()];
        if (choice.is_null()) {
          choice = piece;
          continue;
        }
        choice["text"] = choice["text"].get<std::string>() + piece["text"].get<std::string>();
        for (const char* list : {"token_ids", "adapter_versions"})
          if (piece.contains(list)) choice[list].insert(choice[list].end(), piece[list].begin(), piece[list].end());
        if (!piece["logprobs"].is_null())
          for (const auto& [key, list] : piece["logprobs"].items())
            choice["logprobs"][key].insert(choice["logprobs"][key].end(), list.begin(), list.end());
        EXPECT_EQ(choice["finish_reason"], nullptr) << "something comes after the end";
        choice["finish_reason"] = piece["finish_reason"];
        if (piece.contains("stop_reason")) choice["stop_reason"] = piece["stop_reason"];
      }
    EXPECT_EQ(got, expected["choices"]);
    if (HasFailure()) FAIL() << "in round " << round;
  }
}

}  // namespace
}  // namespace plumb::serve
