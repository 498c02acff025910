#include "tokenizer/bpe_file.h"

#include <fmt/format.h>
#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_map>

#include "base/error.h"

namespace plumb {
namespace {

using nlohmann::json;

constexpr int32_t id_limit = 1 << 24;  // larger ids are surely a broken file and would only fill memory
constexpr const char* unsupported_fix =
    "plumb reads byte-level BPE: Split patterns, ByteLevel, BPE, added tokens; see docs/tokenizer.md";
// The pattern that ByteLevel applies by itself if use_regex is true (GPT-2).
constexpr const char* gpt2_pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// An object of the file together with its place in it, so that each error names the key.
struct Node {
  const json& value;
  std::string where;

  Node at(const std::string& key) const {
    if (!value.is_object()) fail(where, fmt::format("object expected, {} found", value.type_name()));
    const auto found = value.find(key);
    static const json null;
    return {found == value.end() ? null : *found, where + (where.ends_with(' ') ? "" : ".") + key};
  }
  Node at(size_t i) const { return {value.at(i), fmt::format("{}[{}]", where, i)}; }
  bool is_null() const { return value.is_null(); }

  template <class T>
  T as(const char* expected, bool right_type) const {
    if (!right_type) fail(where, fmt::format("{} expected, {} found", expected, value.type_name()));
    return value.get<T>();
  }
  std::string text() const { return as<std::string>("string", value.is_string()); }
  bool flag(std::optional<bool> absent = {}) const {
    if (is_null() && absent) return *absent;
    return as<bool>("true or false", value.is_boolean());
  }
  int32_t id() const {
    const auto n = as<int64_t>("id", value.is_number_integer());
    if (n < 0 || n >= id_limit) fail(where, fmt::format("id {} is outside of 0..{}", n, id_limit - 1));
    return static_cast<int32_t>(n);
  }
  size_t array_size() const {
    if (!value.is_array()) fail(where, fmt::format("array expected, {} found", value.type_name()));
    return value.size();
  }
  [[noreturn]] void unsupported() const {
    std::string shown = value.dump(-1, ' ', false, json::error_handler_t::replace);
    if (shown.size() > 80) shown = shown.substr(0, 80) + "...";
    fail(where, shown + " is not supported", unsupported_fix);
  }
  void require_absent() const {
    if (!is_null()) unsupported();
  }
  void only_keys(std::initializer_list<std::string_view> known) const {
    if (!value.is_object()) fail(where, fmt::format("object expected, {} found", value.type_name()));
    for (const auto& [key, unused] : value.items()) {
      if (std::ranges::find(known, key) == known.end()) at(key).unsupported();
    }
  }
};

void require_no_normalizer(const Node& normalizer) {
  if (normalizer.is_null()) return;
  if (normalizer.at("type").text() != "Sequence") normalizer.at("type").unsupported();
  if (normalizer.at("normalizers").array_size() > 0) normalizer.at("normalizers").unsupported();
}

SplitStep read_split(const Node& split) {
  split.only_keys({"type", "pattern", "behavior", "invert"});
  if (split.at("behavior").text() != "Isolated") split.at("behavior").unsupported();
  if (split.at("invert").flag(false)) split.at("invert").unsupported();
  const Node pattern = split.at("pattern");
  pattern.only_keys({"Regex", "String"});
  const bool is_regex = !pattern.at("Regex").is_null();
  return {is_regex, pattern.at(is_regex ? "Regex" : "String").text()};
}

void read_byte_level(const Node& step, std::vector<SplitStep>& splits) {
  step.only_keys({"type", "add_prefix_space", "trim_offsets", "use_regex"});  // trim_offsets changes no id
  if (step.at("add_prefix_space").flag(true)) step.at("add_prefix_space").unsupported();
  if (step.at("use_regex").flag(true)) splits.push_back({true, gpt2_pattern});
}

std::vector<SplitStep> read_pre_tokenizer(const Node& pre) {
  std::vector<SplitStep> splits;
  if (pre.is_null()) fail(pre.where, "null, but byte-level BPE needs ByteLevel", unsupported_fix);
  if (pre.at("type").text() == "ByteLevel") {
    read_byte_level(pre, splits);
    return splits;
  }
  if (pre.at("type").text() != "Sequence") pre.at("type").unsupported();
  pre.only_keys({"type", "pretokenizers"});
  const Node steps = pre.at("pretokenizers");
  const size_t count = steps.array_size();
  for (size_t i = 0; i < count; ++i) {
    const Node step = steps.at(i), type = step.at("type");
    if (type.text() == "Split" && i + 1 < count) {
      splits.push_back(read_split(step));
    } else if (type.text() == "ByteLevel" && i + 1 == count) {
      read_byte_level(step, splits);
    } else {  // also a Split behind ByteLevel, which would see the byte alphabet instead of the text
      type.unsupported();
    }
  }
  if (count == 0) steps.unsupported();
  return splits;
}

// ByteLevel after the model only moves offsets, which this program does not report.
void require_inert_post_processor(const Node& post) {
  if (!post.is_null() && post.at("type").text() != "ByteLevel") post.at("type").unsupported();
}

void require_byte_level_decoder(const Node& decoder) {
  if (decoder.is_null() || decoder.at("type").text() != "ByteLevel") decoder.unsupported();
}

class VocabularyReader {
 public:
  explicit VocabularyReader(TokenizerFile& file) : file_(file) {}

