// FNV-1a, 64 bits: a hash that is the same on every machine and in every build, for names of random streams, splits of
// data sets and fingerprints. http://www.isthe.com/chongo/tech/comp/fnv
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace plumb {

inline constexpr uint64_t fnv_start = 0xcbf29ce484222325u;

inline uint64_t hash_bytes(const void* data, size_t bytes, uint64_t from = fnv_start) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) from = (from ^ at[i]) * 0x100000001b3u;
  return from;
}
inline uint64_t hash_text(std::string_view text, uint64_t from = fnv_start) {
  return hash_bytes(text.data(), text.size(), from);
}

// Spreads the bits of a hash over the whole range (the finaliser of MurmurHash3): FNV alone leaves the upper bits of
// short inputs uneven.
inline uint64_t mix_bits(uint64_t h) {
  h = (h ^ (h >> 33)) * 0xff51afd7ed558ccdu;
  h = (h ^ (h >> 33)) * 0xc4ceb9fe1a85ec53u;
  return h ^ (h >> 33);
}

}  // namespace plumb
