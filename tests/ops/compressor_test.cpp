#include "ops/compressor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "ops/attention_fixtures.h"

namespace plumb::ops {
namespace {

struct Problem {
  CompressionPlan plan;
  Tensor kv, gate, ape;
  ProjectedRows rows() const { return {kv, gate, {}, {}}; }
};

Problem make_problem(bool overlap, int ratio, int width, const std::vector<int>& lengths, uint64_t seed) {
  std::vector<std::vector<int>> documents;
  int rows = 0;
  for (int n : lengths) documents.emplace_back(n), rows += n;
  const PlanShape shape{8, overlap ? ratio : 0, overlap ? 0 : ratio};
  const SequencePlan plan = plan_documents(shape, documents);
  const int row_width = overlap ? 2 * width : width;
  return {overlap ? plan.csa : plan.hca, random_tensor({rows, row_width}, seed),
          random_tensor({rows, row_width}, seed + 1), random_tensor({ratio, row_width}, seed + 2)};
}

// Spec 3.6 in FP64 from the definition: documents of the given lengths, windows of `ratio`.
std::vector<double> reference(const std::vector<double>& kv, const std::vector<double>& gate,
                              const std::vector<double>& ape, bool overlap, int ratio, int width,
                              const std::vector<int>& lengths) {
  const int row_width = overlap ? 2 * width : width;
  std::vector<double> out;
  int start = 0;
  for (int length : lengths) {
    for (int i = 0; i < length / ratio; ++i)
      for (int c = 0; c < width; ++c) {
        double total = 0, sum = 0;
        const auto add = [&](int window, int channel) {
          for (int j = 0; j < ratio; ++j) {
            const int at = (start + window * ratio + j) * row_width + channel;
            const double weight = std::exp(gate[at] + ape[j * row_width + channel]);
            total += weight;
            sum += weight * kv[at];
          }
        };
        if (overlap && i > 0) add(i - 1, c);
        add(i, overlap ? width + c : c);
        out.push_back(sum / total);
      }
    start += length;
  }
  return out;
}

TEST(Compressor, GoldenA1) {
  SequencePlan plan = plan_documents({8, 4, 4}, {std::vector<int>(10)});
  const ProjectedRows rows{fill_rows(10, 4, 1), fill_rows(10, 4, 31), {}, {}};
  const Tensor e = pool_entries(plan.csa, rows, fill_rows(4, 4, 61));
  const float want[] = {.385868f, .198053f, .501045f, .309519f};
  ASSERT_EQ(e.shape(), (Shape{2, 2}));
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(e.f32()[i], want[i], 1e-6);

  const auto first_two = [](const Tensor& t) {
    Tensor out = Tensor::empty({t.size(0), 2});
    for (int64_t r = 0; r < t.size(0); ++r) std::copy_n(t.f32() + r * 4, 2, out.f32() + r * 2);
    return out;
  };
  const Tensor plain =
      pool_entries(plan.hca, {first_two(rows.kv), first_two(rows.gate), {}, {}}, first_two(fill_rows(4, 4, 61)));
  const float without_overlap[] = {.449786f, .242924f, .605478f, .351012f};
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(plain.f32()[i], without_overlap[i], 1e-6);
}

TEST(Compressor, PackedDocumentsEqualFp64OfEachAlone) {
  const std::vector<int> lengths = {5, 0, 9, 3, 16, 34};
  for (auto [overlap, ratio, width] : {std::tuple{true, 4, 3}, {true, 4, 16}, {false, 16, 24}, {false, 2, 9}}) {
    const Problem p = make_problem(overlap, ratio, width, lengths, ratio * width);
    const Tensor e = pool_entries(p.plan, p.rows(), p.ape);
    EXPECT_LT(worst(e, reference(doubles(p.kv), doubles(p.gate), doubles(p.ape), overlap, ratio, width, lengths)),
              1e-6);  // exponentials and at most 16 products in FP32
  }
}

TEST(Compressor, BackwardEqualsFiniteDifferences) {
  const std::vector<int> lengths = {9, 3, 13};
  for (auto [overlap, ratio, width] : {std::tuple{true, 4, 3}, {false, 5, 10}}) {
    const Problem p = make_problem(overlap, ratio, width, lengths, 7);
    const Tensor d = random_tensor({p.plan.new_entries(), width}, 8);
    std::vector<double> all = doubles(p.kv);
    const std::vector<double> gate = doubles(p.gate), ape = doubles(p.ape);
    const size_t n = all.size();
    all.insert(all.end(), gate.begin(), gate.end());
    all.insert(all.end(), ape.begin(), ape.end());
    const auto g = gradient(all, [&, overlap = overlap, ratio = ratio, width = width](const std::vector<double>& v) {
      const auto e = reference({v.begin(), v.begin() + n}, {v.begin() + n, v.begin() + 2 * n},
                               {v.begin() + 2 * n, v.end()}, overlap, ratio, width, lengths);
      double sum = 0;
      for (size_t i = 0; i < e.size(); ++i) sum += e[i] * d.f32()[i];
      return sum;
    });
    const Tensor d_kv = Tensor::full(p.kv.shape(), 1), d_gate = Tensor::full(p.kv.shape(), 2),
                 d_ape = Tensor::full(p.ape.shape(), 3);  // gradients are added
    pool_entries_backward(p.plan, p.rows(), p.ape, d, d_kv, d_gate, d_ape);
    const auto expect = [](const Tensor& got, std::vector<double> want, double offset) {
      for (double& x : want) x += offset;
      EXPECT_LT(worst(got, want), 2e-6);
    };
    expect(d_kv, {g.begin(), g.begin() + n}, 1);
    expect(d_gate, {g.begin() + n, g.begin() + 2 * n}, 2);
    expect(d_ape, {g.begin() + 2 * n, g.end()}, 3);
    const Tensor again = Tensor::full(p.kv.shape(), 1);
    pool_entries_backward(p.plan, p.rows(), p.ape, d, again, d_gate, Tensor());  // frozen ape
    EXPECT_TRUE(same_bits(again, d_kv));
  }
}

// Branches of a prefix tree share rows: both entries of a shared window must reach its rows.
TEST(Compressor, RowSharedByTwoEntriesGetsBothGradients) {
  CompressionPlan plan;
  plan.ratio = 2, plan.slots = 4, plan.entries = 3;
  plan.source = {-1, -1, 0, 1, 0, 1, 2, 3, 0, 1, 4, 5};  // two branches continue the first window
  plan.position = {0, 2, 2};
  const Tensor kv = random_tensor({6, 16}, 1), gate = random_tensor({6, 16}, 2), ape = random_tensor({2, 16}, 3);
  const auto one = [&](int entry) {
    Tensor d = Tensor::zeros({3, 8});
    for (int i = 0; i < 8; ++i) d.f32()[entry * 8 + i] = 1;
    const Tensor d_kv = Tensor::zeros(kv.shape()), d_gate = Tensor::zeros(kv.shape());
    pool_entries_backward(plan, {kv, gate, {}, {}}, ape, d, d_kv, d_gate, Tensor());
    return d_kv;
  };
  const Tensor d_kv = Tensor::zeros(kv.shape()), d_gate = Tensor::zeros(kv.shape());
  pool_entries_backward(plan, {kv, gate, {}, {}}, ape, Tensor::full({3, 8}, 1), d_kv, d_gate, Tensor());
  std::vector<double> sum(kv.numel());
  for (int e = 0; e < 3; ++e) {
    const Tensor part = one(e);
    for (int64_t i = 0; i < kv.numel(); ++i) sum[i] += part.f32()[i];
  }
  EXPECT_LT(worst(d_kv, sum), 3e-7);
}

// Steps of any size through the cache's pending rows give the bits of the whole document.
TEST(Compressor, ChunkedStepsEqualTheWholeDocumentOnBits) {
  const int length = 77;
  const PlanShape shape{8, 4, 16};
  const SequencePlan whole = plan_documents(shape, {std::vector<int>(length)});
  for (bool overlap : {true, false}) {
    const auto member = overlap ? &SequencePlan::csa : &SequencePlan::hca;
    const int ratio = overlap ? 4 : 16, row_width = overlap ? 24 : 12;
    const Tensor kv = random_tensor({length, row_width}, 1), gate = random_tensor({length, row_width}, 2),
                 ape = random_tensor({ratio, row_width}, 3);
    const Tensor want = pool_entries(whole.*member, {kv, gate, {}, {}}, ape);
    for (int chunk : {1, 2, 3, 4, 5, 7, 16, 31, 76}) {
      const int slots = (whole.*member).slots;
      const float nan = std::numeric_limits<float>::quiet_NaN();  // a slot read before it is written would show
      const ProjectedRows pending{Tensor::full({slots, row_width}, nan), Tensor::full({slots, row_width}, nan), {}, {}};
      Tensor got = Tensor::full(want.shape(), nan);
      for (int done = 0; done < length; done += chunk) {
        const int n = std::min(chunk, length - done);
        CacheSlots place;
        place.key_capacity = length;
        const SequencePlan step =
            plan_cached_step(shape, {length, length, length}, {place}, {done}, {std::vector<int>(n)}, false);
        const CompressionPlan& p = step.*member;
        const ProjectedRows rows{kv.rows(done, done + n), gate.rows(done, done + n), pending.kv, pending.gate};
        const Tensor e = pool_entries(p, rows, ape);
        for (int i = 0; i < p.new_entries(); ++i) std::copy_n(e.f32() + i * 12, 12, got.f32() + p.slot[i] * 12);
        for (size_t i = 0; i < p.pending_row.size(); ++i) {
          std::copy_n(rows.kv.f32() + p.pending_row[i] * row_width, row_width,
                      pending.kv.f32() + p.pending_slot[i] * row_width);
          std::copy_n(rows.gate.f32() + p.pending_row[i] * row_width, row_width,
                      pending.gate.f32() + p.pending_slot[i] * row_width);
        }
      }
      EXPECT_TRUE(same_bits(got, want)) << "chunk " << chunk;
    }
  }
}

TEST(Compressor, LargeScoresStayFinite) {
  Problem p = make_problem(true, 4, 8, {8}, 4);
  for (int64_t i = 0; i < p.gate.numel(); ++i) p.gate.f32()[i] *= 1e4f;
  const Tensor e = pool_entries(p.plan, p.rows(), p.ape);
  for (int64_t i = 0; i < e.numel(); ++i) EXPECT_TRUE(std::isfinite(e.f32()[i]));
}

TEST(Compressor, SameBitsWithAnyNumberOfThreads) {
  const Problem p = make_problem(true, 4, 40, {101, 50}, 5);
  const Tensor d = random_tensor({p.plan.new_entries(), 40}, 6);
  expect_thread_invariant([&] {
    const Tensor d_kv = Tensor::zeros(p.kv.shape()), d_gate = Tensor::zeros(p.kv.shape()),
                 d_ape = Tensor::zeros(p.ape.shape());
    pool_entries_backward(p.plan, p.rows(), p.ape, d, d_kv, d_gate, d_ape);
    return std::vector<Tensor>{pool_entries(p.plan, p.rows(), p.ape), d_kv, d_gate, d_ape};
  });
}

TEST(Compressor, DocumentShorterThanTheRatioHasNoEntry) {
  const Problem p = make_problem(false, 128, 8, {127}, 6);
  EXPECT_EQ(pool_entries(p.plan, p.rows(), p.ape).shape(), (Shape{0, 8}));
}

TEST(Compressor, WrongShapesAndSourcesAreRefused) {
  Problem p = make_problem(true, 4, 8, {8}, 9);
  p.plan.source[3] = 8;
  EXPECT_THROW(pool_entries(p.plan, p.rows(), p.ape), Error);
  p.plan.source[3] = 3;
  EXPECT_THROW(pool_entries(p.plan, p.rows(), Tensor::zeros({4, 8})), Error);
}

}  // namespace
}  // namespace plumb::ops
