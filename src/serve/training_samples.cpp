#include "serve/training_samples.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "base/log.h"
#include "serve/request_fields.h"
#include "serve/training_runs.h"
#include "tokenizer/unicode.h"

namespace plumb::serve {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr size_t kIndices = 8;
constexpr size_t kPreview = 300;  // bytes

// Of a line as plumb writes it without parsing all of it: {"step":12,...
std::optional<int64_t> step_of(std::string_view line) {
  constexpr std::string_view kBegin = "{\"step\":";
  int64_t step = 0;
  if (line.starts_with(kBegin) && line.ends_with('}')) {
    const auto [end, error] = std::from_chars(line.data() + kBegin.size(), line.data() + line.size(), step);
    if (error == std::errc() && *end == ',') return step;
  }
  const json parsed = json::parse(line, nullptr, false);
  const auto it = parsed.is_object() ? parsed.find("step") : parsed.end();
  if (!parsed.is_object() || it == parsed.end() || !it->is_number_integer()) return {};
  return it->get<int64_t>();
}

// Members of a line; null or empty where they are absent or of another type.
json number_in(const json& line, const char* name) {
  const auto it = line.find(name);
  return it != line.end() && it->is_number() ? *it : json();
}
json text_in(const json& line, const char* name) {
  const auto it = line.find(name);
  return it != line.end() && it->is_string() ? *it : json();
}
std::vector<std::optional<double>> numbers_in(const json& line, const char* name) {
  std::vector<std::optional<double>> values;
  if (const auto it = line.find(name); it != line.end() && it->is_array())
    for (const json& v : *it) values.push_back(v.is_number() ? std::optional(v.get<double>()) : std::nullopt);
  return values;
}
std::vector<int32_t> ids_in(const json& line, const char* name) {
  std::vector<int32_t> ids;
  for (const auto& v : numbers_in(line, name))
    ids.push_back(v && *v >= 0 && *v <= INT32_MAX ? static_cast<int32_t>(*v) : -1);
  return ids;
}

std::string preview(std::string text) {
  if (text.size() <= kPreview) return text;
  std::string cut;  // not inside a character
  append_utf8_lossy(std::string_view(text).substr(0, kPreview), false, cut);
  return cut + "…";
}

// Per token of the sample: new - recorded log-probability; nullopt: not trained, or a reply of the environment. The
// file has them for the tokens that the policy made, one after the other; those have a log-probability.
std::vector<std::optional<double>> differences(const json& line, size_t tokens) {
  std::vector<std::optional<double>> all(tokens);
  const auto logprobs = numbers_in(line, "logprobs"), trained = numbers_in(line, "difference");
  std::vector<size_t> made;
  for (size_t i = 0; i < std::min(tokens, logprobs.size()); ++i)
    if (logprobs[i]) made.push_back(i);
  if (made.size() != trained.size()) return all;
  for (size_t i = 0; i < made.size(); ++i) all[made[i]] = trained[i];
  return all;
}

// What a row of the table and the whole sample have in common.
json describe(const json& line, size_t index) {
  const auto ids = ids_in(line, "tokens");
  const auto logprobs = numbers_in(line, "logprobs");
  int64_t compared = 0, unequal = 0;
  double largest = 0;
  for (const auto& d : differences(line, ids.size()))
    if (d) ++compared, unequal += *d != 0, largest = std::max(largest, std::abs(*d));
  return {{"index", index},
          {"line", number_in(line, "line")},
          {"group", number_in(line, "group")},
          {"number", number_in(line, "number")},
          {"finish_reason", text_in(line, "finish_reason")},
          {"turns", number_in(line, "turns")},
          {"reward", line.contains("failure") ? json() : number_in(line, "reward")},
          {"failure", text_in(line, "failure")},
          {"advantage", number_in(line, "advantage")},
          {"trained", line.contains("trained") && line["trained"] == true},
          {"sampled_tokens", std::ranges::count_if(logprobs, [](const auto& v) { return v.has_value(); })},
          {"compared_tokens", compared},
          {"mismatch_tokens", unequal},
          {"mismatch_max", largest}};
}

json decoded(const Tokenizer* tokenizer, const std::vector<int32_t>& ids) {
  return tokenizer ? json(tokenizer->decode(ids, false)) : json();
}

// Beginning of a text for a row of the table: without the tokens of the chat format, which begin every prompt.
json preview(const Tokenizer* tokenizer, std::vector<int32_t> ids) {
  if (!tokenizer) return {};
  std::erase_if(ids, [&](int32_t id) { return tokenizer->is_added(id); });
  return preview(tokenizer->decode(ids, false));
}

// The text that each token adds; a character belongs to the token that completes it.
json pieces(const Tokenizer* tokenizer, const std::vector<int32_t>& ids) {
  if (!tokenizer) return {};
  StreamDecoder decoder(*tokenizer, false);
  std::vector<std::string> texts;
  for (int32_t id : ids) texts.push_back(decoder.push(id));
  if (!texts.empty()) texts.back() += decoder.finish();
  return texts;
}

json optional_list(const std::vector<std::optional<double>>& values) {
  json list = json::array();
  for (const auto& v : values) list.push_back(v ? json(*v) : json());
  return list;
}

json read_line(const RunFile& file, const SampleIndex::Line& line) {
  json parsed = json::parse(read_part(file, line.begin, line.size), nullptr, false);
  return parsed.is_object() ? parsed : json::object();
}

}  // namespace

