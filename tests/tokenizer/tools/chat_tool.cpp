// The chat encoder behind a pipe, for tests/oracle/test_chat.py. usage: chat_tool MODE [TOKENIZER.json] < lines > lines
// MODE dumps: JSON in, Python's JSON out. render: {messages, tools, options} in, the text out as a JSON string. encode:
// the same in, {ids, mask, prompt} out. stream: {ids, thinking} in, {reasoning, content, calls, finish} out. The answer
// to a line that is refused is "error: ...".
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "tokenizer/chat_stream.h"

namespace plumb {
namespace {

std::string stream(const nlohmann::json& in, const ChatTokenizer& tokenizer) {
  ChatStream parser(in["thinking"] ? ThinkingMode::thinking : ThinkingMode::chat);
  std::vector<ChatEvent> events;
  auto add = [&](const std::vector<ChatEvent>& more) { events.insert(events.end(), more.begin(), more.end()); };
  for (int32_t id : in["ids"]) add(parser.feed_token(id, tokenizer));
  add(parser.finish(false));
  ParsedTurn turn = collect(events);
  nlohmann::json out = {{"reasoning", turn.reasoning}, {"content", turn.content}, {"finish", events.back().text}};
  out["calls"] = nlohmann::json::array();
  for (const ToolCall& call : turn.calls) out["calls"].push_back({{"name", call.name}, {"arguments", call.arguments}});
  return out.dump();
}

std::string answer(const std::string& mode, const std::string& line, const ChatTokenizer& tokenizer) {
  if (mode == "dumps") return python_dumps(parse_json(line, "line"));
  if (mode == "stream") return stream(nlohmann::json::parse(line), tokenizer);
  const Json in = parse_json(line, "line");
  const std::vector<Message> messages = messages_from_json(*in.find("messages"), in.find("tools"));
  const ChatOptions options = chat_options_from_json(*in.find("options"), "options");
  if (mode == "render") return nlohmann::json(chat_text(render_chat(messages, options))).dump();
  const ChatTokens tokens = encode_for_training(messages, options, tokenizer);
  return nlohmann::json{
      {"ids", tokens.ids}, {"mask", tokens.mask}, {"prompt", encode_prompt(messages, options, tokenizer)}}
      .dump();
}

int run(const std::string& mode, const char* file) {
  const ChatTokenizer tokenizer = file ? chat_tokenizer(Tokenizer::load(file)) : ChatTokenizer{};
  for (std::string line; std::getline(std::cin, line);) {
    try {
      std::cout << answer(mode, line, tokenizer) << '\n';
    } catch (const Error& e) {
      std::cout << "error: " << e.what() << '\n';
    }
  }
  return 0;
}

}  // namespace
}  // namespace plumb

int main(int argc, char** argv) {
  if (argc == 2 || argc == 3) return plumb::run(argv[1], argc == 3 ? argv[2] : nullptr);
  std::fprintf(stderr, "usage: chat_tool dumps|render|encode|stream [TOKENIZER.json]\n");
  return 2;
}
