// config.json in its three spellings. Each spelling has its own names for the same fields (the tables below) and its
// own way to write the kinds of the layers and the rotary frequencies (the functions read_*).
#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "base/error.h"
#include "config/model_config.h"

namespace plumb {
namespace {

using nlohmann::json;

enum class Spelling { hugging_face, reference };

struct IntKey {
  const char* hugging_face;
  const char* reference;  // nullptr: the reference spelling does not have it
  int ModelConfig::*field;
  bool required;  // else the value of a fresh ModelConfig stands for a missing key
};

struct NumberKey {
  const char* hugging_face;
  const char* reference;
  double ModelConfig::*field;
  bool required;
};

// Required is what differs between models of the family, so that a guess could be wrong without being noticed.
constexpr IntKey kIntKeys[] = {
    {"vocab_size", "vocab_size", &ModelConfig::vocab_size, true},
    {"hidden_size", "dim", &ModelConfig::hidden_size, true},
    {"num_hidden_layers", "n_layers", &ModelConfig::num_hidden_layers, true},
    {"num_nextn_predict_layers", "n_mtp_layers", &ModelConfig::num_nextn_predict_layers, false},
    {"max_position_embeddings", nullptr, &ModelConfig::max_position_embeddings, false},
    {"num_attention_heads", "n_heads", &ModelConfig::num_attention_heads, true},
    {"head_dim", "head_dim", &ModelConfig::head_dim, true},
    {"q_lora_rank", "q_lora_rank", &ModelConfig::q_lora_rank, true},
    {"o_groups", "o_groups", &ModelConfig::o_groups, true},
    {"o_lora_rank", "o_lora_rank", &ModelConfig::o_lora_rank, true},
    {"sliding_window", "window_size", &ModelConfig::sliding_window, true},
    {"index_n_heads", "index_n_heads", &ModelConfig::index_n_heads, true},
    {"index_head_dim", "index_head_dim", &ModelConfig::index_head_dim, true},
    {"index_topk", "index_topk", &ModelConfig::index_topk, true},
    {"moe_intermediate_size", "moe_inter_dim", &ModelConfig::moe_intermediate_size, true},
    {"n_routed_experts", "n_routed_experts", &ModelConfig::n_routed_experts, true},
    {"num_experts_per_tok", "n_activated_experts", &ModelConfig::num_experts_per_tok, true},
    {"n_shared_experts", "n_shared_experts", &ModelConfig::n_shared_experts, false},
    {"hc_mult", "hc_mult", &ModelConfig::hc_mult, false},
    {"hc_sinkhorn_iters", "hc_sinkhorn_iters", &ModelConfig::hc_sinkhorn_iters, false},
    {"bos_token_id", nullptr, &ModelConfig::bos_token_id, false},
};

constexpr NumberKey kNumberKeys[] = {
    {"rope_theta", "rope_theta", &ModelConfig::rope_theta, false},
    {"compress_rope_theta", "compress_rope_theta", &ModelConfig::compress_rope_theta, false},  // see check_compression
    {"routed_scaling_factor", "route_scale", &ModelConfig::routed_scaling_factor, true},
    {"swiglu_limit", "swiglu_limit", &ModelConfig::swiglu_limit, true},
    {"hc_eps", "hc_eps", &ModelConfig::hc_eps, false},
    {"rms_norm_eps", "norm_eps", &ModelConfig::rms_norm_eps, false},
    {"initializer_range", nullptr, &ModelConfig::initializer_range, false},
};

// A key that may be present with one value only, and why.
struct FixedKey {
  const char* key;
  json value;
  const char* reason;
};

const std::vector<FixedKey>& fixed_keys(Spelling spelling) {
  static const std::vector<FixedKey> hugging_face = {
      {"attention_bias", false, "the matrices of DeepSeek-V4 have no bias"},
      {"mlp_bias", false, "the matrices of DeepSeek-V4 have no bias"},
      {"attention_dropout", 0.0, "there is no dropout"},
      {"hidden_act", "silu", "no other activation is computed"},
      {"tie_word_embeddings", false, "embedding and head are separate matrices"},
      {"num_key_value_heads", 1, "all heads share one key-value head"},
      {"norm_topk_prob", true, "route weights are always normalised"},
      {"scoring_func", "sqrtsoftplus", "no other router score is computed"},
      {"topk_method", "noaux_tc", "no other way to choose experts is computed"},
      {"n_group", 1, "experts are not chosen by groups"},
      {"topk_group", 1, "experts are not chosen by groups"},
  };
  static const std::vector<FixedKey> reference = {
      {"score_func", "sqrtsoftplus", "no other router score is computed"},
      {"scale_fmt", "ue8m0", "block scales are powers of two"},
      {"scale_dtype", "fp8", "block scales are powers of two"},
  };
  return spelling == Spelling::hugging_face ? hugging_face : reference;
}

// ---- One value
// -------------------------------------------------------------------------------------------------------------

// The value of a key; nullptr if the key is missing or null.
const json* find(const json& object, const char* key) {
  auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

// The limit keeps sums and products of two such numbers within 64 bits, and sums within 31.
int as_int(const json& value, const std::string& label, const std::string& where) {
  const double number = value.is_number() ? value.get<double>() : NAN;
  if (number != std::floor(number)) fail(where, fmt::format("{} = {}, must be a whole number", label, value.dump()));
  if (std::abs(number) > 1e9) fail(where, fmt::format("{} = {} is out of range", label, value.dump()));
  return static_cast<int>(number);
}

double as_number(const json& value, const std::string& label, const std::string& where) {
  if (!value.is_number()) fail(where, fmt::format("{} = {}, must be a number", label, value.dump()));
  return value.get<double>();
}

const json& required(const json& object, const char* key, const std::string& prefix, const std::string& where) {
  const json* value = find(object, key);
  if (!value) fail(where, fmt::format("key {}{} is missing", prefix, key));
  return *value;
}

const json& as_list(const json& value, const char* key, const std::string& where) {
  if (!value.is_array()) fail(where, fmt::format("{} must be a list, one entry a layer", key));
  return value;
}

void read_plain_keys(ModelConfig& c, const json& j, Spelling spelling, const std::string& where) {
  auto value_of = [&](const char* hugging_face, const char* reference, bool is_required) -> const json* {
    const char* key = spelling == Spelling::hugging_face ? hugging_face : reference;
    if (!key) return nullptr;
    return is_required ? &required(j, key, "", where) : find(j, key);
  };
  auto label = [&](const auto& k) { return spelling == Spelling::hugging_face ? k.hugging_face : k.reference; };
  for (const IntKey& k : kIntKeys)
    if (const json* v = value_of(k.hugging_face, k.reference, k.required)) c.*k.field = as_int(*v, label(k), where);
  for (const NumberKey& k : kNumberKeys)
    if (const json* v = value_of(k.hugging_face, k.reference, k.required)) c.*k.field = as_number(*v, label(k), where);
}

void check_fixed_keys(const json& j, Spelling spelling, const std::string& where) {
  for (const FixedKey& k : fixed_keys(spelling))
    if (const json* v = find(j, k.key); v && *v != k.value)
      fail(where, fmt::format("{} = {}, must be {}", k.key, v->dump(), k.value.dump()), k.reason);
}

// ---- Kinds of layers
// -------------------------------------------------------------------------------------------------------

std::string layer_label(const ModelConfig& c, int layer) {
  return c.is_mtp(layer) ? fmt::format("MTP layer {}", layer - c.num_hidden_layers) : fmt::format("layer {}", layer);
}

// compress_ratios: entry k is backbone layer k, entry num_hidden_layers + j is MTP layer j; longer lists are legal.
std::vector<LayerKind> read_compress_ratios(const ModelConfig& c, const json& list, const std::string& where) {
  const int given = static_cast<int>(list.size());
  if (given < c.layer_count())
    fail(where, fmt::format("compress_ratios has {} entries, none for {}", given, layer_label(c, given)),
         fmt::format("at least {} are needed: {} layers and {} MTP layers", c.layer_count(), c.num_hidden_layers,
                     c.num_nextn_predict_layers));
  std::vector<LayerKind> kinds;
  for (int layer = 0; layer < c.layer_count(); ++layer) {
    const json& r = list[layer];
    if (r != 0 && r != 4 && r != 128)
      fail(where,
           fmt::format("compress_ratios[{}] = {} for {}, must be 0, 4 or 128", layer, r.dump(), layer_label(c, layer)));
    kinds.push_back(r == 0 ? LayerKind::window : r == 4 ? LayerKind::csa : LayerKind::hca);
  }
  return kinds;
}

// layer_types covers the backbone alone. Hugging Face has no MTP layers; in all releases these are of kind window.
std::vector<LayerKind> read_layer_types(const ModelConfig& c, const json& list, const std::string& where) {
  if (static_cast<int>(list.size()) != c.num_hidden_layers)
    fail(where, fmt::format("layer_types has {} entries for {} layers", list.size(), c.num_hidden_layers));
  std::vector<LayerKind> kinds;
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    const json& type = list[layer];
    if (type == "sliding_attention")
      kinds.push_back(LayerKind::window);
    else if (type == "compressed_sparse_attention")
      kinds.push_back(LayerKind::csa);
    else if (type == "heavily_compressed_attention")
      kinds.push_back(LayerKind::hca);
    else
      fail(where, fmt::format("layer_types[{}] = {}, must be \"sliding_attention\", \"compressed_sparse_attention\" or "
                              "\"heavily_compressed_attention\"",
                              layer, type.dump()));
  }
  kinds.resize(c.layer_count(), LayerKind::window);
  return kinds;
}

void read_layer_kinds(ModelConfig& c, const json& j, const std::string& where) {
  const json *ratios = find(j, "compress_ratios"), *types = find(j, "layer_types");
  if (!ratios && !types) fail(where, "key compress_ratios is missing", "it says which layers compress their keys");
  if (types) c.layer_kinds = read_layer_types(c, as_list(*types, "layer_types", where), where);
  if (ratios) {
    std::vector<LayerKind> kinds = read_compress_ratios(c, as_list(*ratios, "compress_ratios", where), where);
    for (int layer = 0; types && layer < c.num_hidden_layers; ++layer)
      if (kinds[layer] != c.layer_kinds[layer])
        fail(where, fmt::format("compress_ratios[{0}] = {1} and layer_types[{0}] = {2} contradict each other", layer,
                                (*ratios)[layer].dump(), (*types)[layer].dump()));
    c.layer_kinds = std::move(kinds);
  }
  // Other rates than 4 and 128 are possible in the Hugging Face spelling; compress_ratios then still says 4 and 128.
  if (const json* rates = find(j, "compress_rates")) {
    if (const json* v = find(*rates, "compressed_sparse_attention"))
      c.csa_ratio = as_int(*v, "compress_rates.compressed_sparse_attention", where);
    if (const json* v = find(*rates, "heavily_compressed_attention"))
      c.hca_ratio = as_int(*v, "compress_rates.heavily_compressed_attention", where);
  }
  if (const json* v = find(j, "compress_rate_csa")) c.csa_ratio = as_int(*v, "compress_rate_csa", where);
  if (const json* v = find(j, "compress_rate_hca")) c.hca_ratio = as_int(*v, "compress_rate_hca", where);
}

void read_hash_layers(ModelConfig& c, const json& j, Spelling spelling, const std::string& where) {
  const char* key = spelling == Spelling::hugging_face ? "num_hash_layers" : "n_hash_layers";
  const json* types = find(j, "mlp_layer_types");
  if (!types) {
    c.num_hash_layers = as_int(required(j, key, "", where), key, where);
    return;
  }
  if (static_cast<int>(as_list(*types, "mlp_layer_types", where).size()) != c.num_hidden_layers)
    fail(where, fmt::format("mlp_layer_types has {} entries for {} layers", types->size(), c.num_hidden_layers));
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
    const json& type = (*types)[layer];
    if (type != "hash_moe" && type != "moe")
      fail(where, fmt::format("mlp_layer_types[{}] = {}, must be \"hash_moe\" or \"moe\"", layer, type.dump()));
    if (type == "hash_moe" && c.num_hash_layers != layer)
      fail(where, fmt::format("mlp_layer_types[{}] = \"hash_moe\" after a layer with \"moe\"", layer),
           "hash layers come first");
    if (type == "hash_moe") ++c.num_hash_layers;
  }
  if (const json* v = find(j, key); v && as_int(*v, key, where) != c.num_hash_layers)
    fail(where, fmt::format("{} = {}, but mlp_layer_types has {} hash layers", key, v->dump(), c.num_hash_layers));
}

// ---- Rotary frequencies
// ----------------------------------------------------------------------------------------------------

// rope_scaling, or the part of rope_parameters for layers with compression. An attention factor (magnitude) is never
// applied: DeepSeek-V4 has none. A file that states another one than 1 is refused; a file without the key means 1,
// although Hugging Face computes 1.277 for a nested dictionary without it.
std::optional<Yarn> read_yarn(const json& object, const std::string& label, const std::string& where) {
  if (!object.is_object()) fail(where, label + " must be an object");
  const json* type = find(object, "rope_type");
  if (!type) type = find(object, "type");
  if (!type || *type == "default") return std::nullopt;
  if (*type != "yarn")
    fail(where, fmt::format("{}.rope_type = {}, must be \"yarn\" or \"default\"", label, type->dump()));
  if (const json* v = find(object, "attention_factor"); v && *v != 1)
    fail(where, fmt::format("{}.attention_factor = {}, must be 1", label, v->dump()),
         "DeepSeek-V4 does not scale its rotated dimensions");
  Yarn yarn;
  yarn.factor = as_number(required(object, "factor", label + ".", where), label + ".factor", where);
  const char* original = "original_max_position_embeddings";
  yarn.original_max_position_embeddings =
      as_int(required(object, original, label + ".", where), label + "." + original, where);
  if (const json* v = find(object, "beta_fast")) yarn.beta_fast = as_number(*v, label + ".beta_fast", where);
  if (const json* v = find(object, "beta_slow")) yarn.beta_slow = as_number(*v, label + ".beta_slow", where);
  return yarn;
}

// A nested rope_parameters wins over the flat rope_theta and compress_rope_theta, as in Hugging Face, which writes both
// and reads the nested ones.
void read_rope(ModelConfig& c, const json& j, const std::string& where) {
  const json *scaling = find(j, "rope_scaling"), *parameters = find(j, "rope_parameters");
  if (scaling && parameters)
    fail(where, "rope_scaling and rope_parameters are both present", "keep the one that the checkpoint was made with");
  if (scaling) c.yarn = read_yarn(*scaling, "rope_scaling", where);
  if (!parameters) return;
  const json *main = find(*parameters, "main"), *compress = find(*parameters, "compress");
  if (!main || !compress) {
    c.yarn = read_yarn(*parameters, "rope_parameters", where);
    return;
  }
  if (read_yarn(*main, "rope_parameters.main", where))
    fail(where, "rope_parameters.main.rope_type = \"yarn\", must be \"default\"",
         "YaRN is for layers with compression only");
  if (const json* v = find(*main, "rope_theta")) c.rope_theta = as_number(*v, "rope_parameters.main.rope_theta", where);
  if (const json* v = find(*compress, "rope_theta"))
    c.compress_rope_theta = as_number(*v, "rope_parameters.compress.rope_theta", where);
  c.yarn = read_yarn(*compress, "rope_parameters.compress", where);
}

// The number of rotary dimensions, given as such or as a part of head_dim.
void read_rope_dim(ModelConfig& c, const json& j, const std::string& where) {
  const json *dim = find(j, "qk_rope_head_dim"), *factor = find(j, "partial_rotary_factor");
  if (dim) c.qk_rope_head_dim = as_int(*dim, "qk_rope_head_dim", where);
  if (factor) {
    const double product = c.head_dim * as_number(*factor, "partial_rotary_factor", where);
    const int rounded = static_cast<int>(std::lround(product));
    if (std::abs(product - rounded) > 1e-6 || (dim && rounded != c.qk_rope_head_dim))
      fail(where, fmt::format("partial_rotary_factor * head_dim = {}, must be {}", product,
                              dim ? "qk_rope_head_dim = " + dim->dump() : "a whole number"));
    c.qk_rope_head_dim = rounded;
  }
  if (!dim && !factor) fail(where, "key qk_rope_head_dim is missing");
}

void read_reference_rope(ModelConfig& c, const json& j, const std::string& where) {
  c.qk_rope_head_dim = as_int(required(j, "rope_head_dim", "", where), "rope_head_dim", where);
  const json* original = find(j, "original_seq_len");
  if (!original || *original == 0) return;  // the reference code then leaves YaRN out
  Yarn yarn;
  yarn.original_max_position_embeddings = as_int(*original, "original_seq_len", where);
  yarn.factor = as_number(required(j, "rope_factor", "", where), "rope_factor", where);
  if (const json* v = find(j, "beta_fast")) yarn.beta_fast = as_number(*v, "beta_fast", where);
  if (const json* v = find(j, "beta_slow")) yarn.beta_slow = as_number(*v, "beta_slow", where);
  c.yarn = yarn;
}

// ---- The rest
// --------------------------------------------------------------------------------------------------------------

void check_model_type(const json& j, const std::string& where) {
  const json& type = required(j, "model_type", "", where);
  if (type == "deepseek_v41")
    fail(where, "model_type = \"deepseek_v41\": DeepSeek-V4.1 is a different model",
         "it has other compression, hyper-connections and layers; only DeepSeek-V4 is supported");
  if (type != "deepseek_v4") fail(where, fmt::format("model_type = {}, must be \"deepseek_v4\"", type.dump()));
}

// Hugging Face allows a list of ends; the generation settings may have more, the model has one.
void read_eos(ModelConfig& c, const json& j, const std::string& where) {
  const json* v = find(j, "eos_token_id");
  if (v && v->is_array() && v->size() != 1)
    fail(where, fmt::format("eos_token_id = {}, must be one token", v->dump()),
         "give further stop tokens when sampling");
  if (v) c.eos_token_id = as_int(v->is_array() ? v->front() : *v, "eos_token_id", where);
}

void read_expert_dtype(ModelConfig& c, const json& j, bool quantized, const std::string& where) {
  const json* v = find(j, "expert_dtype");
  if (!v)
    c.expert_dtype = quantized ? ExpertDtype::fp8 : ExpertDtype::bf16;
  else if (*v == "fp4")
    c.expert_dtype = ExpertDtype::fp4;
  else if (*v == "fp8")
    c.expert_dtype = ExpertDtype::fp8;
  else if (*v == "bf16")
    c.expert_dtype = ExpertDtype::bf16;
  else
    fail(where, fmt::format("expert_dtype = {}, must be \"fp4\", \"fp8\" or \"bf16\"", v->dump()));
}

// Returns whether there is one.
bool check_quantization(const json& j, const std::string& where) {
  const json* q = find(j, "quantization_config");
  if (!q) return false;
  const FixedKey expected[] = {{"quant_method", "fp8", ""},
                               {"fmt", "e4m3", ""},
                               {"scale_fmt", "ue8m0", ""},
                               {"activation_scheme", "dynamic", ""},
                               {"weight_block_size", json::array({128, 128}), ""}};
  for (const FixedKey& k : expected)
    if (const json* v = find(*q, k.key); v && *v != k.value)
      fail(where, fmt::format("quantization_config.{} = {}, must be {}", k.key, v->dump(), k.value.dump()),
           "convert the checkpoint to the released layout or to BF16 with the program that made it");
  return true;
}

void read_dspark(ModelConfig& c, const json& j, const std::string& where) {
  if (!find(j, "dspark_block_size")) return;
  DSpark d;
  d.block_size = as_int(j["dspark_block_size"], "dspark_block_size", where);
  d.noise_token_id = as_int(required(j, "dspark_noise_token_id", "", where), "dspark_noise_token_id", where);
  d.markov_rank = as_int(required(j, "dspark_markov_rank", "", where), "dspark_markov_rank", where);
  const char* key = "dspark_target_layer_ids";
  for (const json& id : as_list(required(j, key, "", where), key, where))
    d.target_layer_ids.push_back(as_int(id, key, where));
  c.dspark = std::move(d);
}

}  // namespace