void SampleIndex::update(const RunFile& file) {
  if (file.identity != identity_ || file.size < noted_ || !begins_line(file, noted_)) *this = {};
  identity_ = file.identity;
  noted_ = for_each_line(file, noted_, UINT64_MAX, [&](uint64_t begin, std::optional<std::string_view> text) {
    if (const auto step = text ? step_of(*text) : std::nullopt) steps_[*step].push_back({begin, text->size()});
  });
}

SampleIndex& TrainingSamples::index_of(const std::string& name, const RunFile& file) {
  const auto it = std::ranges::find(indices_, name, &std::pair<std::string, SampleIndex>::first);
  if (it != indices_.end())
    indices_.splice(indices_.begin(), indices_, it);
  else
    indices_.emplace_front(name, SampleIndex());
  if (indices_.size() > kIndices) indices_.pop_back();
  indices_.front().second.update(file);
  return indices_.front().second;
}

// That of the model the run began with, where its config.toml says it is; relative paths are those of this process. One
// that cannot be read is logged, once: the view then shows numbers instead of texts.
const Tokenizer* TrainingSamples::tokenizer_of(const OpenFile& run) {
  const std::string model = value_in(config_text(run), "model", "path");
  const fs::path file = fs::path(model) / "tokenizer.json";
  std::error_code error;
  const auto time = fs::last_write_time(file, error);
  if (model.empty() || error || !fs::is_regular_file(file, error)) return nullptr;
  const std::string key = fmt::format("{} {}", file.string(), time.time_since_epoch().count());
  if (key != tokenizer_key_) {
    tokenizer_key_ = key;
    tokenizer_.reset();
    try {
      tokenizer_ = Tokenizer::load(file);
    } catch (const Error& e) {
      log_warning("training view: {}", e.what());
    }
  }
  return tokenizer_ ? &*tokenizer_ : nullptr;
}

json TrainingSamples::rows(const OpenFile& run, const std::string& name, int64_t step, size_t from, size_t most) {
  json reply = {{"step", nullptr}, {"first", nullptr}, {"last", nullptr}, {"previous", nullptr},
                {"next", nullptr}, {"total", 0},       {"from", from},    {"samples", json::array()}};
  const auto file = open_run_file(run, "samples.jsonl");
  if (!file) return reply;
  const auto& steps = index_of(name, *file).steps();
  if (steps.empty()) return reply;
  auto at = steps.upper_bound(step);
  if (at != steps.begin()) --at;
  reply["step"] = at->first;
  reply["first"] = steps.begin()->first, reply["last"] = steps.rbegin()->first;
  if (at != steps.begin()) reply["previous"] = std::prev(at)->first;
  if (std::next(at) != steps.end()) reply["next"] = std::next(at)->first;
  const auto& lines = at->second;
  reply["total"] = lines.size();
  const Tokenizer* tokenizer = tokenizer_of(run);
  for (size_t i = from; i < lines.size() && i - from < most; ++i) {
    const json line = read_line(*file, lines[i]);
    json row = describe(line, i);
    const json answer = text_in(line, "answer");
    row["prompt"] = preview(tokenizer, ids_in(line, "prompt_tokens"));
    row["answer"] = tokenizer            ? preview(tokenizer, ids_in(line, "tokens"))
                    : answer.is_string() ? json(preview(answer.get<std::string>()))
                                         : json();
    reply["samples"].push_back(std::move(row));
  }
  return reply;
}

json TrainingSamples::whole(const OpenFile& run, const std::string& name, int64_t step, size_t index) {
  const auto file = open_run_file(run, "samples.jsonl");
  const auto missing = [&](const char* field, const std::string& what) {
    refuse(field, what, "GET /training/samples lists what there is", 404);
  };
  if (!file) missing("run", "it has no samples");
  const auto& steps = index_of(name, *file).steps();
  const auto at = steps.find(step);
  if (at == steps.end()) missing("step", fmt::format("there are no samples of step {}", step));
  if (index >= at->second.size()) missing("index", fmt::format("step {} has {} samples", step, at->second.size()));
  const json line = read_line(*file, at->second[index]);
  json whole = describe(line, index);
  const Tokenizer* tokenizer = tokenizer_of(run);
  const auto prompt = ids_in(line, "prompt_tokens"), tokens = ids_in(line, "tokens");
  auto logprobs = numbers_in(line, "logprobs");
  logprobs.resize(tokens.size());
  whole["step"] = step;
  whole["prompt"] = decoded(tokenizer, prompt);
  whole["prompt_tokens"] = prompt.size();
  whole["answer"] = text_in(line, "answer");
  whole["metrics"] = line.contains("metrics") ? numbers_of(line["metrics"]) : json::object();
  whole["tokens"] = tokens;
  whole["texts"] = pieces(tokenizer, tokens);
  whole["logprobs"] = optional_list(logprobs);
  whole["differences"] = optional_list(differences(line, tokens.size()));
  return whole;
}

}  // namespace plumb::serve
