// The shape and the constants of a DeepSeek-V4 model, under the names of the released config.json.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace plumb {

// What a layer attends to besides its sliding window: nothing, a learned selection of entries that each pool csa_ratio
// tokens (compressed sparse attention), or all entries that each pool hca_ratio tokens (heavily compressed attention).
enum class LayerKind { window, csa, hca };

// How the routed experts are stored: FP4 in groups of 32, FP8 in blocks of 128x128 like all other matrices, or
// everything in BF16. What a file really holds is decided by its tensors; this is what config.json announces and what
// `plumb init` writes.
enum class ExpertDtype { bf16, fp8, fp4 };

// Rotary frequencies of the layers with compression are stretched by YaRN; layers of kind window never are. There is no
// magnitude factor: cos^2 + sin^2 = 1.
struct Yarn {
  double factor = 16;
  int original_max_position_embeddings = 65536;
  double beta_fast = 32;
  double beta_slow = 1;
  bool operator==(const Yarn&) const = default;
};

// Releases from 0731 on bundle a draft model for speculative decoding, whose tensors are called mtp.* too. Present =
// the mtp.* tensors of the checkpoint are this drafter and no multi-token-prediction layers.
struct DSpark {
  int block_size = 0;                 // tokens drafted at once
  int noise_token_id = 0;             // the token that stands for a position to be drafted
  std::vector<int> target_layer_ids;  // layers whose output the drafter reads
  int markov_rank = 0;
  bool operator==(const DSpark&) const = default;
};

struct ModelConfig {
  // Sizes
  int vocab_size = 0;
  int hidden_size = 0;
  int num_hidden_layers = 0;         // backbone layers, MTP not counted
  int num_nextn_predict_layers = 0;  // MTP layers
  int max_position_embeddings = 1048576;

  // Attention. There is one key-value head, whose key is its value.
  int num_attention_heads = 0;
  int head_dim = 0;          // includes the rotary dimensions, which are the last qk_rope_head_dim ones
  int qk_rope_head_dim = 0;  // the indexer rotates the same number of dimensions
  int q_lora_rank = 0;
  int o_groups = 0;     // groups of heads in the output projection
  int o_lora_rank = 0;  // rank of one group
  int sliding_window = 0;
  double rope_theta = 10000;           // layers of kind window
  double compress_rope_theta = 0;      // layers of kind csa and hca; 0 if there are none
  std::optional<Yarn> yarn;            // layers of kind csa and hca
  std::vector<LayerKind> layer_kinds;  // num_hidden_layers + num_nextn_predict_layers entries
  int csa_ratio = 4;                   // tokens that one compressed entry stands for
  int hca_ratio = 128;

  // Indexer of the csa layers
  int index_n_heads = 0;
  int index_head_dim = 0;
  int index_topk = 0;

  // Mixture of experts, the same in all layers; one shared expert
  int moe_intermediate_size = 0;
  int n_routed_experts = 0;
  int num_experts_per_tok = 0;
  int n_shared_experts = 1;
  int num_hash_layers = 0;  // the first layers choose experts by a table indexed by the token
  double routed_scaling_factor = 1;
  double swiglu_limit = 0;  // clamp of gate and up, routed and shared experts alike; 0 = none

  // Hyper-connections
  int hc_mult = 4;  // residual streams
  int hc_sinkhorn_iters = 20;
  double hc_eps = 1e-6;

  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  int bos_token_id = 0;
  int eos_token_id = 1;
  ExpertDtype expert_dtype = ExpertDtype::bf16;
  std::optional<DSpark> dspark;

  // A layer number counts the backbone first: num_hidden_layers + j is MTP layer j.
  int layer_count() const { return num_hidden_layers + num_nextn_predict_layers; }
  bool is_mtp(int layer) const { return layer >= num_hidden_layers; }
  bool is_hash_layer(int layer) const {
    return layer < num_hash_layers;
  }  // num_hash_layers <= num_hidden_layers: never MTP
  LayerKind kind(int layer) const { return layer_kinds.at(layer); }
  int ratio(LayerKind kind) const {
    return kind == LayerKind::window ? 0 : kind == LayerKind::csa ? csa_ratio : hca_ratio;
  }
  int ratio(int layer) const { return ratio(kind(layer)); }
  bool has(LayerKind kind) const;  // some layer, MTP included, is of this kind

  bool operator==(const ModelConfig&) const = default;
};

const char* name(LayerKind kind);
const char* name(ExpertDtype dtype);

// Refuses a configuration that no DeepSeek-V4 model can have: sizes out of range, sizes that do not divide, a kind list
// of the wrong length. `where` is the file (or preset) named in the error.
void validate(const ModelConfig& config, const std::string& where);

// Reads config.json in any of its three spellings and validates it:
// - the released one (compress_ratios, num_hash_layers, rope_scaling),
// - the one that Hugging Face transformers 5 writes (layer_types, mlp_layer_types, compress_rates, rope_parameters),
// - that of the reference inference code (dim, n_layers, ...).
// Keys that do not touch the computation are ignored. A value that asks for something this program does not compute is
// an error.
ModelConfig parse_model_config(const nlohmann::json& json, const std::string& where);

// `path`: a config.json or the folder that holds it.
ModelConfig load_model_config(const std::string& path);

// config.json in the released spelling; parse_model_config gives back an equal configuration.
nlohmann::ordered_json to_json(const ModelConfig& config);

}  // namespace plumb
