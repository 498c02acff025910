#include "data/dataset.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "base/hash.h"
#include "data/line_parts.h"
#include "tokenizer/chat_encode.h"
#include "tokenizer/python_json.h"

namespace plumb {
namespace {

constexpr const char* kFormats =
    R"(write {"messages": [...]}, {"prompt": "...", "completion": "..."}, {"tokens": [...], "mask": [...]} or )"
    R"({"text": "..."})";

std::string format_of(const Json& line, const std::string& where) {
  for (const char* key : {"messages", "prompt", "tokens", "text"})
    if (line.find(key)) return key;
  fail(where, "has none of the keys messages, prompt, tokens, text", kFormats);
}

// Reads one line after the other into samples.
class Reader {
 public:
  Reader(const Tokenizer* tokenizer, const DatasetOptions& options) : tokenizer_(tokenizer), options_(options) {
    if (options.format != "auto") data_.format = options.format;
    if (tokenizer) chat_ = chat_tokenizer(*tokenizer);
  }

  void read(const std::string& text, const std::string& where, int line) {
    const Json json = parse_json(text, where);
    if (!json.is_object()) fail(where, fmt::format("is {}, not an object", kind_name(json.kind)), kFormats);
    if (data_.format.empty()) data_.format = format_of(json, where);
    Sample sample;
    sample.line = line;
    if (data_.format == "messages")
      read_messages(json, where, sample);
    else if (data_.format == "prompt")
      read_prompt(json, where, sample);
    else if (data_.format == "tokens")
      read_tokens(json, where, sample);
    else
      read_text(json, where, sample);
    check_vocabulary(sample.tokens, options_.vocab_size, where);
    data_.longest = std::max<int64_t>(data_.longest, static_cast<int64_t>(sample.tokens.size()));
    keep(std::move(sample));
  }

  Dataset take(const std::string& path, int lines) {
    if (data_.samples.empty())
      fail(path, lines == 0 ? "is empty" : fmt::format("has {} samples, but no token of them is trained", lines),
           lines == 0 ? kFormats : "the mask, or the assistant turns, of a sample say which tokens are trained");
    return std::move(data_);
  }

 private:
  const Tokenizer& text() const {
    if (!tokenizer_)
      fail(fmt::format("data of format {}", data_.format), "needs a tokenizer",
           "put tokenizer.json into the model's folder, or give data of format tokens");
    return *tokenizer_;
  }

  static void append(Sample& sample, const std::vector<int32_t>& ids, uint8_t mask) {
    sample.tokens.insert(sample.tokens.end(), ids.begin(), ids.end());
    sample.mask.resize(sample.tokens.size(), mask);
  }

  void read_messages(const Json& json, const std::string& where, Sample& sample) const {
    const Json& messages = require(json, "messages", Json::Kind::array, where, "messages");
    text();
    try {
      const ChatTokens chat = encode_for_training(messages_from_json(messages, json.find("tools")),
                                                  line_chat_options(json, options_.chat), chat_);
      sample.tokens.assign(chat.ids.begin(), chat.ids.end());
      sample.mask = chat.mask;
    } catch (const Error& e) {  // says which message; the line is known here
      fail(where, e.what());
    }
  }

  void read_prompt(const Json& json, const std::string& where, Sample& sample) const {
    const std::string& prompt = require(json, "prompt", Json::Kind::string, where, "prompt").text;
    const std::string& completion = require(json, "completion", Json::Kind::string, where, "prompt").text;
    append(sample, {options_.bos}, 0);
    append(sample, text().encode(prompt, false), 0);
    append(sample, text().encode(completion, false), 1);
    append(sample, {options_.eos}, 1);
  }

  void read_tokens(const Json& json, const std::string& where, Sample& sample) const {
    sample.tokens = read_token_ids(json, "tokens", where);
    const Json* mask = json.find("mask");
    if (!mask) {
      sample.mask.assign(sample.tokens.size(), 1);
      return;
    }
    for (const Json& value : require(json, "mask", Json::Kind::array, where, "tokens").items) {
      const int flag = value.kind == Json::Kind::boolean ? value.boolean : whole_number(value);
      if (flag != 0 && flag != 1) fail(where, "mask holds " + python_dumps(value), "write 0 or 1");
      sample.mask.push_back(static_cast<uint8_t>(flag));
    }
    if (sample.mask.size() != sample.tokens.size())
      fail(where, fmt::format("mask has {} values, tokens {}", sample.mask.size(), sample.tokens.size()),
           "give one value for each token");
  }

