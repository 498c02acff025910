#include "cli/session.h"

#include <algorithm>
#include <charconv>
#include <CLI/CLI.hpp>
#include <filesystem>
#include <sstream>

#include "base/error.h"
#include "base/files.h"
#include "base/log.h"
#include "base/parallel.h"
#include "checkpoint/checkpoint.h"
#include "config/nearest.h"
#include "memory/device_weights.h"
#include "model/adapter_files.h"

namespace plumb::cli {

void add_model_options(CLI::App& app, ModelArguments& a) {
  app.add_option("--model", a.model, "folder of the checkpoint")->required();
  app.add_option("--adapter", a.adapter, "folder of a LoRA adapter");
  app.add_option("--numerics", a.numerics, "arithmetic")->check(CLI::IsMember({"fp32", "bf16", "released"}));
  app.add_option("--kernels", a.kernels, "what computes: the CPU's ops (reference), a GPU (cuda), or whatever fits")
      ->check(CLI::IsMember({"auto", "reference", "cuda"}));
  app.add_option("--thinking", a.thinking, "how answers to messages begin")->check(CLI::IsMember({"chat", "thinking"}));
  app.add_option("--effort-profile", a.effort_profile, "generation of the checkpoint's effort texts")
      ->check(CLI::IsMember({"preview", "official"}));
  app.add_option("--effort", a.effort, "reasoning effort (thinking only): high or max; official also low");
  app.add_option("--threads", a.threads, "threads, 0 = all cores")->check(CLI::Range(0, 1024));
}

ModelSession open_model(const ModelArguments& a) {
  if (a.threads > 0) set_thread_count(a.threads);
  ModelSession s;
  s.folder = a.model;
  s.numerics = numerics_from_name(a.numerics.c_str());
  const PlacedWeights placed = place_weights(load_weights(Checkpoint::open(a.model)), a.kernels, s.numerics);
  if (!placed.warning.empty()) log_warning("{}", placed.warning);
  s.weights = placed.store;
  if (!a.adapter.empty()) s.adapter = load_adapter(a.adapter, s.weights->config());
  const auto file = std::filesystem::path(a.model) / "tokenizer.json";
  if (std::filesystem::exists(file)) s.tokenizer = Tokenizer::load(file);
  s.chat.mode = a.thinking == "thinking" ? ThinkingMode::thinking : ThinkingMode::chat;
  s.chat.profile = a.effort_profile == "official" ? EffortProfile::official : EffortProfile::preview;
  s.chat.effort = a.effort;
  return s;
}

const Tokenizer& ModelSession::text() const {
  if (!tokenizer)
    fail((std::filesystem::path(folder) / "tokenizer.json").string(), "is not there",
         "put the model's tokenizer.json there, or give token ids instead of text");
  return *tokenizer;
}

void add_sampling_options(CLI::App& app, SamplingArguments& a) {
  app.add_option("--max-tokens", a.params.max_tokens, "longest answer, tokens");
  app.add_option("--temperature", a.params.temperature, "0 = always the most likely token");
  app.add_option("--top-p", a.params.top_p, "keep the most likely tokens that have this probability together");
  app.add_option("--top-k", a.params.top_k, "keep this many most likely tokens, 0 = all");
  app.add_option("--min-p", a.params.min_p, "drop tokens below this share of the most likely one's probability");
  app.add_option("--seed", a.params.seed, "the same seed gives the same text");
}

std::vector<int> text_tokens(const ModelSession& s, const std::string& text) {
  std::vector<int> ids = {s.weights->config().bos_token_id};
  for (int32_t id : s.text().encode(text, false)) ids.push_back(id);
  return ids;
}

std::vector<InputLine> read_lines(const std::string& path) {
  std::istringstream in(read_text(path));
  std::vector<InputLine> lines;
  std::string line;
  for (int number = 1; std::getline(in, line); ++number)
    if (line.find_first_not_of(" \t\r") != std::string::npos)
      lines.push_back({path + ":" + std::to_string(number), line});
  if (lines.empty()) fail(path, "has no line", "write one JSON object a line");
  return lines;
}

std::vector<int> token_list(const Json& list, const std::string& where, const ModelSession& s) {
  if (!list.is_array()) fail(where, "tokens is not a list", "write a list of token ids");
  const int vocabulary = s.weights->config().vocab_size;
  std::vector<int> ids;
  for (const Json& t : list.items) {
    int id = -1;
    const char* end = t.text.data() + t.text.size();
    const auto [stop, error] = std::from_chars(t.text.data(), end, id);
    const bool whole = t.kind == Json::Kind::number && error == std::errc() && stop == end;
    if (!whole || id < 0 || id >= vocabulary)
      fail(where, "tokens holds " + python_dumps(t),
           "token ids are whole numbers from 0 to " + std::to_string(vocabulary - 1));
    ids.push_back(id);
  }
  return ids;
}

void check_keys(const Json& object, const std::string& where, const std::vector<std::string>& known) {
  for (const JsonMember& m : object.members) {
    if (std::find(known.begin(), known.end(), m.key) != known.end()) continue;
    const std::string near = nearest(m.key, known);
    fail(where, "unknown key " + m.key, near.empty() ? "" : "the nearest known key is " + near);
  }
}

std::vector<int> stop_tokens(const ModelSession& s) { return {s.weights->config().eos_token_id}; }

}  // namespace plumb::cli
