#include "train/conversations.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/waiting.h"
#include "tokenizer/chat_encode.h"
#include "tokenizer/chat_stream.h"

namespace plumb {

using nlohmann::json;

Answer read_answer(const LoggedSample& sample, size_t turn, const Prompt& prompt, const Tokenizer* tokenizer,
                   const std::vector<int>& stop_tokens) {
  const int end = sample.turn_end[turn], earlier = turn == 0 ? 0 : sample.turn_end[turn - 1];
  int begin = end;
  while (begin > earlier && sample.policy_made(begin - 1)) --begin;
  Answer a;
  a.tokens = end - begin;
  a.finish_reason = sample.finish[turn] == Finish::length ? "length" : "stop";
  if (!tokenizer) return a;
  for (int i = begin; i < end; ++i) a.text += tokenizer->id_to_bytes(sample.tokens[i]);
  const bool ended = begin < end && std::ranges::count(stop_tokens, sample.tokens[end - 1]) > 0;
  const std::vector<int32_t> said(sample.tokens.begin() + begin, sample.tokens.begin() + end - ended);
  if (prompt.messages.empty()) {
    a.content = tokenizer->decode(said, true);
    return a;
  }
  ChatStream stream(prompt.chat.mode);
  const ChatTokenizer chat = chat_tokenizer(*tokenizer);
  std::vector<ChatEvent> events;
  for (int32_t id : said)
    for (ChatEvent& e : stream.feed_token(id, chat)) events.push_back(std::move(e));
  for (ChatEvent& e : stream.finish(sample.finish[turn] == Finish::length)) events.push_back(std::move(e));
  a.finish_reason = events.back().text;
  ParsedTurn parsed = collect(events);
  a.content = std::move(parsed.content), a.reasoning = std::move(parsed.reasoning);
  for (size_t i = 0; i < parsed.calls.size(); ++i)
    a.calls.push_back({"call_" + std::to_string(i), parsed.calls[i].name, parsed.calls[i].arguments});
  return a;
}

RewardSample reward_sample(const RolloutTask& task) {
  RewardSample s;
  s.line = json::parse(task.prompt->line);
  s.messages = s.line.contains("messages") ? s.line["messages"] : json::array();
  s.group = task.group;
  s.number = task.number;
  return s;
}

Conversations::Conversations(Environment& environment, const std::vector<RolloutTask>& tasks,
                             const Tokenizer& tokenizer, const std::vector<int>& stop_tokens, int row_tokens)
    : environment_(environment), tokenizer_(tokenizer), stop_tokens_(stop_tokens), conversations_(tasks.size()) {
  constexpr int kWaiting = 16;  // programs that are asked at once
  for_each_waiting(static_cast<int64_t>(tasks.size()), kWaiting, [&](int64_t i) {
    Conversation& c = conversations_[static_cast<size_t>(i)];
    c.prompt = *tasks[static_cast<size_t>(i)].prompt;
    try {
      open(c, tasks[static_cast<size_t>(i)], row_tokens);
    } catch (const std::exception& e) {
      c.failure = e.what();
      c.session.reset();
    }
  });
}

void Conversations::open(Conversation& c, const RolloutTask& task, int row_tokens) {
  EnvironmentTurn first;
  c.session = environment_.open(reward_sample(task), first);
  if (!first.messages.empty() || !first.tools.is_null()) {
    json line = json::parse(task.prompt->line);
    for (const json& m : first.messages) line["messages"].push_back(m);
    if (!first.tools.is_null()) line["tools"] = first.tools;
    const Json messages = parse_json(line["messages"].dump(), "environment");
    const Json tools = parse_json(line.value("tools", json()).dump(), "environment");
    c.prompt.messages = messages_from_json(messages, tools.is_null() ? nullptr : &tools);
    const std::vector<int32_t> ids = encode_prompt(c.prompt.messages, c.prompt.chat, chat_tokenizer(tokenizer_));
    if (static_cast<int>(ids.size()) >= row_tokens)
      fail("environment", "its first messages leave no room for an answer", "shorten them, or raise data.row_tokens");
    c.prompt.tokens.assign(ids.begin(), ids.end());
  }
  c.messages = c.prompt.messages;
}

// Tells the answers up to number `turns`; -> what comes after the last of them.
Reply Conversations::advance(Conversation& c, size_t turns, const LoggedSample& sample) {
  Reply reply;
  while (c.told < turns && !c.done) {
    const EnvironmentTurn next = c.session->advance(read_answer(sample, c.told++, c.prompt, &tokenizer_, stop_tokens_));
    c.done = next.done;
    c.messages.emplace_back().role = ChatRole::assistant;  // only marks the place: its tokens are there already
    if (next.messages.empty()) continue;
    ChatOptions chat = c.prompt.chat;
    chat.context = static_cast<int>(c.messages.size());
    chat.drop_thinking = false;  // earlier turns stay token by token
    for (Message& m : messages_from_json(parse_json(next.messages.dump(), "environment"))) c.messages.push_back(m);
    const std::vector<int32_t> ids = encode_prompt(c.messages, chat, chat_tokenizer(tokenizer_));
    reply.tokens.assign(ids.begin(), ids.end());
  }
  if (c.done) reply.tokens.clear();
  return reply;
}

Reply Conversations::reply(size_t i, int turn, const LoggedSample& so_far) {
  Conversation& c = conversations_[i];
  if (!c.session) return {};
  try {
    return advance(c, static_cast<size_t>(turn) + 1, so_far);
  } catch (const std::exception& e) {
    c.failure = e.what();
    c.session.reset();
    return {};
  }
}

Score Conversations::close(size_t i, const LoggedSample& sample) {
  Conversation& c = conversations_[i];
  Score score;
  try {
    if (c.session) {
      advance(c, sample.turn_end.size(), sample);
      score = c.session->close(c.done ? "done" : truncated(sample) ? "length" : "turns");
    }
  } catch (const std::exception& e) {
    c.failure = e.what();
  }
  if (!c.failure.empty()) score.failure = c.failure;
  c.session.reset();
  return score;
}

}  // namespace plumb
