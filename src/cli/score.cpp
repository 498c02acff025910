// plumb score: per-token log-probabilities of given tokens, text or messages, in the arithmetic of a numerics profile.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"
#include "checkpoint/safetensors.h"
#include "cli/commands.h"
#include "cli/session.h"
#include "ops/head.h"

namespace plumb::cli {
namespace {

struct Arguments {
  ModelArguments model;
  std::string input, output, dump_logits, dump_layers;
  bool routed_experts = false;
  int row_tokens = 2048;
};

// One line of the input -> token ids. `tokens`, `text` (behind begin of sentence, as in training) or `messages`.
std::vector<int> read_line(const InputLine& line, const ModelSession& s) {
  const std::string& where = line.where;
  const Json json = parse_json(line.text, where);
  const char* keys = "give one of tokens (list of ids), text (string) or messages (list)";
  if (!json.is_object()) fail(where, std::string("is ") + kind_name(json.kind) + ", not an object", keys);
  // The last three stand in training data and in what an earlier run has written; they change nothing here.
  check_keys(json, where, {"tokens", "text", "messages", "tools", "mask", "logprobs", "routed_experts"});
  const Json *tokens = json.find("tokens"), *text = json.find("text"), *messages = json.find("messages");
  const int given = (tokens != nullptr) + (text != nullptr) + (messages != nullptr);
  if (given != 1)
    fail(where, given ? "has more than one of the keys tokens, text, messages" : "has nothing to score", keys);
  std::vector<int> ids;
  if (tokens) {
    ids = token_list(*tokens, where, s);
  } else if (text) {
    if (!text->is_string()) fail(where, "text is not a string", keys);
    ids = text_tokens(s, text->text);
  } else {
    const ChatTokenizer chat = chat_tokenizer(s.text());
    try {
      for (int32_t id : encode_for_training(messages_from_json(*messages, json.find("tools")), s.chat, chat).ids)
        ids.push_back(id);
    } catch (const Error& e) {  // says which message; the line is known here
      fail(where, e.what());
    }
  }
  if (ids.empty()) fail(where, "has no token", keys);
  const size_t positions = s.weights->config().max_position_embeddings;
  if (ids.size() > positions)
    fail(where,
         "has " + std::to_string(ids.size()) + " tokens, the model has " + std::to_string(positions) + " positions",
         "split it");
  return ids;
}

std::vector<std::vector<int>> read_input(const Arguments& a, const ModelSession& s) {
  std::vector<std::vector<int>> documents;
  for (const InputLine& line : read_lines(a.input)) documents.push_back(read_line(line, s));
  return documents;
}

nlohmann::ordered_json to_json(const std::vector<int>& tokens, const Scores& scores) {
  nlohmann::ordered_json line;
  line["tokens"] = tokens;
  auto& list = line["logprobs"] = nlohmann::ordered_json::array({nullptr});
  for (const float l : scores.logprobs) list.push_back(l);
  if (!scores.routed.defined()) return line;
  auto& all = line["routed_experts"] = nlohmann::ordered_json::array();  // [tokens][layers][experts of a token]
  const int32_t* at = scores.routed.ptr<int32_t>();
  const int64_t layers = scores.routed.size(1), width = scores.routed.size(2);
  for (int64_t t = 0; t < scores.routed.size(0); ++t) {
    auto token = nlohmann::ordered_json::array();
    for (int64_t layer = 0; layer < layers; ++layer, at += width) token.push_back(std::vector<int32_t>(at, at + width));
    all.push_back(token);
  }
  return line;
}

// What `released_check.py layers` reads: taps, ids, logits, and the MTP layer's logits.
void dump_layers(const Arguments& a, ModelSession& s, const std::vector<int>& ids, Taps& taps, const ForwardOptions& o,
                 const ForwardResult& r) {
  std::vector<std::pair<std::string, Tensor>> out(taps.values.begin(), taps.values.end());
  Tensor list = Tensor::empty({static_cast<int64_t>(ids.size())}, DType::i64);
  std::copy(ids.begin(), ids.end(), list.ptr<int64_t>());
  out.emplace_back("ids", list);
  out.emplace_back("logits", to_host(ops::head_logits(r.hidden, s.weights->outer().head).value));
  if (s.weights->mtp_count() > 0 && ids.size() > 1) {
    Taps block;
    ForwardOptions with_taps = o;
    with_taps.taps = &block;
    Tensor hidden =
        mtp_forward(*s.weights, 0, plan_mtp(plan_shape(s.weights->config()), {ids}), r.streams.back(), with_taps);
    out.emplace_back("mtp_logits", to_host(ops::head_logits(hidden, s.weights->outer().head).value));
    for (const auto& [name, value] : block.values) out.emplace_back(name, value);
  }
  write_safetensors(a.dump_layers, out);
}

// Logits and intermediate values are those of a training pass over each document alone; the engine's log-probabilities
// have the same bits.
void dump(const Arguments& a, ModelSession& s, const std::vector<std::vector<int>>& documents) {
  AdapterBatch adapters;
  if (s.adapter) adapters.parts.push_back({s.adapter, {}, true, nullptr});
  std::vector<std::pair<std::string, Tensor>> logits;
  for (size_t d = 0; d < documents.size(); ++d) {
    Taps taps;
    ForwardOptions o;
    o.numerics = s.numerics;
    o.adapters = s.adapter ? &adapters : nullptr;
    o.taps = a.dump_layers.empty() ? nullptr : &taps;
    if (!a.dump_layers.empty()) o.keep = Keep::streams;
    const ForwardResult result =
        forward(*s.weights, plan_documents(plan_shape(s.weights->config()), {documents[d]}), o);
    if (!a.dump_logits.empty())
      logits.emplace_back("logits." + std::to_string(d),
                          to_host(ops::head_logits(result.hidden, s.weights->outer().head).value));
    if (!a.dump_layers.empty()) dump_layers(a, s, documents[d], taps, o, result);
  }
  if (!a.dump_logits.empty()) write_safetensors(a.dump_logits, logits);
}

void score(const Arguments& a) {
  if (a.row_tokens < 1) throw UsageError("--row-tokens", "must be at least 1");
  ModelSession s = open_model(a.model);
  const auto documents = read_input(a, s);
  if (!a.dump_layers.empty() && documents.size() != 1)
    throw UsageError("--dump-layers", "needs an input of one line, not " + std::to_string(documents.size()));
  FileWriter output(a.output);
  const ScoreOptions options{s.numerics, s.adapter, a.routed_experts, a.row_tokens};
  plumb::score(*s.weights, documents, options, [&](size_t document, const Scores& scores) {
    output.write(to_json(documents[document], scores).dump() + "\n");
  });
  if (!a.dump_logits.empty() || !a.dump_layers.empty()) dump(a, s, documents);
  output.commit();
}

}  // namespace

std::function<void()> setup_score(CLI::App& app) {
  auto a = std::make_shared<Arguments>();
  add_model_options(app, a->model);
  app.add_option("--input", a->input, "JSONL: an object with tokens, text or messages a line")->required();
  app.add_option("--output", a->output, "JSONL: tokens and logprobs (the first is null) a line")->required();
  app.add_flag("--routed-experts", a->routed_experts, "also write routed_experts [tokens][layers][experts]");
  app.add_option("--row-tokens", a->row_tokens, "tokens that are computed together (changes no result)");
  app.add_option("--dump-logits", a->dump_logits, "safetensors: logits.I f32 [tokens, vocabulary] of line I");
  app.add_option("--dump-layers", a->dump_layers,
                 "safetensors: intermediate values of every layer, for an input of one line");
  return [a] { score(*a); };
}

}  // namespace plumb::cli
