#include "rollout/adapters.h"

#include <algorithm>

#include "base/error.h"

namespace plumb {

AdapterRegistry::AdapterRegistry(int keep) : keep_(static_cast<size_t>(std::max(1, keep))) {}

AdapterRef AdapterRegistry::publish(const std::string& name, std::shared_ptr<const Adapter> adapter) {
  if (name.empty()) fail("adapter", "has no name", "give it one");
  PLUMB_CHECK(adapter != nullptr, name);
  const std::lock_guard lock(mutex_);
  auto& versions = snapshots_[name];
  versions.push_back(
      std::make_shared<const AdapterSnapshot>(AdapterSnapshot{name, ++last_version_[name], std::move(adapter)}));
  if (versions.size() > keep_) versions.erase(versions.begin());
  return versions.back();
}

const std::vector<AdapterRef>& AdapterRegistry::find(const std::string& name) const {
  const auto it = snapshots_.find(name);
  if (it != snapshots_.end()) return it->second;
  std::string known;
  for (const auto& [other, versions] : snapshots_) known += (known.empty() ? "" : ", ") + other;
  fail("adapter", "'" + name + "' is not loaded", known.empty() ? "none is; load it first" : "loaded: " + known);
}

AdapterRef AdapterRegistry::newest(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return find(name).back();
}

AdapterRef AdapterRegistry::version(const std::string& name, int64_t version) const {
  const std::lock_guard lock(mutex_);
  std::string kept;
  for (const AdapterRef& a : find(name)) {
    if (a->version == version) return a;
    kept += (kept.empty() ? "" : ", ") + std::to_string(a->version);
  }
  fail("adapter", "version " + std::to_string(version) + " of '" + name + "' is not kept", "kept: " + kept);
}

AdapterRef AdapterRegistry::follow(const AdapterRef& current) const {
  const std::lock_guard lock(mutex_);
  const auto it = snapshots_.find(current->name);
  return it != snapshots_.end() && it->second.back()->version > current->version ? it->second.back() : current;
}

bool AdapterRegistry::remove(const std::string& name) {
  const std::lock_guard lock(mutex_);
  return snapshots_.erase(name) > 0;
}

std::vector<AdapterRef> AdapterRegistry::list() const {
  const std::lock_guard lock(mutex_);
  std::vector<AdapterRef> newest;
  for (const auto& [name, versions] : snapshots_) newest.push_back(versions.back());
  return newest;
}

}  // namespace plumb
