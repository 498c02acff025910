#include "train/conversations.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
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
                             const Tokenizer& tokenizer, const std::vector<int>& stop_tokens)
    : environment_(environment),
      tasks_(tasks),
      tokenizer_(tokenizer),
      stop_tokens_(stop_tokens),
      conversations_(tasks.size()) {}

// Tells the answers up to number `turns`; -> what comes after the last of them.
Reply Conversations::advance(size_t i, size_t turns, const LoggedSample& sample) {
  Conversation& c = conversations_[i];
  const Prompt& prompt = *tasks_[i].prompt;
  Reply reply;
  if (!c.session) {
    EnvironmentTurn first;
    c.session = environment_.open(reward_sample(tasks_[i]), first);
    if (!first.messages.empty() || !first.tools.is_null())
      fail("environment", "adds messages or tools in front of the first answer", "put them into the dataset's line");
    c.messages = prompt.messages;
  }
  while (c.told < turns && !c.done) {
    const EnvironmentTurn next = c.session->advance(read_answer(sample, c.told++, prompt, &tokenizer_, stop_tokens_));
    c.done = next.done;
    c.messages.emplace_back().role = ChatRole::assistant;  // only marks the place: its tokens are there already
    ChatOptions chat = prompt.chat;
    chat.context = static_cast<int>(c.messages.size());
    chat.drop_thinking = false;  // earlier turns stay token by token
    if (next.messages.empty()) continue;
    for (Message& m : messages_from_json(parse_json(next.messages.dump(), "environment"))) c.messages.push_back(m);
    const std::vector<int32_t> ids = encode_prompt(c.messages, chat, chat_tokenizer(tokenizer_));
    reply.tokens.assign(ids.begin(), ids.end());
  }
  if (c.done) reply.tokens.clear();
  return reply;
}

Reply Conversations::reply(size_t i, int turn, const LoggedSample& so_far) {
  Conversation& c = conversations_[i];
  if (!c.failure.empty()) return {};
  try {
    return advance(i, static_cast<size_t>(turn) + 1, so_far);
  } catch (const std::exception& e) {
    c.failure = e.what();
    return {};
  }
}

Score Conversations::close(size_t i, const LoggedSample& sample) {
  Conversation& c = conversations_[i];
  Score score;
  try {
    if (c.failure.empty()) {
      advance(i, sample.turn_end.size(), sample);
      const bool cut = sample.finish.back() == Finish::length;
      score = c.session->close(c.done ? "done" : cut ? "length" : "turns");
    }
  } catch (const std::exception& e) {
    c.failure = e.what();
  }
  if (!c.failure.empty()) score.failure = c.failure;
  c.session.reset();
  return score;
}

}  // namespace plumb
