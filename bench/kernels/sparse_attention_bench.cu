// Speed of sparse attention: forward and backward of a training row of 16,384 tokens, forward of decoding steps. One
// line each: time, TFLOPS (real keys only; 2 products forward, 5 backward, of 2 * heads * 512 a key) and percent of the
// ceiling measured in the same run. usage: sparse_attention_bench [RESULT.json]
#include <random>

#include "bench_support.cuh"
#include "kernels/sparse_attention/sparse_attention.h"

namespace {

using namespace plumb::kernels;
using namespace plumb::bench;
constexpr int kDim = kAttentionDim, kHeads = 64;
constexpr float kScale = 0.044194174f;

// ---- lists ----
struct Lists {
  std::vector<int> begin{0}, row;
  void end_query() { begin.push_back(static_cast<int>(row.size())); }
};
// Rows 0 .. queries - 1 are window keys, then compressed entries. full: every query has all `keys`, as if far behind
// the start.
Lists training_lists(int queries, int keys, bool full) {
  Lists lists;
  std::mt19937 random(7);
  const int entries = queries / 4;
  std::vector<char> selected(entries + 1, 0);
  int count = 0;
  for (int t = 0; t < queries; ++t) {
    const int start = std::max(t - 127, 0), visible = full ? entries : (t + 1) / 4;
    for (int s = 0; s < 128 && (full || start + s <= t); ++s) lists.row.push_back(start + s);
    if (keys == 256)
      for (int c = 0; c < 128 && (full || (c + 1) * 128 <= t + 1); ++c) lists.row.push_back(queries + c);
    if (keys == 640) {
      const int wanted = std::min(512, visible);
      if (visible > 512)  // 15 % of the selection changes from one query to the next
        for (int drop = 0; drop < 77 && count > 0;) {
          const int c = random() % visible;
          if (selected[c]) selected[c] = 0, --count, ++drop;
        }
      while (count < wanted) {
        const int c = random() % visible;
        if (!selected[c]) selected[c] = 1, ++count;
      }
      for (int c = 0; c < visible; ++c)
        if (selected[c]) lists.row.push_back(queries + c);
    }
    lists.end_query();
  }
  return lists;
}

void bench_training(Report& report, int keys, bool full) {
  const int queries = 16384, rows = queries + queries / 4;
  const Lists lists = training_lists(queries, keys, full);
  Array<uint16_t> q(size_t{16384} * kHeads * kDim, 1, 1), d_o(q.size(), 1, 3), o(q.size(), 1, 4), dq(q.size(), 1, 5),
      kv(static_cast<size_t>(rows) * kDim, 1, 2);
  Array<int> begin(lists.begin), row(lists.row);
  Array<float> sink(std::vector<float>(kHeads, 0.5f)), lse(static_cast<size_t>(queries) * kHeads), dkv(kv.size()),
      d_sink(kHeads);
  const double pairs = static_cast<double>(lists.row.size()) * kHeads * kDim;
  const SparseAttentionForward f{q.get(), kv.get(), {begin.get(), row.get()}, sink.get(), o.get(), lse.get(), queries,
                                 kHeads,  kScale};
  char what[64];
  double ms = median_ms(15, [&] { check(sparse_attention_forward(f, nullptr)); });
  std::snprintf(what, sizeof what, "forward, %d keys, %s", keys, full ? "full lists" : "causal row");
  report.product(what, pairs * 4, ms);
  SparseAttentionBackward b{q.get(),   kv.get(), f.lists,      sink.get(), o.get(), lse.get(), d_o.get(), dq.get(),
                            dkv.get(), false,    d_sink.get(), nullptr,    queries, kHeads,    rows,      kScale};
  Array<uint8_t> workspace(sparse_attention_backward_workspace(b));
  b.workspace = workspace.get();
  ms = median_ms(9, [&] { check(sparse_attention_backward(b, nullptr)); });
  uint32_t repeated;
  check(cudaMemcpy(&repeated, workspace.get(), 4, cudaMemcpyDeviceToHost));
  std::snprintf(what, sizeof what, "backward, %d keys, %s%s", keys, full ? "full lists" : "causal row",
                repeated ? ", repeated" : "");
  report.product(what, pairs * 10, ms);
}

// Each query has its own sequence of 128 window rows and 2,048 entries; several layers' worth, so that L2 holds none of
// it.
void bench_decoding(Report& report, int batch, bool fp8) {
  const int keys = 640, rows = 2176, layers = std::max(2, 256 / batch);
  Lists lists;
  std::mt19937 random(11);
  for (int t = 0; t < batch; ++t) {
    std::vector<int> chosen(2048);
    for (int c = 0; c < 2048; ++c) chosen[c] = 128 + c;
    std::shuffle(chosen.begin(), chosen.end(), random);
    std::sort(chosen.begin(), chosen.begin() + keys - 128);
    for (int s = 0; s < 128; ++s) lists.row.push_back(t * rows + s);
    for (int c = 0; c < keys - 128; ++c) lists.row.push_back(t * rows + chosen[c]);
    lists.end_query();
  }
  const size_t layer = static_cast<size_t>(batch) * rows * kDim;
  Array<uint16_t> q(static_cast<size_t>(batch) * kHeads * kDim, 1, 1), o(q.size(), 1, 2), kv(layer * layers, 1, 3);
  Array<int> begin(lists.begin), row(lists.row);
  Array<float> sink(std::vector<float>(kHeads, 0.5f)), lse(static_cast<size_t>(batch) * kHeads);
  const size_t row_bytes = fp8 ? kFp8KeyBytes : kDim * 2, layer_bytes = static_cast<size_t>(batch) * rows * row_bytes;
  Array<uint8_t> cache(fp8 ? layer_bytes * layers : 1);
  if (fp8) check(store_fp8_keys(kv.get(), nullptr, batch * rows * layers, cache.get(), nullptr));
  const uint8_t* first_layer = fp8 ? cache.get() : reinterpret_cast<const uint8_t*>(kv.get());
  SparseAttentionForward f{q.get(), kv.get(), {begin.get(), row.get()}, sink.get(), o.get(), lse.get(), batch,
                           kHeads,  kScale};
  f.kv_fp8 = fp8;
  constexpr int kLaunches = 50;  // an event pair around one would time the launch
  const double ms = median_ms(9,
                              [&] {
                                for (int i = 0; i < kLaunches; ++i) {
                                  f.kv = first_layer + layer_bytes * (i % layers);
                                  check(sparse_attention_forward(f, nullptr));
                                }
                              }) /
                    kLaunches;
  const double flop = static_cast<double>(batch) * keys * kHeads * kDim * 4,
               bytes = static_cast<double>(batch) * (keys * static_cast<double>(row_bytes) + 131072);
  char what[64];
  std::snprintf(what, sizeof what, "decoding, batch %d, %d keys%s", batch, keys, fp8 ? ", FP8 cache" : "");
  if (flop / report.peak() > bytes / report.copy())
    report.product(what, flop, ms);
  else
    report.bytes(what, bytes, ms);
}

}  // namespace

int main(int argc, char** argv) {
  Report report("sparse_attention");
  for (int keys : {640, 256, 128})
    for (bool full : {true, false}) bench_training(report, keys, full);
  for (const bool fp8 : {false, true})
    for (int batch : {1, 4, 16, 32, 64, 128, 256}) bench_decoding(report, batch, fp8);
  report.write(argc, argv);
}
