#include "ops/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/float_formats.h"
#include "ops/attention_fixtures.h"
#include "ops/indexer.h"
#include "ops/matmul.h"

namespace plumb::ops {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

KeyLists lists_of(const std::vector<std::vector<int>>& rows) {
  KeyLists lists;
  for (const auto& r : rows) {
    lists.row.insert(lists.row.end(), r.begin(), r.end());
    lists.begin.push_back(static_cast<int>(lists.row.size()));
  }
  return lists;
}

struct Problem {
  Tensor q, keys, sink, d_o;
  KeyLists lists;
};

// Lists of different lengths: none, short, around the block of 64, long; with duplicates.
Problem make_problem(int rows, int heads, int width, int keys, uint64_t seed) {
  Random random(seed, 9);
  std::vector<std::vector<int>> lists(rows);
  const int sizes[] = {5, 0, 64, 1, 65, 63, 128, 150, 3, 70};
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < sizes[r % 10]; ++i) lists[r].push_back(static_cast<int>(random.below(keys)));
  return {random_tensor({rows, heads, width}, seed + 1), random_tensor({keys, width}, seed + 2),
          random_tensor({heads}, seed + 3), random_tensor({rows, heads, width}, seed + 4), lists_of(lists)};
}

struct Reference {
  std::vector<double> o, lse;
};

// Spec 3.5 as it is written, FP64, one softmax over all keys and the sink.
Reference reference(const std::vector<double>& q, const std::vector<double>& keys, const std::vector<double>& sink,
                    const KeyLists& lists, int heads, int width) {
  Reference out;
  for (int r = 0; r < lists.size(); ++r) {
    for (int h = 0; h < heads; ++h) {
      std::vector<double> score;
      double top = sink[h];
      for (int i = lists.begin[r]; i < lists.begin[r + 1]; ++i) {
        double s = 0;
        for (int d = 0; d < width; ++d) s += q[(r * heads + h) * width + d] * keys[lists.row[i] * width + d];
        score.push_back(s / std::sqrt(width));
        top = std::max(top, score.back());
      }
      double total = std::exp(sink[h] - top);
      for (double s : score) total += std::exp(s - top);
      out.lse.push_back(top + std::log(total));
      for (int d = 0; d < width; ++d) {
        double o = 0;
        for (size_t i = 0; i < score.size(); ++i)
          o += std::exp(score[i] - top) / total * keys[lists.row[lists.begin[r] + i] * width + d];
        out.o.push_back(o);
      }
    }
  }
  return out;
}
Reference reference(const Problem& p) {
  return reference(doubles(p.q), doubles(p.keys), doubles(p.sink), p.lists, static_cast<int>(p.q.size(1)),
                   static_cast<int>(p.q.size(2)));
}

struct Gradients {
  Tensor dq, d_keys, d_sink;
};
Gradients backward(const Problem& p) {
  const AttentionResult f = sparse_attention(p.q, p.keys, p.lists, p.sink, Numerics::fp32);
  Gradients g{{}, Tensor::zeros(p.keys.shape()), Tensor::zeros(p.sink.shape())};
  g.dq = sparse_attention_backward(p.d_o, p.q, p.keys, p.lists, p.sink, f, g.d_keys, g.d_sink);
  return g;
}

void expect_near(const float* got, const std::vector<double>& want) {  // printed with 6 digits
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1.1e-6) << i;
}

TEST(Attention, GoldenA2) {
  Problem p{fill_rows(1, 4, 2).view({1, 1, 4}), fill_rows(5, 4, 10), Tensor::of<float>({0.3f}),
            fill_rows(1, 4, 50).view({1, 1, 4}), lists_of({{0, 1, 2, 3, 4}})};
  const AttentionResult f = sparse_attention(p.q, p.keys, p.lists, p.sink, Numerics::fp32);
  expect_near(f.o.f32(), {-.272135, -.381985, -.202756, .129914});
  EXPECT_NEAR(std::exp(0.3 - f.lse.f32()[0]), .179562, 1.1e-6);
  const Gradients g = backward(p);
  expect_near(g.dq.f32(), {-.029734, -.225788, -.250970, -.086223});
  expect_near(g.d_sink.f32(), {-.096344});
  expect_near(g.d_keys.f32(), {-.041951, -.202341, -.209604, -.058242});
}

