#include "ops/indexer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "ops/attention_fixtures.h"

namespace plumb::ops {
namespace {

EntryRanges ranges_of(const std::vector<std::vector<EntryRange>>& rows) {
  EntryRanges out;
  for (const auto& r : rows) {
    out.range.insert(out.range.end(), r.begin(), r.end());
    out.begin.push_back(static_cast<int>(out.range.size()));
  }
  return out;
}
std::vector<int> list(const KeyLists& l, int i) { return {l.row.begin() + l.begin[i], l.row.begin() + l.begin[i + 1]}; }
KeyLists lists_of(const std::vector<std::vector<int>>& rows) {
  KeyLists lists;
  for (const auto& r : rows) {
    lists.row.insert(lists.row.end(), r.begin(), r.end());
    lists.begin.push_back(static_cast<int>(lists.row.size()));
  }
  return lists;
}

// Score of spec 3.7 in FP64.
double score(const double* q, const double* w, const double* key, int heads, int width) {
  double sum = 0;
  for (int h = 0; h < heads; ++h) {
    double product = 0;
    for (int d = 0; d < width; ++d) product += q[h * width + d] * key[d];
    sum += w[h] * std::max(0.0, product);
  }
  return sum;
}

TEST(SelectEntries, GoldenA3) {  // scores 0, 1.057536, .272574
  const Tensor q = fill_rows(2, 3, 70).view({1, 2, 3}), w = fill_rows(1, 2, 90), keys = fill_rows(3, 3, 80);
  const EntryRanges all = ranges_of({{{0, 3}}});
  EXPECT_EQ(list(select_entries(q, w, keys, all, 1), 0), (std::vector<int>{1}));
  EXPECT_EQ(list(select_entries(q, w, keys, all, 2), 0), (std::vector<int>{1, 2}));
  EXPECT_EQ(list(select_entries(q, w, keys, all, 5), 0), (std::vector<int>{0, 1, 2}));
}

// Against a sort of FP64 scores; with random inputs no two of them are closer than the FP32 error.
TEST(SelectEntries, ExactTopKInOrderOfPosition) {
  const int rows = 40, heads = 5, width = 20, entries = 150, topk = 17;
  const Tensor q = random_tensor({rows, heads, width}, 1), w = random_tensor({rows, heads}, 2),
               keys = random_tensor({entries, width}, 3);
  const auto qd = doubles(q), wd = doubles(w), kd = doubles(keys);
  std::vector<std::vector<EntryRange>> visible(rows);
  for (int r = 0; r < rows; ++r) {
    if (r % 3 == 0) visible[r] = {{0, 4 * r % 150}};
    if (r % 3 == 1) visible[r] = {{3, 10}, {50, 50 + r}, {100, 150}};  // the pieces of a path through a prefix tree
  }
  const KeyLists chosen = select_entries(q, w, keys, ranges_of(visible), topk);
  for (int r = 0; r < rows; ++r) {
    std::vector<int> all;
    for (const EntryRange& e : visible[r])
      for (int i = e.first; i < e.last; ++i) all.push_back(i);
    const auto s = [&](int e) { return score(&qd[r * heads * width], &wd[r * heads], &kd[e * width], heads, width); };
    std::stable_sort(all.begin(), all.end(), [&](int a, int b) { return s(a) > s(b); });
    all.resize(std::min<size_t>(all.size(), topk));
    std::sort(all.begin(), all.end());
    EXPECT_EQ(list(chosen, r), all) << r;
  }
}

TEST(SelectEntries, EqualScoresGoToTheEarlierEntry) {
  const Tensor q = Tensor::full({1, 1, 8}, 1), w = Tensor::full({1, 1}, 1), keys = Tensor::full({20, 8}, 1);
  keys.f32()[8 * 13] = 2;  // entry 13 is best, all others tie
  EXPECT_EQ(list(select_entries(q, w, keys, ranges_of({{{0, 20}}}), 4), 0), (std::vector<int>{0, 1, 2, 13}));
  EXPECT_EQ(list(select_entries(q, w, keys, ranges_of({{{10, 12}, {4, 9}}}), 3), 0), (std::vector<int>{10, 11, 4}));
  for (int i = 0; i < 8; ++i) q.f32()[i] = -1;  // ReLU: every score is exactly 0
  EXPECT_EQ(list(select_entries(q, w, keys, ranges_of({{{0, 20}}}), 3), 0), (std::vector<int>{0, 1, 2}));
}

TEST(SelectEntries, NegativeWeightsRankBelowZero) {
  const Tensor q = Tensor::full({1, 1, 8}, 1), w = Tensor::full({1, 1}, -1), keys = Tensor::full({3, 8}, 1);
  for (int i = 8; i < 16; ++i) keys.f32()[i] = -1;  // its product is cut to 0, above the others' -8
  EXPECT_EQ(list(select_entries(q, w, keys, ranges_of({{{0, 3}}}), 1), 0), (std::vector<int>{1}));
}

TEST(SelectEntries, NaNRanksLastAndEveryPlaceIsFilled) {  // spec T30, T33
  const Tensor q = Tensor::full({1, 1, 8}, 1), w = Tensor::full({1, 1}, 1), keys = random_tensor({12, 8}, 5);
  for (int e : {0, 4, 7}) keys.f32()[8 * e] = NAN;
  EXPECT_EQ(list(select_entries(q, w, keys, ranges_of({{{0, 12}}}), 9), 0),
            (std::vector<int>{1, 2, 3, 5, 6, 8, 9, 10, 11}));
  EXPECT_EQ(list(select_entries(q, w, keys, ranges_of({{{0, 12}}}), 99), 0).size(), 12u);
  EXPECT_TRUE(list(select_entries(q, w, keys, ranges_of({{}}), 9), 0).empty());
  EXPECT_TRUE(list(select_entries(q, w, keys, ranges_of({{{0, 12}}}), 0), 0).empty());
}

TEST(SelectEntries, RowChoosesTheSameAloneAndMoved) {
  const int rows = 30, entries = 200;
  const Tensor q = random_tensor({rows, 4, 24}, 6), w = random_tensor({rows, 4}, 7),
               keys = random_tensor({entries, 24}, 8);
  std::vector<std::vector<EntryRange>> visible;
  for (int r = 0; r < rows; ++r) visible.push_back({{r, 90 + 3 * r}});
  const KeyLists all = select_entries(q, w, keys, ranges_of(visible), 25);
  for (int r : {0, 13, 29}) {
    const Tensor part = keys.rows(r, 90 + 3 * r);
    std::vector<int> one =
        list(select_entries(q.rows(r, r + 1), w.rows(r, r + 1), part, ranges_of({{{0, 90 + 2 * r}}}), 25), 0);
    for (int& e : one) e += r;
    EXPECT_EQ(one, list(all, r));
  }
  expect_thread_invariant([&] { return std::vector<Tensor>{select_entries(q, w, keys, ranges_of(visible), 25).row}; });
}

// A later entry never changes the choice of a row that does not see it, spec T28, T29.
TEST(SelectEntries, OnlyVisibleEntriesCount) {
  std::vector<std::vector<int>> document = {std::vector<int>(64)};
  const EntryRanges visible = plan_documents({8, 4, 0}, document).csa.visible;
  const Tensor q = random_tensor({64, 4, 16}, 1), w = random_tensor({64, 4}, 2), keys = random_tensor({16, 16}, 3);
  const KeyLists before = select_entries(q, w, keys, visible, 3);
  for (int e = 0; e < 16; ++e) {
    const Tensor changed = keys.clone();
    for (int i = 0; i < 16; ++i) changed.f32()[e * 16 + i] = 100;
    const KeyLists after = select_entries(q, w, changed, visible, 3);
    for (int t = 0; t < 4 * e + 3; ++t) ASSERT_EQ(list(before, t), list(after, t));
  }
  for (int t = 0; t < 64; ++t) EXPECT_EQ(before.begin[t + 1] - before.begin[t], std::min(3, (t + 1) / 4));
}

TEST(SelectEntries, TopKOfAllEqualsVisibleEntries) {  // spec B5
  const EntryRanges visible = ranges_of({{{0, 3}, {7, 9}}, {}, {{4, 5}}});
  const KeyLists all = visible_entries(visible);
  EXPECT_EQ(all.row, (std::vector<int>{0, 1, 2, 7, 8, 4}));
  EXPECT_EQ(all.begin, (std::vector<int>{0, 5, 5, 6}));
  const Tensor q = random_tensor({3, 2, 8}, 1), w = random_tensor({3, 2}, 2), keys = random_tensor({9, 8}, 3);
  const KeyLists chosen = select_entries(q, w, keys, visible, 5);
  EXPECT_EQ(chosen.row, all.row);
  EXPECT_EQ(chosen.begin, all.begin);
}

struct LossProblem {
  Tensor q, w, keys, attn_q, attn_entries, other_lse;
  KeyLists valid;
};
// The denominator over everything, from that over all but the valid entries.
Tensor joint_lse(const LossProblem& p) {
  const int heads = static_cast<int>(p.attn_q.size(1)), width = static_cast<int>(p.attn_q.size(2));
  Tensor joint = Tensor::empty(p.other_lse.shape());
  for (int r = 0; r < p.valid.size(); ++r)
    for (int h = 0; h < heads; ++h) {
      double sum = std::exp(static_cast<double>(p.other_lse.f32()[r * heads + h]));
      for (int e : list(p.valid, r)) {
        double a = 0;
        for (int d = 0; d < width; ++d)
          a += static_cast<double>(p.attn_q.f32()[(r * heads + h) * width + d]) * p.attn_entries.f32()[e * width + d];
        sum += std::exp(a / std::sqrt(width));
      }
      joint.f32()[r * heads + h] = static_cast<float>(std::log(sum));
    }
  return joint;
}
IndexerLossGrad run(const LossProblem& p, float coefficient = 1, double rows_total = 1) {
  return indexer_loss({coefficient, true, rows_total}, p.q, p.w, p.keys, p.valid, p.attn_q, p.attn_entries,
                      joint_lse(p));
}

// Spec 4.3 in FP64, naively: exponentials of the joint distribution, then L1.
double reference(const LossProblem& p, const std::vector<double>& q, const std::vector<double>& w,
                 const std::vector<double>& keys) {
  const int heads = static_cast<int>(p.attn_q.size(1)), width = static_cast<int>(p.attn_q.size(2));
  const int index_heads = static_cast<int>(p.q.size(1)), index_width = static_cast<int>(p.q.size(2));
  double loss = 0;
  for (int r = 0; r < p.valid.size(); ++r) {
    const std::vector<int> entry = list(p.valid, r);
    std::vector<double> target(entry.size()), student;
    for (int h = 0; h < heads; ++h) {
      double z = std::exp(static_cast<double>(p.other_lse.f32()[r * heads + h]));
      std::vector<double> mass;
      for (int e : entry) {
        double a = 0;
        for (int d = 0; d < width; ++d)
          a += static_cast<double>(p.attn_q.f32()[(r * heads + h) * width + d]) * p.attn_entries.f32()[e * width + d];
        mass.push_back(std::exp(a / std::sqrt(width)));
        z += mass.back();
      }
      for (size_t i = 0; i < entry.size(); ++i) target[i] += mass[i] / z;
    }
    const double total = std::accumulate(target.begin(), target.end(), 0.0);
    double exponentials = 0;
    for (int e : entry) {
      student.push_back(score(&q[r * index_heads * index_width], &w[r * index_heads], &keys[e * index_width],
                              index_heads, index_width));
      exponentials += std::exp(student.back());
    }
    for (size_t i = 0; i < entry.size(); ++i) {
      const double t = target[i] / total;
      loss += t * (std::log(std::max(t, 1e-10)) - (student[i] - std::log(exponentials)));
    }
  }
  return loss;
}

LossProblem make_loss_problem(int rows, int entries, uint64_t seed) {
  Random random(seed, 4);
  std::vector<std::vector<int>> valid(rows);
  for (int r = 0; r < rows; ++r)
    for (int e = 0; e < entries; ++e)
      if (r % 5 != 1 && random.below(3) != 0) valid[r].push_back(e);  // row 1, 6, ... have none
  return {random_tensor({rows, 3, 6}, seed),
          random_tensor({rows, 3}, seed + 1),
          random_tensor({entries, 6}, seed + 2),
          random_tensor({rows, 2, 12}, seed + 3),
          random_tensor({entries, 12}, seed + 4),
          random_tensor({rows, 2}, seed + 5, 2),
          lists_of(valid)};
}

// The joint teacher: two heads over three entries, window log-sums (3, -1), sinks (.3, -.2). The student's scores
// (.1, .4, -.3) are made of two index heads on unit keys.
TEST(IndexerLoss, GoldenT1) {
  const Tensor unit = Tensor::zeros({3, 4});
  for (int e = 0; e < 3; ++e) unit.f32()[e * 4 + e] = 1;
  const auto joint = [](double a, double b) { return static_cast<float>(std::log(std::exp(a) + std::exp(b))); };
  const LossProblem p{Tensor::of<float>({.1f, .4f, 0, 0, 0, 0, .3f, 0}, {1, 2, 4}),
                      Tensor::of<float>({1, -1}, {1, 2}),
                      unit,
                      Tensor::of<float>({1, 3, -1, 0, 4, 0, 2, 0}, {1, 2, 4}),  // scale 1/2
                      unit,
                      Tensor::of<float>({joint(3, .3), joint(-1, -.2)}, {1, 2}),
                      lists_of({{0, 1, 2}})};
  const IndexerLossGrad r = run(p);
  EXPECT_NEAR(r.loss, .1529285, 1e-6);
  EXPECT_NEAR(r.d_q.f32()[0], -.246127, 1e-6);
  EXPECT_NEAR(r.d_q.f32()[1], .236532, 1e-6);
  EXPECT_NEAR(-r.d_q.f32()[4 + 2], .009595, 1e-6);  // through a head of weight -1
  EXPECT_NEAR(r.d_w.f32()[0], .1 * -.246127 + .4 * .236532, 1e-6);
}

// A3: the same student for one head whose distribution is (.2, .5, .3); its denominator then cancels.
TEST(IndexerLoss, GoldenA3) {
  const Tensor unit = Tensor::zeros({3, 4}), logits = Tensor::zeros({1, 1, 4});
  for (int e = 0; e < 3; ++e) {
    unit.f32()[e * 4 + e] = 1;
    logits.f32()[e] = static_cast<float>(2 * std::log(std::vector{.2, .5, .3}[e]));
  }
  const LossProblem p{fill_rows(2, 3, 70).view({1, 2, 3}), fill_rows(1, 2, 90),  fill_rows(3, 3, 80), logits, unit,
                      Tensor::of<float>({1.5f}, {1, 1}),   lists_of({{0, 1, 2}})};
  EXPECT_NEAR(run(p).loss, .007043, 1e-6);
}

TEST(IndexerLoss, GradientsEqualFiniteDifferences) {
  const LossProblem p = make_loss_problem(7, 9, 3);
  std::vector<double> all = doubles(p.q);
  const std::vector<double> w = doubles(p.w), keys = doubles(p.keys);
  const size_t nq = all.size(), nw = w.size();
  all.insert(all.end(), w.begin(), w.end());
  all.insert(all.end(), keys.begin(), keys.end());
  const auto g = gradient(all, [&](const std::vector<double>& v) {
    return reference(p, {v.begin(), v.begin() + nq}, {v.begin() + nq, v.begin() + nq + nw},
                     {v.begin() + nq + nw, v.end()});
  });
  const IndexerLossGrad r = run(p);
  EXPECT_NEAR(r.loss, reference(p, doubles(p.q), w, keys), 1e-5);  // FP32 scores of up to 10
  EXPECT_LT(worst(r.d_q, {g.begin(), g.begin() + nq}), 3e-6);
  EXPECT_LT(worst(r.d_w, {g.begin() + nq, g.begin() + nq + nw}), 3e-6);
  EXPECT_LT(worst(r.d_keys, {g.begin() + nq + nw, g.end()}), 3e-6);
}

TEST(IndexerLoss, CoefficientAndRowsScaleTheGradientOnly) {
  const LossProblem p = make_loss_problem(7, 9, 5);
  const IndexerLossGrad one = run(p), scaled = run(p, 0.5f, 7), none = run(p, 0, 7);
  EXPECT_EQ(one.loss, scaled.loss);
  std::vector<double> expected = doubles(one.d_q);
  for (double& v : expected) v /= 14;
  EXPECT_LT(worst(scaled.d_q, expected), 1e-7);
  for (const Tensor& t : {none.d_q, none.d_w, none.d_keys})  // spec B13: present and exactly zero
    for (int64_t i = 0; i < t.numel(); ++i) EXPECT_EQ(t.f32()[i], 0);
}

// Entries with next to no mass (here e^-300 of it) keep their relative weights: the shift of spec 4.3.
TEST(IndexerLoss, UnderflowingMassKeepsItsShape) {
  LossProblem p = make_loss_problem(7, 9, 6);
  p.other_lse.fill(20);
  const IndexerLossGrad high = run(p);
  p.other_lse.fill(300);
  const IndexerLossGrad extreme = run(p);
  EXPECT_GT(extreme.loss, 0);
  EXPECT_NEAR(extreme.loss, high.loss, 1e-5);  // at e^-20 the denominators of all heads agree to 1e-7
  EXPECT_LT(worst(extreme.d_q, doubles(high.d_q)), 1e-6);
}

TEST(IndexerLoss, RowsWithoutEntriesGiveZero) {  // spec T4
  LossProblem p = make_loss_problem(2, 4, 7);
  p.valid = lists_of({{}, {}});
  const IndexerLossGrad r = run(p);
  EXPECT_EQ(r.loss, 0);
  EXPECT_TRUE(same_bits(r.d_q, Tensor::zeros(p.q.shape())));
  EXPECT_TRUE(same_bits(r.d_keys, Tensor::zeros(p.keys.shape())));
}

TEST(IndexerLoss, SameBitsWithAnyNumberOfThreads) {
  const LossProblem p = make_loss_problem(300, 80, 8);
  expect_thread_invariant([&] {
    const IndexerLossGrad r = run(p);
    return std::vector<Tensor>{Tensor::of<double>({r.loss}), r.d_q, r.d_w, r.d_keys};
  });
}

}  // namespace
}  // namespace plumb::ops