  void read_text(const Json& json, const std::string& where, Sample& sample) const {
    const std::string& document = require(json, "text", Json::Kind::string, where, "text").text;
    append(sample, {options_.bos}, 0);
    append(sample, text().encode(document, false), 1);
    append(sample, {options_.eos}, 1);
  }

  void keep(Sample sample) {
    const size_t limit = static_cast<size_t>(options_.row_tokens);
    while (data_.format == "text" && sample.tokens.size() > limit) {
      const auto cut = static_cast<ptrdiff_t>(limit);
      add({{sample.tokens.begin(), sample.tokens.begin() + cut},
           {sample.mask.begin(), sample.mask.begin() + cut},
           sample.line});
      sample.tokens.erase(sample.tokens.begin(), sample.tokens.begin() + cut);
      sample.mask.erase(sample.mask.begin(), sample.mask.begin() + cut);
    }
    if (sample.tokens.size() > limit) {
      ++data_.truncated;
      sample.tokens.resize(limit);
      sample.mask.resize(limit);
    }
    add(std::move(sample));
  }

  void add(Sample sample) {
    if (!sample.mask.empty()) sample.mask[0] = 0;
    if (sample.trained() > 0)
      data_.samples.push_back(std::move(sample));
    else
      ++data_.untrained;
  }

  const Tokenizer* tokenizer_;
  const DatasetOptions& options_;
  ChatTokenizer chat_;
  Dataset data_;
};

uint64_t hash_of(const Sample& s, uint64_t from = fnv_start) {
  from = hash_bytes(s.tokens.data(), s.tokens.size() * sizeof(int), from);
  return hash_bytes(s.mask.data(), s.mask.size(), from);
}

}  // namespace

int64_t Sample::trained() const { return std::count(mask.begin(), mask.end(), 1); }

DatasetOptions dataset_options(const DataKeys& keys, const ModelConfig& model) {
  DatasetOptions o;
  o.format = keys.format;
  o.chat.mode = keys.thinking_mode == "thinking" ? ThinkingMode::thinking : ThinkingMode::chat;
  o.chat.drop_thinking = keys.drop_thinking;
  o.chat.profile = keys.effort_profile == "official" ? EffortProfile::official : EffortProfile::preview;
  o.chat.effort = keys.reasoning_effort;
  o.row_tokens = static_cast<int>(keys.row_tokens);
  o.vocab_size = model.vocab_size;
  o.bos = model.bos_token_id;
  o.eos = model.eos_token_id;
  return o;
}

Dataset read_dataset(const std::string& path, const Tokenizer* tokenizer, const DatasetOptions& options) {
  std::ifstream in(path);
  if (!in) fail(path, "cannot be read", "check data.train and data.eval; paths start at the current folder");
  Reader reader(tokenizer, options);
  std::string line;
  int samples = 0;
  for (int number = 1; std::getline(in, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    reader.read(line, fmt::format("{}:{}", path, number), number);
    ++samples;
  }
  return reader.take(path, samples);
}

std::vector<Sample> hold_out(std::vector<Sample>& samples, double fraction, const std::string& path) {
  if (fraction <= 0) return {};
  std::vector<uint64_t> key(samples.size());
  for (size_t i = 0; i < samples.size(); ++i) key[i] = mix_bits(hash_of(samples[i]));
  const auto [least, most] = std::minmax_element(key.begin(), key.end());
  if (key.empty() || *least == *most)
    fail(path, "cannot be split: it has fewer than two different samples", "set data.eval_fraction = 0");
  const uint64_t lowest = *least, highest = *most;
  const auto limit = static_cast<uint64_t>(fraction * 0x1p64);  // fraction is at most 0.5
  std::vector<Sample> kept, held;
  for (size_t i = 0; i < samples.size(); ++i) {
    const bool out = key[i] == lowest || (key[i] < limit && key[i] != highest);
    (out ? held : kept).push_back(std::move(samples[i]));
  }
  samples = std::move(kept);
  return held;
}

uint64_t fingerprint(const std::vector<Sample>& samples) {
  return std::accumulate(samples.begin(), samples.end(), fnv_start,
                         [](uint64_t h, const Sample& s) { return mix_bits(hash_of(s, h) ^ s.tokens.size()); });
}

}  // namespace plumb
