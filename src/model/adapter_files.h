// Adapters between files (any layout of checkpoint/adapter.h) and the form that the forward pass uses.
#pragma once
#include <memory>
#include <string>

#include "checkpoint/adapter.h"
#include "config/model_config.h"
#include "model/lora.h"

namespace plumb {

// Values become FP32. A routed expert whose gate and up have different A matrices gets both, one above the other, at
// twice the rank.
std::shared_ptr<Adapter> adapter_from(const StoredAdapter& stored, const ModelConfig& config);
StoredAdapter stored_from(const Adapter& adapter, const ModelConfig& config, const std::string& base_model);

// Reads the folder of an adapter in any layout. Errors: those of read_adapter.
std::shared_ptr<const Adapter> load_adapter(const std::string& folder, const ModelConfig& config);

}  // namespace plumb