// FP32 sums of at most 150 products: relative error of some 1e-6.
TEST(Attention, ForwardEqualsFp64ForOddAndEvenShapes) {
  for (auto [heads, width] : {std::pair{1, 4}, {2, 8}, {3, 20}, {5, 24}, {8, 32}, {7, 128}}) {
    const Problem p = make_problem(20, heads, width, 90, heads * 100 + width);
    const AttentionResult f = sparse_attention(p.q, p.keys, p.lists, p.sink, Numerics::fp32);
    const Reference r = reference(p);
    EXPECT_LT(worst(f.o, r.o), 2e-6) << heads << " x " << width;
    EXPECT_LT(worst(f.lse, r.lse), 2e-6);
  }
}

TEST(Attention, BackwardEqualsFiniteDifferences) {
  for (auto [heads, width] : {std::pair{2, 4}, {3, 6}}) {
    Problem p = make_problem(6, heads, width, 12, 77 + heads);
    std::vector<double> all = doubles(p.q), keys = doubles(p.keys), sink = doubles(p.sink);
    const size_t nq = all.size(), nk = keys.size();
    all.insert(all.end(), keys.begin(), keys.end());
    all.insert(all.end(), sink.begin(), sink.end());
    const auto loss = [&](const std::vector<double>& v) {
      const Reference r = reference({v.begin(), v.begin() + nq}, {v.begin() + nq, v.begin() + nq + nk},
                                    {v.begin() + nq + nk, v.end()}, p.lists, heads, width);
      double sum = 0;
      for (size_t i = 0; i < r.o.size(); ++i) sum += r.o[i] * p.d_o.f32()[i];
      return sum;
    };
    const std::vector<double> g = gradient(all, loss);
    const Gradients got = backward(p);
    EXPECT_LT(worst(got.dq, {g.begin(), g.begin() + nq}), 3e-6);
    EXPECT_LT(worst(got.d_keys, {g.begin() + nq, g.begin() + nq + nk}), 3e-6);
    EXPECT_LT(worst(got.d_sink, {g.begin() + nq + nk, g.end()}), 3e-6);
  }
}

// The same formulas in FP64 on a shape with several chunks of rows, blocks and register tiles.
TEST(Attention, BackwardEqualsTheFormulaInFp64) {
  const int rows = 300, heads = 5, width = 72, keys = 40;
  const Problem p = make_problem(rows, heads, width, keys, 5);
  const Reference f = reference(p);
  std::vector<double> dq(p.q.numel()), dk(p.keys.numel()), ds(heads);
  const float *q = p.q.f32(), *k = p.keys.f32(), *g = p.d_o.f32();
  const double scale = 1 / std::sqrt(width);
  for (int r = 0; r < rows; ++r)
    for (int h = 0; h < heads; ++h) {
      const int64_t at = (r * heads + h) * width;
      double d = 0;
      for (int i = 0; i < width; ++i) d += g[at + i] * f.o[at + i];
      ds[h] -= std::exp(p.sink.f32()[h] - f.lse[r * heads + h]) * d;
      for (int j = p.lists.begin[r]; j < p.lists.begin[r + 1]; ++j) {
        const int64_t key = p.lists.row[j] * width;
        double s = 0, dp = 0;
        for (int i = 0; i < width; ++i)
          s += scale * q[at + i] * k[key + i], dp += static_cast<double>(g[at + i]) * k[key + i];
        const double prob = std::exp(s - f.lse[r * heads + h]), slope = scale * prob * (dp - d);
        for (int i = 0; i < width; ++i) {
          dq[at + i] += slope * k[key + i];
          dk[key + i] += slope * q[at + i] + prob * g[at + i];
        }
      }
    }
  const Gradients got = backward(p);
  EXPECT_LT(worst(got.dq, dq), 3e-6);
  EXPECT_LT(worst(got.d_keys, dk), 5e-6);
  EXPECT_LT(worst(got.d_sink, ds), 5e-6);
}

