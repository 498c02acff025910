// Speed of pooling compressed entries at 16,384 rows. usage: compressor_bench [RESULT.json]
#include "bench_support.cuh"
#include "kernels/compressor/compressor.h"

using namespace plumb::kernels;
using namespace plumb::bench;

int main(int argc, char** argv) {
  Report report("compressor");
  const int rows = 16384;
  struct Line {
    const char* what;
    int ratio, width;
  };
  for (const Line& l : {Line{"ratio 4, width 512", 4, 512}, Line{"ratio 4, width 128 (index)", 4, 128},
                        Line{"ratio 128, width 512", 128, 512}}) {
    const int slots = l.ratio == 4 ? 8 : 128, entries = rows / l.ratio, row_width = slots / l.ratio * l.width;
    std::vector<int> source;
    for (int e = 0; e < entries; ++e)
      for (int s = 0; s < slots; ++s) source.push_back(std::max(-1, (e + 1) * l.ratio - slots + s));
    const SlotTargetLists lists = slot_targets(source, rows, l.ratio, slots);
    Array<int> sources(source), target(lists.target), key(lists.key), begin(lists.begin);
    const size_t count = size_t(rows) * row_width, results = size_t(entries) * l.width;
    const double projected = 8.0 * count, small = 2.0 * results;
    const int copies = cold_copies(projected);
    Array<float> kv(count * copies, 1, 1), gate(kv.size(), 1, 2), ape(size_t(l.ratio) * row_width, 1, 3);
    Array<uint16_t> d_entries(results * copies, 1, 4), out(d_entries.size());
    Array<float> d_kv(kv.size()), d_gate(kv.size()), d_ape(ape.size());
    const auto pooling = [&](int i) {
      return CompressedPooling{kv.get() + i * count,
                               gate.get() + i * count,
                               nullptr,
                               nullptr,
                               ape.get(),
                               sources.get(),
                               rows,
                               entries,
                               l.ratio,
                               slots,
                               l.width};
    };
    Array<uint8_t> workspace(pool_entries_backward_workspace(pooling(0), lists.parts(), true));
    double ms = cold_ms(
        copies, [&](int i, cudaStream_t stream) { check(pool_entries(pooling(i), out.get() + i * results, stream)); });
    report.cold(l.what, projected + small, ms);
    const auto backward = [&](float* gradient) {
      return cold_ms(copies, [&](int i, cudaStream_t stream) {
        check(pool_entries_backward({pooling(i),
                                     d_entries.get() + i * results,
                                     {target.get(), key.get(), begin.get(), lists.joined(), lists.parts()},
                                     d_kv.get() + i * count,
                                     d_gate.get() + i * count,
                                     gradient,
                                     workspace.get()},
                                    stream));
      });
    };
    report.cold(std::string(l.what) + ", backward", 2 * projected + small, backward(nullptr));
    report.cold(std::string(l.what) + ", backward with ape", 2 * projected + small, backward(d_ape.get()));
  }
  report.write(argc, argv);
}
