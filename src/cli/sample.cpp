// plumb sample: one answer on the terminal, or answers for every line of a file.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"
#include "cli/commands.h"
#include "cli/session.h"

namespace plumb::cli {
namespace {

struct Arguments {
  ModelArguments model;
  SamplingArguments sampling;
  std::string prompt, message, input, output;
  int batch = 16;
  bool json = false;
};

std::vector<int> to_ids(const std::vector<int32_t>& ids) { return {ids.begin(), ids.end()}; }

// {"prompt": text} (behind begin of sentence) or {"tokens": ids} is continued; {"messages": [...]} is answered.
std::vector<int> prompt_of(const InputLine& line, const ModelSession& s) {
  const std::string& where = line.where;
  const Json json = parse_json(line.text, where);
  const char* keys = R"(write {"messages": [...]}, {"prompt": "..."} or {"tokens": [...]})";
  if (!json.is_object()) fail(where, std::string("is ") + kind_name(json.kind) + ", not an object", keys);
  check_keys(json, where, {"messages", "tools", "prompt", "tokens"});
  const Json *messages = json.find("messages"), *prompt = json.find("prompt"), *tokens = json.find("tokens");
  if ((messages != nullptr) + (prompt != nullptr) + (tokens != nullptr) != 1)
    fail(where, "needs exactly one of the keys messages, prompt, tokens", keys);
  std::vector<int> ids;
  if (tokens) {
    ids = token_list(*tokens, where, s);
  } else if (prompt) {
    if (!prompt->is_string() || prompt->text.empty()) fail(where, "prompt is no text", keys);
    ids = text_tokens(s, prompt->text);
  } else {
    const ChatTokenizer chat = chat_tokenizer(s.text());
    try {
      ids = to_ids(encode_prompt(messages_from_json(*messages, json.find("tools")), s.chat, chat));
    } catch (const Error& e) {  // says which message; the line is known here
      fail(where, e.what());
    }
  }
  if (ids.empty()) fail(where, "the prompt is empty", keys);
  return ids;
}

std::vector<int> message_prompt(const std::string& text, const ModelSession& s) {
  Message m;
  m.content = text;
  return to_ids(encode_prompt({m}, s.chat, chat_tokenizer(s.text())));
}

std::string answer_text(const ModelSession& s, const Generation& g) {
  std::vector<int32_t> ids;
  for (const GeneratedToken& t : g.tokens) ids.push_back(t.id);
  if (g.stopped) ids.pop_back();
  return s.text().decode(ids, false);
}

nlohmann::ordered_json to_json(const ModelSession& s, const Generation& g) {
  nlohmann::ordered_json j;
  if (s.tokenizer) j["text"] = answer_text(s, g);
  j["finish_reason"] = g.stopped ? "stop" : "length";
  auto ids = nlohmann::ordered_json::array(), logprobs = nlohmann::ordered_json::array();
  for (const GeneratedToken& t : g.tokens) ids.push_back(t.id), logprobs.push_back(t.logprob);
  j["tokens"] = std::move(ids);
  j["logprobs"] = std::move(logprobs);
  return j;
}

void sample_one(const Arguments& a, ModelSession& s, const GenerateOptions& options) {
  const std::vector<int> prompt = a.message.empty() ? text_tokens(s, a.prompt) : message_prompt(a.message, s);
  const Generation g = generate(*s.weights, {{prompt, a.sampling.params, 0}}, options)[0];
  if (a.json)
    std::printf("%s\n", to_json(s, g).dump().c_str());
  else
    std::printf("%s\n", answer_text(s, g).c_str());
}

void sample_file(const Arguments& a, ModelSession& s, const GenerateOptions& options) {
  std::vector<GenerationRequest> requests;
  for (const InputLine& line : read_lines(a.input))
    requests.push_back({prompt_of(line, s), a.sampling.params, requests.size()});
  FileWriter output(a.output);
  for (const Generation& g : generate(*s.weights, requests, options)) output.write(to_json(s, g).dump() + "\n");
  output.commit();
}

void sample(Arguments& a) {
  const int given = !a.prompt.empty() + !a.message.empty() + !a.input.empty();
  if (given != 1) throw UsageError("sample", "needs exactly one of --message, --prompt and --input");
  if (a.input.empty() != a.output.empty()) throw UsageError("sample", "--input and --output belong together");
  check(a.sampling.params);
  ModelSession s = open_model(a.model);
  a.sampling.params.stop_tokens = stop_tokens(s);
  GenerateOptions options;
  options.numerics = s.numerics;
  options.adapter = s.adapter;
  options.batch = a.batch;
  a.input.empty() ? sample_one(a, s, options) : sample_file(a, s, options);
}

}  // namespace

std::function<void()> setup_sample(CLI::App& app) {
  auto a = std::make_shared<Arguments>();
  add_model_options(app, a->model);
  add_sampling_options(app, a->sampling);
  app.add_option("--message", a->message, "a user's message to answer");
  app.add_option("--prompt", a->prompt, "text to continue, behind begin of sentence");
  app.add_option("--input", a->input, "JSONL: an object with messages, prompt or tokens a line");
  app.add_option("--output", a->output, "JSONL: text (given a tokenizer), finish_reason, tokens, logprobs a line");
  app.add_option("--batch", a->batch, "answers written side by side (changes no result)")->check(CLI::Range(1, 4096));
  app.add_flag("--json", a->json, "print one JSON object instead of text");
  return [a] { sample(*a); };
}

}  // namespace plumb::cli
