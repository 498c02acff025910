// plumb chat: a conversation in the terminal. Sampled turns are kept as token ids and never rendered again.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/session.h"
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
  std::vector<int> ids;
  std::string line;
  for (uint64_t turn = 0; std::printf("> "), std::fflush(stdout), std::getline(std::cin, line); ++turn) {
    if (line.empty()) continue;
    Message user;
    user.content = line;
    messages.push_back(user);
    for (int32_t id : encode_prompt(messages, s.chat, tokenizer)) ids.push_back(id);

    Printer printer(s);
    GenerateOptions options;
    options.numerics = s.numerics;
    options.adapter = s.adapter;
    options.on_token = [&](size_t, const GeneratedToken& t) {
      if (t.id != a.sampling.params.stop_tokens[0]) printer.push(t.id);
      return true;
    };
    const Generation g = generate(*s.weights, {{ids, a.sampling.params, turn}}, options)[0];
    printer.finish(!g.stopped);
    for (const GeneratedToken& t : g.tokens) ids.push_back(t.id);
    if (!g.stopped) ids.push_back(a.sampling.params.stop_tokens[0]);
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
