// Pieces of replies that OpenAI's chat and text completions share (with the additions of vLLM that training loops rely
// on). docs/api.md describes the fields.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "serve/request_fields.h"

namespace plumb::serve {

// prefix + 24 random hexadecimal digits.
std::string fresh_id(std::string_view prefix);
// One server-sent event. Bytes of strings that are not UTF-8 become U+FFFD.
std::string server_event(const nlohmann::json& data);
inline constexpr std::string_view kLastEvent = "data: [DONE]\n\n";
inline constexpr std::string_view kCommentEvent = ": still working\n\n";

struct Usage {
  int64_t prompt = 0, cached = 0;     // tokens; cached: of the prompt, found in the prefix cache
  int64_t answer = 0, reasoning = 0;  // reasoning is part of the answer
};
nlohmann::json usage_json(const Usage& usage, bool chat);

// How log-probabilities name a token: by its text, or as "token_id:7".
std::string token_name(int id, const Tokenizer& tokenizer, bool as_id);
// A log-probability as JSON, in all its digits. JSON has no infinity: the least value is -9999.
double finite_logprob(float logprob);

// The text of an answer that comes in bytes: whole characters only, U+FFFD for what is none.
class TextStream {
 public:
  std::string push(std::string_view bytes);           // what is certain now
  std::string finish();                               // the rest
  int64_t characters() const { return characters_; }  // that were returned so far

 private:
  std::string take(bool all);
  std::string pending_;
  int64_t characters_ = 0;
};

// chat: {"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}, one entry a token.
nlohmann::json chat_logprobs(std::span<const GeneratedToken> tokens, const Tokenizer& tokenizer, bool as_ids);
// vLLM's `prompt_logprobs`: null, then for each further token of the prompt {"id": {logprob, rank, decoded_token}} of
// itself and of the most likely ones. The rank of a token that is not among these is null.
nlohmann::json prompt_logprobs_json(const std::vector<int>& prompt, const std::vector<float>& logprobs,
                                    const std::vector<std::vector<TokenLogprob>>& top, const Tokenizer& tokenizer);

// What training loops want of a choice beside its text.
nlohmann::json token_ids_json(std::span<const GeneratedToken> tokens);
nlohmann::json adapter_versions_json(std::span<const GeneratedToken> tokens);
// Adds prompt_routed_experts and routed_experts: [tokens][layers][experts of a token]. The last token of the answer has
// been through no layer: -1.
void add_routed_experts(nlohmann::json& choice, const Tensor& routed, size_t prompt, size_t answer);

}  // namespace plumb::serve
