// What sample, chat and score have in common: a model, its tokenizer, an adapter, and how conversations are written.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/lora.h"
#include "model/weights.h"
#include "rollout/generate.h"
#include "tokenizer/chat_encode.h"
#include "tokenizer/tokenizer.h"

namespace CLI {
class App;
}

namespace plumb::cli {

struct ModelArguments {
  std::string model, adapter, numerics = "released", kernels = "auto";
  std::string thinking = "chat", effort_profile = "preview", effort;
  int threads = 0;
};
void add_model_options(CLI::App& app, ModelArguments& a);

struct ModelSession {
  std::string folder;
  std::shared_ptr<WeightStore> weights;
  std::shared_ptr<const Adapter> adapter;  // nullptr = base model
  std::optional<Tokenizer> tokenizer;      // absent: the folder has no tokenizer.json
  Numerics numerics;
  ChatOptions chat;
  const Tokenizer& text() const;  // Error: the folder has no tokenizer.json
};
ModelSession open_model(const ModelArguments& a);

struct SamplingArguments {
  SamplingParams params;
};
void add_sampling_options(CLI::App& app, SamplingArguments& a);

// Plain text as the model has met it in training: begin of sentence, then the text without control tokens.
std::vector<int> text_tokens(const ModelSession& s, const std::string& text);

// The lines of a JSONL file that are not blank. Errors: cannot be read, has no line.
struct InputLine {
  std::string where;  // "file:number"
  std::string text;
};
std::vector<InputLine> read_lines(const std::string& path);

// A list of token ids of the model. Errors name `where` and the value.
std::vector<int> token_list(const Json& list, const std::string& where, const ModelSession& s);

// Error if an object has a key that is not in the list; names the nearest one.
void check_keys(const Json& object, const std::string& where, const std::vector<std::string>& known);

// The tokens that end an answer: the configuration's end of sentence.
std::vector<int> stop_tokens(const ModelSession& s);

}  // namespace plumb::cli
