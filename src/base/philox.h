// Counter-based random numbers (Philox4x32-10, Salmon et al. 2011): the value depends on (key, counter) alone, so that
// a sample does not depend on what else is in the batch and a resumed run draws what the uninterrupted one would have
// drawn.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace plumb {

inline std::array<uint32_t, 4> philox(uint64_t key, uint64_t counter_high, uint64_t counter_low) {
  std::array<uint32_t, 4> c = {static_cast<uint32_t>(counter_low), static_cast<uint32_t>(counter_low >> 32),
                               static_cast<uint32_t>(counter_high), static_cast<uint32_t>(counter_high >> 32)};
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c[0], p1 = uint64_t{0xCD9E8D57} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += 0x9E3779B9, k1 += 0xBB67AE85;
  }
  return c;
}

// A stream of numbers for one purpose: key = seed, high counter half = purpose (a hash of a name, a request id).
class Random {
 public:
  explicit Random(uint64_t seed, uint64_t stream = 0, uint64_t position = 0)
      : seed_(seed), stream_(stream), position_(position) {}
  uint32_t next_u32() {
    if (position_ % 4 == 0 || !filled_) block_ = philox(seed_, stream_, position_ / 4), filled_ = true;
    return block_[position_++ % 4];
  }
  float uniform() { return static_cast<float>(next_u32() >> 8) * 0x1p-24f; }  // [0, 1)
  float normal() {                                                            // mean 0, variance 1 (Box-Muller)
    const double u = (next_u32() + 0.5) * 0x1p-32, v = next_u32() * 0x1p-32;
    return static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v));
  }
  uint32_t below(uint32_t n) { return static_cast<uint32_t>((uint64_t{next_u32()} * n) >> 32); }  // [0, n)
  uint64_t position() const { return position_; }

 private:
  uint64_t seed_, stream_, position_;
  std::array<uint32_t, 4> block_{};
  bool filled_ = false;
};

}  // namespace plumb