ModelConfig parse_model_config(const json& j, const std::string& where) {
  if (!j.is_object()) fail(where, "the configuration of a model must be a JSON object");
  const bool is_reference = !j.contains("hidden_size") && (j.contains("dim") || j.contains("n_layers"));
  const Spelling spelling = is_reference ? Spelling::reference : Spelling::hugging_face;
  if (!is_reference) check_model_type(j, where);
  check_fixed_keys(j, spelling, where);
  ModelConfig c;
  read_plain_keys(c, j, spelling, where);
  // These numbers size lists, so they are checked before the rest is read.
  if (c.num_hidden_layers < 1 || c.num_nextn_predict_layers < 0 || c.num_nextn_predict_layers > c.num_hidden_layers)
    validate(c, where);
  read_layer_kinds(c, j, where);
  read_hash_layers(c, j, spelling, where);
  read_eos(c, j, where);
  read_dspark(c, j, where);
  if (is_reference) {
    read_reference_rope(c, j, where);
    const json* dtype = find(j, "dtype");
    read_expert_dtype(c, j, dtype && *dtype == "fp8", where);
  } else {
    read_rope(c, j, where);
    read_rope_dim(c, j, where);
    read_expert_dtype(c, j, check_quantization(j, where), where);
  }
  validate(c, where);
  return c;
}

