#include "config/model_config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "config/presets.h"
#include "support/temp_path.h"

namespace plumb {
namespace {

using nlohmann::json;

json data(const std::string& file) {
  std::ifstream in(PLUMB_SOURCE_DIR "/tests/config/data/" + file);
  return json::parse(in);
}

// The text of the error that `json` is refused with.
std::string refusal(const json& j) {
  try {
    parse_model_config(j, "config.json");
  } catch (const Error& e) {
    return e.what();
  }
  return "accepted";
}

// The refusal of the released configuration `ratios_released.json` with one key changed; a null value removes it.
std::string refusal(const std::string& key, const json& value) {
  json j = data("ratios_released.json");
  if (value.is_null())
    j.erase(key);
  else
    j[key] = value;
  return refusal(j);
}

// ---- The three spellings
// ---------------------------------------------------------------------------------------------------

// data/flash.json and data/pro.json are transcriptions of the published files.
TEST(ModelConfig, ReleasedFilesEqualThePresets) {
  EXPECT_EQ(parse_model_config(data("flash.json"), "flash"), preset("flash"));
  EXPECT_EQ(parse_model_config(data("pro.json"), "pro"), preset("pro"));
}

TEST(ModelConfig, FlashHasTheKindsOfTheReport) {
  const ModelConfig c = preset("flash");
  int count[3] = {};
  for (int layer = 0; layer < c.num_hidden_layers; ++layer) ++count[static_cast<int>(c.kind(layer))];
  EXPECT_EQ(count[0], 2);
  EXPECT_EQ(count[1], 21);
  EXPECT_EQ(count[2], 20);
  EXPECT_EQ(c.kind(43), LayerKind::window);
  EXPECT_TRUE(c.is_mtp(43) && !c.is_mtp(42));
  EXPECT_TRUE(c.is_hash_layer(2) && !c.is_hash_layer(3) && !c.is_hash_layer(43));
  EXPECT_EQ(c.ratio(1), 0);
  EXPECT_EQ(c.ratio(2), 4);
  EXPECT_EQ(c.ratio(3), 128);
}

// ratios_hf.json is ratios_released.json without its quantisation, read and written again by transformers 5.17.
TEST(ModelConfig, HuggingFaceSpellingEqualsReleased) {
  ModelConfig released = parse_model_config(data("ratios_released.json"), "released");
  EXPECT_EQ(released.expert_dtype, ExpertDtype::fp4);
  released.expert_dtype = ExpertDtype::bf16;
  EXPECT_EQ(parse_model_config(data("ratios_hf.json"), "hf"), released);
}

// hf_tiny.json was written by transformers 5.17 for a model with ratios 4 and 16.
TEST(ModelConfig, HuggingFaceSpellingWithOtherRates) {
  const ModelConfig c = parse_model_config(data("hf_tiny.json"), "hf");
  EXPECT_EQ(c.layer_kinds, (std::vector{LayerKind::window, LayerKind::csa, LayerKind::hca, LayerKind::csa,
                                        LayerKind::window, LayerKind::window}));
  EXPECT_EQ(c.ratio(1), 4);
  EXPECT_EQ(c.ratio(2), 16);
  EXPECT_EQ(c.num_hash_layers, 2);
  EXPECT_EQ(c.qk_rope_head_dim, 8);
  EXPECT_EQ(c.compress_rope_theta, 160000);
  EXPECT_EQ(c.yarn, (Yarn{.factor = 16, .original_max_position_embeddings = 64, .beta_fast = 32, .beta_slow = 1}));
  EXPECT_EQ(parse_model_config(to_json(c), "again"), c);
}

TEST(ModelConfig, ReferenceSpellingEqualsReleased) {
  const json reference = {{"vocab_size", 129280},
                          {"dim", 4096},
                          {"moe_inter_dim", 2048},
                          {"n_layers", 43},
                          {"n_hash_layers", 3},
                          {"n_mtp_layers", 1},
                          {"n_heads", 64},
                          {"n_routed_experts", 256},
                          {"n_shared_experts", 1},
                          {"n_activated_experts", 6},
                          {"score_func", "sqrtsoftplus"},
                          {"route_scale", 1.5},
                          {"swiglu_limit", 10.0},
                          {"q_lora_rank", 1024},
                          {"head_dim", 512},
                          {"rope_head_dim", 64},
                          {"norm_eps", 1e-6},
                          {"o_groups", 8},
                          {"o_lora_rank", 1024},
                          {"window_size", 128},
                          {"compress_ratios", data("flash.json")["compress_ratios"]},
                          {"compress_rope_theta", 160000.0},
                          {"original_seq_len", 65536},
                          {"rope_theta", 10000.0},
                          {"rope_factor", 16},
                          {"beta_fast", 32},
                          {"beta_slow", 1},
                          {"index_n_heads", 64},
                          {"index_head_dim", 128},
                          {"index_topk", 512},
                          {"hc_mult", 4},
                          {"hc_sinkhorn_iters", 20},
                          {"hc_eps", 1e-6},
                          {"dtype", "fp8"},
                          {"scale_fmt", "ue8m0"},
                          {"expert_dtype", "fp4"},
                          {"max_batch_size", 4},
                          {"max_seq_len", 4096}};
  EXPECT_EQ(parse_model_config(reference, "reference"), preset("flash"));

  json without_yarn = reference;
  without_yarn["original_seq_len"] = 0;
  EXPECT_EQ(parse_model_config(without_yarn, "reference").yarn, std::nullopt);
  json without_theta = reference;
  without_theta.erase("compress_rope_theta");
  EXPECT_EQ(
      refusal(without_theta),
      "config.json: compress_rope_theta is missing, but there are layers with compression (the released models have "
      "160000; 40000 is the unset default of other programs)");
  json missing = reference;
  missing.erase("n_activated_experts");
  EXPECT_EQ(refusal(missing), "config.json: key n_activated_experts is missing");
}

TEST(ModelConfig, PresetsRoundTrip) {
  for (const std::string& name : preset_names()) {
    const ModelConfig c = preset(name);
    EXPECT_NO_THROW(validate(c, name));
    EXPECT_EQ(parse_model_config(json::parse(to_json(c).dump(1)), name), c) << name;
  }
}

// `plumb init` writes what the release has: same keys, same values (but for the version of the library that wrote it).
TEST(ModelConfig, WritesTheReleasedFile) {
  json expected = data("flash.json"), written = json::parse(to_json(preset("flash")).dump());
  expected.erase("transformers_version");
  EXPECT_EQ(written, expected);
}

TEST(Presets, CoverAllKindsAndBothRoutings) {
  for (const char* name : {"tiny", "flash-4layer"}) {
    const ModelConfig c = preset(name);
    for (LayerKind kind : {LayerKind::window, LayerKind::csa, LayerKind::hca}) EXPECT_TRUE(c.has(kind)) << name;
    EXPECT_TRUE(c.num_hash_layers > 0 && c.num_hash_layers < c.num_hidden_layers);
    EXPECT_EQ(c.num_nextn_predict_layers, 1);
  }
}

TEST(Presets, UnknownNameNamesTheNearest) {
  auto message = [](const char* name) {
    try {
      preset(name);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(message("flsh"), "preset flsh: there is no such preset (did you mean flash?)");
  EXPECT_EQ(message("llama"), "preset llama: there is no such preset (there are tiny, flash, flash-4layer, pro)");
}

// ---- Accepted variants
// -----------------------------------------------------------------------------------------------------

TEST(ModelConfig, SurplusRatiosAndDraftModelAreAccepted) {
  json j = data("flash.json");
  j["compress_ratios"].push_back(0);
  j["compress_ratios"].push_back(0);
  EXPECT_EQ(parse_model_config(j, "longer"), preset("flash"));
  j["dspark_block_size"] = 5;
  j["dspark_noise_token_id"] = 128799;
  j["dspark_target_layer_ids"] = {40, 41, 42};
  j["dspark_markov_rank"] = 256;
  const ModelConfig c = parse_model_config(j, "0731");
  EXPECT_EQ(c.dspark,
            (DSpark{.block_size = 5, .noise_token_id = 128799, .target_layer_ids = {40, 41, 42}, .markov_rank = 256}));
  EXPECT_EQ(parse_model_config(to_json(c), "again"), c);
  j.erase("dspark_markov_rank");
  EXPECT_EQ(refusal(j), "config.json: key dspark_markov_rank is missing");
}

TEST(ModelConfig, YarnIsOnOnlyIfTheFileHasIt) {
  json j = data("ratios_released.json");
  j.erase("rope_scaling");
  EXPECT_EQ(parse_model_config(j, "").yarn, std::nullopt);
  j["rope_scaling"] = nullptr;
  EXPECT_EQ(parse_model_config(j, "").yarn, std::nullopt);
  j = data("ratios_hf.json");
  j["rope_parameters"]["compress"] = {{"rope_type", "default"}, {"rope_theta", 160000}};
  EXPECT_EQ(parse_model_config(j, "").yarn, std::nullopt);
}

// Without the key Hugging Face would compute 1.277 here; no magnitude is ever applied by us.
TEST(ModelConfig, AttentionFactorMayBeAbsentButNotOtherThanOne) {
  json j = data("ratios_hf.json");
  const ModelConfig with_key = parse_model_config(j, "");
  j["rope_parameters"]["compress"].erase("attention_factor");
  EXPECT_EQ(parse_model_config(j, ""), with_key);
  j["rope_parameters"]["compress"]["attention_factor"] = 1.25;
  EXPECT_EQ(refusal(j),
            "config.json: rope_parameters.compress.attention_factor = 1.25, must be 1 (DeepSeek-V4 does not scale its "
            "rotated "
            "dimensions)");
}

TEST(ModelConfig, NestedThetaWinsAndFlatRopeParametersAreRopeScaling) {
  json j = data("ratios_hf.json");
  j["rope_parameters"]["main"]["rope_theta"] = 20000;
  j["rope_parameters"]["compress"]["rope_theta"] = 80000;
  EXPECT_EQ(parse_model_config(j, "").rope_theta, 20000);
  EXPECT_EQ(parse_model_config(j, "").compress_rope_theta, 80000);
  j = data("ratios_released.json");
  const ModelConfig released = parse_model_config(j, "");
  j["rope_parameters"] = j["rope_scaling"];
  j.erase("rope_scaling");
  EXPECT_EQ(parse_model_config(j, ""), released);
}

TEST(ModelConfig, RopeDimFromPartialFactor) {
  json j = data("hf_tiny.json");
  j.erase("qk_rope_head_dim");
  EXPECT_EQ(parse_model_config(j, "").qk_rope_head_dim, 8);
  j["partial_rotary_factor"] = 0.3;
  EXPECT_EQ(refusal(j), "config.json: partial_rotary_factor * head_dim = 9.6, must be a whole number");
  j["qk_rope_head_dim"] = 8;
  EXPECT_EQ(refusal(j), "config.json: partial_rotary_factor * head_dim = 9.6, must be qk_rope_head_dim = 8");
}

TEST(ModelConfig, ExpertDtypeFollowsTheQuantisation) {
  json j = data("ratios_released.json");
  j.erase("expert_dtype");
  EXPECT_EQ(parse_model_config(j, "").expert_dtype, ExpertDtype::fp8);
  EXPECT_EQ(parse_model_config(to_json(parse_model_config(j, "")), "").expert_dtype, ExpertDtype::fp8);
  j.erase("quantization_config");
  EXPECT_EQ(parse_model_config(j, "").expert_dtype, ExpertDtype::bf16);
}

TEST(ModelConfig, ModelWithoutCompressionNeedsNoCompressTheta) {
  json j = data("ratios_released.json");
  j["compress_ratios"] = {0, 0, 0, 0, 0, 0, 0};
  j.erase("compress_rope_theta");
  j["index_head_dim"] = 96;  // not looked at: there is no indexer
  EXPECT_EQ(refusal(j), "accepted");
}

// ---- Refusals
// --------------------------------------------------------------------------------------------------------------

TEST(ModelConfigRefuses, OtherModels) {
  EXPECT_EQ(refusal("model_type", "deepseek_v41"),
            "config.json: model_type = \"deepseek_v41\": DeepSeek-V4.1 is a different model (it has other compression, "
            "hyper-connections and layers; only DeepSeek-V4 is supported)");
  EXPECT_EQ(refusal("model_type", "deepseek_v3"), "config.json: model_type = \"deepseek_v3\", must be \"deepseek_v4\"");
  EXPECT_EQ(refusal("model_type", nullptr), "config.json: key model_type is missing");
  EXPECT_EQ(refusal(json::array()), "config.json: the configuration of a model must be a JSON object");
}

TEST(ModelConfigRefuses, ArithmeticThatIsNotThere) {
  struct Case {
    const char* key;
    json value;
    const char* message;
  };
  const Case cases[] = {
      {"attention_bias", true, "attention_bias = true, must be false (the matrices of DeepSeek-V4 have no bias)"},
      {"mlp_bias", true, "mlp_bias = true, must be false (the matrices of DeepSeek-V4 have no bias)"},
      {"attention_dropout", 0.1, "attention_dropout = 0.1, must be 0.0 (there is no dropout)"},
      {"hidden_act", "gelu", "hidden_act = \"gelu\", must be \"silu\" (no other activation is computed)"},
      {"tie_word_embeddings", true,
       "tie_word_embeddings = true, must be false (embedding and head are separate matrices)"},
      {"num_key_value_heads", 2, "num_key_value_heads = 2, must be 1 (all heads share one key-value head)"},
      {"norm_topk_prob", false, "norm_topk_prob = false, must be true (route weights are always normalised)"},
      {"scoring_func", "sigmoid",
       "scoring_func = \"sigmoid\", must be \"sqrtsoftplus\" (no other router score is computed)"},
      {"topk_method", "group_limited_greedy",
       "topk_method = \"group_limited_greedy\", must be \"noaux_tc\" (no other way to choose experts is computed)"},
      {"n_group", 8, "n_group = 8, must be 1 (experts are not chosen by groups)"},
      {"topk_group", 4, "topk_group = 4, must be 1 (experts are not chosen by groups)"},
      {"n_shared_experts", 2, "n_shared_experts = 2, must be 1"},
      {"eos_token_id", {1, 2}, "eos_token_id = [1,2], must be one token (give further stop tokens when sampling)"},
      {"expert_dtype", "int4", "expert_dtype = \"int4\", must be \"fp4\", \"fp8\" or \"bf16\""},
      {"quantization_config",
       {{"quant_method", "gptq"}},
       "quantization_config.quant_method = \"gptq\", must be \"fp8\" (convert the checkpoint to the released layout or "
       "to "
       "BF16 with the program that made it)"},
      {"rope_scaling", {{"type", "linear"}}, "rope_scaling.rope_type = \"linear\", must be \"yarn\" or \"default\""},
      {"rope_scaling",
       {{"type", "yarn"}, {"factor", 16}},
       "key rope_scaling.original_max_position_embeddings is missing"},
  };
  for (const Case& c : cases) EXPECT_EQ(refusal(c.key, c.value), "config.json: " + std::string(c.message));
}

TEST(ModelConfigRefuses, SizesThatDoNotFit) {
  struct Case {
    const char* key;
    json value;
    const char* message;
  };
  const Case cases[] = {
      {"o_groups", nullptr, "key o_groups is missing"},
      {"hidden_size", "128", "hidden_size = \"128\", must be a whole number"},
      {"hidden_size", 128.5, "hidden_size = 128.5, must be a whole number"},
      {"hidden_size", 3000000000, "hidden_size = 3000000000 is out of range"},
      {"num_nextn_predict_layers", 7, "num_nextn_predict_layers = 7 is greater than num_hidden_layers = 6"},
      {"rms_norm_eps", "1e-6", "rms_norm_eps = \"1e-6\", must be a number"},
      {"num_hidden_layers", 0, "num_hidden_layers = 0, must be at least 1"},
      {"num_nextn_predict_layers", -1, "num_nextn_predict_layers = -1, must be at least 0"},
      {"hc_sinkhorn_iters", 0, "hc_sinkhorn_iters = 0, must be at least 1"},
      {"index_topk", 0, "index_topk = 0, must be at least 1"},
      {"o_groups", 3, "num_attention_heads * head_dim = 512 is not divisible by o_groups = 3"},
      {"qk_rope_head_dim", 63, "qk_rope_head_dim = 63 is odd (rotation turns pairs of dimensions)"},
      {"qk_rope_head_dim", 130, "qk_rope_head_dim = 130 is greater than head_dim = 128"},
      {"index_head_dim", 32,
       "qk_rope_head_dim = 64 is greater than index_head_dim = 32 (the indexer rotates as many dimensions as the "
       "attention)"},
      {"index_head_dim", 96,
       "index_head_dim = 96 is not a power of two (the indexer rotates its heads by a Hadamard matrix)"},
      {"num_hash_layers", 7, "num_hash_layers = 7 is greater than num_hidden_layers = 6"},
      {"num_experts_per_tok", 17, "num_experts_per_tok = 17 is greater than n_routed_experts = 16"},
      {"moe_intermediate_size", 48,
       "moe_intermediate_size = 48 is not a multiple of 32 (FP4 experts have one scale for 32 values)"},
      {"swiglu_limit", -1, "swiglu_limit = -1, must be positive, or 0 for no clamp"},
      {"rms_norm_eps", 0, "rms_norm_eps = 0, must be greater than 0"},
      {"eos_token_id", 256, "eos_token_id = 256 is outside of the vocabulary of 256"},
      {"compress_rope_theta", nullptr,
       "compress_rope_theta is missing, but there are layers with compression (the released models have 160000; 40000 "
       "is "
       "the unset default of other programs)"},
      {"rope_scaling",
       {{"type", "yarn"}, {"factor", 0.5}, {"original_max_position_embeddings", 64}},
       "YaRN factor 0.5, original_max_position_embeddings 64, beta_fast 32, beta_slow 1 (factor and length must be at "
       "least "
       "1 and beta_fast > beta_slow > 0)"},
      {"compress_rates", {{"heavily_compressed_attention", 1}}, "hca_ratio = 1, must be at least 2"},
      {"compress_rate_csa", 1, "csa_ratio = 1, must be at least 2"},
  };
  for (const Case& c : cases) EXPECT_EQ(refusal(c.key, c.value), "config.json: " + std::string(c.message));
}

TEST(ModelConfigRefuses, RatioListsThatDoNotFit) {
  EXPECT_EQ(refusal("compress_ratios", nullptr),
            "config.json: key compress_ratios is missing (it says which layers compress their keys)");
  EXPECT_EQ(refusal("compress_ratios", 4), "config.json: compress_ratios must be a list, one entry a layer");
  EXPECT_EQ(
      refusal("compress_ratios", {0, 4, 128, 4, 128, 0}),
      "config.json: compress_ratios has 6 entries, none for MTP layer 0 (at least 7 are needed: 6 layers and 1 MTP "
      "layers)");
  EXPECT_EQ(refusal("compress_ratios", {0, 4, 128}),
            "config.json: compress_ratios has 3 entries, none for layer 3 (at least 7 are needed: 6 layers and 1 MTP "
            "layers)");
  EXPECT_EQ(refusal("compress_ratios", {0, 4, 16, 4, 128, 0, 0}),
            "config.json: compress_ratios[2] = 16 for layer 2, must be 0, 4 or 128");
  EXPECT_EQ(refusal("compress_ratios", {0, 4, 128, 4, 128, 0, 1}),
            "config.json: compress_ratios[6] = 1 for MTP layer 0, must be 0, 4 or 128");
  json j = data("ratios_hf.json");
  j["compress_ratios"] = {0, 4, 4, 4, 128, 0, 0};
  EXPECT_EQ(refusal(j),
            "config.json: compress_ratios[2] = 4 and layer_types[2] = \"heavily_compressed_attention\" contradict each "
            "other");
}

TEST(ModelConfigRefuses, LayerTypesThatDoNotFit) {
  json j = data("ratios_hf.json");
  j["layer_types"][1] = "full_attention";
  EXPECT_EQ(refusal(j),
            "config.json: layer_types[1] = \"full_attention\", must be \"sliding_attention\", "
            "\"compressed_sparse_attention\" "
            "or \"heavily_compressed_attention\"");
  j = data("ratios_hf.json");
  j["layer_types"].erase(5);
  EXPECT_EQ(refusal(j), "config.json: layer_types has 5 entries for 6 layers");
  j = data("ratios_hf.json");
  j["mlp_layer_types"][3] = "hash_moe";
  EXPECT_EQ(refusal(j),
            "config.json: mlp_layer_types[3] = \"hash_moe\" after a layer with \"moe\" (hash layers come first)");
  j = data("ratios_hf.json");
  j["mlp_layer_types"][3] = "dense";
  EXPECT_EQ(refusal(j), "config.json: mlp_layer_types[3] = \"dense\", must be \"hash_moe\" or \"moe\"");
  j = data("ratios_hf.json");
  j["mlp_layer_types"].erase(0);
  EXPECT_EQ(refusal(j), "config.json: mlp_layer_types has 5 entries for 6 layers");
  j = data("ratios_hf.json");
  j["num_hash_layers"] = 3;
  EXPECT_EQ(refusal(j), "config.json: num_hash_layers = 3, but mlp_layer_types has 2 hash layers");
  j = data("ratios_hf.json");
  j["rope_parameters"]["main"] = j["rope_parameters"]["compress"];
  EXPECT_EQ(refusal(j),
            "config.json: rope_parameters.main.rope_type = \"yarn\", must be \"default\" (YaRN is for layers with "
            "compression "
            "only)");
  j = data("ratios_hf.json");
  j["rope_scaling"] = {{"type", "yarn"}};
  EXPECT_EQ(refusal(j),
            "config.json: rope_scaling and rope_parameters are both present (keep the one that the checkpoint was made "
            "with)");
}

TEST(ModelConfigRefuses, KindListOfTheWrongLength) {
  ModelConfig c = preset("tiny");
  c.layer_kinds.pop_back();
  try {
    validate(c, "tiny");
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "tiny: 5 layer kinds for 5 layers and 1 MTP layers");
  }
}

TEST(ModelConfig, LoadsFromFileAndFolder) {
  const std::string folder = testing::temp_path("model_config");
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/config.json") << to_json(preset("tiny")).dump(1);
  EXPECT_EQ(load_model_config(folder), preset("tiny"));
  EXPECT_EQ(load_model_config(folder + "/config.json"), preset("tiny"));
  std::ofstream(folder + "/config.json") << "{\"vocab_size\": ";
  auto message = [](const std::string& path) {
    try {
      load_model_config(path);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(folder).find(folder + "/config.json: not JSON: "), 0u);
  std::filesystem::remove_all(folder);
  EXPECT_EQ(message(folder), folder + ": cannot be read (give a config.json or the folder of a checkpoint)");
}

}  // namespace
}  // namespace plumb
