// The list of all tensors that a model of a given configuration consists of: spec/model.md 2.1.
#pragma once
#include <string>
#include <vector>

#include "checkpoint/codecs.h"
#include "checkpoint/safetensors.h"
#include "config/model_config.h"

namespace plumb {

enum class Role {
  linear,   // quantised matrix: FP8 in the released files
  expert,   // matrix of a routed expert: FP4 (FP8 in the -Base releases)
  dense,    // BF16: embedding, head, norms, router, compressor matrices
  precise,  // FP32: hyper-connections, sinks, position bias of the compressor, router bias
  table     // I64: experts of each token in the hash layers
};

struct InventoryEntry {
  std::string name;  // released name of the data: "layers.0.attn.wq_a.weight"
  Shape shape;       // of the values: [out, in], also for packed formats
  Role role = Role::dense;
  int layer = -1;  // backbone layers first, num_hidden_layers + j = MTP layer j; -1 outside of the layers
};

// In the order of the forward pass; MTP layers last. MTP layers of a configuration with a DSpark drafter are not listed
// (their mtp.* tensors are the drafter's).
std::vector<InventoryEntry> inventory(const ModelConfig& config);

// The format that the released files of this configuration have for an entry. Not for tables.
Codec released_codec(const ModelConfig& config, Role role);

// "layers.0.attn.wq_a.weight" -> "layers.0.attn.wq_a.scale".
std::string scale_name(const std::string& data_name);

// Every stored tensor of the released layout, scales after their data.
std::vector<TensorSpec> released_tensors(const ModelConfig& config);

// Trained values, unpacked (expert tables do not count). active: what one token multiplies with, the input embedding
// left out; of the routed experts num_experts_per_tok.
struct ParameterCounts {
  int64_t backbone = 0, active = 0, mtp = 0;
};
ParameterCounts count_parameters(const ModelConfig& config);

// Tensors under mtp. that belong to no MTP layer of the configuration: layers beyond num_nextn_predict_layers, and the
// DSpark drafter of the 0731 and later releases (main_proj, confidence_head, ...). Recognised, reported, not used.
bool is_extra_mtp(const std::string& canonical, const ModelConfig& config);

}  // namespace plumb