// Tolerance: the sums now run near 3, where a rounding is 1e-7, some 100 times.
TEST(Attention, GradientsAreAdded) {
  for (int width : {8, 6}) {
    const Problem p = make_problem(4, 2, width, 10, 3);
    const AttentionResult f = sparse_attention(p.q, p.keys, p.lists, p.sink, Numerics::fp32);
    const Gradients g = backward(p);
    const Tensor d_keys = Tensor::full(p.keys.shape(), 3), d_sink = Tensor::full({2}, -1);
    sparse_attention_backward(p.d_o, p.q, p.keys, p.lists, p.sink, f, d_keys, d_sink);
    for (int i = 0; i < d_keys.numel(); ++i) EXPECT_NEAR(d_keys.f32()[i], g.d_keys.f32()[i] + 3, 1e-5);
    for (int i = 0; i < 2; ++i) EXPECT_NEAR(d_sink.f32()[i], g.d_sink.f32()[i] - 1, 1e-5);
    sparse_attention_backward(p.d_o, p.q, p.keys, p.lists, p.sink, f, d_keys, Tensor());  // a frozen sink
  }
}

TEST(Attention, EmptyListGivesZeroAndTheSink) {
  const Problem p = make_problem(2, 3, 8, 4, 1);  // row 1 has no key
  const AttentionResult f = sparse_attention(p.q, p.keys, p.lists, p.sink, Numerics::fp32);
  EXPECT_TRUE(same_bits(f.o.rows(1, 2), Tensor::zeros({1, 3, 8})));
  EXPECT_TRUE(same_bits(f.lse.rows(1, 2), p.sink.view({1, 3})));
  EXPECT_TRUE(same_bits(backward(p).dq.rows(1, 2), Tensor::zeros({1, 3, 8})));
}

TEST(Attention, SinkOfMinusInfinityIsOrdinarySoftmaxAndALargeOneTakesAll) {  // spec B6
  Problem p = make_problem(8, 2, 16, 30, 2);
  for (const float sink : {-kInf, 40.0f, 500.0f}) {
    p.sink.fill(sink);
    const AttentionResult f = sparse_attention(p.q, p.keys, p.lists, p.sink, Numerics::fp32);
    const Gradients g = backward(p);
    for (const Tensor& t : {f.o, g.dq, g.d_keys, g.d_sink})
      for (int64_t i = 0; i < t.numel(); ++i) ASSERT_TRUE(std::isfinite(t.f32()[i]));
    if (sink > 0) {
      EXPECT_LT(worst(f.o, std::vector<double>(f.o.numel())), 1e-13);
      EXPECT_NEAR(f.lse.f32()[0], sink, 1e-4);
      continue;
    }
    EXPECT_EQ(f.lse.f32()[2], -kInf);  // no key and no sink
    EXPECT_TRUE(same_bits(g.d_sink, Tensor::zeros({2})));
    p.sink.fill(-1e4f);  // the reference cannot take -inf for an empty list; e^-10000 is 0 all the same
    EXPECT_LT(worst(f.o, reference(p).o), 2e-6);
  }
}

TEST(Attention, HugeScoresStayFinite) {
  Problem p = make_problem(8, 2, 16, 30, 4);
  for (int64_t i = 0; i < p.q.numel(); ++i) p.q.f32()[i] *= 1e4f;
  const AttentionResult f = sparse_attention(p.q, p.keys, p.lists, p.sink, Numerics::fp32);
  EXPECT_LT(worst(f.o, reference(p).o), 5e-3);  // scores of 1e5 carry an error of 5e-3 in FP32
}

TEST(Attention, NaNReachesTheOutputOfItsRowsAlone) {
  Problem p = make_problem(3, 1, 8, 9, 6);
  p.lists = lists_of({{0, 1}, {2, 3}, {4, 5}});
  p.keys.f32()[3 * 8 + 1] = NAN;
  const Tensor o = sparse_attention(p.q, p.keys, p.lists, p.sink, Numerics::fp32).o;
  EXPECT_TRUE(std::isnan(o.f32()[8]));
  for (int r : {0, 2})
    for (int i = 0; i < 8; ++i) EXPECT_TRUE(std::isfinite(o.f32()[r * 8 + i]));
}

