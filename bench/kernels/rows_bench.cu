// Speed of rows that move and of sums of rows, at 16,384 tokens of 4,096. usage: rows_bench [RESULT.json]
#include <random>

#include "bench_support.cuh"
#include "kernels/rows/rows.h"

namespace {

using namespace plumb::bench;
using namespace plumb::kernels::rows;

constexpr int kRows = 16384, kWidth = 4096, kVocabulary = 129280;
constexpr double kUnit = 2.0 * kRows * kWidth;  // bytes of one bf16 row of the width, all tokens

void moves(Report& report) {
  std::mt19937 random(1);
  std::vector<int> tokens(kRows), experts(6 * kRows);
  for (int& t : tokens) t = static_cast<int>(std::exp(random() * 0x1p-32 * std::log(kVocabulary - 1.0)));  // as in text
  for (int& e : experts) e = static_cast<int>(random() % kRows);
  const Array<int> token(tokens), source(experts);
  const Array<uint16_t> table(size_t{kVocabulary} * kWidth, 1, 1), streams(4 * size_t{kRows} * kWidth, 1, 2),
      x(size_t{kRows} * kWidth, 1, 3), gathered(6 * size_t{kRows} * kWidth);
  Array<float> d_table(size_t{kVocabulary} * kWidth);
  report.bytes("embedding into four streams", 5 * kUnit, median_ms(11, [&] {
                 embed(table.get(), kVocabulary, kWidth, token.get(), kRows, 4, streams.get(), nullptr);
               }));
  // As often as not a row has left the cache when it is wanted again: bytes of a copy of as many rows.
  report.cold("gather 98304 rows of 16384", 12 * kUnit, median_ms(11, [&] {
                copy(x.get(), source.get(), gathered.get(), nullptr, 6 * kRows, 2 * kWidth, nullptr);
              }));
  report.time("store 256 keys into slots",
              median_ms(11, [&] { copy(x.get(), nullptr, gathered.get(), source.get(), 256, 1024, nullptr); }));
  const Meetings m = meetings(tokens);
  const Array<int> to(m.to), begin(m.begin), row(m.row);
  const int count = static_cast<int>(m.to.size());
  report.bytes("gradient of the embedding, tokens as in text", 4 * kUnit + 8.0 * count * kWidth, median_ms(11, [&] {
                 add_meetings(
                     {streams.get(), 4, kWidth, to.get(), begin.get(), row.get(), count, d_table.get(), false, true},
                     nullptr);
               }));
}

void sums(Report& report) {
  const size_t count = size_t{kRows} * kWidth;
  const Array<uint16_t> a(count, 1, 1), b(count, 1, 2), out(count);
  const Array<float> c(count, 1, 3), d(count, 1, 4);
  const auto run = [&](const Sum& s) { return median_ms(11, [&] { sum(s, nullptr); }); };
  report.bytes("FP32 to bf16", 3 * kUnit, run({{{c.get(), false}}, 1, kRows, kWidth, 1, out.get(), true}));
  report.bytes("two bf16 and two FP32 terms to bf16", 7 * kUnit,
               run({{{a.get(), true}, {b.get(), true}, {c.get(), false}, {d.get(), false}},
                    4,
                    kRows,
                    kWidth,
                    1,
                    out.get(),
                    true}));
}

void keys(Report& report) {
  constexpr size_t kCopies = 6;
  std::vector<int> window_begin{0}, entry_begin{0};
  for (int t = 0; t < kRows; ++t) window_begin.push_back(128 * (t + 1)), entry_begin.push_back(512 * (t + 1));
  const Array<int> wb(window_begin), eb(entry_begin), window(kCopies * 128 * kRows), entries(kCopies * 512 * kRows),
      begin(kRows + 1), row(kCopies * 640 * kRows);
  report.cold("merge lists of 128 and 512 keys", 8.0 * 640 * kRows, cold_ms(kCopies, [&](int i, cudaStream_t stream) {
                merge_keys({wb.get(), window.get() + i * size_t{128 * kRows}},
                           {eb.get(), entries.get() + i * size_t{512 * kRows}}, 20480, kRows, begin.get(),
                           row.get() + i * size_t{640 * kRows}, stream);
              }));
}

}  // namespace

int main(int argc, char** argv) {
  Report report("rows");
  moves(report);
  sums(report);
  keys(report);
  report.write(argc, argv);
}
