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
    const SlotUseLists lists = transpose_sources(source, rows, l.ratio, slots);
    Array<int> sources(source), begin(lists.begin), use(lists.use);
    const size_t count = size_t(rows) * row_width, results = size_t(entries) * l.width;
    const double projected = 8.0 * count, small = 1.0 * results;
    const int copies = cold_copies(projected);
    Array<float> kv(count * copies, 1, 1), gate(kv.size(), 1, 2), ape(size_t(l.ratio) * row_width, 1, 3);
    Array<uint16_t> d_entries(results * copies, 1, 4), out(d_entries.size());
    Array<float> total(out.size()), value(out.size()), d_kv(kv.size()), d_gate(kv.size()), d_ape(ape.size());
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
    Array<uint8_t> workspace(pool_entries_backward_workspace(pooling(0)));
    double ms = cold_ms(copies, [&](int i, cudaStream_t stream) {
      check(pool_entries(pooling(i), out.get() + i * results, nullptr, nullptr, stream));
    });
    report.cold(l.what, projected + 2 * small, ms);
    ms = cold_ms(copies, [&](int i, cudaStream_t stream) {
      check(pool_entries(pooling(i), out.get() + i * results, total.get() + i * results, value.get() + i * results,
                         stream));
    });
    report.cold(std::string(l.what) + ", kept for backward", projected + 10 * small, ms);
    const auto backward = [&](float* gradient) {
      return cold_ms(copies, [&](int i, cudaStream_t stream) {
        check(pool_entries_backward({pooling(i),
                                     total.get() + i * results,
                                     value.get() + i * results,
                                     d_entries.get() + i * results,
                                     {begin.get(), use.get()},
                                     d_kv.get() + i * count,
                                     d_gate.get() + i * count,
                                     gradient,
                                     workspace.get()},
                                    stream));
      });
    };
    report.cold(std::string(l.what) + ", backward", 2 * projected + 10 * small, backward(nullptr));
    report.cold(std::string(l.what) + ", backward with ape", 3 * projected + 20 * small, backward(d_ape.get()));
  }
  report.write(argc, argv);
}
