#include "checkpoint/init.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <numeric>
#include <vector>

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
      return draw(e, t, first, [&](const std::array<uint32_t, 4>& bits) {
        std::array<float, 4> x;
        for (int i = 0; i < 4; ++i) x[i] = (static_cast<float>(bits[i] >> 8) * 0x1p-23f - 1) * bound;
        return x;
      });
    }
    const auto deviation = static_cast<float>(config_.initializer_range);
    draw(e, t, first, [&](const std::array<uint32_t, 4>& bits) { return normals(bits, deviation); });
  }

  // Box-Muller, two pairs.
  static std::array<float, 4> normals(const std::array<uint32_t, 4>& bits, float deviation) {
    std::array<float, 4> x;
    for (int i = 0; i < 4; i += 2) {
      const float u = (static_cast<float>(bits[i]) + 0.5f) * 0x1p-32f;
      const float angle = static_cast<float>(bits[i + 1]) * (2 * std::numbers::pi_v<float> * 0x1p-32f);
      const float radius = deviation * std::sqrt(-2 * std::log(u));
      x[i] = radius * std::cos(angle);
      x[i + 1] = radius * std::sin(angle);
    }
    return x;
  }

  // Elements 4i .. 4i+3 of the tensor come from block i of the tensor's own stream; `first` is a multiple of 4, because
  // bands begin at multiples of 128 rows.
  template <class Values>
  void draw(const InventoryEntry& e, const Tensor& t, int64_t first, Values values) const {
    const uint64_t stream = hash_name(e.name);
    parallel_for((t.numel() + 3) / 4, 1024, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const std::array<float, 4> x = values(philox(seed_, stream, static_cast<uint64_t>(first / 4 + i)));
        std::copy_n(x.begin(), std::min<int64_t>(4, t.numel() - 4 * i), t.f32() + 4 * i);
      }
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
