#include "config/model_config.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace plumb {
namespace {

// One whole-number field with its smallest legal value.
struct Minimum {
  const char* name;
  int ModelConfig::*field;
  int least;
};

constexpr Minimum kMinimums[] = {
    {"vocab_size", &ModelConfig::vocab_size, 1},
    {"hidden_size", &ModelConfig::hidden_size, 1},
    {"num_hidden_layers", &ModelConfig::num_hidden_layers, 1},
    {"num_nextn_predict_layers", &ModelConfig::num_nextn_predict_layers, 0},
    {"max_position_embeddings", &ModelConfig::max_position_embeddings, 1},
    {"num_attention_heads", &ModelConfig::num_attention_heads, 1},
    {"head_dim", &ModelConfig::head_dim, 1},
    {"qk_rope_head_dim", &ModelConfig::qk_rope_head_dim, 2},
    {"q_lora_rank", &ModelConfig::q_lora_rank, 1},
    {"o_groups", &ModelConfig::o_groups, 1},
    {"o_lora_rank", &ModelConfig::o_lora_rank, 1},
    {"sliding_window", &ModelConfig::sliding_window, 1},
    {"moe_intermediate_size", &ModelConfig::moe_intermediate_size, 1},
    {"n_routed_experts", &ModelConfig::n_routed_experts, 1},
    {"num_experts_per_tok", &ModelConfig::num_experts_per_tok, 1},
    {"num_hash_layers", &ModelConfig::num_hash_layers, 0},
    {"hc_mult", &ModelConfig::hc_mult, 1},
    {"hc_sinkhorn_iters", &ModelConfig::hc_sinkhorn_iters, 1},
};

constexpr Minimum kIndexerMinimums[] = {
    {"index_n_heads", &ModelConfig::index_n_heads, 1},
    {"index_head_dim", &ModelConfig::index_head_dim, 2},
    {"index_topk", &ModelConfig::index_topk, 1},
};

void check_minimum(const ModelConfig& c, const Minimum& m, const std::string& where) {
  if (c.*m.field < m.least) fail(where, fmt::format("{} = {}, must be at least {}", m.name, c.*m.field, m.least));
}

void check_attention(const ModelConfig& c, const std::string& where) {
  if (c.qk_rope_head_dim % 2 != 0)
    fail(where, fmt::format("qk_rope_head_dim = {} is odd", c.qk_rope_head_dim), "rotation turns pairs of dimensions");
  if (c.qk_rope_head_dim > c.head_dim)
    fail(where, fmt::format("qk_rope_head_dim = {} is greater than head_dim = {}", c.qk_rope_head_dim, c.head_dim));
  const int64_t heads_width = int64_t{c.num_attention_heads} * c.head_dim;
  if (heads_width % c.o_groups != 0)
    fail(where,
         fmt::format("num_attention_heads * head_dim = {} is not divisible by o_groups = {}", heads_width, c.o_groups));
}

void check_compression(const ModelConfig& c, const std::string& where) {
  const bool csa = c.has(LayerKind::csa), hca = c.has(LayerKind::hca);
  if (csa && c.csa_ratio < 2) fail(where, fmt::format("csa_ratio = {}, must be at least 2", c.csa_ratio));
  if (hca && c.hca_ratio < 2) fail(where, fmt::format("hca_ratio = {}, must be at least 2", c.hca_ratio));
  if (csa || hca) {
    if (!(c.compress_rope_theta > 1))
      fail(where, "compress_rope_theta is missing, but there are layers with compression",
           "the released models have 160000; 40000 is the unset default of other programs");
    if (c.yarn && !(c.yarn->factor >= 1 && c.yarn->original_max_position_embeddings >= 1 && c.yarn->beta_slow > 0 &&
                    c.yarn->beta_fast > c.yarn->beta_slow))
      fail(where,
           fmt::format("YaRN factor {}, original_max_position_embeddings {}, beta_fast {}, beta_slow {}",
                       c.yarn->factor, c.yarn->original_max_position_embeddings, c.yarn->beta_fast, c.yarn->beta_slow),
           "factor and length must be at least 1 and beta_fast > beta_slow > 0");
  }
  if (!csa) return;
  for (const Minimum& m : kIndexerMinimums) check_minimum(c, m, where);
  if ((c.index_head_dim & (c.index_head_dim - 1)) != 0)
    fail(where, fmt::format("index_head_dim = {} is not a power of two", c.index_head_dim),
         "the indexer rotates its heads by a Hadamard matrix");
  if (c.qk_rope_head_dim > c.index_head_dim)
    fail(where,
         fmt::format("qk_rope_head_dim = {} is greater than index_head_dim = {}", c.qk_rope_head_dim, c.index_head_dim),
         "the indexer rotates as many dimensions as the attention");
}

void check_experts(const ModelConfig& c, const std::string& where) {
  if (c.n_shared_experts != 1) fail(where, fmt::format("n_shared_experts = {}, must be 1", c.n_shared_experts));
  if (c.num_experts_per_tok > c.n_routed_experts)
    fail(where, fmt::format("num_experts_per_tok = {} is greater than n_routed_experts = {}", c.num_experts_per_tok,
                            c.n_routed_experts));
  if (c.num_hash_layers > c.num_hidden_layers)
    fail(where, fmt::format("num_hash_layers = {} is greater than num_hidden_layers = {}", c.num_hash_layers,
                            c.num_hidden_layers));
  if (!(c.swiglu_limit >= 0))
    fail(where, fmt::format("swiglu_limit = {}, must be positive, or 0 for no clamp", c.swiglu_limit));
  if (c.expert_dtype == ExpertDtype::fp4)
    for (auto [label, size] :
         {std::pair{"hidden_size", c.hidden_size}, {"moe_intermediate_size", c.moe_intermediate_size}})
      if (size % 32 != 0)
        fail(where, fmt::format("{} = {} is not a multiple of 32", label, size),
             "FP4 experts have one scale for 32 values");
}

void check_constants(const ModelConfig& c, const std::string& where) {
  for (auto [label, value] : {std::pair{"rope_theta", c.rope_theta},
                              {"rms_norm_eps", c.rms_norm_eps},
                              {"routed_scaling_factor", c.routed_scaling_factor},
                              {"hc_eps", c.hc_eps}})
    if (!(value > 0)) fail(where, fmt::format("{} = {}, must be greater than 0", label, value));
  for (auto [label, id] : {std::pair{"bos_token_id", c.bos_token_id}, {"eos_token_id", c.eos_token_id}})
    if (id < 0 || id >= c.vocab_size)
      fail(where, fmt::format("{} = {} is outside of the vocabulary of {}", label, id, c.vocab_size));
}

}  // namespace

