#include "base/hash.h"

#include <gtest/gtest.h>

#include <array>

namespace plumb {
namespace {

TEST(Hash, Fnv1a) {  // test vectors of the reference implementation (isthe.com/chongo/src/fnv/test_fnv.c)
  EXPECT_EQ(hash_text(""), 0xcbf29ce484222325u);
  EXPECT_EQ(hash_text("a"), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(hash_text("foobar"), 0x85944171f73967e8u);
  EXPECT_EQ(hash_text("bar", hash_text("foo")), hash_text("foobar"));
}

TEST(Hash, MixedBitsAreEven) {
  // Each bit is 1 for about half of 4,096 neighbouring inputs: 2048 +- 5 standard deviations of 32.
  std::array<int, 64> ones{};
  for (uint64_t i = 0; i < 4096; ++i)
    for (int bit = 0; bit < 64; ++bit) ones[bit] += mix_bits(i) >> bit & 1;
  for (int bit = 0; bit < 64; ++bit) EXPECT_NEAR(ones[bit], 2048, 160) << bit;
}

}  // namespace
}  // namespace plumb
