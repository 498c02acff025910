// The registry of adapters: named, versioned, immutable snapshots, shared by trainer and engine in memory. Publishing
// swaps a pointer; whoever still uses an older snapshot keeps it alive.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "config/model_config.h"
#include "model/lora.h"

namespace plumb {

struct AdapterSnapshot {
  std::string name;
  int64_t version = 0;  // 1, 2, ... of this name, never used twice
  std::shared_ptr<const Adapter> adapter;
};
using AdapterRef = std::shared_ptr<const AdapterSnapshot>;  // nullptr = the base model, version 0

// Error if an adapter does not belong to a model: names the tensor, the shape that is expected and the one found.
void check_fit(const std::string& name, const Adapter& adapter, const ModelConfig& config);

// All functions may be called from any thread.
class AdapterRegistry {
 public:
  // keep: versions of a name that requests can still ask for, the newest included; at least 1.
  explicit AdapterRegistry(int keep = 2);

  // Checks all adapters, those that are there and those to come, against the model that uses them.
  void require_fit(const ModelConfig& config);

  // Errors: no name, or an adapter that does not fit.
  AdapterRef publish(const std::string& name, std::shared_ptr<const Adapter> adapter);
  // The newest snapshot of a name. Error: unknown name (lists the known ones).
  AdapterRef newest(const std::string& name) const;
  // Error: unknown name, or a version that is not kept (says which are).
  AdapterRef version(const std::string& name, int64_t version) const;
  // The newest snapshot if it is newer than `current`; `current` if not, or if the name was removed since.
  AdapterRef follow(const AdapterRef& current) const;
  // Requests that use the adapter finish with it; new ones cannot name it. false: unknown name.
  bool remove(const std::string& name);
  std::vector<AdapterRef> list() const;  // newest of each name, by name

 private:
  const std::vector<AdapterRef>& find(const std::string& name) const;

  mutable std::mutex mutex_;
  size_t keep_;
  std::optional<ModelConfig> model_;
  std::map<std::string, std::vector<AdapterRef>> snapshots_;  // oldest first, never empty
  std::map<std::string, int64_t> last_version_;               // also of removed names
};

}  // namespace plumb