// The rounding of P is relative to the running maximum of the block in which a key is met: the recurrence of spec 3.5
// in FP64, rounded to bf16 at its two points.
TEST(Attention, ReleasedProfileRoundsEachBlockAgainstItsRunningMaximum) {
  const int heads = 3, width = 16;
  const Problem p = make_problem(10, heads, width, 50, 8);
  const Tensor o = sparse_attention(p.q, p.keys, p.lists, p.sink, Numerics::released).o;
  int equal = 0, total = 0;
  for (int r = 0; r < 10; ++r)
    for (int h = 0; h < heads; ++h) {
      double top = -kInf, denominator = 0;
      std::vector<double> sum(width);
      const float* q = p.q.f32() + (r * heads + h) * width;
      for (int at = p.lists.begin[r]; at < p.lists.begin[r + 1]; at += 64) {
        const int end = std::min(at + 64, p.lists.begin[r + 1]);
        std::vector<double> score;
        for (int i = at; i < end; ++i) {
          double s = 0;
          for (int d = 0; d < width; ++d) s += static_cast<double>(q[d]) * p.keys.f32()[p.lists.row[i] * width + d];
          score.push_back(s / 4);
        }
        const double before = top;
        top = std::max(top, *std::max_element(score.begin(), score.end()));
        const double shrink = std::exp(before - top);
        denominator *= shrink;
        for (double& v : sum) v *= shrink;
        for (int i = at; i < end; ++i) {
          const double prob = std::exp(score[i - at] - top);
          denominator += prob;
          for (int d = 0; d < width; ++d)
            sum[d] += round_bf16(static_cast<float>(prob)) * p.keys.f32()[p.lists.row[i] * width + d];
        }
      }
      for (int d = 0; d < width; ++d, ++total) {
        const double exact = top == -kInf ? 0 : sum[d] / (denominator + std::exp(p.sink.f32()[h] - top));
        const float got = o.f32()[(r * heads + h) * width + d];
        EXPECT_NEAR(got, exact, std::abs(exact) / 200 + 1e-3);
        equal += got == round_bf16(static_cast<float>(exact));
      }
    }
  EXPECT_GT(equal, total * 97 / 100);  // a value next to a rounding boundary may fall on the other side
}

TEST(Attention, RowBitsDependOnTheRowAlone) {
  const Problem p = make_problem(60, 6, 40, 90, 10);
  for (Numerics numerics : {Numerics::fp32, Numerics::released}) {
    const AttentionResult all = sparse_attention(p.q, p.keys, p.lists, p.sink, numerics);
    for (int r : {0, 1, 7, 33, 59}) {
      // Alone, with the row's keys moved to other places of the buffer.
      const std::vector<int> list(p.lists.row.begin() + p.lists.begin[r], p.lists.row.begin() + p.lists.begin[r + 1]);
      Tensor moved = Tensor::zeros({static_cast<int64_t>(list.size()) + 3, 40});
      std::vector<int> place;
      for (size_t i = 0; i < list.size(); ++i) {
        place.push_back(static_cast<int>(list.size() - i) + 1);
        std::copy_n(p.keys.f32() + list[i] * 40, 40, moved.f32() + place.back() * 40);
      }
      const AttentionResult one = sparse_attention(p.q.rows(r, r + 1), moved, lists_of({place}), p.sink, numerics);
      EXPECT_TRUE(same_bits(one.o, all.o.rows(r, r + 1))) << r;
      EXPECT_TRUE(same_bits(one.lse, all.lse.rows(r, r + 1))) << r;
    }
  }
}

