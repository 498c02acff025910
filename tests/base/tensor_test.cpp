#include "base/tensor.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/parallel.h"
#include "base/philox.h"

namespace plumb {
namespace {

TEST(Tensor, RowsShareMemoryAndViewKeepsElements) {
  Tensor t = Tensor::of<float>({0, 1, 2, 3, 4, 5}, {3, 2});
  Tensor r = t.rows(1, 3);
  r.f32()[0] = 7;
  EXPECT_EQ(t.f32()[2], 7);
  EXPECT_EQ(r.view({4}).f32()[3], 5);
  EXPECT_EQ(t.clone().rows(0, 1).shape(), (Shape{1, 2}));
}

TEST(Tensor, EmptyTensorIsDefined) {
  EXPECT_FALSE(Tensor().defined());
  EXPECT_TRUE(Tensor::empty({0, 4}).defined());
}

TEST(Tensor, WrongTypeAndWrongViewThrow) {
  Tensor t = Tensor::zeros({2, 2}, DType::i64);
  EXPECT_THROW(t.f32(), Error);
  EXPECT_THROW(t.view({3}), Error);
  EXPECT_THROW(t.rows(1, 3), Error);
}

TEST(Parallel, CoversEveryIndexOnceAndPassesErrorsOn) {
  for (int threads : {1, 2, 5}) {
    set_thread_count(threads);
    std::vector<int> hits(10007);
    parallel_for(hits.size(), 3, [&](int64_t b, int64_t e) {
      for (int64_t i = b; i < e; ++i) ++hits[i];
    });
    for (int h : hits) ASSERT_EQ(h, 1);
    EXPECT_THROW(parallel_for(100, 1, [](int64_t, int64_t) { fail("here", "boom"); }), Error);
  }
}

// Known answers of the Random123 distribution for Philox4x32-10: all-zero and all-one inputs.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox(0, 0, 0), (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox(~0ull, ~0ull, ~0ull), (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

TEST(Philox, StreamContinuesFromPosition) {
  Random a(3, 5);
  for (int i = 0; i < 6; ++i) a.next_u32();
  Random b(3, 5, 6);
  for (int i = 0; i < 9; ++i) EXPECT_EQ(a.next_u32(), b.next_u32());
}

}  // namespace
}  // namespace plumb
