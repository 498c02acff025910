// Helpers of the tests of src/checkpoint: temporary folders, a small model, its random checkpoint, messages of errors.
#pragma once
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "base/philox.h"
#include "checkpoint/codecs.h"
#include "checkpoint/inventory.h"
#include "checkpoint/safetensors.h"
#include "config/model_config.h"

namespace plumb::testing_checkpoint {
namespace fs = std::filesystem;

class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (fs::temp_directory_path() / "plumb-checkpoint-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~TempFolder() { fs::remove_all(folder_); }
  std::string operator/(const std::string& name) const { return (folder_ / name).string(); }
  std::string path() const { return folder_.string(); }
  int count() const {
    return static_cast<int>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

 private:
  fs::path folder_;
};

inline std::string message(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

inline void expect_error(const std::function<void()>& f, const std::vector<std::string>& parts) {
  const std::string text = message(f);
  for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " not in: " << text;
}

// All kinds of layers, nothing a multiple of 128: every block at an end is partial.
inline ModelConfig small_config(ExpertDtype experts = ExpertDtype::fp4) {
  ModelConfig c;
  c.vocab_size = 40;
  c.hidden_size = 160;
  c.num_hidden_layers = 3;
  c.num_nextn_predict_layers = 1;
  c.num_attention_heads = 6;
  c.head_dim = 24;
  c.qk_rope_head_dim = 8;
  c.q_lora_rank = 20;
  c.o_groups = 3;
  c.o_lora_rank = 12;
  c.sliding_window = 8;
  c.compress_rope_theta = 160000;
  c.layer_kinds = {LayerKind::window, LayerKind::csa, LayerKind::hca, LayerKind::window};
  c.index_n_heads = 4;
  c.index_head_dim = 16;
  c.index_topk = 4;
  c.moe_intermediate_size = 32;
  c.n_routed_experts = 5;
  c.num_experts_per_tok = 2;
  c.num_hash_layers = 1;
  c.expert_dtype = experts;
  validate(c, "small");
  return c;
}

// A tensor of the spec filled with valid random codes (no NaN scales, no NaN values).
inline Tensor random_tensor(const TensorSpec& spec, uint64_t seed) {
  Tensor t = Tensor::empty(spec.shape, spec.dtype);
  Random random(seed, std::hash<std::string>{}(spec.name));
  for (int64_t i = 0; i < t.numel(); ++i) switch (spec.dtype) {
      case DType::f32:
        t.f32()[i] = random.normal();
        break;
      case DType::bf16:
        t.ptr<uint16_t>()[i] = static_cast<uint16_t>(0x3f00 + random.below(0x100) + (random.below(2) << 15));
        break;
      case DType::i64:
        t.ptr<int64_t>()[i] = (i + i / t.size(-1)) % 5;  // distinct experts in each row of two
        break;
      case DType::f8_e8m0:
        t.ptr<uint8_t>()[i] = static_cast<uint8_t>(110 + random.below(20));
        break;
      default: {
        const auto code = static_cast<uint8_t>(random.below(256));
        t.ptr<uint8_t>()[i] = spec.dtype == DType::f8_e4m3 && (code & 0x7f) == 0x7f ? 0x40 : code;
      }
    }
  return t;
}

using Tensors = std::vector<std::pair<std::string, Tensor>>;
inline Tensors random_tensors(const ModelConfig& config, uint64_t seed = 1) {
  Tensors all;
  for (const TensorSpec& s : released_tensors(config)) all.emplace_back(s.name, random_tensor(s, seed));
  return all;
}

inline void write_checkpoint(const std::string& folder, const ModelConfig& config, const Tensors& tensors) {
  fs::create_directories(folder);
  write_text(folder + "/config.json", to_json(config).dump(1));
  write_safetensors(folder + "/model.safetensors", tensors);
}

inline bool same(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() && std::memcmp(a.raw(), b.raw(), a.bytes()) == 0;
}

}  // namespace plumb::testing_checkpoint
