// plumb chat: a conversation in the terminal. Sampled turns are kept as token ids and never rendered again.
#include <algorithm>
#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/session.h"
#include "rollout/engine.h"
#include "tokenizer/chat_stream.h"

namespace plumb::cli {
namespace {

struct Arguments {
  ModelArguments model;
  SamplingArguments sampling;
  std::string system;
};

// Prints an answer while it is made: reasoning dim, tool calls marked.
class Printer {
 public:
  explicit Printer(const ModelSession& s) : stream_(s.chat.mode), tokenizer_(chat_tokenizer(s.text())) {}
  void push(int id) { show(stream_.feed_token(id, tokenizer_)); }
  void finish(bool hit_limit) {
    show(stream_.finish(hit_limit));
    std::printf("\n");
  }

 private:
  void show(const std::vector<ChatEvent>& events) {
    for (const ChatEvent& e : events) {
      switch (e.kind) {
        case ChatEvent::Kind::reasoning:
          std::printf("\033[2m%s\033[0m", e.text.c_str());
          break;
        case ChatEvent::Kind::content:
        case ChatEvent::Kind::arguments:
          std::printf("%s", e.text.c_str());
          break;
        case ChatEvent::Kind::call_begin:
          std::printf("\n[call %s] ", e.text.c_str());
          break;
        case ChatEvent::Kind::finish:
          if (e.text == "length") std::printf(" ...");
          break;
        case ChatEvent::Kind::call_end:
        case ChatEvent::Kind::markup:
          break;
      }
    }
    std::fflush(stdout);
  }
  ChatStream stream_;
  ChatTokenizer tokenizer_;
};

// One engine for all turns: its prefix cache holds what was said before, so that a turn reads only what is new.
class Talk {
 public:
  explicit Talk(const ModelSession& s) : session_(s) {
    if (s.adapter) registry_->publish("adapter", s.adapter);
  }

  // Calls each(token) for all tokens of the answer, the stop token included. -> whether a stop token ended it.
  template <class Each>
  bool answer(const std::vector<int>& prompt, const SamplingParams& sampling, uint64_t turn, Each&& each) {
    make_room(static_cast<int64_t>(prompt.size()) + sampling.max_tokens);
    Request r;
    r.prompt = prompt, r.sampling = sampling, r.key = turn;
    if (session_.adapter) r.adapter = "adapter";
    engine_->submit(std::move(r));
    Finish finish = Finish::none;
    while (!engine_->idle())
      for (const Event& e : engine_->step()) {
        if (e.finish == Finish::error) fail("engine", e.error);
        finish = e.finish;
        each(e.token);
      }
    return finish == Finish::stop;
  }

 private:
  // A larger engine when the conversation outgrows the one that is there.
  void make_room(int64_t tokens) {
    const ModelConfig& config = session_.weights->config();
    if (engine_ && tokens <= room_) return;
    room_ = static_cast<int>(std::min<int64_t>(std::max<int64_t>(4096, 2 * tokens), config.max_position_embeddings));
    EngineOptions o;
    o.numerics = session_.numerics;
    o.max_running = 1;
    const int positions = page_positions(plan_shape(config));
    o.key_pages = o.entry_pages = room_ / positions + 2;
    engine_.reset();
    engine_ = std::make_unique<Engine>(*session_.weights, o, registry_);
  }

  const ModelSession& session_;
  std::shared_ptr<AdapterRegistry> registry_ = std::make_shared<AdapterRegistry>();
  std::unique_ptr<Engine> engine_;
  int room_ = 0;
};

void chat(Arguments& a) {
  check(a.sampling.params);
  ModelSession s = open_model(a.model);
  s.chat.drop_thinking = false;  // earlier turns are kept token by token
  a.sampling.params.stop_tokens = stop_tokens(s);
  const ChatTokenizer tokenizer = chat_tokenizer(s.text());
  std::vector<Message> messages;
  if (!a.system.empty()) {
    Message m;
    m.role = ChatRole::system;
    m.content = a.system;
    messages.push_back(m);
  }
  Talk talk(s);
  std::vector<int> ids;
  std::string line;
  for (uint64_t turn = 0; std::printf("> "), std::fflush(stdout), std::getline(std::cin, line); ++turn) {
    if (line.empty()) continue;
    Message user;
    user.content = line;
    messages.push_back(user);
    for (int32_t id : encode_prompt(messages, s.chat, tokenizer)) ids.push_back(id);

    Printer printer(s);
    std::vector<int> answered;
    const bool stopped = talk.answer(ids, a.sampling.params, turn, [&](const GeneratedToken& t) {
      if (t.id != a.sampling.params.stop_tokens[0]) printer.push(t.id);
      answered.push_back(t.id);
    });
    printer.finish(!stopped);
    ids.insert(ids.end(), answered.begin(), answered.end());
    if (!stopped) ids.push_back(a.sampling.params.stop_tokens[0]);
    Message answer;  // only marks the place: its tokens are in ids already
    answer.role = ChatRole::assistant;
    messages.push_back(answer);
    s.chat.context = static_cast<int>(messages.size());
  }
  std::printf("\n");
}

}  // namespace

std::function<void()> setup_chat(CLI::App& app) {
  auto a = std::make_shared<Arguments>();
  add_model_options(app, a->model);
  add_sampling_options(app, a->sampling);
  app.add_option("--system", a->system, "system message");
  return [a] { chat(*a); };
}

}  // namespace plumb::cli