// The keys of a sequence in a ring and its entries in slots, step by step, give the bits of the whole document at once.
TEST(Attention, CachedStepsEqualTheWholeDocumentOnBits) {
  const int length = 150, heads = 2, width = 16, topk = 5;
  const PlanShape shape{16, 4, 0};
  const SequencePlan whole = plan_documents(shape, {std::vector<int>(length)});
  const Tensor q = random_tensor({length, heads, width}, 1), sink = random_tensor({heads}, 2);
  const Tensor keys = random_tensor({length + whole.csa.entries, width}, 3);
  const Tensor iq = random_tensor({length, heads, 8}, 4), iw = random_tensor({length, heads}, 5);
  const Tensor ik = random_tensor({whole.csa.entries, 8}, 6);
  const KeyLists chosen = select_entries(iq, iw, ik, whole.csa.visible, topk);
  const Tensor want = sparse_attention(q, keys, merge_keys(whole.window, chosen, length), sink, Numerics::released).o;
  for (int chunk : {1, 3, 4, 17, 64}) {
    const CacheShape cache{16 + chunk - 1 + 2, whole.csa.entries + 1, 0};
    const CacheSlots slots{2, 16 + chunk - 1, 1, 0, 0, 0};
    const Tensor buffer = Tensor::full({cache.key_rows + cache.csa_entries, width}, NAN);
    const Tensor index = Tensor::full({cache.csa_entries, 8}, NAN);
    for (int done = 0; done < length; done += chunk) {
      const int n = std::min(chunk, length - done);
      const SequencePlan step = plan_cached_step(shape, cache, {slots}, {done}, {std::vector<int>(n)}, true);
      for (int r = 0; r < n; ++r)
        std::copy_n(keys.f32() + (done + r) * width, width, buffer.f32() + step.key_slot[r] * width);
      for (int i = 0; i < step.csa.new_entries(); ++i) {
        const int entry = step.csa.position[i] / 4, slot = step.csa.slot[i];
        std::copy_n(keys.f32() + (length + entry) * width, width, buffer.f32() + (cache.key_rows + slot) * width);
        std::copy_n(ik.f32() + entry * 8, 8, index.f32() + slot * 8);
      }
      const KeyLists picks =
          select_entries(iq.rows(done, done + n), iw.rows(done, done + n), index, step.csa.visible, topk);
      const Tensor o = sparse_attention(q.rows(done, done + n), buffer, merge_keys(step.window, picks, step.key_rows),
                                        sink, Numerics::released)
                           .o;
      ASSERT_TRUE(same_bits(o, want.rows(done, done + n))) << "chunk " << chunk << " at " << done;
    }
  }
}

TEST(Attention, HeadBitsDoNotDependOnTheNumberOfHeads) {
  const Problem p = make_problem(9, 7, 24, 40, 11);
  const Tensor all = sparse_attention(p.q, p.keys, p.lists, p.sink, Numerics::fp32).o;
  for (int h = 0; h < 7; ++h) {
    Tensor q = Tensor::empty({9, 1, 24});
    for (int r = 0; r < 9; ++r) std::copy_n(p.q.f32() + (r * 7 + h) * 24, 24, q.f32() + r * 24);
    const Tensor one = sparse_attention(q, p.keys, p.lists, p.sink.rows(h, h + 1), Numerics::fp32).o;
    for (int r = 0; r < 9; ++r)
      EXPECT_EQ(std::memcmp(one.f32() + r * 24, all.f32() + (r * 7 + h) * 24, 24 * sizeof(float)), 0);
  }
}

TEST(Attention, SameBitsWithAnyNumberOfThreads) {
  const Problem p = make_problem(300, 4, 40, 90, 12);
  expect_thread_invariant([&] {
    const AttentionResult f = sparse_attention(p.q, p.keys, p.lists, p.sink, Numerics::released);
    const Gradients g = backward(p);
    return std::vector<Tensor>{f.o, f.lse, g.dq, g.d_keys, g.d_sink};
  });
}

TEST(Attention, GradientsHaveTheSameBitsOnBothVectorUnits) {
  if (!vector_unit_available(VectorUnit::avx512)) GTEST_SKIP() << "no AVX-512 here";
  const Problem p = make_problem(40, 7, 208, 90, 13);  // heads: 4, 2, 1 at once; channels: 128, 64, 8
  const VectorUnit before = vector_unit();
  use_vector_unit(VectorUnit::avx512);
  const Gradients wide = backward(p);
  use_vector_unit(VectorUnit::avx2);
  const Gradients narrow = backward(p);
  use_vector_unit(before);
  EXPECT_TRUE(same_bits(wide.d_keys, narrow.d_keys) && same_bits(wide.dq, narrow.dq));
}

TEST(Attention, MergedListsHaveTheWindowFirst) {
  const KeyLists all = merge_keys(lists_of({{0}, {0, 1}, {}}), lists_of({{}, {2, 0}, {1}}), 10);
  EXPECT_EQ(all.row, (std::vector<int>{0, 0, 1, 12, 10, 11}));
  EXPECT_EQ(all.begin, (std::vector<int>{0, 1, 5, 6}));
}

TEST(Attention, KeyOutsideTheBufferIsRefused) {
  Problem p = make_problem(1, 1, 8, 4, 13);
  for (int key : {-1, 4}) {
    p.lists = lists_of({{key}});
    EXPECT_THROW(sparse_attention(p.q, p.keys, p.lists, p.sink, Numerics::fp32), Error);
  }
}

}  // namespace
}  // namespace plumb::ops
