#include "train/training_data.h"

#include <filesystem>
#include <optional>

#include "base/error.h"
#include "base/log.h"
#include "tokenizer/tokenizer.h"

namespace plumb {
namespace {

Dataset read_and_warn(const std::string& path, const Tokenizer* tokenizer, const DatasetOptions& options) {
  Dataset d = read_dataset(path, tokenizer, options);
  if (d.truncated > 0)
    log_warning(
        "{}: {} samples were cut off at {} tokens (the longest has {}); raise data.row_tokens to keep them whole", path,
        d.truncated, options.row_tokens, d.longest);
  if (d.untrained > 0) log_warning("{}: {} samples were left out, no token of them is trained", path, d.untrained);
  return d;
}

}  // namespace

TrainingData load_training_data(const RunConfig& config, const ModelConfig& model) {
  const DataKeys& keys = config.data;
  if (!keys.eval.empty() && keys.eval_fraction > 0)
    fail("data.eval_fraction", "is given together with data.eval", "give one of the two");
  const auto file = std::filesystem::path(config.model.path) / "tokenizer.json";
  std::optional<Tokenizer> tokenizer;
  if (std::filesystem::exists(file)) tokenizer = Tokenizer::load(file);
  const Tokenizer* text = tokenizer ? &*tokenizer : nullptr;

  const DatasetOptions options = dataset_options(keys, model);
  TrainingData data;
  Dataset train = read_and_warn(keys.train, text, options);
  data.format = train.format;
  data.train = std::move(train.samples);
  data.eval = hold_out(data.train, keys.eval_fraction, keys.train);
  if (!keys.eval.empty()) data.eval = read_and_warn(keys.eval, text, options).samples;
  return data;
}

std::vector<int> lengths_of(const std::vector<Sample>& samples) {
  std::vector<int> lengths;
  for (const Sample& s : samples) lengths.push_back(static_cast<int>(s.tokens.size()));
  return lengths;
}

}  // namespace plumb
