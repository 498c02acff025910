// A model on disk, in whichever layout: tensors are asked for by their released name, shapes are checked against the
// configuration once, packed weights are never copied.
#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/inventory.h"
#include "checkpoint/names.h"
#include "checkpoint/safetensors.h"
#include "config/model_config.h"

namespace plumb {

struct Problem {
  std::string where, what, fix;
};

// Which stored tensors are which, and all that does not fit. Reads headers only.
struct TensorMap {
  Layout layout = Layout::released;
  std::vector<InventoryEntry> entries;          // of MTP layers that the files lack altogether: left out
  std::unordered_map<std::string, int> entry;   // released name -> index in entries
  std::unordered_map<std::string, int> stored;  // canonical name (stacks included) -> index in Safetensors::tensors()
  std::vector<std::string> extras;              // see is_extra_mtp
  std::vector<Problem> problems;                // the first max_problems ones
  size_t problem_count = 0;
  static constexpr size_t max_problems = 20;
};
TensorMap map_tensors(const ModelConfig& config, const Safetensors& files);

class Checkpoint {
 public:
  // folder: config.json and safetensors. Errors (the first of all, with the number of the others): a tensor that is
  // missing, unknown, of wrong shape or dtype, without its scale; name of file and tensor, expected and found, the fix.
  static Checkpoint open(const std::string& folder);

  const std::string& path() const { return files_.path(); }
  const ModelConfig& config() const { return config_; }
  Layout layout() const { return map_.layout; }
  const Safetensors& files() const { return files_; }
  const std::vector<InventoryEntry>& entries() const { return map_.entries; }  // what it holds, in forward order
  const std::vector<std::string>& extras() const { return map_.extras; }       // recognised tensors that are not used
  bool has(const std::string& name) const { return map_.entry.contains(name); }
  bool has_mtp(int j) const { return has("mtp." + std::to_string(j) + ".norm.weight"); }

  // The data as stored (see Weight for dtypes and shapes) and the scale as e8m0, for the released name of any
  // inventory entry. Memory is the mapping. Error: a scale is NaN or, stored as FP32, no power of two.
  Weight weight(const std::string& name) const;
  Codec codec(const std::string& name) const;  // format of the data of an entry that is no table
  // A recognised tensor that is not used, as stored.
  Tensor extra(const std::string& name) const;
  // Any entry but a table as FP32 values [shape]; a copy unless it is stored so.
  Tensor floats(const std::string& name) const { return decode(weight(name)); }
  // A table of experts (ffn.gate.tid2eid) as i32 [V, K], each checked to be 0..n_routed_experts-1.
  Tensor table(const std::string& name) const;
  // The pages that weight(name) touched may leave memory.
  void drop(const std::string& name) const;

 private:
  const InventoryEntry& entry(const std::string& name) const;
  const StoredTensor* locate(const std::string& canonical, StackedExpert& stack) const;
  Tensor part(const std::string& canonical, const Shape& shape, const StoredTensor** stored = nullptr) const;
  Tensor scale(const std::string& name, const Shape& shape) const;
  Safetensors files_;
  ModelConfig config_;
  TensorMap map_;
};

// Throws the first problem as an Error; says how many more there are.
[[noreturn]] void fail_with(const std::vector<Problem>& problems, size_t count);

}  // namespace plumb