  void model(const Node& model) {
    model.only_keys({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                     "byte_fallback", "ignore_merges", "vocab", "merges"});
    if (!model.at("type").is_null() && model.at("type").text() != "BPE") model.at("type").unsupported();
    if (model.at("dropout").value != 0.0) model.at("dropout").require_absent();
    for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (model.at(affix).value != "") model.at(affix).require_absent();
    }
    if (model.at("byte_fallback").flag(false)) model.at("byte_fallback").unsupported();
    // unk_token and fuse_unk have no effect: every byte is a token (checked by the caller), so nothing is unknown.
    file_.ignore_merges = model.at("ignore_merges").flag(false);
    vocab(model.at("vocab"));
    merges(model.at("merges"));
  }

  void added(const Node& list) {
    if (list.is_null()) return;
    const size_t count = list.array_size();
    for (size_t i = 0; i < count; ++i) {
      const Node item = list.at(i);
      item.only_keys({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
      AddedToken token;
      token.id = item.at("id").id();
      token.content = item.at("content").text();
      token.special = item.at("special").flag();
      token.normalized = item.at("normalized").flag();
      token.lstrip = item.at("lstrip").flag();
      token.rstrip = item.at("rstrip").flag();
      token.single_word = item.at("single_word").flag();
      if (token.content.empty()) fail(item.at("content").where, "an added token cannot be empty");
      place(token.content, token.id, item.where);
      file_.added.push_back(std::move(token));
    }
    std::ranges::sort(file_.added, {}, &AddedToken::id);
    const auto twice = std::ranges::adjacent_find(file_.added, {}, &AddedToken::id);
    if (twice != file_.added.end()) fail(list.where, fmt::format("id {} is listed twice", twice->id));
  }

 private:
  // The loops over vocabulary and merges are 250,000 steps: places for errors are only spelled out when there is one.
  void vocab(const Node& vocab) {
    if (!vocab.value.is_object()) fail(vocab.where, "object of token: id expected");
    id_of_.reserve(vocab.value.size());
    for (const auto& [token, id] : vocab.value.items()) {
      if (token.empty()) fail(vocab.where, "a token cannot be empty");
      const bool good = id.is_number_integer() && id.get<int64_t>() >= 0 && id.get<int64_t>() < id_limit;
      place(token, good ? id.get<int32_t>() : vocab.at(token).id(), vocab.where);
    }
    file_.model_size = static_cast<int32_t>(file_.tokens.size());
  }

  // A token may be placed twice (model and added list), but with one id.
  void place(const std::string& token, int32_t id, const std::string& where) {
    const auto [known, fresh] = id_of_.emplace(token, id);
    if (known->second != id) {
      fail(where, fmt::format("token {:?} has id {} here and {} elsewhere in the file", token, id, known->second));
    }
    if (file_.tokens.size() <= static_cast<size_t>(id)) file_.tokens.resize(id + 1);
    std::string& there = file_.tokens[id];
    if (fresh && !there.empty()) fail(where, fmt::format("id {} is both {:?} and {:?}", id, there, token));
    there = token;
  }

  void merges(const Node& list) {
    const size_t count = list.array_size();
    file_.merges.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      const json& merge = list.value[i];
      std::string left, right;
      if (merge.is_string()) {  // "a b"; the byte alphabet has no space, so there is one way to read it
        const auto& pair = merge.get_ref<const std::string&>();
        const size_t space = pair.find(' ');
        if (space == std::string::npos || pair.find(' ', space + 1) != std::string::npos) {
          fail(list.at(i).where, fmt::format("{:?}: two tokens and one space expected", pair));
        }
        left = pair.substr(0, space), right = pair.substr(space + 1);
      } else {
        if (list.at(i).array_size() != 2) fail(list.at(i).where, fmt::format("{} tokens, 2 expected", merge.size()));
        left = list.at(i).at(0).text(), right = list.at(i).at(1).text();
      }
      const auto id = [&](const std::string& token) {
        const auto found = id_of_.find(token);
        if (found == id_of_.end()) fail(list.at(i).where, fmt::format("{:?} is not in the vocabulary", token));
        return found->second;
      };
      file_.merges.push_back({id(left), id(right), id(left + right)});
    }
  }

  TokenizerFile& file_;
  std::unordered_map<std::string, int32_t> id_of_;
};

}  // namespace

TokenizerFile parse_tokenizer_file(std::string_view text, const std::string& name) {
  json document;
  try {
    document = json::parse(text);
  } catch (const json::exception& e) {
    fail(name, fmt::format("not JSON: {}", e.what()), "is the download complete?");
  }
  const Node root{document, name + ": "};
  root.only_keys({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
                  "decoder", "model"});
  if (root.at("version").text() != "1.0") root.at("version").unsupported();
  root.at("truncation").require_absent();
  root.at("padding").require_absent();
  require_no_normalizer(root.at("normalizer"));
  require_inert_post_processor(root.at("post_processor"));
  require_byte_level_decoder(root.at("decoder"));
  TokenizerFile file;
  file.splits = read_pre_tokenizer(root.at("pre_tokenizer"));
  VocabularyReader reader(file);
  reader.model(root.at("model"));
  reader.added(root.at("added_tokens"));
  return file;
}

}  // namespace plumb
