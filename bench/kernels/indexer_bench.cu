// Speed of the indexer: a row of 16,384 tokens over 4,096 entries, causal, scores and selection apart and together; and
// decoding steps; of records and of bf16 vectors. usage: indexer_bench [RESULT.json]
#include "bench_support.cuh"
#include "kernels/indexer/indexer.h"
#include "kernels/rotary/rotary.h"

using namespace plumb::kernels;
using namespace plumb::bench;

namespace {

// Index vectors as the model makes them: normally distributed, transformed, rounded to FP4.
struct Vectors {
  Array<uint16_t> bf16;
  Array<uint8_t> records;
  Vectors(int rows, int vectors, uint64_t seed)
      : bf16(size_t(rows) * vectors * kIndexDim, 1, seed), records(size_t(rows) * vectors * kIndexRecordBytes) {
    const Array<int> position(rows);
    const Array<float> frequency(32);
    const Array<float2> table(size_t(rows) * 32);
    check(rotary_table(position.get(), frequency.get(), rows, table.get(), nullptr));
    check(finish_vectors({bf16.get(), nullptr, table.get(), nullptr, records.get(), rows, vectors, kIndexDim,
                          VectorNorm::none, VectorStorage::fp4_record, 0},
                         nullptr));
    check(index_values(records.get(), int64_t{rows} * vectors, bf16.get(), nullptr));
    check(cudaDeviceSynchronize());
  }
  const void* as(IndexForm form) const {
    return form == IndexForm::record ? static_cast<const void*>(records.get()) : bf16.get();
  }
};
const char* name(IndexForm form) { return form == IndexForm::record ? "records" : "bf16"; }

struct Case {
  int rows, entries;
  IndexGroups groups;
  Vectors q, keys;
  Array<float> w;
  Array<int> tile_begin, tile_first, count, out_begin, out;
  Array<uint64_t> visible;
  Array<uint8_t> workspace;
  IndexSelection selection;
  Case(const std::vector<int>& begin, const std::vector<IndexRange>& range, int entries, int topk, size_t limit,
       IndexForm form)
      : rows(static_cast<int>(begin.size()) - 1),
        entries(entries),
        groups(make_index_groups(begin, range)),
        q(rows, kIndexHeads, 1),
        keys(entries, 1, 2),
        w(size_t(rows) * kIndexHeads, 0.01f, 3),
        tile_begin(groups.tile_begin),
        tile_first(groups.tile_first),
        count(groups.visible_count),
        out_begin(begins(topk)),
        out(size_t(rows) * topk),
        visible(groups.visible),
        workspace(index_workspace(groups, limit)),
        selection{q.as(form),
                  w.get(),
                  keys.as(form),
                  entries,
                  form,
                  &groups,
                  {tile_begin.get(), tile_first.get(), visible.get(), count.get()},
                  topk,
                  out_begin.get(),
                  out.get(),
                  0,
                  workspace.get(),
                  workspace.size()} {}
  std::vector<int> begins(int topk) const {
    std::vector<int> b{0};
    for (int r = 0; r < rows; ++r) b.push_back(b.back() + std::min(topk, groups.visible_count[r]));
    return b;
  }
};

}  // namespace

int main(int argc, char** argv) {
  Report report("indexer");
  std::vector<int> begin{0};
  std::vector<IndexRange> range;
  double pairs = 0, scored = 0;
  for (int t = 0; t < 16384; ++t) {
    range.push_back({0, (t + 1) / 4});
    begin.push_back(t + 1);
    pairs += (t + 1) / 4, scored += (t + 1) / 4 > 512 ? (t + 1) / 4 : 0;
  }
  for (const IndexForm form : {IndexForm::record, IndexForm::bf16}) {
    for (const size_t limit : {size_t{16} << 20, size_t{64} << 20, size_t{256} << 20}) {
      Case c(begin, range, 4096, 512, limit, form);
      const std::string what =
          name(form) + (", 16,384 rows x 4,096 entries causal, " + std::to_string(limit >> 20) + " MB");
      report.time(what + ", scores and top-512", median_ms(11, [&] { check(select_entries(c.selection, nullptr)); }));
    }
    Case c(begin, range, 4096, 512, size_t{512} << 20, form);
    Array<float> scores(size_t{16384} * 4096);
    const int groups = static_cast<int>(c.groups.tile_begin.size()) - 1;
    double ms = median_ms(11, [&] { check(index_scores(c.selection, 0, groups, 4096, scores.get(), nullptr)); });
    report.product(std::string(name(form)) + ", scores alone, rows that select", scored * 64 * 128 * 2, ms);
    IndexSelection all = c.selection;
    all.topk = 1;
    ms = median_ms(11, [&] { check(index_scores(all, 0, groups, 4096, scores.get(), nullptr)); });
    report.product(std::string(name(form)) + ", scores alone, all rows", pairs * 64 * 128 * 2, ms);
  }
  for (const IndexForm form : {IndexForm::record, IndexForm::bf16})
    for (const int rows : {1, 64, 256}) {  // each row its own sequence of 64 K tokens, or of 4 K in larger batches
      const int each = rows == 1 ? 16384 : 4096;
      std::vector<int> b{0};
      std::vector<IndexRange> r;
      for (int t = 0; t < rows; ++t) r.push_back({t * each, (t + 1) * each}), b.push_back(t + 1);
      Case c(b, r, rows * each, 512, size_t{64} << 20, form);
      constexpr int kLaunches = 20;
      const double ms = median_ms(9,
                                  [&] {
                                    for (int i = 0; i < kLaunches; ++i) check(select_entries(c.selection, nullptr));
                                  }) /
                        kLaunches;
      report.bytes(std::string(name(form)) + ", decoding, " + std::to_string(rows) + " rows x " + std::to_string(each) +
                       " entries",
                   (form == IndexForm::record ? kIndexRecordBytes : 2.0 * kIndexDim) * rows * each, ms);
    }
  report.write(argc, argv);
}
