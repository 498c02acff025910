// Speed of the indexer: a row of 16,384 tokens over 4,096 entries, causal, scores and selection apart and together; and
// decoding steps. usage: indexer_bench [RESULT.json]
#include "gpu_bench.cuh"
#include "kernels/indexer/indexer.h"
#include "tensor_peak.cuh"

using namespace plumb::kernels;
using namespace gpu_bench;

namespace {

struct Case {
  int rows, entries;
  IndexGroups groups;
  Normal<Bf16> q, keys;
  Normal<float> w;
  Buffer<int> tile_begin, tile_first, count, out_begin, out;
  Buffer<uint64_t> visible;
  Buffer<uint8_t> workspace;
  IndexSelection selection;
  Case(const std::vector<int>& begin, const std::vector<IndexRange>& range, int entries, int topk, size_t limit)
      : rows(static_cast<int>(begin.size()) - 1),
        entries(entries),
        groups(make_index_groups(begin, range)),
        q(size_t(rows) * kIndexHeads * kIndexDim, 1),
        keys(size_t(entries) * kIndexDim, 2),
        w(size_t(rows) * kIndexHeads, 3, 0.01f),
        tile_begin(groups.tile_begin),
        tile_first(groups.tile_first),
        count(groups.visible_count),
        out_begin(begins(topk)),
        out(size_t(rows) * topk),
        visible(groups.visible),
        workspace(index_workspace(groups, limit)),
        selection{q.data,  w.data,         keys.data,
                  entries, &groups,        {tile_begin.data, tile_first.data, visible.data, count.data},
                  topk,    out_begin.data, out.data,
                  0,       workspace.data, workspace.count} {}
  std::vector<int> begins(int topk) const {
    std::vector<int> b{0};
    for (int r = 0; r < rows; ++r) b.push_back(b.back() + std::min(topk, groups.visible_count[r]));
    return b;
  }
};

}  // namespace

int main(int argc, char** argv) {
  Report report("indexer", argc > 1 ? argv[1] : nullptr);
  const double peak = peak_tflops(report.processors());
  std::printf("bf16 tensor peak %.0f TFLOPS\n", peak);
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
    double ms = median_ms(11, [&](int) { check(select_entries(c.selection, nullptr)); });
    report.time((name + ", scores and top-512").c_str(), ms);
  }
  {
    Case c(begin, range, 4096, 512, size_t{512} << 20);
    Buffer<float> scores(size_t{16384} * 4096);
    const int groups = static_cast<int>(c.groups.tile_begin.size()) - 1;
    double ms = median_ms(11, [&](int) { check(index_scores(c.selection, 0, groups, 4096, scores.data, nullptr)); });
    report.flops("scores alone, rows that select", ms, scored * 64 * 128 * 2, peak);
    IndexSelection all = c.selection;
    all.topk = 1;
    ms = median_ms(11, [&](int) { check(index_scores(all, 0, groups, 4096, scores.data, nullptr)); });
    report.flops("scores alone, all rows", ms, pairs * 64 * 128 * 2, peak);
  }
  for (const int rows : {1, 64, 256}) {  // each row its own sequence of 64 K tokens, or of 4 K in larger batches
    const int each = rows == 1 ? 16384 : 4096;
    std::vector<int> b{0};
    std::vector<IndexRange> r;
    for (int t = 0; t < rows; ++t) r.push_back({t * each, (t + 1) * each}), b.push_back(t + 1);
    Case c(b, r, rows * each, 512, size_t{64} << 20);
    constexpr int kLaunches = 20;
    const double ms = median_ms(9,
                                [&](int) {
                                  for (int i = 0; i < kLaunches; ++i) check(select_entries(c.selection, nullptr));
                                }) /
                      kLaunches;
    report.bytes(("decoding, " + std::to_string(rows) + " rows x " + std::to_string(each) + " entries").c_str(), ms,
                 256.0 * rows * each);
  }
  return report.write();
}
