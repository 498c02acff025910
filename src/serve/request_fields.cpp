#include "serve/request_fields.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <random>

#include "config/nearest.h"
#include "tokenizer/unicode.h"

namespace plumb::serve {
namespace {

constexpr size_t kShownBytes = 80;  // of a value in an error
constexpr size_t kMostStopStrings = 64, kLongestStopString = 1024;

std::string shown(const Json& value) {
  std::string s = python_dumps(value);
  if (s.size() <= kShownBytes) return s;
  s.resize(kShownBytes);
  s.resize(valid_utf8_length(s));
  return s + "...";
}

[[noreturn]] void wrong_type(const Json& value, const std::string& path, const std::string& expected) {
  refuse(path, fmt::format("{} is {}", shown(value), kind_name(value.kind)), "give " + expected);
}

// The number that a JSON number spells; none if no double is near it (1e999, NaN, Infinity).
std::optional<double> double_of(const std::string& spelling) {
  double value = 0;
  const auto [end, error] = std::from_chars(spelling.data(), spelling.data() + spelling.size(), value);
  if (error != std::errc() || end != spelling.data() + spelling.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::optional<int64_t> integer_of(const std::string& spelling) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(spelling.data(), spelling.data() + spelling.size(), value);
  if (error == std::errc() && end == spelling.data() + spelling.size()) return value;
  const std::optional<double> real = double_of(spelling);
  if (!real || *real != std::trunc(*real) || std::fabs(*real) > 0x1p53) return std::nullopt;
  return static_cast<int64_t>(*real);
}

}  // namespace

// ---- Errors --------------------------------------------------------------------------------------------------------

void refuse(const std::string& field, const std::string& what, const std::string& fix, int status) {
  ApiError e;
  e.status = status;
  e.field = field;
  e.message = (field.empty() ? "" : field + ": ") + what + (fix.empty() ? "" : " (" + fix + ")");
  throw e;
}

ApiError api_error(const Error& e, int status, const std::string& field) {
  ApiError out;
  out.status = status;
  out.field = field.empty() ? e.where() : field;
  out.message = out.field + std::string(e.what()).substr(e.where().size());
  return out;
}

// ---- Values --------------------------------------------------------------------------------------------------------

Json parse_body(std::string_view body) {
  Json json;
  try {
    json = parse_json(body, "body");
  } catch (const Error& e) {
    ApiError error = api_error(e);
    error.field = "";
    throw error;
  }
  if (!json.is_object()) refuse("", fmt::format("the body is {}", kind_name(json.kind)), "send a JSON object");
  return json;
}

int64_t integer_at(const Json& value, const std::string& path, int64_t least, int64_t most) {
  const std::string expected = fmt::format("a whole number from {} to {}", least, most);
  if (value.kind != Json::Kind::number) wrong_type(value, path, expected);
  const std::optional<int64_t> number = integer_of(value.text);
  if (!number || *number < least || *number > most) refuse(path, shown(value) + " is out of range", "give " + expected);
  return *number;
}

double number_at(const Json& value, const std::string& path, double least, double most) {
  const std::string expected = fmt::format("a number from {} to {}", least, most);
  if (value.kind != Json::Kind::number) wrong_type(value, path, expected);
  const std::optional<double> number = double_of(value.text);
  if (!number || *number < least || *number > most) refuse(path, shown(value) + " is out of range", "give " + expected);
  return *number;
}

const std::string& string_at(const Json& value, const std::string& path) {
  if (!value.is_string()) wrong_type(value, path, "a string");
  return value.text;
}

const std::vector<Json>& list_at(const Json& value, const std::string& path) {
  if (!value.is_array()) wrong_type(value, path, "a list");
  return value.items;
}

std::vector<int> token_ids_at(const Json& value, const std::string& path, int vocab) {
  std::vector<int> ids;
  for (const Json& id : list_at(value, path))
    ids.push_back(static_cast<int>(integer_at(id, fmt::format("{}[{}]", path, ids.size()), 0, vocab - 1)));
  return ids;
}

// ---- Fields --------------------------------------------------------------------------------------------------------

Fields::Fields(const Json& object, std::string path) : object_(object), path_(std::move(path)) {
  if (!object.is_object()) wrong_type(object, path_, "an object");
}

std::string Fields::path(std::string_view name) const {
  return path_.empty() ? std::string(name) : path_ + "." + std::string(name);
}

const Json* Fields::find(std::string_view name) const {
  asked_.emplace_back(name);
  const Json* value = object_.find(name);
  return value && !value->is_null() ? value : nullptr;
}

const Json& Fields::need(std::string_view name) const {
  const Json* value = find(name);
  if (!value) refuse(path(name), "is missing", "add it");
  return *value;
}

bool Fields::flag(std::string_view name, bool otherwise) const {
  const Json* value = find(name);
  if (!value) return otherwise;
  if (value->kind != Json::Kind::boolean) wrong_type(*value, path(name), "true or false");
  return value->boolean;
}

std::optional<int64_t> Fields::integer(std::string_view name, int64_t least, int64_t most) const {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  return integer_at(*value, path(name), least, most);
}

std::optional<double> Fields::number(std::string_view name, double least, double most) const {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  return number_at(*value, path(name), least, most);
}

std::optional<std::string> Fields::text(std::string_view name) const {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  return string_at(*value, path(name));
}

std::optional<std::string> Fields::word(std::string_view name, const std::vector<std::string>& allowed) const {
  const std::optional<std::string> word = text(name);
  if (word && std::find(allowed.begin(), allowed.end(), *word) == allowed.end())
    refuse(path(name), fmt::format("{} is not known", shown(json_string(*word))),
           fmt::format("use one of {}", fmt::join(allowed, ", ")));
  return word;
}

void Fields::ignore(std::initializer_list<std::string_view> names) const {
  asked_.insert(asked_.end(), names.begin(), names.end());
}

void Fields::refuse_given(std::string_view name, const std::string& why, const std::string& fix) const {
  const Json* value = find(name);
  const bool off =
      !value || (value->kind == Json::Kind::boolean && !value->boolean) || (value->is_array() && value->items.empty());
  if (!off) refuse(path(name), why, fix);
}

void Fields::refuse_unknown() const {
  for (const JsonMember& m : object_.members) {
    if (std::find(asked_.begin(), asked_.end(), m.key) != asked_.end()) continue;
    const std::string near = nearest(m.key, asked_);
    refuse(path(m.key), "is not known", near.empty() ? "leave it out" : "did you mean " + near + "?");
  }
}

std::vector<int> prompt_tokens(const Fields& body, const std::string& text, const ServedModel& model) {
  std::vector<int> ids = model.tokenizer.encode(text, true);
  const int begin = model.config.bos_token_id;
  if (body.flag("add_special_tokens", true) && (ids.empty() || ids[0] != begin)) ids.insert(ids.begin(), begin);
  return ids;
}

// ---- Model ---------------------------------------------------------------------------------------------------------

namespace {

std::optional<int64_t> version_of(std::string_view digits) {
  int64_t version = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), version);
  if (error != std::errc() || end != digits.data() + digits.size() || version < 0) return std::nullopt;
  return version;
}

}  // namespace

