// Sparse attention forward and backward against a plain FP64 version on the GPU, over lists that a careless kernel gets
// wrong; and the bits: a query alone, moved, repeated.
#include <cuda_fp8.h>

#include "device_data.cuh"
#include "kernels/rotary/rotary.h"
#include "kernels/sparse_attention/sparse_attention.h"

namespace plumb::kernels {
namespace {

constexpr int kDim = kAttentionDim;
constexpr double kScale = 0.044194173824159216;  // 512^-1/2

// ---- lists ----
using Lists = std::vector<std::vector<int>>;

Lists odd_lists(int queries, int rows, int seed) {
  std::mt19937 random(seed);
  const int lengths[] = {1, 2, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 191, 200};
  Lists lists(queries);
  for (int t = 0; t < queries; ++t) {
    auto& list = lists[t];
    if (t % 9 == 0) continue;  // no entry at all
    list.resize(lengths[random() % 14]);
    const int kind = t % 9;
    for (size_t k = 0; k < list.size(); ++k) {
      const int any = random() % rows;
      list[k] = kind == 1   ? -1                                 // entries, but no key
                : kind == 2 ? (k + 1 == list.size() ? any : -1)  // one key, last
                : kind == 3 ? (random() % 2 ? any : -1)          // holes
                : kind == 4 ? any % 5                            // duplicates
                : kind == 5 ? 3                                  // one key many times
                : kind == 6 ? (k < 64 ? -1 : any)                // first block empty
                            : any;
    }
  }
  return lists;
}
// What a training row has: a window, then sorted selected entries, most of them the neighbour's too.
Lists near_lists(int queries, int window, int selected, int rows) {
  std::mt19937 random(5);
  Lists lists(queries);
  std::vector<int> entries;
  for (int c = 0; c < selected; ++c) entries.push_back(queries + random() % (rows - queries));
  for (int t = 0; t < queries; ++t) {
    for (int k = std::max(0, t - window + 1); k <= t; ++k) lists[t].push_back(k);
    for (int& e : entries)
      if (random() % 7 == 0) e = queries + random() % (rows - queries);
    auto sorted = entries;
    std::sort(sorted.begin(), sorted.end());
    lists[t].insert(lists[t].end(), sorted.begin(), sorted.end());
  }
  return lists;
}
Lists long_lists(int rows) {
  std::mt19937 random(3);
  Lists lists;
  for (int length : {4096, 1, 4095, 2049, 1000, 640, 0, 3000})
    for (lists.emplace_back(length); int& row : lists.back()) row = random() % rows;
  return lists;
}

// ---- inputs ----
std::vector<uint16_t> normal(size_t count, int seed, float deviation = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw(0, deviation);
  std::vector<float> pool(65537);  // co-prime to all sizes: rows differ
  for (float& x : pool) x = draw(random);
  std::vector<uint16_t> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = float_to_bf16(pool[(i + i / 65537 * 977) % 65537]);
  return values;
}

struct Problem {
  int queries, heads, rows;
  std::vector<int> begin{0}, row;
  std::vector<uint16_t> q, kv, d_o;
  std::vector<float> sink;
  Problem(const Lists& lists, int heads, int rows, float q_deviation = 1, float sink_size = 3)
      : queries(static_cast<int>(lists.size())), heads(heads), rows(rows) {
    for (const auto& list : lists) {
      row.insert(row.end(), list.begin(), list.end());
      begin.push_back(static_cast<int>(row.size()));
    }
    q = normal(head_count() * kDim, 1, q_deviation);
    kv = normal(static_cast<size_t>(rows) * kDim, 2);
    d_o = normal(head_count() * kDim, 3);
    for (int h = 0; h < heads; ++h) sink.push_back(std::sin(h * 1.7f) * sink_size);
  }
  size_t head_count() const { return static_cast<size_t>(queries) * heads; }
};

struct Forward {
  Buffer<uint16_t> q, kv, o;
  Buffer<int> begin, row;
  Buffer<float> sink, lse;
  SparseAttentionForward arguments;
  explicit Forward(const Problem& p)
      : q(p.q), kv(p.kv), o(p.q.size()), begin(p.begin), row(p.row), sink(p.sink), lse(p.head_count()) {
    arguments = {q.get(),   kv.get(), {begin.get(), row.get()},  sink.get(), o.get(), lse.get(),
                 p.queries, p.heads,  static_cast<float>(kScale)};
    run();
  }
  void run() {
    check(sparse_attention_forward(arguments, nullptr));
    check(cudaDeviceSynchronize());
  }
};

struct Backward {
  Buffer<uint16_t> d_o, dq, dkv16;
  Buffer<float> dkv, d_sink;
  SparseAttentionBackward arguments;
  Buffer<uint8_t> workspace;
  Backward(const Problem& p, const Forward& f)
      : d_o(p.d_o),
        dq(p.q.size()),
        dkv16(p.kv.size()),
        dkv(p.kv.size()),
        d_sink(p.heads),
        arguments{f.q.get(),
                  f.kv.get(),
                  f.arguments.lists,
                  f.sink.get(),
                  f.o.get(),
                  f.lse.get(),
                  d_o.get(),
                  dq.get(),
                  dkv.get(),
                  false,
                  d_sink.get(),
                  nullptr,
                  p.queries,
                  p.heads,
                  p.rows,
                  static_cast<float>(kScale)},
        workspace(sparse_attention_backward_workspace(arguments)) {
    arguments.workspace = workspace.get();
    run();
  }
  void run() {
    check(sparse_attention_backward(arguments, nullptr));
    check(cudaDeviceSynchronize());
  }
  bool repeated() const {
    uint32_t word;
    check(cudaMemcpy(&word, workspace.get(), 4, cudaMemcpyDeviceToHost));
    return word == 1;
  }
};

// ---- FP64, the formulas of sparse_attention.h and their derivatives as written ----
__device__ double dot(const uint16_t* a, const uint16_t* b) {
  double total = 0;
  for (int c = 0; c < kDim; ++c) total += to_double(a[c]) * to_double(b[c]);
  return total;
}
struct ReferenceArguments {
  const uint16_t *q, *kv, *d_o;
  const int *begin, *row;
  const float* sink;
  int heads;
  double *weight, *gradient;  // [entries, heads]
  double *lse, *delta, *o, *dq, *dkv, *d_sink;
};
// One CTA a query, one thread a head.
__global__ void reference_rows(ReferenceArguments a) {
  const int t = blockIdx.x, h = threadIdx.x;
  const size_t head = static_cast<size_t>(t) * a.heads + h;
  const uint16_t *q = a.q + head * kDim, *d_o = a.d_o + head * kDim;
  double top = a.sink[h];
  for (int k = a.begin[t]; k < a.begin[t + 1]; ++k) {
    if (a.row[k] < 0) continue;
    const double s = dot(q, a.kv + static_cast<size_t>(a.row[k]) * kDim) * kScale;
    a.weight[static_cast<size_t>(k) * a.heads + h] = s;
    top = fmax(top, s);
  }
  double total = exp(a.sink[h] - top);
  for (int k = a.begin[t]; k < a.begin[t + 1]; ++k)
    if (a.row[k] >= 0) total += exp(a.weight[static_cast<size_t>(k) * a.heads + h] - top);
  const double lse = top + log(total);
  a.lse[head] = lse;
  double delta = 0;
  for (int k = a.begin[t]; k < a.begin[t + 1]; ++k) {
    if (a.row[k] < 0) continue;
    double& weight = a.weight[static_cast<size_t>(k) * a.heads + h];
    weight = exp(weight - lse);
    delta += weight * dot(d_o, a.kv + static_cast<size_t>(a.row[k]) * kDim);  // = dO . o
  }
  a.delta[head] = delta;
  atomicAdd(a.d_sink + h, -exp(a.sink[h] - lse) * delta);
  for (int k = a.begin[t]; k < a.begin[t + 1]; ++k)
    if (a.row[k] >= 0)
      a.gradient[static_cast<size_t>(k) * a.heads + h] =
          a.weight[static_cast<size_t>(k) * a.heads + h] *
          (dot(d_o, a.kv + static_cast<size_t>(a.row[k]) * kDim) - delta) * kScale;
}
// One CTA a query, one thread a column.
__global__ void reference_columns(ReferenceArguments a) {
  const int t = blockIdx.x, c = threadIdx.x;
  for (int h = 0; h < a.heads; ++h) {
    const size_t at = (static_cast<size_t>(t) * a.heads + h) * kDim + c;
    double o = 0, dq = 0;
    for (int k = a.begin[t]; k < a.begin[t + 1]; ++k) {
      if (a.row[k] < 0) continue;
      const double value = to_double(a.kv[static_cast<size_t>(a.row[k]) * kDim + c]);
      const double weight = a.weight[static_cast<size_t>(k) * a.heads + h];
      const double gradient = a.gradient[static_cast<size_t>(k) * a.heads + h];
      o += weight * value;
      dq += gradient * value;
      atomicAdd(a.dkv + static_cast<size_t>(a.row[k]) * kDim + c,
                weight * to_double(a.d_o[at]) + gradient * to_double(a.q[at]));
    }
    a.o[at] = o;
    a.dq[at] = dq;
  }
}

struct Reference {
  std::vector<double> o, lse, dq, dkv, d_sink;
  explicit Reference(const Problem& p) {
    Buffer<uint16_t> dev_q(p.q), dev_kv(p.kv), dev_d_o(p.d_o);
    Buffer<int> dev_begin(p.begin), dev_row(p.row);
    Buffer<float> dev_sink(p.sink);
    Buffer<double> weight(p.row.size() * p.heads), gradient(weight.size()), lse64(p.head_count()),
        delta(p.head_count()), o64(p.q.size()), dq64(p.q.size()), dkv64(p.kv.size()), sink64(p.heads);
    dkv64.fill(0);
    sink64.fill(0);
    const ReferenceArguments a{dev_q.get(),    dev_kv.get(), dev_d_o.get(), dev_begin.get(), dev_row.get(),
                               dev_sink.get(), p.heads,      weight.get(),  gradient.get(),  lse64.get(),
                               delta.get(),    o64.get(),    dq64.get(),    dkv64.get(),     sink64.get()};
    reference_rows<<<p.queries, p.heads>>>(a);
    reference_columns<<<p.queries, kDim>>>(a);
    check(cudaDeviceSynchronize());
    o = o64.host(), lse = lse64.host(), dq = dq64.host(), dkv = dkv64.host(), d_sink = sink64.host();
  }
};

// Tolerances, as relative norms. bf16 rounds with a relative deviation of 2^-9 / sqrt(3) = 1.1e-3. o: weights and o
// itself are rounded, 1.6e-3 together. dq: weights' gradients, and D = dO . o from the rounded o, whose error is of the
// size of a small dS: up to 4e-3 where few keys share the weight. dkv: weights and gradients. d_sink: D. lse: FP32
// throughout, a dozen roundings of numbers below 100.
constexpr double kTolerance = 4e-3, kGradientTolerance = 8e-3, kLseTolerance = 2e-6;

void compare(const Problem& p, const char* name) {
  SCOPED_TRACE(name);
  const Reference want(p);
  Forward f(p);
  const double eo = relative_error(f.o.host(), want.o), el = relative_error(f.lse.host(), want.lse);
  EXPECT_LT(eo, kTolerance);
  EXPECT_LT(el, kLseTolerance);
  Backward b(p, f);
  const double eq = relative_error(b.dq.host(), want.dq), ek = relative_error(b.dkv.host(), want.dkv),
               es = relative_error(b.d_sink.host(), want.d_sink);
  EXPECT_LT(eq, kGradientTolerance);
  EXPECT_LT(ek, kTolerance);
  EXPECT_LT(es, kGradientTolerance);
  std::printf("%-28s o %.2e lse %.1e dq %.2e dkv %.2e d_sink %.2e%s\n", name, eo, el, eq, ek, es,
              b.repeated() ? " (repeated)" : "");
  // bf16 dkv is the FP32 one rounded
  b.arguments.dkv = b.dkv16.get(), b.arguments.dkv_bf16 = true;
  b.run();
  const auto wide = b.dkv.host();
  const auto narrow = b.dkv16.host();
  size_t different = 0;
  for (size_t i = 0; i < wide.size(); ++i) different += value(narrow[i]) != value(float_to_bf16(wide[i]));
  EXPECT_EQ(different, 0u);
}

TEST(SparseAttention, Small) {  // also for compute-sanitizer
  for (int heads : {64, 128})
    compare(Problem(odd_lists(19, 40, heads), heads, 40), heads == 64 ? "small, 64 heads" : "small, 128 heads");
  compare(Problem({{7}}, 64, 8), "one query, one key");
}

TEST(SparseAttention, OddLists) {
  compare(Problem(odd_lists(301, 400, 1), 64, 400), "odd lists, 64 heads");
  compare(Problem(odd_lists(150, 400, 2), 128, 400), "odd lists, 128 heads");
}
TEST(SparseAttention, NearLists) {
  compare(Problem(near_lists(640, 128, 100, 1000), 64, 1000), "window and selection");
}
TEST(SparseAttention, LongLists) {
  compare(Problem(long_lists(5000), 64, 5000), "1 to 4,096 keys, 64 heads");
  compare(Problem(long_lists(3000), 128, 3000), "1 to 4,096 keys, 128 heads");
}
// Scores up to a few hundred, sinks up to 100: weights that underflow, sinks above all keys.
TEST(SparseAttention, LargeScores) {
  const Problem p(odd_lists(97, 300, 4), 64, 300, 60, 100);
  const Reference want(p);
  Forward f(p);
  EXPECT_LT(relative_error(f.o.host(), want.o), kTolerance);
  EXPECT_LT(relative_error(f.lse.host(), want.lse), kLseTolerance);
  Backward b(p, f);
  // P = exp(s - lse) carries the FP32 error of scores of size 300: 300 * 2^-23 * log2(e) and more; dS cancels where one
  // key has all the weight, so only NaN and size are looked at.
  EXPECT_LT(relative_error(b.dkv.host(), want.dkv), 2e-2);
  for (uint16_t x : b.dq.host()) ASSERT_TRUE(std::isfinite(value(x)));
}

TEST(SparseAttention, NoKeys) {
  const Problem p({{}, {-1, -1}, {}}, 64, 4);
  Forward f(p);
  const auto o = f.o.host();
  const auto lse = f.lse.host();
  for (uint16_t x : o) ASSERT_EQ(value(x), 0);
  for (size_t i = 0; i < lse.size(); ++i) ASSERT_NEAR(lse[i], p.sink[i % 64], 1e-6);
  Backward b(p, f);
  for (uint16_t x : b.dq.host()) ASSERT_EQ(value(x), 0);
  for (float x : b.dkv.host()) ASSERT_EQ(x, 0);
  for (float x : b.d_sink.host()) ASSERT_EQ(x, 0);
}

TEST(SparseAttention, Arguments) {
  SparseAttentionForward f{};
  f.heads = 64, f.scale = 1;
  EXPECT_EQ(sparse_attention_forward(f, nullptr), cudaSuccess);  // no query
  f.heads = 32;
  EXPECT_EQ(sparse_attention_forward(f, nullptr), cudaErrorInvalidValue);
  SparseAttentionBackward b{};
  b.heads = 64, b.scale = 0;
  EXPECT_EQ(sparse_attention_backward(b, nullptr), cudaErrorInvalidValue);
}

// ---- bits ----
TEST(SparseAttention, ForwardBitsDoNotDependOnPlace) {
  Lists lists = odd_lists(200, 900, 7);
  const Lists near = near_lists(200, 64, 60, 900);
  for (int t = 0; t < 200; t += 2) lists[t] = near[t];
  const Problem p(lists, 64, 900);
  Forward base(p);
  const auto o = base.o.host();
  const auto lse = base.lse.host();
  for (int count : {1, 3, 150}) {  // queries of the batch, reversed and mixed, in batches of other sizes
    std::vector<int> from(count);
    Lists moved;
    for (int i = 0; i < count; ++i) moved.push_back(lists[from[i] = ((count - 1 - i) * 7919 + 13) % 200]);
    Problem m(moved, 64, 900);
    m.kv = p.kv;
    for (int i = 0; i < count; ++i)
      std::copy_n(p.q.begin() + static_cast<size_t>(from[i]) * 64 * kDim, 64 * kDim,
                  m.q.begin() + static_cast<size_t>(i) * 64 * kDim);
    Forward f(m);
    const auto o2 = f.o.host();
    const auto lse2 = f.lse.host();
    for (int i = 0; i < count; ++i) {
      EXPECT_EQ(0, std::memcmp(&o2[static_cast<size_t>(i) * 64 * kDim], &o[static_cast<size_t>(from[i]) * 64 * kDim],
                               64 * kDim * 2));
      EXPECT_EQ(0, std::memcmp(&lse2[static_cast<size_t>(i) * 64], &lse[static_cast<size_t>(from[i]) * 64], 64 * 4));
    }
  }
}

// Few queries are computed by clusters, a kernel of its own; the same queries, repeated until they are 67 items (64
// heads of a query), are too many for it.
void compare_few_with_many(const Lists& lists, int heads, int rows, bool fp8) {
  SCOPED_TRACE(testing::Message() << heads << " heads" << (fp8 ? ", FP8 keys" : ""));
  const int count = static_cast<int>(lists.size()), times = 67 / (count * heads / 64) + 1;
  Lists repeated;
  for (int i = 0; i < times; ++i) repeated.insert(repeated.end(), lists.begin(), lists.end());
  Problem many(repeated, heads, rows), few(lists, heads, rows), one({lists.back()}, heads, rows);
  const size_t row = static_cast<size_t>(heads) * kDim;
  for (int i = 1; i < times; ++i) std::copy_n(many.q.begin(), count * row, many.q.begin() + i * count * row);
  std::copy_n(many.q.begin() + (count - 1) * row, row, one.q.begin());
  ASSERT_EQ(few.q, std::vector<uint16_t>(many.q.begin(), many.q.begin() + few.q.size()));

  std::vector<float2> turns(static_cast<size_t>(times * count) * 32);
  for (size_t i = 0; i < turns.size(); ++i) {
    const float angle = static_cast<float>(i % (count * 32)) * 0.37f;
    turns[i] = make_float2(std::cos(angle), std::sin(angle));
  }
  Buffer<float2> table(turns);
  Buffer<uint16_t> keys(many.kv);
  Buffer<uint8_t> cache(static_cast<size_t>(rows) * kFp8KeyBytes);
  check(store_fp8_keys(keys.get(), nullptr, rows, cache.get(), nullptr));
  const auto run = [&](const Problem& p, int first, std::vector<uint16_t>& o, std::vector<float>& lse) {
    Forward f(p);
    f.arguments.rotation = table.get() + static_cast<size_t>(first) * 32;
    if (fp8) f.arguments.kv = cache.get(), f.arguments.kv_fp8 = true;
    f.o.poison(), f.lse.poison();
    f.run();
    o = f.o.host(), lse = f.lse.host();
  };
  std::vector<uint16_t> o[3];
  std::vector<float> lse[3];
  run(many, 0, o[0], lse[0]), run(few, 0, o[1], lse[1]), run(one, count - 1, o[2], lse[2]);
  const auto equals = [&](int other, int at, int first) {
    return 0 == std::memcmp(&o[other][at * row], &o[0][first * row], row * 2) &&
           0 == std::memcmp(&lse[other][static_cast<size_t>(at) * heads], &lse[0][static_cast<size_t>(first) * heads],
                            heads * 4);
  };
  for (int t = 0; t < count; ++t)
    EXPECT_TRUE(equals(1, t, t) && equals(1, t, (times - 1) * count + t)) << "query " << t;
  EXPECT_TRUE(equals(2, 0, count - 1)) << "the last query alone";
}
TEST(SparseAttention, FewQueriesHaveTheBitsOfManySmall) {
  Lists lists = odd_lists(7, 90, 21);
  std::mt19937 random(9);
  for (int length : {520, 641}) {  // more blocks than a ring has buffers, with holes
    lists.emplace_back(length);
    for (int& key : lists.back()) key = random() % 5 ? static_cast<int>(random() % 90) : -1;
  }
  lists.erase(lists.begin());
  for (const bool fp8 : {false, true})
    for (int heads : {64, 128})  // eight items
      compare_few_with_many({lists.end() - 512 / heads, lists.end()}, heads, 90, fp8);
}
TEST(SparseAttention, FewQueriesWithLongListsHaveTheBitsOfMany) {
  compare_few_with_many(long_lists(5000), 64, 5000, false);
  compare_few_with_many(long_lists(5000), 128, 5000, true);
}
// As many as have a cluster each, beside other work: whatever the clusters of an item wait for comes from themselves.
TEST(SparseAttention, FewQueriesRepeatBitwiseBesideOtherWork) {
  const Problem p(near_lists(66, 128, 512, 2000), 64, 2000);
  Forward f(p);
  const auto o = f.o.host();
  const auto lse = f.lse.host();
  OtherWork work;
  for (int i = 0; i < 100; ++i) {
    work.start(i);
    f.o.poison(), f.lse.poison();
    f.run();
    ASSERT_TRUE(same_bits(f.o.host(), o) && same_bits(f.lse.host(), lse)) << "run " << i;
  }
}

// The second tile of 128 heads is the same computation as 64 heads of their own; padding at the end of a list changes
// nothing.
TEST(SparseAttention, ForwardBitsDoNotDependOnTileOrPadding) {
  const Lists lists = odd_lists(60, 300, 8);
  const Problem wide(lists, 128, 300);
  Forward both(wide);
  const auto o = both.o.host();
  Lists padded = lists;
  for (size_t t = 0; t < padded.size(); ++t) padded[t].resize(padded[t].size() + t % 130, -1);
  Problem half(padded, 64, 300);
  for (int t = 0; t < 60; ++t)
    std::copy_n(wide.q.begin() + (static_cast<size_t>(t) * 128 + 64) * kDim, 64 * kDim,
                half.q.begin() + static_cast<size_t>(t) * 64 * kDim);
  half.sink.assign(wide.sink.begin() + 64, wide.sink.end());
  Forward second(half);
  const auto o2 = second.o.host();
  for (int t = 0; t < 60; ++t)
    EXPECT_EQ(0, std::memcmp(&o2[static_cast<size_t>(t) * 64 * kDim], &o[(static_cast<size_t>(t) * 128 + 64) * kDim],
                             64 * kDim * 2))
        << t;
}

// Keys from an FP8 cache give the bits of the same keys in bf16; the codes are the nearest ones.
TEST(SparseAttention, Fp8KeysGiveTheBitsOfTheirValuesSmall) {
  for (const int heads : {64, 128}) {
    const int rows = 150;
    Problem p(odd_lists(60, rows, 4), heads, rows);
    for (int r = 0; r < rows; ++r)  // rows of very different sizes
      for (int c = 0; c < kDim; ++c)
        p.kv[r * kDim + c] = float_to_bf16(value(p.kv[r * kDim + c]) * std::ldexp(1.f, (r + c / 64) % 12 - 6));
    std::vector<int> slot(rows);
    for (int r = 0; r < rows; ++r) slot[r] = (r * 7 + 3) % rows;
    Buffer<int> slots(slot);
    Buffer<uint16_t> keys(p.kv);
    Buffer<uint8_t> cache(static_cast<size_t>(rows) * kFp8KeyBytes);
    check(store_fp8_keys(keys.get(), slots.get(), rows, cache.get(), nullptr));
    const auto bytes = cache.host();
    Problem widened = p;
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < kDim; ++c) {
        const uint8_t* row = &bytes[static_cast<size_t>(slot[r]) * kFp8KeyBytes];
        uint16_t& key = widened.kv[static_cast<size_t>(slot[r]) * kDim + c];
        const float original = value(p.kv[static_cast<size_t>(r) * kDim + c]);
        if (c >= kFp8KeyCodes) {
          std::memcpy(&key, row + kFp8KeyCodes + (c - kFp8KeyCodes) * 2, 2);
          ASSERT_EQ(value(key), original);
          continue;
        }
        __nv_fp8_e4m3 code;
        code.__x = row[c];
        const float scale = std::ldexp(1.f, row[kFp8KeyScales + c / 64] - 127);
        key = float_to_bf16(static_cast<float>(code) * scale);
        ASSERT_EQ(value(key), static_cast<float>(code) * scale);  // exact
        ASSERT_LE(std::abs(value(key) - original), std::abs(original) / 16 + scale * 0x1p-10);
      }
    Forward wide(widened), narrow(widened);
    narrow.arguments.kv = cache.get(), narrow.arguments.kv_fp8 = true;
    narrow.o.poison(), narrow.lse.poison();
    narrow.run();
    EXPECT_TRUE(same_bits(wide.o.host(), narrow.o.host()) && same_bits(wide.lse.host(), narrow.lse.host())) << heads;
  }
}

// The fused rotation gives the bits of the kernel that rotates outputs in place.
TEST(SparseAttention, RotatesOutputsBackSmall) {
  for (const int heads : {64, 128}) {
    const Problem p(near_lists(40, 16, 20, 90), heads, 90);
    Forward f(p);
    std::vector<int> positions(p.queries);
    std::vector<float> frequencies(32);
    for (int t = 0; t < p.queries; ++t) positions[t] = 31 * t;
    for (int j = 0; j < 32; ++j) frequencies[j] = std::pow(10000.f, -j / 32.f);
    Buffer<int> position(positions);
    Buffer<float> frequency(frequencies);
    Buffer<float2> table(static_cast<size_t>(p.queries) * 32);
    check(rotary_table(position.get(), frequency.get(), p.queries, table.get(), nullptr));
    check(rotate_tails(f.o.get(), table.get(), p.queries, heads, kDim, true, nullptr));
    const auto apart = f.o.host();
    f.arguments.rotation = table.get();
    f.o.poison();
    f.run();
    EXPECT_TRUE(same_bits(f.o.host(), apart)) << heads;
  }
}

TEST(SparseAttention, RepeatsBitwiseBesideOtherWork) {
  const Problem p(near_lists(700, 128, 100, 1000), 64, 1000);
  Forward f(p);
  Backward b(p, f);
  const auto o = f.o.host(), dq = b.dq.host();
  const auto lse = f.lse.host(), dkv = b.dkv.host(), d_sink = b.d_sink.host();
  OtherWork work;
  for (int i = 0; i < 100; ++i) {
    work.start(i);
    f.o.poison(), f.lse.poison(), b.dq.poison(), b.dkv.poison(), b.d_sink.poison();
    check(sparse_attention_forward(f.arguments, nullptr));
    check(sparse_attention_backward(b.arguments, nullptr));
    check(cudaStreamSynchronize(nullptr));
    ASSERT_TRUE(same_bits(f.o.host(), o) && same_bits(f.lse.host(), lse)) << "forward, run " << i;
    ASSERT_TRUE(same_bits(b.dq.host(), dq) && same_bits(b.dkv.host(), dkv) && same_bits(b.d_sink.host(), d_sink))
        << "backward, run " << i;
  }
}

// ---- the scale of the fixed-point sums ----
Problem scaled_gradients(float (*factor)(int query)) {
  Problem p(near_lists(1100, 32, 16, 1200), 64, 1200);  // the pilot looks at every eighth query
  for (size_t i = 0; i < p.d_o.size(); ++i)
    p.d_o[i] = float_to_bf16(value(p.d_o[i]) * factor(static_cast<int>(i / (64 * kDim))));
  return p;
}
void expect_dkv(const Problem& p, bool repeated) {
  Forward f(p);
  Backward b(p, f);
  EXPECT_EQ(b.repeated(), repeated);
  EXPECT_LT(relative_error(b.dkv.host(), Reference(p).dkv), kTolerance);
  const auto first = b.dkv.host();
  b.run();
  EXPECT_TRUE(same_bits(b.dkv.host(), first));
}
TEST(FixedPoint, OrdinaryGradientsTakeOnePass) {
  expect_dkv(scaled_gradients([](int) { return 1.f; }), false);
}
TEST(FixedPoint, AnySize) {
  expect_dkv(scaled_gradients([](int) { return 0x1p-70f; }), false);
  expect_dkv(scaled_gradients([](int) { return 0x1p60f; }), false);
}
TEST(FixedPoint, LargeGradientsOutsideTheSampleAreMetByASecondPass) {
  expect_dkv(scaled_gradients([](int t) { return t / 2 % 4 == 1 ? 4096.f : 1.f; }), true);
  expect_dkv(scaled_gradients([](int t) { return t == 3 ? 0x1p40f : 1.f; }), true);  // bounds saturate
}
// A sample that meets no term says nothing about the scale.
TEST(FixedPoint, ZeroGradientsAreExact) {
  const Problem p = scaled_gradients([](int) { return 0.f; });
  Forward f(p);
  Backward b(p, f);
  EXPECT_FALSE(b.repeated());
  for (uint16_t x : b.dq.host()) ASSERT_EQ(value(x), 0);
  for (float x : b.dkv.host()) ASSERT_EQ(x, 0);
  for (float x : b.d_sink.host()) ASSERT_EQ(x, 0);
}
TEST(FixedPoint, GradientsOutsideASampleOfZerosAreMetByASecondPass) {
  expect_dkv(scaled_gradients([](int t) { return t % 8 == 3 ? 1.f : 0.f; }), true);
}
TEST(FixedPoint, NaN) {
  Problem p = scaled_gradients([](int) { return 1.f; });
  p.d_o[12345 * 64] = float_to_bf16(NAN);
  Forward f(p);
  Backward b(p, f);
  for (float x : b.dkv.host()) ASSERT_TRUE(std::isnan(x));
}

}  // namespace
}  // namespace plumb::kernels
