#include "serve/openai_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "serve/errors.h"
#include "tokenizer/unicode.h"

namespace plumb::serve {

using nlohmann::json;

namespace {

std::string lossy(std::string_view bytes) {
  std::string text;
  append_utf8_lossy(bytes, true, text);
  return text;
}

json token_json(int id, float logprob, const Tokenizer& tokenizer, bool as_id) {
  const std::string& bytes = tokenizer.id_to_bytes(id);
  return {{"token", token_name(id, tokenizer, as_id)},
          {"logprob", finite_logprob(logprob)},
          {"bytes", std::vector<uint8_t>(bytes.begin(), bytes.end())}};
}

}  // namespace

std::string fresh_id(std::string_view prefix) {
  std::random_device device;
  return fmt::format("{}{:08x}{:08x}{:08x}", prefix, device(), device(), device());
}

std::string server_event(const json& data) { return "data: " + dump(data) + "\n\n"; }

json usage_json(const Usage& usage, bool chat) {
  json out = {{"prompt_tokens", usage.prompt},
              {"completion_tokens", usage.answer},
              {"total_tokens", usage.prompt + usage.answer},
              {"prompt_tokens_details", {{"cached_tokens", usage.cached}}}};
  if (chat) out["completion_tokens_details"] = {{"reasoning_tokens", usage.reasoning}};
  return out;
}

std::string token_name(int id, const Tokenizer& tokenizer, bool as_id) {
  return as_id ? fmt::format("token_id:{}", id) : lossy(tokenizer.id_to_bytes(id));
}

std::string TextStream::push(std::string_view bytes) {
  pending_ += bytes;
  return take(false);
}

std::string TextStream::finish() { return take(true); }

std::string TextStream::take(bool all) {
  std::string text;
  pending_.erase(0, append_utf8_lossy(pending_, all, text));
  characters_ += std::count_if(text.begin(), text.end(), [](unsigned char c) { return (c & 0xC0) != 0x80; });
  return text;
}

double finite_logprob(float logprob) { return std::max(logprob, -9999.f); }

json chat_logprobs(std::span<const GeneratedToken> tokens, const Tokenizer& tokenizer, bool as_ids) {
  json content = json::array();
  for (const GeneratedToken& t : tokens) {
    json entry = token_json(t.id, t.logprob, tokenizer, as_ids);
    json& top = entry["top_logprobs"] = json::array();
    for (const TokenLogprob& other : t.top) top.push_back(token_json(other.id, other.logprob, tokenizer, as_ids));
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}, {"refusal", nullptr}};
}

json prompt_logprobs_json(const std::vector<int>& prompt, const std::vector<float>& logprobs,
                          const std::vector<std::vector<TokenLogprob>>& top, const Tokenizer& tokenizer) {
  json out = json::array({nullptr});
  const auto entry = [&](int id, float logprob, json rank) -> json {
    return {{"logprob", finite_logprob(logprob)},
            {"rank", std::move(rank)},
            {"decoded_token", token_name(id, tokenizer, false)}};
  };
  for (size_t i = 0; i < logprobs.size(); ++i) {
    json token = json::object();
    if (i < top.size())
      for (size_t k = 0; k < top[i].size(); ++k)
        token[std::to_string(top[i][k].id)] = entry(top[i][k].id, top[i][k].logprob, k + 1);
    const int id = prompt[i + 1];
    token.emplace(std::to_string(id), entry(id, logprobs[i], nullptr));
    out.push_back(std::move(token));
  }
  return out;
}

json token_ids_json(std::span<const GeneratedToken> tokens) {
  json out = json::array();
  for (const GeneratedToken& t : tokens) out.push_back(t.id);
  return out;
}

json adapter_versions_json(std::span<const GeneratedToken> tokens) {
  json out = json::array();
  for (const GeneratedToken& t : tokens) out.push_back(t.adapter_version);
  return out;
}

void add_routed_experts(json& choice, const Tensor& routed, size_t prompt, size_t answer) {
  const size_t rows = routed.size(0), layers = routed.size(1), each = routed.size(2);
  json all[2] = {json::array(), json::array()};
  for (size_t row = 0; row < prompt + answer; ++row) {
    json token = json::array();
    for (size_t layer = 0; layer < layers; ++layer) {
      std::vector<int32_t> experts(each, -1);
      if (row < rows) std::copy_n(routed.ptr<int32_t>() + (row * layers + layer) * each, each, experts.begin());
      token.push_back(std::move(experts));
    }
    all[row >= prompt].push_back(std::move(token));
  }
  choice["prompt_routed_experts"] = std::move(all[0]);
  choice["routed_experts"] = std::move(all[1]);
}

}  // namespace plumb::serve