ModelChoice read_model(const Fields& body, const ServedModel& model) {
  const std::string name = body.text("model").value_or(model.name);
  if (name == model.name) return {name, "", std::nullopt};
  std::vector<std::string> adapters;
  if (model.adapters)
    for (const AdapterRef& a : model.adapters->list()) adapters.push_back(a->name);
  const auto loaded = [&](std::string_view n) {
    return std::find(adapters.begin(), adapters.end(), n) != adapters.end();
  };
  if (loaded(name)) return {name, name, std::nullopt};
  const size_t at = name.rfind('@');
  if (at != std::string::npos && loaded(std::string_view(name).substr(0, at))) {
    const std::string adapter = name.substr(0, at);
    const std::optional<int64_t> version = version_of(std::string_view(name).substr(at + 1));
    if (!version)
      refuse(body.path("model"), fmt::format("{} names no version of {}", shown(json_string(name)), adapter),
             "write the number of a version after the @", 404);
    try {
      model.adapters->version(adapter, *version);
    } catch (const Error& e) {
      refuse(body.path("model"), e.what(), "", 404);
    }
    return {name, adapter, version};
  }
  adapters.insert(adapters.begin(), model.name);
  refuse(body.path("model"), fmt::format("{} is not served", shown(json_string(name))),
         fmt::format("use one of {}", fmt::join(adapters, ", ")), 404);
}

