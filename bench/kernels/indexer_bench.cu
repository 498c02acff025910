// Speed of the indexer: a row of 16,384 tokens over 4,096 entries, causal, scores and selection apart and together; and
// decoding steps. usage: indexer_bench [RESULT.json]
#include "bench_support.cuh"
#include "kernels/indexer/indexer.h"

using namespace plumb::kernels;
using namespace plumb::bench;

namespace {

struct Case {
  int rows, entries;
  IndexGroups groups;
  Array<uint16_t> q, keys;
  Array<float> w;
  Array<int> tile_begin, tile_first, count, out_begin, out;
  Array<uint64_t> visible;
  Array<uint8_t> workspace;
  IndexSelection selection;
  Case(const std::vector<int>& begin, const std::vector<IndexRange>& range, int entries, int topk, size_t limit)
      : rows(static_cast<int>(begin.size()) - 1),
        entries(entries),
        groups(make_index_groups(begin, range)),
        q(size_t(rows) * kIndexHeads * kIndexDim, 1, 1),
        keys(size_t(entries) * kIndexDim, 1, 2),
        w(size_t(rows) * kIndexHeads, 0.01f, 3),
        tile_begin(groups.tile_begin),
        tile_first(groups.tile_first),
        count(groups.visible_count),
        out_begin(begins(topk)),
        out(size_t(rows) * topk),
        visible(groups.visible),
        workspace(index_workspace(groups, limit)),
        selection{q.get(), w.get(),         keys.get(),
                  entries, &groups,         {tile_begin.get(), tile_first.get(), visible.get(), count.get()},
                  topk,    out_begin.get(), out.get(),
                  0,       workspace.get(), workspace.size()} {}
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
  for (const size_t limit : {size_t{16} << 20, size_t{64} << 20, size_t{256} << 20}) {
    Case c(begin, range, 4096, 512, limit);
    const std::string name = "16,384 rows x 4,096 entries causal, " + std::to_string(limit >> 20) + " MB";
    double ms = median_ms(11, [&] { check(select_entries(c.selection, nullptr)); });
    report.time(name + ", scores and top-512", ms);
  }
  {
    Case c(begin, range, 4096, 512, size_t{512} << 20);
    Array<float> scores(size_t{16384} * 4096);
    const int groups = static_cast<int>(c.groups.tile_begin.size()) - 1;
    double ms = median_ms(11, [&] { check(index_scores(c.selection, 0, groups, 4096, scores.get(), nullptr)); });
    report.product("scores alone, rows that select", scored * 64 * 128 * 2, ms);
    IndexSelection all = c.selection;
    all.topk = 1;
    ms = median_ms(11, [&] { check(index_scores(all, 0, groups, 4096, scores.get(), nullptr)); });
    report.product("scores alone, all rows", pairs * 64 * 128 * 2, ms);
  }
  for (const int rows : {1, 64, 256}) {  // each row its own sequence of 64 K tokens, or of 4 K in larger batches
    const int each = rows == 1 ? 16384 : 4096;
    std::vector<int> b{0};
    std::vector<IndexRange> r;
    for (int t = 0; t < rows; ++t) r.push_back({t * each, (t + 1) * each}), b.push_back(t + 1);
    Case c(b, r, rows * each, 512, size_t{64} << 20);
    constexpr int kLaunches = 20;
    const double ms = median_ms(9,
                                [&] {
                                  for (int i = 0; i < kLaunches; ++i) check(select_entries(c.selection, nullptr));
                                }) /
                      kLaunches;
    report.bytes("decoding, " + std::to_string(rows) + " rows x " + std::to_string(each) + " entries",
                 256.0 * rows * each, ms);
  }
  report.write(argc, argv);
}
