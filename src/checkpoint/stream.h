// Writes a whole checkpoint from any source of weights, a band of rows at a time: memory does not grow with the model.
// Shared by convert and init.
#pragma once
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/inventory.h"
#include "checkpoint/names.h"
#include "config/model_config.h"

namespace plumb {

// How weights are written. Whatever the choice but keep and fp32: norms, embedding and the like in BF16, the tensors
// that the released files keep in FP32 (Role::precise) in FP32.
enum class TargetFormat {
  keep,     // as the source has them
  fp32,     // all of them in FP32
  bf16,     // matrices in BF16
  fp8,      // all quantised matrices in FP8, as in the -Base releases
  released  // FP8, routed experts FP4
};
TargetFormat parse_target_format(const std::string& name);  // "keep", "fp32", "bf16", "fp8", "released"; UsageError

using Progress = std::function<void(uint64_t bytes_done, uint64_t bytes_total)>;

struct WriteOptions {
  Layout layout = Layout::released;
  TargetFormat format = TargetFormat::keep;
  uint64_t max_shard_bytes = default_shard_bytes;
  Progress progress;  // may be empty
};

// Where the weights come from.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  // Format of an entry that is no table.
  virtual Codec codec(const InventoryEntry& e) const = 0;
  // Rows [begin, end) of it in that format; begin is a multiple of 128. Vectors are asked for as a whole: [0, size).
  virtual Weight rows(const InventoryEntry& e, int64_t begin, int64_t end) const = 0;
  // i64 or i32 [V, K].
  virtual Tensor table(const InventoryEntry& e) const = 0;
  virtual void done(const InventoryEntry&) const {}  // its memory may go
};

struct WriteReport {
  uint64_t tensors = 0, bytes = 0;
};

// Writes config.json and the weights into `folder`, which exists. `extras` are copied under their own names.
WriteReport stream_checkpoint(const std::string& folder, const ModelConfig& config,
                              const std::vector<InventoryEntry>& entries, const WeightSource& source,
                              const std::vector<std::pair<std::string, Tensor>>& extras, const WriteOptions& options);

}  // namespace plumb