// ---- Sampling ------------------------------------------------------------------------------------------------------

namespace {

std::vector<std::string> read_stop_strings(const Fields& body) {
  const Json* stop = body.find("stop");
  if (!stop) return {};
  const std::string path = body.path("stop");
  std::vector<std::string> strings;
  if (stop->is_string()) {
    strings.push_back(stop->text);
  } else {
    for (const Json& s : list_at(*stop, path))
      strings.push_back(string_at(s, fmt::format("{}[{}]", path, strings.size())));
  }
  if (strings.size() > kMostStopStrings)
    refuse(path, fmt::format("has {} strings", strings.size()), fmt::format("give at most {}", kMostStopStrings));
  for (const std::string& s : strings)
    if (s.empty() || s.size() > kLongestStopString)
      refuse(path, fmt::format("a stop string has {} bytes", s.size()), fmt::format("1 to {}", kLongestStopString));
  return strings;
}

std::vector<std::pair<int, float>> read_logit_bias(const Fields& body, int vocab) {
  const Json* bias = body.find("logit_bias");
  std::vector<std::pair<int, float>> out;
  if (!bias) return out;
  const std::string path = body.path("logit_bias");
  if (!bias->is_object()) wrong_type(*bias, path, "an object: token id -> number");
  for (const JsonMember& m : bias->members) {
    const std::optional<int64_t> id = version_of(m.key);
    const std::string at = path + "." + m.key;
    if (!id || *id >= vocab)
      refuse(at, shown(json_string(m.key)) + " is no token id", fmt::format("use 0 to {}", vocab - 1));
    out.emplace_back(static_cast<int>(*id), static_cast<float>(number_at(m.value, at, -100, 100)));
  }
  return out;
}

uint64_t fresh_seed() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

SamplingParams read_sampling(const Fields& body, const ServedModel& model) {
  constexpr double kLeastPositive = 1e-6;
  const int vocab = static_cast<int>(model.config.vocab_size);
  SamplingParams p;
  p.temperature = static_cast<float>(body.number("temperature", 0, 100).value_or(1));
  p.top_p = static_cast<float>(body.number("top_p", kLeastPositive, 1).value_or(1));
  p.top_k = static_cast<int>(std::max<int64_t>(0, body.integer("top_k", -1, INT32_MAX).value_or(0)));
  p.min_p = static_cast<float>(body.number("min_p", 0, 1).value_or(0));
  p.repetition_penalty = static_cast<float>(body.number("repetition_penalty", kLeastPositive, 100).value_or(1));
  p.presence_penalty = static_cast<float>(body.number("presence_penalty", -2, 2).value_or(0));
  p.frequency_penalty = static_cast<float>(body.number("frequency_penalty", -2, 2).value_or(0));
  p.logit_bias = read_logit_bias(body, vocab);
  const std::optional<int64_t> seed = body.integer("seed", INT64_MIN, INT64_MAX);
  p.seed = seed ? static_cast<uint64_t>(*seed) : fresh_seed();
  p.min_tokens = static_cast<int>(body.integer("min_tokens", 0, model.max_positions).value_or(0));
  if (!body.flag("ignore_eos", false)) p.stop_tokens = model.stop_tokens;
  if (const Json* ids = body.find("stop_token_ids"))
    for (int id : token_ids_at(*ids, body.path("stop_token_ids"), vocab)) p.stop_tokens.push_back(id);
  return p;
}

// vLLM counts the alternatives that are shown beside each token of the prompt.
void read_prompt_logprobs(const Fields& body, const ServedModel& model, Request& request) {
  const Json* value = body.find("prompt_logprobs");
  if (!value) return;
  const bool is_flag = value->kind == Json::Kind::boolean;
  request.prompt_logprobs = !is_flag || value->boolean;
  if (is_flag) return;
  request.prompt_top_logprobs =
      static_cast<int>(integer_at(*value, body.path("prompt_logprobs"), 0, model.max_logprobs));
}

void read_stream(const Fields& body, AnswerFields& out) {
  out.stream = body.flag("stream", false);
  const Json* options = body.find("stream_options");
  if (!options) return;
  const Fields fields(*options, body.path("stream_options"));
  if (!out.stream) refuse(body.path("stream_options"), "is given without stream", "set stream to true or leave it out");
  out.stream_usage = fields.flag("include_usage", false);
  out.continuous_usage = fields.flag("continuous_usage_stats", false);
  fields.ignore({"include_obfuscation"});
}

}  // namespace

