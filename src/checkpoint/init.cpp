#include "checkpoint/init.h"

#include <cmath>
#include <functional>
#include <numeric>

#include "base/files.h"
#include "base/parallel.h"
#include "base/philox.h"

namespace plumb {
namespace {

// FNV-1a: the same on every machine, unlike std::hash.
uint64_t hash_name(const std::string& name) {
  uint64_t h = 0xcbf29ce484222325u;
  for (const char c : name) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return h;
}

class RandomSource : public WeightSource {
 public:
  RandomSource(const ModelConfig& config, uint64_t seed, bool fp32) : config_(config), seed_(seed), fp32_(fp32) {}

  Codec codec(const InventoryEntry& e) const override { return fp32_ ? Codec::f32 : released_codec(config_, e.role); }

  Weight rows(const InventoryEntry& e, int64_t begin, int64_t end) const override {
    Shape shape = e.shape;
    shape[0] = end - begin;
    const Tensor t = Tensor::empty(shape);
    fill(e, t, begin * (numel_of(e.shape) / e.shape[0]));
    return encode(t, codec(e), e.name);
  }

  // A partial shuffle for each token.
  Tensor table(const InventoryEntry& e) const override {
    const int64_t tokens = e.shape[0], chosen = e.shape[1];
    const Tensor t = Tensor::empty(e.shape, DType::i64);
    std::vector<int64_t> experts(config_.n_routed_experts);
    for (int64_t token = 0; token < tokens; ++token) {
      Random random(seed_, hash_name(e.name), static_cast<uint64_t>(token * chosen));
      std::iota(experts.begin(), experts.end(), 0);
      for (int64_t k = 0; k < chosen; ++k) {
        std::swap(experts[k], experts[k + random.below(static_cast<uint32_t>(experts.size() - k))]);
        t.ptr<int64_t>()[token * chosen + k] = experts[k];
      }
    }
    return t;
  }

 private:
  void fill(const InventoryEntry& e, const Tensor& t, int64_t first) const {
    const auto leaf = [&](const char* suffix) { return e.name.ends_with(suffix); };
    if (e.role == Role::dense && e.shape.size() == 1) return Tensor(t).fill(1);  // norms
    if (e.role == Role::precise && leaf("_scale")) return Tensor(t).fill(0.01f);
    if (e.role == Role::precise && e.shape.size() == 1) return Tensor(t).zero();  // sinks, router bias, base
    if (e.role == Role::precise && leaf("_fn")) {
      const float bound = std::sqrt(6.0f / static_cast<float>(e.shape[0] + e.shape[1]));
      return draw(e, t, first, 1, [&](Random& r) { return (2 * r.uniform() - 1) * bound; });
    }
    const auto deviation = static_cast<float>(config_.initializer_range);
    draw(e, t, first, 2, [&](Random& r) { return r.normal() * deviation; });
  }

  // Element i of the tensor uses numbers [i * per_value, (i + 1) * per_value) of the tensor's own stream.
  template <class Draw>
  void draw(const InventoryEntry& e, const Tensor& t, int64_t first, int64_t per_value, Draw value) const {
    parallel_for(t.numel(), 4096, [&](int64_t begin, int64_t end) {
      Random random(seed_, hash_name(e.name), static_cast<uint64_t>((first + begin) * per_value));
      for (int64_t i = begin; i < end; ++i) t.f32()[i] = value(random);
    });
  }

  const ModelConfig& config_;
  uint64_t seed_;
  bool fp32_;
};
}  // namespace

WriteReport init_checkpoint(const ModelConfig& config, const std::string& out, uint64_t seed,
                            const WriteOptions& options) {
  validate(config, "configuration");
  FolderWriter folder(out);
  const RandomSource source(config, seed, options.format != TargetFormat::keep);
  const WriteReport report = stream_checkpoint(folder.partial(), config, inventory(config), source, {}, options);
  folder.commit();
  return report;
}

}  // namespace plumb