bool ModelConfig::has(LayerKind kind) const {
  return std::find(layer_kinds.begin(), layer_kinds.end(), kind) != layer_kinds.end();
}

const char* name(LayerKind kind) {
  return kind == LayerKind::window ? "window" : kind == LayerKind::csa ? "csa" : "hca";
}

const char* name(ExpertDtype dtype) {
  return dtype == ExpertDtype::bf16 ? "bf16" : dtype == ExpertDtype::fp8 ? "fp8" : "fp4";
}

void validate(const ModelConfig& c, const std::string& where) {
  if (c.num_nextn_predict_layers > c.num_hidden_layers && c.num_hidden_layers > 0)
    fail(where, fmt::format("num_nextn_predict_layers = {} is greater than num_hidden_layers = {}",
                            c.num_nextn_predict_layers, c.num_hidden_layers));
  for (const Minimum& m : kMinimums) check_minimum(c, m, where);
  if (static_cast<int>(c.layer_kinds.size()) != c.layer_count())
    fail(where, fmt::format("{} layer kinds for {} layers and {} MTP layers", c.layer_kinds.size(), c.num_hidden_layers,
                            c.num_nextn_predict_layers));
  check_attention(c, where);
  check_compression(c, where);
  check_experts(c, where);
  check_constants(c, where);
}

}  // namespace plumb