AnswerFields read_answer_fields(const Fields& body, const ServedModel& model,
                                std::initializer_list<std::string_view> length_names, int least_length) {
  AnswerFields out;
  out.model = read_model(body, model);
  out.request.adapter = out.model.adapter;
  out.request.adapter_version = out.model.version;
  out.request.sampling = read_sampling(body, model);
  out.request.sampling.max_tokens = -1;
  out.length_field = body.path(*length_names.begin());
  for (std::string_view name : length_names) {
    const std::optional<int64_t> length = body.integer(name, least_length, INT32_MAX);
    if (!length || out.request.sampling.max_tokens >= 0) continue;
    out.request.sampling.max_tokens = static_cast<int>(*length);
    out.length_field = body.path(name);
  }
  out.request.stop_strings = read_stop_strings(body);
  // vLLM's meaning: lower numbers first.
  out.request.priority = static_cast<int>(-body.integer("priority", -1000000, 1000000).value_or(0));
  read_prompt_logprobs(body, model, out.request);
  out.request.routed_experts = body.flag("return_routed_experts", false);
  out.choices = static_cast<int>(body.integer("n", 1, model.max_choices).value_or(1));
  out.skip_special = body.flag("skip_special_tokens", true);
  out.return_token_ids = body.flag("return_token_ids", false);
  out.tokens_as_ids = body.flag("return_tokens_as_token_ids", false);
  read_stream(body, out);
  body.refuse_given("use_beam_search", "beam search is not done", "leave it out");
  body.refuse_given("logits_processors", "logits processors are not run", "use logit_bias");
  body.refuse_given("include_stop_str_in_output", "stop strings are never part of the answer", "leave it out");
  return out;
}

void fit_length(Request& request, const ServedModel& model, const std::string& prompt_field,
                const std::string& length_field) {
  const int64_t prompt = static_cast<int64_t>(request.prompt.size()), room = model.max_positions - prompt;
  SamplingParams& p = request.sampling;
  if (prompt == 0) refuse(prompt_field, "has no token", "give at least one");
  if (room < (p.max_tokens == 0 ? 0 : 1))
    refuse(prompt_field,
           fmt::format("has {} tokens, and prompt and answer have at most {}", prompt, model.max_positions),
           "shorten it");
  if (p.max_tokens < 0)
    p.max_tokens = static_cast<int>(model.default_tokens > 0 ? std::min<int64_t>(model.default_tokens, room) : room);
  if (p.max_tokens > room)
    refuse(length_field,
           fmt::format("{} tokens after a prompt of {} are more than the {} that prompt and answer have at most",
                       p.max_tokens, prompt, model.max_positions),
           fmt::format("give at most {}, or shorten the prompt", room));
  if (p.min_tokens > p.max_tokens)
    refuse("min_tokens",
           fmt::format("{} is more than the {} tokens that the answer has at most", p.min_tokens, p.max_tokens),
           "lower it");
}

std::vector<Request> one_each(const Request& request, int choices, uint64_t first_key) {
  std::vector<Request> out(choices, request);
  for (int i = 0; i < choices; ++i) out[i].key = first_key + i;
  return out;
}

}  // namespace plumb::serve
