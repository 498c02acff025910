// Rows by number against the obvious loops.
#include "ops/rows.h"

#include <gtest/gtest.h>

#include "attention_fixtures.h"
#include "base/error.h"
#include "base/float_formats.h"

namespace plumb::ops {
namespace {

Tensor numbers(const std::vector<int>& v) { return Tensor::of(v); }

TEST(Rows, EmbeddingRowsAreRepeatedForEachStream) {
  const Tensor values = random_tensor({5, 6}, 1);
  Tensor packed = Tensor::empty({5, 6}, DType::bf16);
  for (int i = 0; i < 30; ++i) packed.ptr<uint16_t>()[i] = float_to_bf16(values.f32()[i]);
  const std::vector<int> token = {4, 0, 4};
  const Tensor exact = embed({values, {}, WeightFormat::f32, 5, 6}, numbers(token), 2);
  const Tensor rounded = embed({packed, {}, WeightFormat::bf16, 5, 6}, numbers(token), 2);
  for (int r = 0; r < 3; ++r)
    for (int c = 0; c < 2; ++c)
      for (int i = 0; i < 6; ++i) {
        EXPECT_EQ(exact.f32()[(r * 2 + c) * 6 + i], values.f32()[token[r] * 6 + i]);
        EXPECT_EQ(rounded.f32()[(r * 2 + c) * 6 + i], round_bf16(values.f32()[token[r] * 6 + i]));
      }
  EXPECT_THROW(embed({values, {}, WeightFormat::f32, 5, 6}, numbers({5}), 1), Error);
}

// <embed(table), d> differentiated by the table: each token's row collects the gradients of all its copies.
TEST(Rows, EmbeddingGradientIsTheTransposedLookup) {
  const std::vector<int> token = {1, 3, 1};
  const Tensor d = random_tensor({3, 2, 4}, 2), d_table = Tensor::full({4, 4}, 1);
  embed_backward(d, numbers(token), d_table);
  for (int v = 0; v < 4; ++v)
    for (int i = 0; i < 4; ++i) {
      double want = 1;
      for (int r = 0; r < 3; ++r)
        for (int c = 0; c < 2 && token[r] == v; ++c) want += d.f32()[(r * 2 + c) * 4 + i];
      EXPECT_NEAR(d_table.f32()[v * 4 + i], want, 1e-6);  // a few FP32 additions of numbers of size 1
    }
}

TEST(Rows, GatherAndScatterAreTransposed) {
  const Tensor x = random_tensor({5, 2, 3}, 3), dy = random_tensor({4, 2, 3}, 4);
  const std::vector<int> row = {4, 0, 0, 2};
  const Tensor y = gather_rows(x, numbers(row));
  EXPECT_EQ(y.shape(), (Shape{4, 2, 3}));
  const Tensor dx = Tensor::zeros({5, 2, 3});
  scatter_add_rows(dy, numbers(row), dx);
  double forward = 0, backward = 0;
  for (int64_t i = 0; i < y.numel(); ++i) forward += double{y.f32()[i]} * dy.f32()[i];
  for (int64_t i = 0; i < x.numel(); ++i) backward += double{x.f32()[i]} * dx.f32()[i];
  EXPECT_NEAR(forward, backward, 1e-5);  // FP32 sums of 24 products of size 1
}

TEST(Rows, CopiesGoToTheirSlots) {
  const Tensor from = fill_rows(3, 2, 1), to = Tensor::zeros({6, 2});
  copy_rows(from, {{}, numbers({2, 0, 1}), 3}, to);
  for (int r = 0; r < 3; ++r)
    for (int i = 0; i < 2; ++i) EXPECT_EQ(to.f32()[(3 + (r + 2) % 3) * 2 + i], from.f32()[r * 2 + i]);
  copy_rows(from, {numbers({1}), numbers({0})}, to);
  EXPECT_EQ(to.f32()[0], from.f32()[2]);
  copy_rows(from.rows(0, 0), {{}, {}, 6}, to);  // nothing to copy
  EXPECT_THROW(copy_rows(from, {{}, numbers({0, 1, 6})}, to), Error);
  EXPECT_THROW(copy_rows(from, {numbers({3}), {}}, to), Error);
}

TEST(Rows, CopiesOfARowAreSummedAndMet) {
  const Tensor x = random_tensor({2, 3, 4}, 5), e = random_tensor({2, 4}, 6);
  const Tensor sum = sum_copies(x), both = add_to_copies(e, x, {Numerics::bf16, Point::mtp_sum});
  for (int r = 0; r < 2; ++r)
    for (int i = 0; i < 4; ++i) {
      float want = 0;
      for (int c = 0; c < 3; ++c) {
        want += x.f32()[(r * 3 + c) * 4 + i];
        EXPECT_EQ(both.f32()[(r * 3 + c) * 4 + i], round_bf16(x.f32()[(r * 3 + c) * 4 + i] + e.f32()[r * 4 + i]));
      }
      EXPECT_EQ(sum.f32()[r * 4 + i], want);
    }
}

}  // namespace
}  // namespace plumb::ops
