// Rows that move, sums and key lists against loops on the CPU: all of them bit for bit, as FP32 additions in one order
// leave nothing to tolerate. Tests named Small* also run under compute-sanitizer.
#include "kernels/rows/rows.h"

#include <memory>
#include <numeric>

#include "device_data.cuh"

namespace plumb::kernels::rows {
namespace {

// Width of no whole piece of a warp, and of several.
const int kWidths[] = {8, 264, 4096};

void check_embed(int rows, int width, int copies) {
  const int vocabulary = 50;
  const auto table = random_bf16(static_cast<size_t>(vocabulary) * width, 1, 1);
  std::vector<int> token(rows);
  for (int r = 0; r < rows; ++r) token[r] = r * 37 % vocabulary;
  if (rows > 2) token[1] = -1, token[2] = vocabulary;
  const Buffer<uint16_t> table_device(table);
  const Buffer<int> token_device(token);
  Buffer<uint16_t> out(static_cast<size_t>(rows) * copies * width);
  out.fill(0);
  embed(table_device.get(), vocabulary, width, token_device.get(), rows, copies, out.get(), nullptr);
  const auto v = out.host();
  for (size_t i = 0; i < v.size(); ++i) {
    const int id = token[i / (static_cast<size_t>(copies) * width)];
    if (id < 0 || id >= vocabulary)
      ASSERT_TRUE(std::isnan(value(v[i]))) << i;
    else
      ASSERT_EQ(v[i], table[static_cast<size_t>(id) * width + i % width]) << i;
  }
}
TEST(Rows, SmallEmbedding) {
  for (const int width : kWidths)
    for (const int copies : {1, 4}) check_embed(19, width, copies), check_embed(1, width, copies);
}
TEST(Rows, Embedding) { check_embed(3000, 4096, 4); }

// Rows of two bytes and of four an element; gathered, stored, both, and some that stay.
template <typename T>
void check_copy(int rows, int width, bool gathered, bool stored) {
  const int others = rows + 30;
  std::vector<T> x(static_cast<size_t>(others) * width), before(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<T>(i * 2654435761u >> 7), before[i] = static_cast<T>(i);
  std::vector<int> from(rows), to(rows);
  for (int r = 0; r < rows; ++r) from[r] = r * 7 % others, to[r] = (r * 11 + 3) % others;
  ASSERT_EQ(std::gcd(11, others), 1);  // no slot twice
  if (rows > 4) from[2] = -1, to[4] = -1;
  std::vector<T> want = before;
  for (int r = 0; r < rows; ++r) {
    const int source = gathered ? from[r] : r, target = stored ? to[r] : r;
    if (source >= 0 && target >= 0) std::copy_n(x.begin() + source * width, width, want.begin() + target * width);
  }
  const Buffer<T> x_device(x), out(before);
  const Buffer<int> from_device(from), to_device(to);
  copy(x_device.get(), gathered ? from_device.get() : nullptr, out.get(), stored ? to_device.get() : nullptr, rows,
       width * sizeof(T), nullptr);
  ASSERT_EQ(differences(out.host(), want), 0u) << rows << " x " << width;
}
TEST(Rows, SmallCopies) {
  for (const int width : kWidths)
    for (const bool gathered : {false, true})
      for (const bool stored : {false, true}) {
        check_copy<uint16_t>(23, width, gathered, stored), check_copy<uint16_t>(1, width, gathered, stored);
        check_copy<uint32_t>(40, width, gathered, stored);
      }
}

// Terms of both formats, some shared by neighbouring rows, into both formats.
void check_sum(int64_t rows, int width, int terms, bool out_bf16, float scale) {
  const int shared[kMostTerms] = {1, 4, 1, 2, 1, 4};
  std::vector<std::vector<float>> x(terms);
  std::vector<std::unique_ptr<Buffer<uint16_t>>> narrow;
  std::vector<std::unique_ptr<Buffer<float>>> wide;
  Sum p{{}, terms, rows, width, scale, nullptr, out_bf16};
  for (int i = 0; i < terms; ++i) {
    const size_t count = rows / shared[i] * width;
    if (i % 2 == 0) {
      const auto bits = random_bf16(count, 1, i + 1);
      x[i] = from_bf16(bits);
      narrow.push_back(std::make_unique<Buffer<uint16_t>>(bits));
      p.term[i] = {narrow.back()->get(), true, shared[i]};
    } else {
      x[i] = random_floats(count, 1, i + 1);
      wide.push_back(std::make_unique<Buffer<float>>(x[i]));
      p.term[i] = {wide.back()->get(), false, shared[i]};
    }
  }
  Buffer<float> out(rows * width);
  Buffer<uint16_t> out_narrow(rows * width);
  p.out = out_bf16 ? static_cast<void*>(out_narrow.get()) : out.get();
  sum(p, nullptr);
  const auto v = out.host();
  const auto bits = out_narrow.host();
  for (int64_t i = 0; i < rows * width; ++i) {
    float total = x[0][i];
    for (int t = 1; t < terms; ++t) total += x[t][i / width / shared[t] * width + i % width];
    total *= scale;
    if (out_bf16)
      ASSERT_EQ(bits[i], float_to_bf16(total)) << i;
    else
      ASSERT_EQ(v[i], total) << i;
  }
}
TEST(Rows, SmallSums) {
  for (const int width : kWidths)
    for (const int terms : {1, 2, 6})
      for (const bool out_bf16 : {false, true}) check_sum(12, width, terms, out_bf16, terms == 2 ? 0.011f : 1);
}
TEST(Rows, SumsInPlace) {
  const auto bits = random_bf16(4096, 1, 1), more = random_bf16(4096, 1, 2);
  const Buffer<uint16_t> x(bits), y(more);
  sum({{{x.get(), true}, {y.get(), true}}, 2, 1, 4096, 1, x.get(), true}, nullptr);
  const auto v = x.host();
  for (int i = 0; i < 4096; ++i) ASSERT_EQ(v[i], float_to_bf16(bf16_to_float(bits[i]) + bf16_to_float(more[i]))) << i;
}

TEST(Rows, MeetingsAreSortedAndKeepTheirOrder) {
  const Meetings m = meetings({3, 0, 3, -1, 7, 0, 3});
  EXPECT_EQ(m.to, (std::vector<int>{0, 3, 7}));
  EXPECT_EQ(m.begin, (std::vector<int>{0, 2, 5, 6}));
  EXPECT_EQ(m.row, (std::vector<int>{1, 5, 0, 2, 6, 4}));
  EXPECT_EQ(meetings({}).begin, (std::vector<int>{0}));
}

// The CPU's order: streams of a row first, then row by row.
void check_meetings(const std::vector<int>& to, int targets, int copies, int width, bool out_bf16, bool add,
                    bool with_lists) {
  const int rows = static_cast<int>(to.size());
  const auto x = random_bf16(static_cast<size_t>(rows) * copies * width, 1, 1);
  const auto before = random_bf16(static_cast<size_t>(targets) * width, 1, 2);
  const auto row_sum = [&](int row, int channel) {
    float sum = bf16_to_float(x[static_cast<size_t>(row) * copies * width + channel]);
    for (int c = 1; c < copies; ++c) sum += bf16_to_float(x[(static_cast<size_t>(row) * copies + c) * width + channel]);
    return sum;
  };
  std::vector<float> want = from_bf16(before);
  std::vector<bool> met(targets, false);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < width; ++c) {
      float& sum = want[static_cast<size_t>(to[r]) * width + c];
      if (!met[to[r]] && !add) sum = 0;
      sum += row_sum(r, c);
      if (c == width - 1) met[to[r]] = true;
    }
  const Meetings m = meetings(to);
  const Buffer<int> to_device(m.to), begin(m.begin), row(m.row);
  const Buffer<uint16_t> x_device(x), narrow(before);
  const Buffer<float> wide(from_bf16(before));
  MeetingSums p{x_device.get(), copies, width, nullptr, nullptr, nullptr, rows, wide.get(), out_bf16, add};
  if (out_bf16) p.out = narrow.get();
  if (with_lists)
    p.to = to_device.get(), p.begin = begin.get(), p.row = row.get(), p.meetings = static_cast<int>(m.to.size());
  add_meetings(p, nullptr);
  if (out_bf16) {
    std::vector<uint16_t> rounded(want.size());
    std::transform(want.begin(), want.end(), rounded.begin(), float_to_bf16);
    ASSERT_EQ(differences(narrow.host(), rounded), 0u) << width;
  } else {
    ASSERT_EQ(differences(wide.host(), want), 0u) << width;
  }
}
TEST(Rows, SmallMeetings) {
  std::vector<int> to, identity;
  for (int r = 0; r < 37; ++r) to.push_back(r * r % 11), identity.push_back(r);
  for (const int width : kWidths)
    for (const int copies : {1, 4})
      for (const bool out_bf16 : {false, true})
        for (const bool add : {false, true}) {
          check_meetings(to, 12, copies, width, out_bf16, add, true);
          check_meetings(identity, 37, copies, width, out_bf16, add, false);
        }
}
// One token that occurs in every third row of a batch.
TEST(Rows, AFrequentToken) {
  std::vector<int> to;
  for (int r = 0; r < 3000; ++r) to.push_back(r % 3 == 0 ? 5 : r % 400);
  check_meetings(to, 400, 4, 512, false, true, true);
}

TEST(Rows, SmallMergedKeys) {
  const int rows = 70, offset = 1000;
  std::vector<int> window_begin{0}, window, entry_begin{0}, entries, begin{0}, want;
  for (int t = 0; t < rows; ++t) {
    for (int k = 0; k < t * 5 % 129; ++k) window.push_back(t + k), want.push_back(t + k);
    for (int k = 0; k < t * 7 % 90; ++k) entries.push_back(3 * k + t), want.push_back(3 * k + t + offset);
    window_begin.push_back(static_cast<int>(window.size())), entry_begin.push_back(static_cast<int>(entries.size()));
    begin.push_back(static_cast<int>(want.size()));
  }
  const Buffer<int> wb(window_begin), w(window), eb(entry_begin), e(entries);
  Buffer<int> out_begin(rows + 1), out(want.size());
  merge_keys({wb.get(), w.get()}, {eb.get(), e.get()}, offset, rows, out_begin.get(), out.get(), nullptr);
  EXPECT_EQ(differences(out_begin.host(), begin), 0u);
  EXPECT_EQ(differences(out.host(), want), 0u);
}

TEST(Rows, RefuseWhatTheyCannotDo) {
  const Buffer<uint16_t> x(64);
  EXPECT_THROW(embed(x.get(), 4, 12, nullptr, 1, 1, x.get(), nullptr), std::invalid_argument);
  EXPECT_THROW(copy(x.get(), nullptr, x.get() + 1, nullptr, 1, 16, nullptr), std::invalid_argument);
  EXPECT_THROW(copy(x.get(), nullptr, x.get(), nullptr, 1, 8, nullptr), std::invalid_argument);
  EXPECT_THROW(sum({{{x.get(), true, 2}}, 1, 3, 8, 1, x.get(), true}, nullptr), std::invalid_argument);
  const int lists = 0;
  EXPECT_THROW(add_meetings({x.get(), 1, 8, &lists, nullptr, nullptr, 1, x.get(), true, true}, nullptr),
               std::invalid_argument);
  copy(nullptr, nullptr, nullptr, nullptr, 0, 16, nullptr);  // nothing to do
}

}  // namespace
}  // namespace plumb::kernels::rows
