// The indexer's loss and its gradients against the formulas in FP64 on the CPU, whose own gradient is checked by a
// difference quotient. Tests named Small* also run under compute-sanitizer.
#include "device_data.cuh"
#include "kernels/indexer/indexer.h"
#include "kernels/indexer/loss.h"

namespace plumb::kernels {
namespace {

constexpr int kAttnDim = 512;
constexpr float kScale = 0.044194174f, kFactor = 0.37f;

struct Problem {
  int rows, entries, heads;
  std::vector<int> begin{0}, entry;
  std::vector<uint16_t> q, keys, attn_q, attn_entries;
  std::vector<float> w, joint_lse;
  // Each row lists every entry below `seen(row)` that `chosen` takes.
  template <class Seen, class Chosen>
  Problem(int rows, int entries, int heads, const Seen& seen, const Chosen& chosen)
      : rows(rows), entries(entries), heads(heads) {
    for (int t = 0; t < rows; ++t) {
      for (int e = 0; e < seen(t); ++e)
        if (chosen(t, e)) entry.push_back(e);
      begin.push_back(static_cast<int>(entry.size()));
    }
    q = random_bf16(static_cast<size_t>(rows) * kIndexHeads * kIndexDim, 1, 1);
    keys = random_bf16(static_cast<size_t>(entries) * kIndexDim, 1, 2);
    w = random_floats(static_cast<size_t>(rows) * kIndexHeads, 0.01f, 3);
    attn_q = random_bf16(static_cast<size_t>(rows) * heads * kAttnDim, 1, 4);
    attn_entries = random_bf16(static_cast<size_t>(entries) * kAttnDim, 1, 5);
    // The rest of the denominator, window and sink: e^3.
    for (int t = 0; t < rows; ++t)
      for (int h = 0; h < heads; ++h) {
        double sum = std::exp(3.0);
        for (int i = begin[t]; i < begin[t + 1]; ++i) sum += std::exp(attention(t, h, entry[i]));
        joint_lse.push_back(static_cast<float>(std::log(sum)));
      }
  }
  double attention(int t, int h, int e) const {
    double sum = 0;
    for (int c = 0; c < kAttnDim; ++c)
      sum += value(attn_q[(static_cast<size_t>(t) * heads + h) * kAttnDim + c]) *
             value(attn_entries[static_cast<size_t>(e) * kAttnDim + c]);
    return sum * kScale;
  }
  double product(int t, int h, int e) const {
    double sum = 0;
    for (int c = 0; c < kIndexDim; ++c)
      sum += value(q[(static_cast<size_t>(t) * kIndexHeads + h) * kIndexDim + c]) *
             value(keys[static_cast<size_t>(e) * kIndexDim + c]);
    return sum;
  }
};

struct Reference {
  double loss = 0;
  std::vector<double> d_q, d_w, d_keys;
  explicit Reference(const Problem& p) : d_q(p.q.size()), d_w(p.w.size()), d_keys(p.keys.size()) {
    for (int t = 0; t < p.rows; ++t) row(p, t);
  }
  void row(const Problem& p, int t) {
    const int first = p.begin[t], n = p.begin[t + 1] - first;
    if (n == 0) return;
    std::vector<double> target(n, 0), score(n, 0), products(static_cast<size_t>(n) * kIndexHeads);
    double mass = 0, sum = 0;
    for (int i = 0; i < n; ++i) {
      const int e = p.entry[first + i];
      for (int h = 0; h < p.heads; ++h)
        target[i] += std::exp(p.attention(t, h, e) - p.joint_lse[static_cast<size_t>(t) * p.heads + h]);
      for (int h = 0; h < kIndexHeads; ++h) {
        const double product = products[static_cast<size_t>(i) * kIndexHeads + h] = p.product(t, h, e);
        score[i] += p.w[static_cast<size_t>(t) * kIndexHeads + h] * std::max(0.0, product);
      }
      mass += target[i], sum += std::exp(score[i]);
    }
    for (int i = 0; i < n; ++i) {
      const double wanted = target[i] / mass, student = score[i] - std::log(sum);
      loss += wanted * (std::log(std::max(wanted, 1e-10)) - student);
      const double slope = kFactor * (std::exp(student) - wanted);
      const int e = p.entry[first + i];
      for (int h = 0; h < kIndexHeads; ++h) {
        const double product = products[static_cast<size_t>(i) * kIndexHeads + h];
        const size_t head = static_cast<size_t>(t) * kIndexHeads + h;
        if (product <= 0) continue;
        d_w[head] += slope * product;
        for (int c = 0; c < kIndexDim; ++c) {
          d_q[head * kIndexDim + c] += slope * p.w[head] * value(p.keys[static_cast<size_t>(e) * kIndexDim + c]);
          d_keys[static_cast<size_t>(e) * kIndexDim + c] += slope * p.w[head] * value(p.q[head * kIndexDim + c]);
        }
      }
    }
  }
};

struct Launch {
  Buffer<uint16_t> q, keys, attn_q, attn_entries, d_q;
  Buffer<float> w, joint_lse, d_w, d_keys;
  Buffer<int> begin, entry;
  Buffer<double> loss;
  Buffer<uint8_t> workspace;
  IndexLoss arguments;
  explicit Launch(const Problem& p)
      : q(p.q),
        keys(p.keys),
        attn_q(p.attn_q),
        attn_entries(p.attn_entries),
        d_q(p.q.size()),
        w(p.w),
        joint_lse(p.joint_lse),
        d_w(p.w.size()),
        d_keys(p.keys.size()),
        begin(p.begin),
        entry(p.entry),
        loss(1),
        workspace(index_loss_workspace(p.rows, p.entries, static_cast<int>(p.entry.size()))),
        arguments{q.get(),         w.get(),
                  keys.get(),      p.rows,
                  p.entries,       begin.get(),
                  entry.get(),     static_cast<int>(p.entry.size()),
                  attn_q.get(),    attn_entries.get(),
                  joint_lse.get(), p.heads,
                  kScale,          kFactor,
                  d_q.get(),       d_w.get(),
                  d_keys.get(),    loss.get(),
                  workspace.get()} {
    run();
  }
  void run() {
    check(index_loss(arguments, nullptr));
    check(cudaDeviceSynchronize());
  }
};

// Relative norms. d_q, d_keys: d score * w is rounded to bf16, a relative deviation of 2^-9 / sqrt(3) = 1.1e-3 of each
// term, and so is d_q itself. d_w, loss: FP32 sums of a hundred products and 64 heads and differences of probabilities
// near each other.
void compare(const Problem& p) {
  const Reference want(p);
  const Launch got(p);
  EXPECT_LT(relative_error(got.d_q.host(), want.d_q), 4e-3);
  EXPECT_LT(relative_error(got.d_keys.host(), want.d_keys), 4e-3);
  EXPECT_LT(relative_error(got.d_w.host(), want.d_w), 1e-4);
  EXPECT_NEAR(got.loss.host()[0], want.loss, 1e-4 * want.loss);
}

TEST(IndexLoss, TheReferenceIsTheDerivativeOfItsLoss) {
  Problem p(
      3, 40, 64, [](int) { return 40; }, [](int, int) { return true; });
  const Reference at(p);
  double along = 0;
  const auto direction = random_floats(p.w.size(), 1e-4f, 9);
  for (size_t i = 0; i < p.w.size(); ++i) along += at.d_w[i] * direction[i] / kFactor;
  const auto moved = [&](float by) {
    Problem other = p;
    for (size_t i = 0; i < p.w.size(); ++i) other.w[i] += by * direction[i];
    return Reference(other).loss;
  };
  // Weights of size 1e-2 are FP32: moves of 1e-4 are off by 1e-5 of themselves, the quotient by 1e-4 of its size.
  EXPECT_NEAR((moved(1) - moved(-1)) / 2, along, 1e-3 * std::abs(along));
}

TEST(IndexLoss, SmallSelections) {  // lists of 0 to 90 entries, tiles that nobody lists, a last tile of 22
  compare(Problem(
      21, 150, 64, [](int t) { return t * 7; }, [](int t, int e) { return (e * 5 + t) % 3 != 0 || e < 9; }));
}
TEST(IndexLoss, SmallWithMoreHeads) {
  compare(Problem(
      9, 70, 128, [](int t) { return t * 8; }, [](int, int) { return true; }));
}
TEST(IndexLoss, ManyRows) {
  compare(Problem(
      300, 600, 64, [](int t) { return 2 * t; }, [](int t, int e) { return (e * 7 + t) % 4 == 0; }));
}

TEST(IndexLoss, NobodyListsAnything) {
  const Launch got(Problem(
      5, 64, 64, [](int) { return 0; }, [](int, int) { return true; }));
  EXPECT_EQ(got.loss.host()[0], 0);
  for (const uint16_t v : got.d_q.host()) ASSERT_EQ(v, 0);
  for (const float v : got.d_keys.host()) ASSERT_EQ(v, 0);
}

TEST(IndexLoss, RepeatsBitwiseBesideOtherWork) {
  Launch r(Problem(
      200, 400, 64, [](int t) { return 2 * t; }, [](int t, int e) { return (e * 7 + t) % 4 == 0; }));
  const auto d_q = r.d_q.host();
  const auto d_w = r.d_w.host(), d_keys = r.d_keys.host();
  OtherWork work;
  for (int i = 0; i < 50; ++i) {
    work.start(i);
    r.d_q.poison(), r.d_w.poison(), r.d_keys.poison(), r.workspace.poison();
    check(index_loss(r.arguments, nullptr));
    check(cudaStreamSynchronize(nullptr));
    ASSERT_TRUE(same_bits(r.d_q.host(), d_q) && same_bits(r.d_w.host(), d_w) && same_bits(r.d_keys.host(), d_keys))
        << i;
  }
}

}  // namespace
}  // namespace plumb::kernels