ModelConfig load_model_config(const std::string& path) {
  const std::string file =
      std::filesystem::is_directory(path) ? (std::filesystem::path(path) / "config.json").string() : path;
  std::ifstream in(file);
  if (!in) fail(file, "cannot be read", "give a config.json or the folder of a checkpoint");
  json j;
  try {
    j = json::parse(in);
  } catch (const json::parse_error& e) {
    fail(file, std::string("not JSON: ") + e.what());
  }
  return parse_model_config(j, file);
}

nlohmann::ordered_json to_json(const ModelConfig& c) {
  nlohmann::ordered_json j = {{"architectures", {"DeepseekV4ForCausalLM"}}, {"model_type", "deepseek_v4"}};
  for (const IntKey& k : kIntKeys) j[k.hugging_face] = c.*k.field;
  for (const NumberKey& k : kNumberKeys) j[k.hugging_face] = c.*k.field;
  if (c.compress_rope_theta == 0) j.erase("compress_rope_theta");
  for (const FixedKey& k : fixed_keys(Spelling::hugging_face))
    if (std::string_view group = k.key; group != "n_group" && group != "topk_group" && group != "mlp_bias")
      j[k.key] = k.value;
  j["qk_rope_head_dim"] = c.qk_rope_head_dim;
  j["num_hash_layers"] = c.num_hash_layers;
  j["eos_token_id"] = c.eos_token_id;
  j["compress_ratios"] = nlohmann::ordered_json::array();
  for (LayerKind kind : c.layer_kinds)
    j["compress_ratios"].push_back(kind == LayerKind::window ? 0 : kind == LayerKind::csa ? 4 : 128);
  if (c.csa_ratio != 4 || c.hca_ratio != 128)
    j["compress_rates"] = {{"compressed_sparse_attention", c.csa_ratio}, {"heavily_compressed_attention", c.hca_ratio}};
  if (c.yarn)
    j["rope_scaling"] = {{"type", "yarn"},
                         {"factor", c.yarn->factor},
                         {"original_max_position_embeddings", c.yarn->original_max_position_embeddings},
                         {"beta_fast", c.yarn->beta_fast},
                         {"beta_slow", c.yarn->beta_slow}};
  if (c.expert_dtype == ExpertDtype::fp4) j["expert_dtype"] = "fp4";
  if (c.expert_dtype != ExpertDtype::bf16)
    j["quantization_config"] = {{"quant_method", "fp8"},
                                {"fmt", "e4m3"},
                                {"activation_scheme", "dynamic"},
                                {"scale_fmt", "ue8m0"},
                                {"weight_block_size", {128, 128}}};
  if (c.dspark) {
    j["dspark_block_size"] = c.dspark->block_size;
    j["dspark_noise_token_id"] = c.dspark->noise_token_id;
    j["dspark_target_layer_ids"] = c.dspark->target_layer_ids;
    j["dspark_markov_rank"] = c.dspark->markov_rank;
  }
  j["use_cache"] = true;
  j["torch_dtype"] = "bfloat16";
  return j;
}

}  // namespace plumb
